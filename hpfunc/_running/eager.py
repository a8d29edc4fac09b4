"""`Eager`: the reference driver, which issues every collective where it is needed and awaits it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .._values.mesh import Mesh
from ..planning.program import Program
from .channel import finish_block, gather_whole, scatter_whole
from .context import current_session
from .session import Session
from .use import Unreduced, Use

Tensor = Any


class Eager:
    """The reference `Driver`. A step that leaves its plan also continues with it.

    Args:
        session: the step.
        left: gradients that the previous driver has left.
        review: called with the program so far when a backward has ended; may raise.
    """

    def __init__(self, session: Session, left: Unreduced, review: Callable[[Program], None] | None = None) -> None:
        self.session, self._left, self._review = session, left, review
        self._wholes: dict[Use, list[Tensor]] = {}
        self._recomputed: dict[int, list[Tensor]] = {}  # whole weights of the last recomputed unit, for its backward

    def _agree(self, index: int) -> None:
        """Compares the next event with all ranks; see Note [Agreement]."""
        session = self.session
        if not session.is_abstract:
            session.control.agree("hpfunc.sharded", lambda: _facts(session, index))

    def _gather_all(self, use: Use, index: int) -> list[Tensor]:
        self._agree(index)
        wholes = self._recomputed.pop(use.unit, None)
        self._recomputed.clear()
        if wholes is None:
            wholes = [self._gather(w) for w in use.weights]
        self._wholes[use] = wholes
        return wholes

    def _gather(self, weight: int) -> Tensor:
        session = self.session
        record, local = session.weights[weight], session.backend.detach(session.arrays[weight]._value)
        if record.shard_is_whole:
            return local
        return gather_whole(local, session.gathers[weight], "gather", record.dtype)

    def before_forward(self, use: Use) -> list[Tensor]:
        return self._gather_all(use, use.index)

    def after_forward(self, use: Use) -> None:
        wholes = self._wholes.pop(use, None)
        if wholes is not None and self.session.events[use.index].kind == "recompute":
            self._recomputed[use.unit] = wholes

    def before_backward(self, use: Use) -> None:
        self._gather_all(use, use.backward_index)

    def whole(self, use: Use, index: int) -> Tensor:
        found = self._wholes.get(use)
        return found[index] if found is not None else self._gather(use.weights[index])

    def after_backward(self, use: Use, gradients: Sequence[Tensor]) -> None:
        session, run, wholes = self.session, use.run, self._left.wholes
        self._wholes.pop(use, None)
        for weight, gradient in zip(use.trained, gradients, strict=True):
            known, dtype = wholes.get(weight), session.weights[weight].accum_dtype
            wholes[weight] = gradient if known is None else session.backend.add(known, gradient, dtype)
        for weight in dict.fromkeys(use.weights):
            if weight in wholes and not run.uses_left[weight] and run.carry != "wholes":
                self._scatter(weight, carries=run.carry == "shards")

    def _scatter(self, weight: int, *, carries: bool) -> None:
        """Scatters a whole gradient, adds the carried shard, and carries the sum or finishes it."""
        session, left = self.session, self._left
        w, gather = session.weights[weight], session.gathers[weight]
        block = scatter_whole(left.wholes.pop(weight), gather, "reduce_scatter", w.reduce_dtype, w.divisor)
        if weight in left.blocks:
            block = session.backend.add(left.blocks.pop(weight), block, w.accum_dtype)
        if carries:
            left.blocks[weight] = session.backend.cast(block, w.accum_dtype)
        else:
            self._finish(weight, block)

    def _finish(self, weight: int, block: Tensor) -> None:
        """Reduces a scattered block over `reduce_axes`. May write into the block."""
        w, gather = self.session.weights[weight], self.session.gathers[weight]
        finished = finish_block(block, gather, w.reduce_axes, "all_reduce", w.reduce_dtype, w.divisor, w.accum_dtype)
        self._left.finished[weight] = finished

    def pin(self, index: int) -> None:
        self._agree(index)

    def end_backward(self, index: int) -> dict[int, Tensor]:
        """Also finishes gradients of weights that the last of several backwards has not used."""
        session, left = self.session, self._left
        self._agree(index)
        if self._review is not None:
            self._review(session.program)
        self._recomputed.clear()
        if session.events[index].carry:
            return {}
        for weight in sorted(left.wholes):
            self._scatter(weight, carries=False)
        for weight in sorted(left.blocks):
            self._finish(weight, left.blocks.pop(weight))
        finished, left.finished = left.finished, {}
        return finished

    def end_step(self, index: int) -> None:
        self._agree(index)

    def leave(self) -> Unreduced:
        return self._left  # nothing is ever in flight


def session_on(mesh: Mesh, known: Session | None = None) -> AbstractContextManager[Session]:
    """Returns a context with the session that is known, else that of the enclosing step, else one for its body."""
    found = known or current_session()
    return nullcontext(found) if found else Session(mesh, Eager).running()


def _facts(session: Session, index: int) -> str:
    event = session.events[index]
    lines = [f"event {index} is {session.program.spell(event)}"]
    if event.unit is not None:
        lines += [f"event {index} uses {session.weights[w]}" for w in session.units[event.unit].weights]
    return "\n".join(lines)
