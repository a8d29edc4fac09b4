"""All of torch's autograd that hpfunc relies on: VJP nodes, saved-tensor hooks, gates, and the leaf form.

# Note [Anchor and tokens]
Shards are not differentiable leaves: autograd would add, cast and read gradients before their collectives are done.
The only leaf is a dummy *anchor*. The whole weights of a unit use are outputs of a node whose backward hands the
gradients to the run and returns nothing. The unit's outputs pass a *gate* whose backward runs first of all in the unit.
Both nodes also exchange a *token*, and every gate's token is a root of the backward: so the engine visits both nodes of
every use, in reverse call order, on every rank, whether or not the use reached the loss. Nodes run by sequence number,
highest first. The weights' node is older than all operations of the unit and younger than everything before the unit,
so it runs between the two, even if a unit has no trainable weight.

# Note [Recomputation comes first]
Activation checkpointing recomputes its region when a tensor of it that was not saved is first needed. By default that
is in the middle of a unit's backward, and other units would be called within it. So the weights' node saves its anchor
before anything else in the unit, and the gate reads it before the unit's backward begins: a recomputation of the unit
happens there. Calls and backwards of units then follow one another, and can be planned.

# Note [Weights that outlive their unit]
A checkpoint inside of a unit keeps the objects that its function closes over, and arguments that are not tensors, such
as a dict of weights: no hook sees these. It will compute with the same tensor objects again. So a tensor that is still
referenced when the unit has returned is emptied, and gets the current whole weight during the unit's backward.

# Note [Differentiation inside of the loss]
A loss may call `torch.autograd.grad` itself: for forces, for a gradient penalty, for an adversarial example. Its engine
visits gates and the operations of units, but not a weights' node, unless weights are differentiated too, which is
refused. The unit's weights are gathered once more for it, like those of a call without backward, and copied. The copies
are the caller's memory, and live until that engine ends, or as long as a graph of second order keeps them. Tensors that
torch saves keep their place in the graph, so the second order reaches the weights' node by itself. A graph that the
inner engine frees has no further backward: its token is not a root any more, and its use expects no backward.

# Note [A backward within the backward]
The backward of an autograd function of the caller's, such as a reversible layer's, may run code of its unit again and
call `backward` on it. That engine visits the weights' node early, or it leaves gradients at the weights of a module's
copy (see `nn.torch.inside`). Both are added to the gradients of the unit. If such a backward calls a unit, no backward
of that unit has begun: this is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import optree
import torch
from torch.utils.checkpoint import checkpoint

from ..._errors import UsageError, message
from ..unit_rules import is_called_by, refuse_escaped, refuse_loss, refusing_writes, taken_apart
from ..unit_use import UnitUse
from . import borrowed, private, ranges
from .arguments import Arguments, refuse
from .modes import differentiating, ordinary
from .saved_tensors import Saving, Wholes, during, storage_of

Tensor = torch.Tensor


class _Wholes(torch.autograd.Function):
    """The whole weights of one use, and a token. See Note [Anchor and tokens].

    Attributes of its context:
        task: the backward that has begun at the gate.
        within: gradients of backwards within that one. See Note [A backward within the backward].
        is_repeat: whether the unit was called again, by a checkpoint: that graph is for its saved tensors only.
    """

    @staticmethod
    def forward(ctx: Any, held: Wholes, wholes: list[Tensor], anchor: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        use = held.use
        ctx.use, ctx.held, ctx.outliving = use, held, _Outliving()
        ctx.task, ctx.within, ctx.is_repeat = None, [], False
        if use.scope is not None:  # see Note [Recomputation comes first]
            ctx.save_for_backward(anchor)
        outputs = tuple(whole.detach() for whole in wholes)
        frozen = [out for out, trainable in zip(outputs, use.trainable, strict=True) if not trainable]
        ctx.mark_non_differentiable(*frozen)
        return (*outputs, anchor.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        taken = borrowed.take(gradients[:-1])  # first: a gradient may be one of the weights that outlive their unit
        if ctx.is_repeat:
            raise _refuse_own_backward(ctx.use.label)
        if ctx.task is not None and ctx.task != private.graph_task():
            ctx.within.append(taken)
            return None, None, None
        ctx.outliving.empty()
        for within in (*ctx.within, ctx.held.end()):
            taken = list(map(_sum, taken, within)) if within else taken
        with ranges.of_unit("after backward", ctx.use):
            ctx.use.after_backward(taken)
        return None, None, None


def _refuse_own_backward(label: str) -> UsageError:
    rule = f"a backward within the backward, such as that of a reversible layer, calls the unit {label!r}"
    hint = "make one unit of all that the autograd function calls, and of the function itself"
    return UsageError(message("hpfunc.unit", rule, hint=hint))


def _sum(gradient: Tensor | None, other: Tensor | None) -> Tensor | None:
    if gradient is None or other is None:
        return gradient if other is None else other.to_dense()
    return gradient + other


class _Gate(torch.autograd.Function):
    """The outputs of one use, and a token. See Note [Anchor and tokens]."""

    @staticmethod
    def forward(ctx: Any, use: UnitUse, node: Any, token: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.use, ctx.node, ctx.is_freed = use, node, False
        return (*(out.detach() for out in outputs), token.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        inner = ctx.use.inner()
        if inner is None:
            _begin_backward(ctx)
        else:
            _begin_inner_backward(ctx, inner)
        return None, None, None, *gradients[:-1]


def _begin_backward(gate: Any) -> None:
    use, node, gate.node = gate.use, gate.node, None
    if gate.is_freed:
        hint = "pass retain_graph=True there, or call the unit again for the loss"
        rule = f"torch.autograd.grad inside of the loss freed the graph of the unit {use.label!r}, which the loss uses"
        raise UsageError(message("hpfunc.unit", rule, hint=hint))
    if use.scope is not None:
        _ = node.saved_tensors  # see Note [Recomputation comes first]
    with ranges.of_unit("before backward", use):
        use.before_backward()
    node.task = private.graph_task()
    node.outliving.fill(node.held)
    node.held.begin()


def _begin_inner_backward(gate: Any, inner: UnitUse) -> None:
    """See Note [Differentiation inside of the loss]."""
    use, node = gate.use, gate.node
    copies = [whole.clone() for whole in inner.before_forward()]
    inner.after_forward()
    node.held.at_hand = copies
    node.outliving.fill(node.held)
    node.held.begin()
    if use.scope is not None:
        _ = node.saved_tensors

    keeps = private.keeps_graph()

    def end() -> None:
        node.held.end()
        if not keeps:  # else the graph of this backward may have saved such a weight, for the outer one to read
            node.outliving.empty()

    private.queue_callback(end)
    if not keeps:
        gate.is_freed = True
        use.dismiss()


# What `Function.apply` does before it calls these is for transforms of torch.func, of which none is active here.
_apply_wholes = cast(Any, super(torch.autograd.Function, _Wholes)).apply
_apply_gate = cast(Any, super(torch.autograd.Function, _Gate)).apply


class _Outliving:
    """See Note [Weights that outlive their unit]."""

    def __init__(self) -> None:
        self.refs: list[tuple[int, weakref.ref[Tensor]]] = []

    def give(self, use: UnitUse, weights: Sequence[Tensor]) -> None:
        """Records the released weights, which the unit is about to get."""
        self.refs = [(i, weakref.ref(w)) for i, w in enumerate(weights) if use.released[i]]

    def empty(self) -> None:
        """Empties the weights that are still referenced."""
        self.refs = [(i, ref) for i, ref in self.refs if ref() is not None]
        for _, ref in self.refs:
            if (weight := ref()) is not None:
                weight.data = weight.data.new_empty(0)

    def fill(self, held: Wholes) -> None:
        """Gives them the memory of the current whole weights."""
        for i, ref in self.refs:
            if (weight := ref()) is not None:
                weight.data = held[i]


def _mark(hook: Any) -> object:
    """Returns a key for a hook, equal only to keys for the same hook. It does not keep the hook alive."""
    try:
        return weakref.ref(hook)
    except TypeError:  # an object of the caller that does not support weak references
        return hook


def _tensors(tree: Any) -> list[Tensor]:
    """Returns the tensors in a tree. Most often the tree is a tensor."""
    return [tree] if type(tree) is Tensor else [x for x in optree.tree_leaves(tree) if isinstance(x, Tensor)]


def _refuse_escapes(wholes: Sequence[Tensor], outputs: Any, names: Sequence[str]) -> None:
    owners = {storage_of(whole): name for name, whole in zip(names, wholes, strict=True)}
    storages = [storage_of(leaf) for leaf in _tensors(outputs)]
    escaped = [owners[storage] for storage in storages if storage in owners]
    refuse_escaped(escaped, "w.clone()")


def use_plain(fn: Callable[..., Any], wholes: Sequence[Tensor], use: UnitUse, *args: Any, **kwargs: Any) -> Any:
    """See `Differentiation.use_plain`."""
    with ranges.of_unit("forward", use):
        return _plain(fn, wholes, use.names, *args, **kwargs)


def _plain(fn: Callable[..., Any], wholes: Sequence[Tensor], names: Sequence[str], *args: Any, **kwargs: Any) -> Any:
    wholes = [whole.detach() for whole in wholes]
    with refusing_writes(wholes, names):
        outputs = fn(wholes, *args, **kwargs)
    _refuse_escapes(wholes, outputs, names)
    return outputs


def _recording(
    fn: Callable[..., Any], held: Wholes, wholes: Sequence[Tensor], weights: Sequence[Tensor], args: Any, kwargs: Any
) -> Any:
    """Calls ``fn(weights, ...)``, which autograd records without keeping whole weights; refuses escapes and writes."""
    names = held.use.names
    with refusing_writes(wholes, names):
        outputs = during(held, wholes, lambda: fn(weights, *args, **kwargs))
    _refuse_escapes(wholes, outputs, names)
    return outputs


def _forgetting(
    fn: Callable[..., Any], held: Wholes, wholes: Sequence[Tensor], weights: Sequence[Tensor], anchor: Tensor,
    args: Any, kwargs: Any,
) -> Any:  # fmt: skip
    """The same, but only the tensors among the arguments are kept. The rest is computed again in backward.

    torch's own checkpointing does it: it restores random states and autocast, sees tensors that `fn` closes over, hands
    the saved arguments to the enclosing hooks, and stops as soon as it has what it needs. `anchor` tells it the device
    if the arguments hold no tensor. See Note [Arguments as they were].
    """
    first = [(wholes, weights, args, kwargs)]
    before = Arguments(args, kwargs, _version, only_objects=True)
    tensors, put_back = taken_apart((args, kwargs), lambda leaf: isinstance(leaf, Tensor))

    def call(_: Tensor, *tensors: Tensor) -> Any:
        if first:
            return _recording(fn, held, *first.pop())
        again = held.detached()
        args, kwargs = put_back(tensors)
        with before.put_back(held.use.label):
            return _recording(fn, held, [weight.detach() for weight in again], again, args, kwargs)

    with Saving(held, ()).hooks():  # for the arguments, which checkpointing saves
        return checkpoint(call, anchor, *tensors, use_reentrant=False)


def _version(x: Any) -> Any:
    """Returns a value that changes when a tensor is written to, or a generator is drawn from."""
    if isinstance(x, Tensor):
        return 0 if x.is_inference() else private.version_of(x)
    return x.get_state().numpy().tobytes() if isinstance(x, torch.Generator) else None


def _explained(text: str) -> UsageError | None:
    """Returns an error in words of ours for one of torch's, if there are such words."""
    if "modified by an inplace operation" in text:
        rule = "a tensor that a backward needs was written to in place since; units run backward even if the loss"
        rule += f" does not depend on them: {text}"
        hint = "write out of place (`x = x + y` for `x += y`), or write into a clone"
    elif "use_reentrant=True" in text:
        rule = "a checkpoint with use_reentrant=True runs a second backward inside of the first"
        hint = "use_reentrant=False, which a model of transformers takes as"
        hint += " gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False});"
        hint += " or remat=True in the place of checkpoints"
    else:
        return None
    return UsageError(message("hpfunc.value_and_grad", rule, hint=hint))


