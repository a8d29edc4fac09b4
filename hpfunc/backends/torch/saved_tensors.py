"""What autograd saves within a unit: weights by their place, everything else as it is, with its version.

# Note [Released weights]
A whole weight that autograd saves, or a view of one, would keep the storage alive. The pack hook replaces it by its
place in the unit; the unpack hook reads the current whole weights. Hooks do not nest in torch, so all other tensors are
passed to the enclosing pair: activation checkpointing around the unit still works.

# Note [Views of another kind]
A view may have another dtype than its weight (`view_as_complex`, `real`, `view(dtype)`), and bits that say that its
elements are to be conjugated or negated when they are read (`conj`, `imag` of that). The hook keeps all of these, with
strides and offset in elements of the view, and makes the view again over the memory of the current whole weight.

# Note [Versions of saved tensors]
torch counts the writes into a tensor, and refuses in backward a tensor that was written to after it was saved. It does
not compare what a hook returns, so the hooks do. They keep an alias, which shares the counter, and pass an alias to an
enclosing hook. If the same object comes back, as it does from activation checkpointing, its counter is compared.
Another tensor, such as a copy on the host, is the responsibility of the enclosing hook.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..._errors import UsageError, message
from ..unit_use import UnitUse
from . import private

Tensor = torch.Tensor
Kind = tuple[torch.dtype, bool, bool]  # of a view: dtype, whether it is conjugated, whether it is negated
_VERSION = "_hpfunc_version"


def storage_of(tensor: Tensor) -> int | None:
    """Returns a value that two tensors share exactly if they share memory; None for a tensor without a storage."""
    try:
        return private.storage_id(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return None


class Wholes:
    """Access to the current whole weights of one use.

    Attributes:
        at_hand: the weights while the unit's own code runs; copies of them during a differentiation inside of the loss.
    """

    __slots__ = ("at_hand", "use")

    def __init__(self, use: UnitUse) -> None:
        self.use = use
        self.at_hand: Sequence[Tensor] | None = None

    def __getitem__(self, index: int) -> Tensor:
        return self.use.whole(index) if self.at_hand is None else self.at_hand[index]

    def detached(self) -> list[Tensor]:
        """Returns all of them as leaves, for a run whose graph nobody differentiates."""
        wholes = [self[i] for i in range(len(self.use.names))]
        return [w.detach().requires_grad_(trains) for w, trains in zip(wholes, self.use.trainable, strict=True)]

    def begin(self) -> None:
        """The unit's backward begins, or a differentiation inside of the loss reaches the unit."""
        if self.use.inside is not None:
            self.use.inside.begin(self.detached)

    def end(self) -> Sequence[Tensor | None]:
        """It has ended. Returns what `Inside.end` returns."""
        self.at_hand = None
        return () if self.use.inside is None else self.use.inside.end()


class Saving:
    """The hooks of one run of a unit's code, which gets these whole weights. See the notes of this module."""

    __slots__ = ("_enclosing", "_places", "_wholes")

    def __init__(self, wholes: Wholes, tensors: Sequence[Tensor]) -> None:
        self._wholes = wholes
        # By storage: place, dtype and offset of a weight. Not the weight itself: these hooks outlive it.
        self._places = {
            storage_of(x): (i, x.dtype, int(x.storage_offset()))
            for i, x in enumerate(tensors)
            if wholes.use.released[i]
        }
        self._enclosing: Any = private.enclosing_hooks(True)

    def hooks(self) -> saved_tensors_hooks:
        """Returns the context in which the hooks are active."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Any:
        place = self._places.get(storage_of(tensor))
        if place is not None:
            return _place_of(tensor, *place)
        # A node that keeps its own output would keep itself alive: a cycle that no collector sees.
        alias = tensor.detach()
        if self._enclosing:
            setattr(alias, _VERSION, private.version_of(alias))
            return (self._enclosing[0](alias),)
        return alias, private.version_of(alias)

    def _unpack(self, saved: Any) -> Tensor:
        if len(saved) == 2:
            alias, version = saved
            if private.version_of(alias) != version:
                raise self._written(alias, version)
            return alias
        if len(saved) == 1:
            found = self._enclosing[1](saved[0])
            version = vars(found).get(_VERSION)
            if version is not None and private.version_of(found) != version:
                raise self._written(found, version)
            return found
        index, kind, *geometry = saved
        whole = self._wholes[index]
        if kind is not None:
            return _another_kind(whole, kind, *geometry)
        shape, stride, offset = geometry
        return whole.as_strided(shape, stride, whole.storage_offset() + offset)

    def _written(self, saved: Tensor, version: int) -> UsageError:
        dtype = str(saved.dtype).removeprefix("torch.")
        now = private.version_of(saved)
        found = f"shape {tuple(saved.shape)}, {dtype}: saved at version {version}, now at version {now}"
        rule = f"a tensor that the unit {self._wholes.use.label!r} saved for its backward was written to in place since"
        hint = "write out of place (`x = x + y` for `x += y`), or write into a clone"
        return UsageError(message("hpfunc.unit", rule, [found], hint=hint))


def _place_of(tensor: Tensor, index: int, dtype: torch.dtype, start: int) -> tuple[Any, ...]:
    """Returns where a tensor lies in a whole weight, and its kind if that is not the kind of the weight."""
    kind = tensor.dtype, tensor.is_conj(), tensor.is_neg()
    if kind == (dtype, False, False):  # whole weights that are released are made here
        return index, None, tensor.shape, tensor.stride(), int(tensor.storage_offset()) - start
    assert start * dtype.itemsize % tensor.itemsize == 0, "whole weights begin at the beginning of their memory"
    offset = int(tensor.storage_offset()) - start * dtype.itemsize // tensor.itemsize
    return index, kind, tensor.shape, tensor.stride(), offset


def _another_kind(whole: Tensor, kind: Kind, shape: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """See Note [Views of another kind]."""
    dtype, is_conj, is_neg = kind
    start = int(whole.storage_offset()) * whole.itemsize // dtype.itemsize
    view = torch.empty(0, dtype=dtype, device=whole.device)
    view.set_(whole.untyped_storage(), start + offset, shape, stride)
    view = view.conj() if is_conj else view
    return private.neg_view(view) if is_neg else view


def during(wholes: Wholes, tensors: Sequence[Tensor], run: Callable[[], Any]) -> Any:
    """Returns ``run()``; autograd keeps no whole weight of it. `tensors` are the whole weights that `run` gets."""
    before, wholes.at_hand = wholes.at_hand, tensors
    try:
        with Saving(wholes, tensors).hooks():
            return run()
    finally:
        wholes.at_hand = before
