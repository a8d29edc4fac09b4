"""Comparisons of ``sharded(..., debug=True)``: values that must have the same bits on all ranks along an axis.

# Note [Cotangent hashes]
The result of a `psum` is the same on all ranks along its axes, and so is the argument of `pvary`. Then their cotangents
must be the same, too. If they are not, some use of the value differed between these ranks without a `pvary`, or a
hand-written backward is wrong, and the gradients before it would silently be those of one rank. The same holds for an
array that is replicated along an axis that is not a data axis: nothing reduces its gradient there. Ranks exchange
digests over the whole mesh, so that all of them raise the same error. An error that is the same on all ranks, such as a
wrong factor, is not detected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from .._errors import UsageError, message
from .._values.array import describe, is_sharded
from .._values.mesh import Mesh
from .._values.reduction_axes import alike_axes
from ..planning.program import COMPUTES
from .caller_collectives import pinned
from .context import current_session
from .replicas import Axes, Groups, differing
from .session import Session

Tensor = Any

_RULES = {
    "cotangent": "the cotangent of its result differs between ranks along",
    "argument": "its argument differs between ranks along",
}
_HINTS = {
    "cotangent": "the fault is in what was computed from it, which must be the same on these ranks: put hpfunc.pvary "
    "before a use that differs (beside a weight that these axes cut, say), and look at hand-written backwards",
    "argument": "pvary takes what is the same on these ranks: leave it out, or hpfunc.psum the argument first",
}


def same(tensor: Tensor) -> Tensor:
    """Returns a new tensor over the same memory."""
    return tensor[...]


def compared(
    function: str, what: Literal["cotangent", "argument"], mesh: Mesh, axes: Axes
) -> Callable[[Tensor], Tensor]:
    """Returns the identity; in a step with ``debug=True`` it compares its argument along `axes`.

    It raises UsageError on all ranks if bits differ.

    Communication: with ``debug=True`` 8 bytes from each rank.
    """
    session = current_session()
    if session is None or not session.debug:
        return same

    def compare(tensor: Tensor) -> Tensor:
        groups = _differing(session, [(tensor, axes)])[0]
        if groups:
            leaves = [f"shape {tuple(tensor.shape)}, {session.backend.dtype_name(tensor)}: {_spell(groups)}"]
            events = [event for event in session.events if event.kind in COMPUTES]
            leaves += [f"last unit before it: {session.program.describe(event)}" for event in events[-1:]]
            rule = f"{_RULES[what]} {axes}"
            raise UsageError(message(function, rule, leaves, mesh=mesh, hint=_HINTS[what]))
        return same(tensor)

    return pinned(f"compare {what} of {function.removeprefix('hpfunc.')}", axes, mesh, compare)


def compare_gradients(session: Session, leaves: Sequence[Any], gradients: Sequence[Any]) -> None:
    """With ``debug=True`` compares the gradients of arrays along axes that do not cut them and are not data axes.

    Raises:
        UsageError: some differ. Raised on all ranks; names every one of them.

    Communication: 8 bytes for each gradient from each rank.
    """
    if not session.debug:
        return
    mesh = session.mesh
    named = [(session.name_of(x), g) for x, g in zip(leaves, gradients, strict=True) if is_sharded(g)]
    items = [(n, a, axes) for n, a in named if mesh.axis_size(axes := alike_axes(a.layout)) > 1]
    if not items:
        return
    session.pin(f"compare {len(items)} gradients along axes without data")
    differing = _differing(session, [(array._value, axes) for _, array, axes in items])
    bad = [
        f"{name}: {describe(array)}, along {axes}: {_spell(groups)}"
        for (name, array, axes), groups in zip(items, differing, strict=True)
        if groups
    ]
    if bad:
        rule = "the gradient of an array differs between ranks that hold the same part of it"
        hint = "hpfunc.pvary the weight before a use that differs between these ranks, so that its gradient is summed"
        raise UsageError(message("hpfunc.value_and_grad", rule, bad, mesh=mesh, hint=hint))


def _differing(session: Session, items: Sequence[tuple[Tensor, Axes]]) -> list[Groups]:
    return [[] for _ in items] if session.is_abstract else differing(session.mesh, items, "comparison of debug=True")


def _spell(groups: Groups) -> str:
    return "ranks " + ", ".join(map(str, groups))