class TorchTape:
    """One differentiation: its anchor, its tokens and its leaves."""

    def __init__(self, device: str) -> None:
        self._anchor = torch.zeros(1, device=device, requires_grad=True)
        self._tokens: list[Tensor] = []
        self._graph_task = private.graph_task()
        self.leaves: list[Tensor] = []

    def close(self) -> None:
        """Releases the graph. Its nodes hold the run, which holds this tape: a cycle that no collector sees."""
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
        if private.graph_task() != self._graph_task:
            rule = f"the unit {use.label!r} is computed again for a differentiation inside of the loss"
            hint = "recompute by units, hpfunc.unit(fn, remat=True), in the place of a checkpoint around them"
            raise UsageError(message("hpfunc.unit", rule, hint=hint))
        wholes = use.before_forward()
        with ranges.of_unit("forward", use):
            outputs, token = self._call(fn, use, wholes, args, kwargs)
        if token is None:
            return outputs
        cast(Any, token.grad_fn).outliving.empty()
        if type(outputs) is Tensor and outputs.requires_grad:
            output, token = _apply_gate(use, token.grad_fn, token, outputs)
            self._tokens.append(token)
            return output
        leaves, put_back = taken_apart(outputs, lambda leaf: isinstance(leaf, Tensor) and leaf.requires_grad)
        *gated, token = _apply_gate(use, token.grad_fn, token, *leaves)
        self._tokens.append(token)
        return put_back(gated)

    def recompute_unit(self, fn: Callable[..., Any], use: UnitUse, *args: Any, **kwargs: Any) -> Any:
        """Calls ``fn(whole weights, ...)`` again, for checkpointing: it must save what the first call saved."""
        if use.changed and (again := Arguments(args, kwargs, _version).holding(use.changed)):
            raise refuse(use.label, again)
        wholes = use.before_recompute()
        try:
            with ranges.of_unit("recompute", use):
                outputs, token = self._call(fn, use, wholes, args, kwargs)
            if token is not None:
                cast(Any, token.grad_fn).is_repeat = True
            return outputs
        finally:  # checkpointing leaves by an exception once it has what it needs
            use.after_recompute()

    def _call(
        self, fn: Callable[..., Any], use: UnitUse, wholes: list[Tensor], args: Any, kwargs: Any
    ) -> tuple[Any, Tensor | None]:
        """Returns the outputs and the token of the weights' node, if there is one."""
        use.needs_backward = any(use.trainable) or any(
            x.requires_grad for arg in (*args, *kwargs.values()) for x in _tensors(arg)
        )
        if not use.needs_backward or not torch.is_grad_enabled():
            return _plain(fn, wholes, use.names, *args, **kwargs), None
        enclosing = private.enclosing_hooks(True)
        use.scope = _mark(enclosing[1]) if enclosing else None
        held = Wholes(use)
        *weights, token = _apply_wholes(held, wholes, self._anchor)
        token.grad_fn.outliving.give(use, weights)
        given = Arguments(args, kwargs, _version) if enclosing or use.remat else None
        if use.remat:
            outputs = _forgetting(fn, held, wholes, weights, self._anchor, args, kwargs)
        else:
            outputs = _recording(fn, held, wholes, weights, args, kwargs)
        changed = [] if given is None else given.changed()
        if use.remat and given is not None and (written := given.written(changed)):
            raise refuse(use.label, written)
        use.changed = [thing for _, things in changed for thing in things] if enclosing else []
        return outputs, token

    @differentiating()
    def differentiate(self, forward: Callable[[], Tensor]) -> list[Tensor | None]:
        loss = forward()
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            found = type(loss).__name__
            if isinstance(loss, Tensor):
                found = f"shape {tuple(loss.shape)}, {str(loss.dtype).removeprefix('torch.')}"
            raise refuse_loss(found)
        roots = [loss] if loss.requires_grad else []
        seeds = [torch.ones_like(loss)] if loss.requires_grad else []
        tokens = [token for token in self._tokens if not cast(Any, token.grad_fn).is_freed]
        roots += tokens
        seeds += [torch.zeros_like(token) for token in tokens]
        if not roots:
            return [None] * len(self.leaves)
        try:
            return list(torch.autograd.grad(roots, [self._anchor, *self.leaves], seeds, allow_unused=True)[1:])
        except RuntimeError as error:
            explained = _explained(str(error))
            if explained is None:
                raise
            raise explained from error
