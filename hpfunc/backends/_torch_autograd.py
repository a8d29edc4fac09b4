"""All of torch's autograd that hpfunc relies on: VJP nodes, saved-tensor hooks, gates, and the leaf form.

# Note [Anchor and tokens]
Shards are no differentiable leaves: autograd would add up, cast and read gradients before their collectives are done.
The one leaf is a dummy *anchor*. The whole weights of a unit use are outputs of a node whose backward hands the
gradients to the run and returns nothing. The unit's outputs pass a *gate* whose backward runs first of all in the unit.
Both nodes also exchange a *token*, and every gate's token is a root of the backward: so the engine visits both nodes of
every use, in reverse call order, on every rank, whether or not the use reached the loss. Nodes run by sequence number,
highest
first: the weights' node is older than all of the unit's operations and younger than everything before the unit, so that
it runs just between them, also where a unit has no trainable weight.

# Note [Released weights]
What autograd saves of a whole weight, or of a view of it, would keep the storage alive. The pack hook replaces it by
its place in the unit; the unpack hook asks the run for the whole weights of the moment. Hooks do not nest in torch, so
whatever is not a weight is handed to the enclosing pair: activation checkpointing around the unit goes on to work.

# Note [Recomputation comes first]
Activation checkpointing recomputes everything inside it when the first tensor that it did not save is asked for. Left
alone that is in the middle of a unit's backward, and other units would be called within it. So the weights' node saves
its anchor, first of all in the unit, and the gate asks for it before the unit's backward begins: whatever recomputes
the unit does so there. Calls and backwards of units then follow one another, and can be planned.

# Note [Weights that outlive their unit]
A checkpoint inside of a unit keeps what its function closes over, and what is no tensor among its arguments, say a dict
of weights: no hook sees that. These very tensors are what it will compute with again. So a tensor that somebody still
holds when the unit has returned is emptied, and gets the whole weight of the moment while the unit's backward is open.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import optree
import torch
from torch._C._autograd import _top_saved_tensors_default_hooks as enclosing_hooks
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from .._errors import LeafError, UsageError, message
from . import _torch_borrowed as borrowed
from ._base import UnitUse
from ._contract import is_called_by, refusing_writes
from ._torch_modes import differentiating, ordinary

Tensor = torch.Tensor


class _Wholes(torch.autograd.Function):
    """The whole weights of one use, and a token. See Note [Anchor and tokens]."""

    @staticmethod
    def forward(ctx: Any, use: UnitUse, wholes: list[Tensor], anchor: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.use, ctx.outliving = use, _Outliving()
        if use.scope is not None:  # see Note [Recomputation comes first]
            ctx.save_for_backward(anchor)
        outputs = tuple(whole.detach() for whole in wholes)
        frozen = [out for out, trainable in zip(outputs, use.trainable, strict=True) if not trainable]
        ctx.mark_non_differentiable(*frozen)
        return (*outputs, anchor.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.outliving.empty()
        ctx.use.after_backward(borrowed.take(gradients[:-1]))
        return None, None, None


class _Gate(torch.autograd.Function):
    """The outputs of one use, and a token. See Note [Anchor and tokens]."""

    @staticmethod
    def forward(ctx: Any, use: UnitUse, node: Any, token: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.use, ctx.node = use, node
        return (*(out.detach() for out in outputs), token.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        node, ctx.node = ctx.node, None
        if ctx.use.scope is not None:
            _ = node.saved_tensors  # see Note [Recomputation comes first]
        ctx.use.before_backward()
        node.outliving.fill(ctx.use)
        return None, None, None, *gradients[:-1]


class _Outliving:
    """See Note [Weights that outlive their unit]."""

    def __init__(self) -> None:
        self.refs: list[tuple[int, weakref.ref[Tensor]]] = []

    def give(self, use: UnitUse, weights: Sequence[Tensor]) -> None:
        """Notes the released weights, which are about to be given to the unit."""
        self.refs = [(i, weakref.ref(w)) for i, w in enumerate(weights) if use.released[i]]

    def empty(self) -> None:
        """Takes the memory away from those that are still held."""
        self.refs = [(i, ref) for i, ref in self.refs if ref() is not None]
        for _, ref in self.refs:
            if (weight := ref()) is not None:
                weight.data = weight.data.new_empty(0)

    def fill(self, use: UnitUse) -> None:
        """Gives them the whole weights of the moment."""
        for i, ref in self.refs:
            if (weight := ref()) is not None:
                weight.data = use.whole(i)


class _Linear(torch.autograd.Function):
    """A linear map and its transpose, closed under differentiation of any kind and order."""

    @staticmethod
    def forward(x: Tensor, forward: Any, transpose: Any) -> Tensor:
        return forward(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.forward_map, ctx.transpose_map = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, None, None]:
        return linear(ctx.transpose_map, ctx.forward_map, gradient), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return linear(ctx.forward_map, ctx.transpose_map, tangent)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, forward: Any, transpose: Any) -> tuple[Tensor, int]:
        # Maps address dims from the front and leave further ones alone, so the mapped dim goes to the end.
        assert in_dims[0] is not None
        out = linear(forward, transpose, x.movedim(in_dims[0], -1))
        return out, out.dim() - 1


def linear(forward: Callable[[Tensor], Tensor], transpose: Callable[[Tensor], Tensor] | None, x: Tensor) -> Tensor:
    """Returns ``forward(x)`` with this transpose; None is a map that may not be differentiated."""
    if transpose is None:
        if is_transformed([x]) and torch.is_grad_enabled():
            raise UsageError(message("hpfunc", "this collective has no derivative", hint="call it on x.detach()"))
        return forward(x)
    return _Linear.apply(x, forward, transpose)


def is_transformed(tensors: Iterable[Tensor]) -> bool:
    """Returns whether torch.func is active, or one of the tensors takes part in a differentiation."""
    if peek_interpreter_stack() is not None:
        return True
    records = torch.is_grad_enabled()
    return any(
        (records and tensor.requires_grad) or forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
    )


def _mark(hook: Any) -> object:
    """Returns what stands for a hook, equal to what stands for the same one only, and does not keep it alive."""
    try:
        return weakref.ref(hook)
    except TypeError:  # an object of the caller's that cannot be referred to weakly
        return hook


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _refuse_escapes(wholes: Sequence[Tensor], outputs: Any, names: Sequence[str]) -> None:
    owners = {_storage(whole): name for name, whole in zip(names, wholes, strict=True)}
    tensors = [leaf for leaf in optree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    escaped = [owners[_storage(t)] for t in tensors if _storage(t) in owners]
    if escaped:
        hint = "return a copy (`w.clone()`), or use hpfunc.unshard where the whole weight is wanted outside of a unit"
        raise UsageError(
            message("hpfunc.unit", "a gathered weight escapes from the unit as an output", escaped, hint=hint)
        )


def use_plain(fn: Callable[..., Any], wholes: Sequence[Tensor], names: Sequence[str], *args: Any, **kwargs: Any) -> Any:
    """Calls ``fn(wholes, ...)`` without hooks, and refuses writes into the weights and escapes."""
    wholes = [whole.detach() for whole in wholes]
    with refusing_writes(wholes, names):
        outputs = fn(wholes, *args, **kwargs)
    _refuse_escapes(wholes, outputs, names)
    return outputs


def _recording(
    fn: Callable[..., Any], use: UnitUse, wholes: Sequence[Tensor], weights: Sequence[Tensor], args: Any, kwargs: Any
) -> Any:
    """Calls ``fn(weights, ...)``, which autograd records without keeping the whole weights; refuses what may not be."""
    with refusing_writes(wholes, use.names), saved_tensors_hooks(*_release_hooks(use, wholes)):
        outputs = fn(weights, *args, **kwargs)
    _refuse_escapes(wholes, outputs, use.names)
    return outputs


def _forgetting(
    fn: Callable[..., Any], use: UnitUse, wholes: Sequence[Tensor], weights: Sequence[Tensor], anchor: Tensor,
    args: Any, kwargs: Any,
) -> Any:  # fmt: skip
    """The same, and nothing but the tensors among the arguments is kept: the rest is computed again in backward.

    torch's own checkpointing does it: it restores random states and autocast, sees tensors that `fn` closes over, hands
    the saved arguments to the enclosing hooks, and stops as soon as it has what it needs. `anchor` goes along to show
    it the device where the arguments hold no tensor.
    """
    first = [(wholes, weights)]
    leaves, treedef = optree.tree_flatten(cast(Any, (args, kwargs)))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[i] for i in places]
    rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def call(_: Tensor, *tensors: Tensor) -> Any:
        filled: list[Any] = list(rest)
        for i, tensor in zip(places, tensors, strict=True):
            filled[i] = tensor
        args, kwargs = cast(Any, optree.tree_unflatten(treedef, filled))
        wholes, weights = first.pop() if first else _detached(use)
        return _recording(fn, use, wholes, weights, args, kwargs)

    return checkpoint(call, anchor, *tensors, use_reentrant=False)


def _detached(use: UnitUse) -> tuple[list[Tensor], list[Tensor]]:
    wholes = [use.whole(i) for i in range(len(use.names))]
    return wholes, [w.detach().requires_grad_(trains) for w, trains in zip(wholes, use.trainable, strict=True)]


class TorchTape:
    """One differentiation: its anchor, its tokens and its leaves."""

    def __init__(self, device: str) -> None:
        self._anchor = torch.zeros(1, device=device, requires_grad=True)
        self._tokens: list[Tensor] = []
        self.leaves: list[Tensor] = []

    def close(self) -> None:
        """Lets go of the graph, whose nodes hold the run, which holds this tape: no collector sees that circle."""
        self._tokens.clear()
        self.leaves.clear()

    def leaf(self, local: Tensor) -> Tensor:
        alias = ordinary(local).detach().requires_grad_()
        self.leaves.append(alias)
        return alias

    @staticmethod
    def is_grad_enabled() -> bool:
        return torch.is_grad_enabled()

    @staticmethod
    def refuse_reentrant() -> None:
        if is_called_by("CheckpointFunction."):
            hint = "use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            raise UsageError(message("hpfunc.unit", "a unit runs under reentrant checkpointing", hint=hint))

    def use_unit(self, fn: Callable[..., Any], use: UnitUse, *args: Any, **kwargs: Any) -> Any:
        """Calls ``fn(whole weights, ...)`` such that its backward reports to `use`."""
        outputs, token = self._call(fn, use, use.before_forward(), args, kwargs)
        if token is None:
            return outputs
        cast(Any, token.grad_fn).outliving.empty()
        leaves, treedef = optree.tree_flatten(outputs)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        *gated, token = _Gate.apply(use, token.grad_fn, token, *(leaves[i] for i in places))
        self._tokens.append(token)
        for i, out in zip(places, gated, strict=True):
            leaves[i] = out
        return optree.tree_unflatten(treedef, leaves)

    def recompute_unit(self, fn: Callable[..., Any], use: UnitUse, *args: Any, **kwargs: Any) -> Any:
        """Calls ``fn(whole weights, ...)`` again, for checkpointing: it must save what the first call saved."""
        wholes = use.before_recompute()
        try:
            return self._call(fn, use, wholes, args, kwargs)[0]
        finally:  # checkpointing leaves by an exception once it has what it needs
            use.after_recompute()

    def _call(
        self, fn: Callable[..., Any], use: UnitUse, wholes: list[Tensor], args: Any, kwargs: Any
    ) -> tuple[Any, Tensor | None]:
        """Returns the outputs and the token of the weights' node, if there is one."""
        inputs = [leaf for leaf in optree.tree_leaves(cast(Any, [args, kwargs])) if isinstance(leaf, Tensor)]
        use.needs_backward = any(use.trainable) or any(x.requires_grad for x in inputs)
        if not use.needs_backward or not torch.is_grad_enabled():
            return use_plain(fn, wholes, use.names, *args, **kwargs), None
        enclosing = enclosing_hooks(True)
        use.scope = _mark(enclosing[1]) if enclosing else None
        *weights, token = _Wholes.apply(use, wholes, self._anchor)
        token.grad_fn.outliving.give(use, weights)
        if use.remat:
            return _forgetting(fn, use, wholes, weights, self._anchor, args, kwargs), token
        return _recording(fn, use, wholes, weights, args, kwargs), token

    @differentiating()
    def differentiate(self, forward: Callable[[], Tensor]) -> list[Tensor | None]:
        """See `Tape`; None is the gradient of a leaf that has no path to the loss."""
        loss = forward()
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            found = type(loss).__name__
            if isinstance(loss, Tensor):
                found = f"shape {tuple(loss.shape)}, {str(loss.dtype).removeprefix('torch.')}"
            raise LeafError(message("hpfunc.value_and_grad", f"the loss must be a real scalar tensor, got {found}"))
        roots = [loss] if loss.requires_grad else []
        seeds = [torch.ones_like(loss)] if loss.requires_grad else []
        roots += self._tokens
        seeds += [torch.zeros_like(token) for token in self._tokens]
        if not roots:
            return [None] * len(self.leaves)
        gradients = torch.autograd.grad(roots, [self._anchor, *self.leaves], seeds, allow_unused=True)
        return list(gradients[1:])


def _release_hooks(use: UnitUse, wholes: Sequence[Tensor]) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """See Note [Released weights]."""
    place = {_storage(whole): i for i, whole in enumerate(wholes) if use.released[i]}
    enclosing = enclosing_hooks(True)

    def pack(tensor: Tensor) -> Any:
        index = place.get(_storage(tensor))
        if index is not None:
            return index, tensor.shape, tensor.stride(), tensor.storage_offset()
        # A node that keeps its own output, as it is, would keep itself alive: no collector sees that circle.
        return (enclosing[0](tensor),) if enclosing else tensor.detach()

    def unpack(saved: Any) -> Tensor:
        if not isinstance(saved, tuple):
            return saved
        if len(saved) == 1:
            return enclosing[1](saved[0])
        index, shape, stride, offset = saved
        return use.whole(index).as_strided(shape, stride, offset)

    return pack, unpack
