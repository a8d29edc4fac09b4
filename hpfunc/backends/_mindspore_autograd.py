"""All of MindSpore's autograd that hpfunc relies on: VJP nodes, saved-tensor hooks and gates, the same on every device.

Anchor, gates and tokens are those of torch (see Note [Anchor and tokens] in ``_torch_autograd``). What differs:

# Note [One call]
MindSpore differentiates functions, and has no ``backward()``. So forward and backward are one call of
``mindspore.value_and_grad``, with the anchor as the only argument; the gate's tokens are outputs beside the loss. Their
gradients there are ones, but no backward reads the gradient of a token: they only make the engine come by.

# Note [Frozen weights]
A node's outputs that are marked as not differentiable shift the places of the others in MindSpore 2.10 ("index should
less than metadata size"). So only trainable weights are outputs of the node; the frozen ones bypass it.

# Note [Views of weights]
`linear` and its kin save the weight itself, which the pack hook knows by its address. A view of a weight (``w.T``, a
reshape) is saved as a copy, which it cannot know: the copy stays alive until backward. The first calls of a unit look
for saved tensors with the values of a weight, and warn.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import mindspore
import numpy as np
import optree
from mindspore import ops
from mindspore.common._grad_function import _Function
from mindspore.common.api import _pynative_executor as executor

from .._errors import HpfuncWarning, LeafError, UsageError, message
from ._base import UnitUse

Tensor = Any
_UNIT = "hpfunc.unit"


@dataclass(frozen=True, slots=True)
class Bridge:
    """What a device adds: how its runtime's tensors become the caller's and back, and how its queue is drained."""

    hold: Callable[[Tensor], Tensor]
    give: Callable[[Tensor], Tensor]
    drain: Callable[[], None]


def dtype_of(name: str) -> Any:
    """Returns MindSpore's dtype of this name."""
    return mindspore.bool_ if name == "bool" else getattr(mindspore, name)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, mindspore.Tensor)


def _token() -> Tensor:
    return mindspore.Tensor([0.0], mindspore.float32)


class _Wholes(_Function):
    """The trainable whole weights of one use, and a token. See Note [Frozen weights]."""

    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        return (*call.trainable, _token())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        call, ctx.call = ctx.call, None
        call.tape.guard(lambda: call.after_backward(gradients[:-1]))
        return None, None


