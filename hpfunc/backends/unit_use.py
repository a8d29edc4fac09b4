"""Protocols between a framework's autograd and a run: for one call of a unit, and for one differentiation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

Tensor = Any


class Inside(Protocol):
    """The code of a unit that may run again in the middle of its backward, because a checkpoint is inside of it."""

    def begin(self, weights: Callable[[], Sequence[Tensor]]) -> None:
        """Called when the backward of the unit begins, with a function that returns its whole weights."""
        ...

    def end(self) -> Sequence[Tensor | None]:
        """Called when the backward has ended.

        Returns:
            For each weight the gradient that a backward within the backward has computed; empty if there was none.
        """
        ...


class UnitUse(Protocol):
    """One call of a unit, as the framework's VJP nodes see it.

    Attributes:
        names: names of its weights, for messages.
        trainable: which weights want a gradient.
        released: which weights are dropped after forward, so that autograd must not keep them.
        remat: keep nothing of what the unit computes, and compute it again in backward.
        inside: notified for code of the unit that runs again by itself; None if that needs nothing.
        needs_backward: set by the tape: the use will have a backward.
        changed: set by the tape: the arguments that the unit has changed, shared with the use that this one repeats.
        scope: set by the tape: the activation checkpoint that will call the unit again before its backward; equal for
            all uses in one checkpoint; None without a checkpoint.
    """

    names: list[str]
    trainable: list[bool]
    released: list[bool]
    remat: bool
    inside: Inside | None
    needs_backward: bool
    changed: list[Any]
    scope: object

    def before_forward(self) -> list[Tensor]:
        """Returns the whole weights."""
        ...

    def after_forward(self) -> None:
        """Called after the unit's forward, by the caller of `before_forward`."""
        ...

    @property
    def label(self) -> str:
        """The name of the unit, for messages."""
        ...

    def whole(self, index: int) -> Tensor:
        """Returns one of the whole weights again, in backward."""
        ...

    def inner(self) -> UnitUse | None:
        """Returns a use without backward, for a differentiation inside of the loss; None in the backward of the run."""
        ...

    def dismiss(self) -> None:
        """The use will have no backward: its graph is gone."""
        ...

    def before_recompute(self) -> list[Tensor]:
        """Returns the whole weights for another call, before the backward of the use that it repeats."""
        ...

    def after_recompute(self) -> None:
        """Called after that call, even if it was left early."""
        ...

    def before_backward(self) -> None:
        """Called before the backward of the unit's own operations."""
        ...

    def after_backward(self, gradients: Sequence[Tensor | None]) -> None:
        """Called after the backward, with the gradient of every weight (None: no path to the loss).

        They are dense, of any strides, and nobody writes into them any more.
        """
        ...


class Tape(Protocol):
    """The framework's part of one differentiation."""

    leaves: list[Tensor]

    def leaf(self, local: Tensor) -> Tensor:
        """Returns an alias of `local` whose uses are differentiated, and appends it to `leaves`."""
        ...

    def is_grad_enabled(self) -> bool:
        """Returns whether operators are being recorded."""
        ...

    def use_unit(self, fn: Callable[..., Any], use: UnitUse, *args: Any, **kwargs: Any) -> Any:
        """Calls ``fn(whole weights, ...)`` so that its backward reports to `use`."""
        ...

    def recompute_unit(self, fn: Callable[..., Any], use: UnitUse, *args: Any, **kwargs: Any) -> Any:
        """Calls ``fn(whole weights, ...)`` again, between two backwards of units, for activation checkpointing."""
        ...

    def refuse_reentrant(self) -> None:
        """Raises UsageError inside a reentrant checkpoint, whose inner backward would be invisible."""
        ...

    def differentiate(self, forward: Callable[[], Tensor]) -> list[Tensor | None]:
        """Calls `forward`, which returns the loss, runs the backward, and returns the gradient of each leaf.

        Every other method is called from inside of `forward` or of the backward; `close` comes after both.
        """
        ...

    def close(self) -> None:
        """Releases everything that the tape holds."""
        ...
