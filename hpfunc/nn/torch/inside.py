"""A unit's code that runs again in the middle of its backward, because a checkpoint is inside of its module.

# Note [Checkpoints inside of a module]
In a unit's backward the places of its parameters and buffers hold stand-ins again. A checkpoint inside of the module
then runs a part of its code once more. So the use of the unit has a `Reopening`. When the backward begins, the copy's
stand-ins refer to it, and the modules get the modes of their call back. The first stand-in that is asked for its values
puts all weights of the unit, and its buffers as they were at the start, into their places. When the backward has ended,
the stand-ins return.

A reversible layer does without torch's checkpoints: an autograd function of its own runs a part of the module again in
its backward, and calls `backward` there, which leaves gradients at the weights. They are added to those of the unit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from ..._errors import UsageError, message
from ...backends.torch import private
from .._slots import NAME, Part, filled, set_modes

Tensor = torch.Tensor


class Home:
    """State that the stand-ins of one copy share.

    Attributes:
        modules: all modules of the copy.
        modes: the modes that were set last; None if somebody else has changed them.
        open: the use whose backward has begun.
    """

    __slots__ = ("modes", "modules", "open")

    def __init__(self, modules: Sequence[Any]) -> None:
        self.modules = modules
        self.modes: tuple[bool, ...] | None = None
        self.open: Reopening | None = None

    def take(self, modes: tuple[bool, ...]) -> None:
        """Gives the modules their modes."""
        set_modes(enumerate(self.modules), modes)
        self.modes = modes

    def close(self) -> None:
        """Ends a reopening that an error has left open."""
        if self.open is not None:
            self.open.end()


class Reopening:
    """The inside of one use of a unit. See Note [Checkpoints inside of a module]."""

    __slots__ = ("_buffers", "_filled", "_home", "_modes", "_part", "_places", "_weights")

    def __init__(self, home: Home, part: Part, modes: tuple[bool, ...], buffers: Mapping[str, Tensor]) -> None:
        self._home, self._part, self._modes, self._buffers = home, part, modes, buffers
        self._weights: Callable[[], Sequence[Tensor]] | None = None
        self._filled: Sequence[Tensor] = ()
        self._places = ExitStack()

    def begin(self, weights: Callable[[], Sequence[Tensor]]) -> None:
        """See `Inside`."""
        self._home.close()
        self._home.open, self._weights = self, weights
        if self._home.modes is not self._modes:
            self._home.take(self._modes)

    def end(self) -> list[Tensor | None]:
        """See `Inside`."""
        self._places.close()
        gradients = [weight.grad for weight in self._filled]
        self._weights, self._filled = None, ()
        if self._home.open is self:
            self._home.open = None
        return [] if all(gradient is None for gradient in gradients) else gradients

    def fill(self) -> None:
        """Puts weights and buffers into their places, once."""
        if self._weights is None:
            return
        paths = sorted({slot.path for slot in self._part.weights})  # as a dict is flattened
        with private.disable_current_modes():  # a selective checkpoint's mode counts all operators
            self._filled = self._weights()
            values = dict(zip(paths, self._filled, strict=True))
            values |= {path: x.clone() for path, x in self._buffers.items()}
        self._places.enter_context(filled((*self._part.weights, *self._part.buffers), values))
        self._weights = None

    def value(self, path: str) -> Tensor | None:
        """Returns a weight or buffer of the unit; None if it is not in the unit."""
        self.fill()
        slots = (*self._part.weights, *self._part.buffers)
        return next((slot.tensors[slot.name] for slot in slots if slot.path == path), None)


def refuse_own_backward(paths: Sequence[str]) -> UsageError:
    """Returns the error for code that runs again in a backward of its own, in which no unit holds its parameters."""
    rule = "a backward of the module's own, such as that of a reversible layer, uses parameters outside of their unit"
    hint = "make one unit of all that it uses: hpfunc.from_module(module, units=...) with the module that calls it"
    hint += " (units='reformer.encoder' for Reformer)"
    return UsageError(message(NAME, rule, paths, hint=hint))
