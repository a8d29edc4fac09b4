"""Exceptions of hpfunc, and the one form in which their messages are written."""

from __future__ import annotations

from collections.abc import Iterable


class HpfuncError(Exception):
    """Base of every error that hpfunc raises for its caller."""


class SpecError(HpfuncError, ValueError):
    """A partition spec does not fit its array, its mesh or its tree."""


class MeshError(HpfuncError, ValueError):
    """A mesh cannot be built, or a named axis does not exist in it."""


class PolicyError(HpfuncError, ValueError):
    """A policy or numerics field has a value outside of its range."""


class LeafError(HpfuncError, TypeError):
    """A leaf of a tree has the wrong type, framework, dtype or device."""


class UsageError(HpfuncError, RuntimeError):
    """A public function is called in a way, or at a place, that its contract excludes."""

    _array: object | None = None  # the array that was taken for a tensor: a unit tells more about it


class ArrayAttributeError(UsageError, AttributeError):
    """An attribute of tensors is asked of a sharded array: a `UsageError`, and an AttributeError for `hasattr`."""


class MissingNameError(UsageError, AttributeError):
    """A name is asked of hpfunc that it does not have, such as one of another library: a `UsageError`, too."""


class ArgumentError(UsageError, TypeError):
    """A public function is called with an argument that it does not take: a `UsageError`, and Python's TypeError."""


class CheckpointError(HpfuncError, RuntimeError):
    """A checkpoint cannot be written, cannot be read, is damaged, or is that of another tree."""


class DonatedError(HpfuncError, RuntimeError):
    """A sharded array is used after it was donated."""


class AgreementError(HpfuncError, RuntimeError):
    """Ranks disagree on arguments or on the program that they run."""


class PeerError(HpfuncError, RuntimeError):
    """Another rank failed, or did not answer within the timeout."""


class ScheduleError(HpfuncError, RuntimeError):
    """A schedule is not safe to run, or its text cannot be read."""


class LoweringError(HpfuncError, RuntimeError):
    """A step cannot be recorded without running it."""


class VersionError(HpfuncError, ImportError):
    """A framework is installed in a version that hpfunc cannot run on."""


class HpfuncWarning(UserWarning):
    """Something is valid, but probably a mistake."""


def message(
    function: str,
    rule: str,
    leaves: Iterable[str] = (),
    *,
    mesh: object | None = None,
    hint: str | None = None,
) -> str:
    """Returns an error text: who refuses, which rule broke, every leaf at fault, the mesh and a remedy.

    >>> print(message("hpfunc.shard", "no such axis", ["params['w']: shape (4,), spec P('x')"], hint="use 'shard'"))
    hpfunc.shard: no such axis
      params['w']: shape (4,), spec P('x')
    <BLANKLINE>
    Hint: use 'shard'
    """
    lines = [f"{function}: {rule}", *(f"  {leaf}" for leaf in leaves)]
    if mesh is not None:
        lines.append(f"  mesh: {mesh}")
    if hint is not None:
        lines += ["", f"Hint: {hint}"]
    return "\n".join(lines)