class _Gate(_Function):
    """The outputs of one use, and a token."""

    @staticmethod
    def forward(ctx: Any, call: _Call, token: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        return (*outputs, token)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        call, ctx.call = ctx.call, None
        call.tape.guard(call.use.before_backward)
        return None, _token(), *gradients[:-1]  # a token without a gradient would end the way to the weights' node


class _Leaf(_Function):
    """An alias of a tensor that puts its gradient into the tape."""

    @staticmethod
    def forward(ctx: Any, leaf: _LeafPlace, anchor: Tensor) -> Tensor:
        ctx.leaf = leaf
        return ops.stop_gradient(leaf.local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        leaf, ctx.leaf = ctx.leaf, None
        leaf.tape.gradients[leaf.place] = gradient
        return None, None


@dataclass(slots=True)
class _LeafPlace:
    """A leaf of a tape."""

    tape: MindSporeTape
    place: int
    local: Tensor


class _Linear(_Function):
    """A linear map and its transpose."""

    @staticmethod
    def forward(ctx: Any, maps: _Maps, x: Tensor) -> Tensor:
        ctx.maps = maps
        return maps.bridge.give(maps.forward(maps.bridge.hold(x)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        maps = ctx.maps
        return None, linear(maps.bridge, maps.transpose, maps.forward, gradient)


@dataclass(frozen=True, slots=True)
class _Maps:
    """What `_Linear` applies."""

    bridge: Bridge
    forward: Callable[[Tensor], Tensor]
    transpose: Any


def linear(
    bridge: Bridge, forward: Callable[[Tensor], Tensor], transpose: Callable[[Tensor], Tensor] | None, x: Tensor
) -> Tensor:
    """Returns ``forward(x)`` with this transpose; None is a map that may not be differentiated."""
    if not is_transformed([x]):
        return bridge.give(forward(bridge.hold(x)))
    if transpose is None:
        hint = "call it on mindspore.ops.stop_gradient(x)"
        raise UsageError(message("hpfunc", "this collective has no derivative", hint=hint))
    return _Linear.apply(_Maps(bridge, forward, transpose), x)


def is_transformed(tensors: Iterable[Tensor]) -> bool:
    """Returns whether one of the tensors takes part in a differentiation."""
    return executor.requires_grad() and any(_is_tensor(tensor) and tensor._requires_grad for tensor in tensors)


def keep_each(tree: Any, prepare: Callable[[Any], Callable[[int, Tensor], Any]]) -> Any:
    """Returns the tree with ``keep(index, leaf)`` for each leaf."""
    keep = prepare(tree)
    leaves, treedef = optree.tree_flatten(tree)
    kept = []
    for i in range(len(leaves)):
        kept.append(keep(i, leaves[i]))
        leaves[i] = None
    return optree.tree_unflatten(treedef, kept)


# --- units ----------------------------------------------------------------------------------------------------------
@contextmanager
def _refusing_writes(wholes: Sequence[Tensor], names: Sequence[str]) -> Iterator[None]:
    versions = [whole._version for whole in wholes]
    try:
        yield
    finally:
        written = [name for name, whole, v in zip(names, wholes, versions, strict=True) if whole._version != v]
        if written:
            rule = "the unit writes in place into gathered weights"
            hint = "whole weights are read-only; write `w = w + ...`, or keep state out of the weights"
            raise UsageError(message(_UNIT, rule, written, hint=hint))


@contextmanager
def _explaining(names: Sequence[str]) -> Iterator[None]:
    """Says what an operator that does not exist for a dtype means: MindSpore's own text lists what does."""
    try:
        yield
    except TypeError as error:
        if not str(error).startswith("Select CPU operator"):
            raise
        rule = f"an operator of the unit does not exist on the CPU in this dtype: {str(error).splitlines()[0]}"
        hint = "on the CPU bfloat16 only stores and casts; compute in float32, and set Numerics.reduce_dtype alone"
        raise UsageError(message(_UNIT, rule, names, hint=hint)) from error


def _refuse_escapes(wholes: Sequence[Tensor], outputs: Any, names: Sequence[str]) -> None:
    spans = [(whole.data_ptr(), whole.data_ptr() + whole.nbytes) for whole in wholes]
    places = [leaf.data_ptr() for leaf in optree.tree_leaves(outputs) if _is_tensor(leaf) and leaf.size]
    escaped = [n for n, (a, b) in zip(names, spans, strict=True) if any(a <= place < b for place in places)]
    if escaped:
        hint = "return a copy (`w.copy()`), or use hpfunc.unshard where the whole weight is wanted outside of a unit"
        raise UsageError(message(_UNIT, "a gathered weight escapes from the unit as an output", escaped, hint=hint))


def use_plain(
    bridge: Bridge, fn: Callable[..., Any], wholes: Sequence[Tensor], names: Sequence[str], *args: Any, **kwargs: Any
) -> Any:
    """Calls ``fn(wholes, ...)`` without hooks, drains the queue, and refuses writes into the weights and escapes."""
    given = [bridge.give(whole) for whole in wholes]
    with _explaining(names), _refusing_writes(given, names):
        outputs = fn(given, *args, **kwargs)
        bridge.drain()
    _refuse_escapes(given, outputs, names)
    return outputs


class _Call:
    """One call of a unit with a backward: what its nodes hold."""

    def __init__(self, tape: MindSporeTape, use: UnitUse, wholes: Sequence[Tensor]) -> None:
        self.tape, self.use = tape, use
        self.wholes = [tape.bridge.give(whole) for whole in wholes]

    @property
    def trainable(self) -> list[Tensor]:
        """The weights that are outputs of the node."""
        return [whole for whole, trains in zip(self.wholes, self.use.trainable, strict=True) if trains]

    def weights(self, outputs: Iterable[Tensor]) -> list[Tensor]:
        """Returns all weights, of which `outputs` are the trainable ones."""
        left = iter(outputs)
        return [next(left) if trains else w for w, trains in zip(self.wholes, self.use.trainable, strict=True)]

    def wholes_again(self) -> list[Tensor]:
        """Returns the whole weights of the moment, for a computation that saves what the first one saved."""
        wholes = [self.tape.bridge.give(whole) for whole in self.use.wholes()]
        for whole, trains in zip(wholes, self.use.trainable, strict=True):
            if trains:
                whole.requires_grad_()
        return wholes

    def forget(self) -> None:
        """Lets go of the whole weights: the nodes need them no more."""
        self.wholes = []

    def after_backward(self, gradients: Sequence[Tensor | None]) -> None:
        """Hands the gradients to the run, complete."""
        left, hold = iter(gradients), self.tape.bridge.hold
        found = [next(left) if trains else None for trains in self.use.trainable]
        self.use.after_backward([None if gradient is None else hold(gradient) for gradient in found])


class MindSporeTape:
    """One differentiation: its anchor, its tokens and its leaves. See Note [One call]."""

    def __init__(self, bridge: Bridge) -> None:
        self.bridge = bridge
        self.leaves: list[Tensor] = []
        self.gradients: dict[int, Tensor] = {}
        self._anchor: Tensor = None
        self._tokens: list[Tensor] = []
        self._error: BaseException | None = None

    @property
    def num_uses(self) -> int:
        """How many units with a backward were called so far."""
        return len(self._tokens)

    def close(self) -> None:
        """Lets go of everything."""
        for held in (self._tokens, self.leaves, self.gradients):
            held.clear()
        self._anchor = self._error = None

    def leaf(self, local: Tensor) -> Tensor:
        alias = _Leaf.apply(_LeafPlace(self, len(self.leaves), local), self._anchor)
        self.leaves.append(alias)
        return alias

    @staticmethod
    def is_grad_enabled() -> bool:
        return executor.requires_grad()

    @staticmethod
    def refuse_reentrant() -> None:
        """A reentrant `mindspore.recompute` is refused when it calls the unit again."""

    def guard(self, work: Callable[[], None]) -> None:
        """Does a node's work. MindSpore may wrap what it raises: `differentiate` raises the error itself."""
        try:
            work()
        except BaseException as error:
            self._error = error
            raise

    def use_unit(self, fn: Callable[..., Any], use: UnitUse, *args: Any, **kwargs: Any) -> Any:
        """Calls ``fn(whole weights, ...)`` such that its backward reports to `use`."""
        if executor.is_saved_tensor_hook_active():
            rule = "a unit is called where mindspore.recompute, or another pair of saved-tensor hooks, is at work"
            raise UsageError(message(_UNIT, rule, hint="recompute by units: hpfunc.unit(fn, remat=True)"))
        wholes = use.before_forward()
        inputs = [leaf for leaf in optree.tree_leaves([args, kwargs]) if _is_tensor(leaf)]
        use.needs_backward = any(use.trainable) or any(x._requires_grad for x in inputs)
        if not use.needs_backward:
            return use_plain(self.bridge, fn, wholes, use.names, *args, **kwargs)
        call = _Call(self, use, wholes)
        *weights, token = _Wholes.apply(call, self._anchor)
        record = _forgetting if use.remat else _recording
        with _explaining(use.names):
            outputs = record(fn, call, call.weights(weights), args, kwargs)
            self.bridge.drain()  # so that the whole weights may be released now; see Note [Queued operators]
        _refuse_escapes(call.wholes, outputs, use.names)
        call.forget()
        return self._gated(call, token, outputs)

    def _gated(self, call: _Call, token: Tensor, outputs: Any) -> Any:
        leaves, treedef = optree.tree_flatten(outputs)
        places = [i for i, leaf in enumerate(leaves) if _is_tensor(leaf) and leaf._requires_grad]
        *gated, token = _Gate.apply(call, token, *(leaves[i] for i in places))
        self._tokens.append(token)
        for i, out in zip(places, gated, strict=True):
            leaves[i] = out
        return optree.tree_unflatten(treedef, leaves)

    def recompute_unit(self, fn: Callable[..., Any], use: UnitUse, *args: Any, **kwargs: Any) -> Any:
        """Is not done on MindSpore: its recomputation begins in the middle of a unit's backward."""
        rule = "a unit is called again during backward, by mindspore.recompute"
        raise UsageError(message(_UNIT, rule, hint="recompute by units: hpfunc.unit(fn, remat=True)"))

    def differentiate(self, forward: Callable[[], Tensor]) -> list[Tensor | None]:
        """See `Tape`."""

        def run(anchor: Tensor) -> tuple[Tensor, ...]:
            self._anchor = anchor
            loss = forward()
            _check_loss(loss)
            return (loss, *self._tokens)

        was_on = executor.grad_flag()
        try:
            mindspore.value_and_grad(run, 0)(_token())
        except BaseException:
            executor.clear_res()
            executor.set_grad_flag(was_on)
            if self._error is not None:
                raise self._error from None
            raise
        return [self.gradients.get(place) for place in range(len(self.leaves))]


def _check_loss(loss: Any) -> None:
    if not _is_tensor(loss) or loss.size != 1 or "float" not in str(loss.dtype).lower():
        found = f"shape {tuple(loss.shape)}, {loss.dtype}" if _is_tensor(loss) else type(loss).__name__
        raise LeafError(message("hpfunc.value_and_grad", f"the loss must be a real scalar tensor, got {found}"))


def _recording(fn: Callable[..., Any], call: _Call, weights: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
    """Calls ``fn(weights, ...)``, which MindSpore records without keeping the whole weights."""
    with _refusing_writes(call.wholes, call.use.names), mindspore.saved_tensors_hooks(*_release_hooks(call)):
        return fn(weights, *args, **kwargs)


def _release_hooks(call: _Call) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    use, give = call.use, call.tape.bridge.give
    # By shape first: asking a MindSpore tensor for its address drains the queue.
    place: dict[tuple[int, ...], dict[int, int]] = {}
    for i, whole in enumerate(call.wholes):
        if use.released[i]:
            place.setdefault(tuple(whole.shape), {})[whole.data_ptr()] = i
    watch = _Watch(call)

    def pack(tensor: Tensor) -> Any:
        alike = place.get(tuple(tensor.shape))
        index = alike.get(tensor.data_ptr()) if alike else None
        if index is not None and tensor.is_contiguous():
            return index
        watch.see(tensor)
        return ops.stop_gradient(tensor)

    def unpack(saved: Any) -> Tensor:
        return give(use.wholes()[saved]) if isinstance(saved, int) else saved

    return pack, unpack


class _Watch:
    """Looks for copies of whole weights in the first call of a unit. See Note [Views of weights]."""

    seen: ClassVar[set[object]] = set()

    def __init__(self, call: _Call) -> None:
        self._call = call
        key = call.tape.num_uses, tuple(call.use.names)  # the same in every step, and no two units of a step alike
        self._sizes: dict[int, list[int]] = {}
        if key not in self.seen:
            self.seen.add(key)
            for i, whole in enumerate(call.wholes):
                if call.use.released[i] and whole.size > 1:
                    self._sizes.setdefault(whole.size, []).append(i)

    def see(self, tensor: Tensor) -> None:
        """Warns if a saved tensor has the values of a weight, in any order."""
        for i in self._sizes.get(tensor.size, ()):
            whole = self._call.wholes[i]
            if whole.dtype == tensor.dtype and _same_values(whole, tensor):
                rule = "autograd keeps a copy of a whole weight until backward"
                hint = "use it as it is (mint.nn.functional.linear, no transpose or reshape of it), or unit(remat=True)"
                warnings.warn(message(_UNIT, rule, [self._call.use.names[i]], hint=hint), HpfuncWarning, stacklevel=3)


def _same_values(whole: Tensor, tensor: Tensor) -> bool:
    values = [np.sort(x.asnumpy().reshape(-1).view(f"u{x.itemsize}")) for x in (whole, tensor)]
    return values[0][0] != values[0][-1] and np.array_equal(*values)  # all alike, as in a bias of zeros, says nothing


def _forgetting(fn: Callable[..., Any], call: _Call, weights: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
    """The same, and nothing but the arguments is kept: the rest is computed again in backward.

    MindSpore's own recomputation does it, which restores the random state and stops once it has what it needs.
    """
    first = [weights]
    leaves, treedef = optree.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if _is_tensor(leaf)]
    tensors = [leaves[i] for i in places]
    rest = [None if _is_tensor(leaf) else leaf for leaf in leaves]

    def block(*tensors: Tensor) -> Any:
        filled: list[Any] = list(rest)
        for i, tensor in zip(places, tensors, strict=True):
            filled[i] = tensor
        args, kwargs = optree.tree_unflatten(treedef, filled)
        return fn(first.pop() if first else call.wholes_again(), *args, **kwargs)

    with _refusing_writes(call.wholes, call.use.names):
        return mindspore.recompute(block, *tensors, use_reentrant=False)
