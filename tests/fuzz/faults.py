"""Faults that hpfunc once had, planted again in the ranks: one or more of each kind that the fuzzer must find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from hpfunc._running import eager as _eager
from hpfunc._running import planned as _execute
from hpfunc.backends.torch import autograd as _torch_autograd
from hpfunc.backends.torch import backend as _torch
from hpfunc.backends.torch import borrowed as _torch_borrowed
from hpfunc.backends.torch import saved_tensors as _torch_saved

Tensor = torch.Tensor


def gradients_are_taken_as_they_come() -> None:
    """Kind 1: what autograd returned, which may be another weight's too, is scaled and delivered."""
    _torch_borrowed.take = list


def gradients_are_added_in_place() -> None:
    """Kind 1: the gradient of a second use is added to that of the first, in autograd's memory."""

    def add(self: Any, left: Tensor, right: Tensor, dtype: str) -> Tensor:
        total = left.detach().to(getattr(torch, dtype))  # the very tensor, if it has this dtype
        return total.add_(right.detach())

    _torch_borrowed.take = list
    _torch.TorchBackend.add = add


def versions_are_not_compared() -> None:
    """Kind 3: what was saved within a unit may be written to."""
    unpack = _torch_saved.Saving._unpack

    def trusting(self: Any, saved: Any) -> Tensor:
        return saved[0] if len(saved) == 2 else unpack(self, saved)

    _torch_saved.Saving._unpack = trusting


def views_have_the_dtype_of_their_weight() -> None:
    """Kind 4: a view of a whole weight is made again by shape, strides and offset alone."""
    _torch_saved._another_kind = lambda whole, kind, shape, stride, offset: whole.as_strided(
        shape, stride, whole.storage_offset() + offset
    )


def the_last_gradient_wins() -> None:
    """Kind 5: of one array at two places of a unit the eager driver keeps the last gradient."""
    after_backward = _eager.Eager.after_backward

    def last(self: Any, use: Any, gradients: Sequence[Tensor | None]) -> None:
        place = {weight: i for i, weight in enumerate(use.weights)}
        kept = [g if place[w] == i else None for i, (w, g) in enumerate(zip(use.weights, gradients, strict=True))]
        after_backward(self, use, kept)

    _eager.Eager.after_backward = last


def the_mode_of_the_caller_counts() -> None:
    """Kind 6: under no_grad there is no gradient."""
    _torch_autograd.TorchTape.differentiate = cast(Any, _torch_autograd.TorchTape.differentiate).__wrapped__


def rows_of_empty_messages_are_counted() -> None:
    """Kind 7: a message of weights without elements is taken apart by the length of its rows."""
    parts = _execute.Planned._parts

    def counting(self: Any, op: Any, message: Tensor) -> list[Tensor]:
        message.reshape((-1, sum(self.schedule.program.weights[weight].block_numel for weight in op.weights)))
        return parts(self, op, message)

    _execute.Planned._parts = counting


FAULTS: dict[Callable[[], None], str] = {
    gradients_are_taken_as_they_come: "shared memory|written|wrong gradient|bits differ",
    gradients_are_added_in_place: "written|wrong gradient|bits differ",
    versions_are_not_compared: "no error where plain torch raises",
    views_have_the_dtype_of_their_weight: "wrong gradient",
    the_last_gradient_wins: r"wrong gradient \(eager\)",
    the_mode_of_the_caller_counts: "refused without a reason|wrong gradient",
    rows_of_empty_messages_are_counted: r"raw RuntimeError: cannot reshape.*\(planned\)",
}
"""Each fault, and what it looks like."""
