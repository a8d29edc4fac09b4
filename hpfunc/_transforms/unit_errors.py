"""What a unit's function raises, in words that tell of units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import optree

from .._errors import ArgumentError, HpfuncError, LeafError, UsageError, message
from .._running.context import current_run, current_session
from .._values.array import ShardedArray, describe
from .._values.dtypes import is_floating_dtype
from .._values.not_a_tensor import shortened
from .._values.numerics import dtype_name

Tensor = Any
_NAME = "hpfunc.unit"


def check_function(fn: object) -> None:
    """Raises ArgumentError if `fn` is not a function, or is a module with weights of its own."""
    if not callable(fn):
        rule = f"fn must be a function, got {shortened(repr(fn))}"
        raise ArgumentError(message(_NAME, rule, hint="hpfunc.unit(fn)(weights, x)"))
    listed = getattr(fn, "named_parameters", None) or getattr(fn, "parameters_and_names", None)
    if listed is not None and next(iter(listed()), None) is not None:
        rule = f"fn is a module ({type(fn).__name__}), which computes with weights of its own"
        hint = "apply, params = hpfunc.from_module(module) makes units of its parts; shard the params"
        raise ArgumentError(message(_NAME, rule, hint=hint))


def refuse_nested(label: str, outer: str) -> NoReturn:
    """Raises UsageError: no plan can follow events inside of another unit's."""
    hint = "call one after the other, or give the outer unit all the weights and call the inner function itself"
    raise UsageError(message(_NAME, f"{label!r} is called inside of the unit {outer!r}", hint=hint))


def explain(
    label: str, error: Exception, wholes: Sequence[Tensor], names: Callable[[], list[str]], args: Any, kwargs: Any
) -> None:
    """Raises what is behind an error of a unit's function, if that is known, with the error as its cause."""
    array = error._array if isinstance(error, UsageError) else None
    if array is not None:
        _refuse_array(label, cast(ShardedArray, array), error)
    if isinstance(error, (RuntimeError, TypeError, ValueError)) and not isinstance(error, HpfuncError):
        _refuse_dtypes(label, error, dict(zip(names(), wholes, strict=True)), {"args": args, **kwargs})


def _refuse_array(label: str, array: ShardedArray, error: Exception) -> NoReturn:
    run, session = current_run(), current_session()
    session = run.session if run is not None else session
    path = session.name_of(array) if session is not None else ""
    rule = f"{label!r} uses an array that is not among its weights, so it is not gathered"
    hint = "give it in the first argument: hpfunc.unit(lambda w, x: ...)((weights, array), x), where both are tensors"
    shown = describe(array) if not path else f"{path}: {describe(array)}"
    raise UsageError(message(_NAME, rule, [shown], hint=hint)) from error


def _refuse_dtypes(label: str, error: Exception, weights: dict[str, Tensor], rest: dict[str, Any]) -> None:
    if "type" not in str(error):  # all frameworks say "dtype" or "type" of these
        return
    found = dict(weights)
    for name, tree in rest.items():
        accessors, leaves, _ = optree.tree_flatten_with_accessor(cast(Any, tree))
        found |= {accessor.codify(name): leaf for accessor, leaf in zip(accessors, leaves, strict=True)}
    kinds = {name: dtype_name(getattr(leaf, "dtype", "")) for name, leaf in found.items()}
    floating = {name: kind for name, kind in kinds.items() if kind and is_floating_dtype(kind)}
    if len(set(floating.values())) < 2:
        return
    dtype = next(iter(floating.values()))
    rows = [f"{name}: shape {tuple(found[name].shape)}, {kind}" for name, kind in floating.items()]
    rule = f"{label!r} fails, and computes with weights and arguments of different dtypes"
    hint = (
        f"hpfunc.Numerics(param_dtype={dtype!r}, cast_inputs=True) casts what units are called with; or cast it before"
    )
    raise LeafError(message(_NAME, rule, rows, hint=hint)) from error
