"""`Eager`: the driver that does every collective at its place and awaits it. It is the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .session import Session, Use

Tensor = Any


class Eager:
    """Every collective at its place, awaited: the reference, and the way on for a step that leaves its plan."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._wholes: dict[Use, list[Tensor]] = {}
        self._recomputed: dict[int, list[Tensor]] = {}  # of the unit that was recomputed last, for its backward

    def _gather(self, use: Use, index: int) -> list[Tensor]:
        self.session.agree(index)
        wholes = self._recomputed.pop(use.unit, None)
        self._recomputed.clear()
        if wholes is None:
            wholes = [self.session.gather(w) for w in use.weights]
        self._wholes[use] = wholes
        return wholes

    def before_forward(self, use: Use) -> list[Tensor]:
        """See `Driver`."""
        return self._gather(use, use.index)

    def after_forward(self, use: Use) -> None:
        """See `Driver`."""
        wholes = self._wholes.pop(use, None)
        if wholes is not None and self.session.events[use.index].kind == "recompute":
            self._recomputed[use.unit] = wholes

    def before_backward(self, use: Use) -> None:
        """See `Driver`."""
        self._gather(use, use.backward_index)

    def whole(self, use: Use, index: int) -> Tensor:
        """See `Driver`."""
        found = self._wholes.get(use)
        return found[index] if found is not None else self.session.gather(use.weights[index])

    def after_backward(self, use: Use, gradients: Sequence[Tensor | None]) -> None:
        """See `Driver`."""
        session, run = self.session, use.run
        self._wholes.pop(use, None)
        for weight, gradient, trainable in zip(use.weights, gradients, use.trainable, strict=True):
            if trainable:
                total = session.zeros(weight) if gradient is None else gradient
                if weight in session.accumulated:
                    dtype = session.weights[weight].accum_dtype
                    total = session.backend.add(session.accumulated[weight], total, dtype)
                session.accumulated[weight] = total
        for weight in dict.fromkeys(use.weights):
            if weight in session.accumulated and not run.uses_left[weight] and run.carry != "wholes":
                self._scatter(weight, session.accumulated.pop(weight), carries=run.carry == "shards")

    def _scatter(self, weight: int, whole: Tensor, *, carries: bool) -> None:
        """Scatters a whole gradient, adds what is carried, and carries the sum on or finishes it."""
        session, record = self.session, self.session.weights[weight]
        block = session.scatter(weight, whole)
        if weight in session.carried:
            block = session.backend.add(session.carried.pop(weight), block, record.accum_dtype)
        if carries:
            session.carried[weight] = session.backend.cast(block, record.accum_dtype)
        else:
            session.gradients[weight] = session.finish(weight, block)

    def pin(self, index: int) -> None:
        """See `Driver`."""
        self.session.agree(index)

    def end_backward(self, index: int) -> None:
        """See `Driver`. What the last of several backwards has not used is finished here."""
        session = self.session
        session.agree(index)
        session.review(session.program)
        self._recomputed.clear()
        if session.events[index].carry:
            return
        for weight in sorted(session.accumulated):
            self._scatter(weight, session.accumulated.pop(weight), carries=False)
        for weight in sorted(session.carried):
            session.gradients[weight] = session.finish(weight, session.carried.pop(weight))

    def end_step(self, index: int) -> None:
        """See `Driver`."""
        self.session.agree(index)

    def leave(self) -> None:
        """See `Driver`. Nothing is ever under way, and what is unreduced is with the session."""
