"""All of MindSpore's autograd that hpfunc relies on: VJP nodes, saved-tensor hooks and gates, the same on every device.

Anchor, gates and tokens are those of torch (see Note [Anchor and tokens] in `torch.autograd`). What differs:

# Note [One call]
MindSpore differentiates functions, and has no ``backward()``. So forward and backward are one call of
``mindspore.value_and_grad``, with the anchor as the only argument; the gate's tokens are outputs beside the loss. Their
gradients there are ones, but no backward reads the gradient of a token: they only make the engine visit nodes.

# Note [Frozen weights]
In MindSpore 2.10, outputs of a node that are marked as not differentiable shift the indices of the others ("index
should less than metadata size"). So only trainable weights are outputs of the node; the frozen ones bypass it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import mindspore
import optree
from mindspore import ops

from ..._errors import UsageError, message
from ..unit_rules import is_called_by, refuse_loss, taken_apart
from ..unit_use import UnitUse
from .private import Function, executor, requires_grad
from .units import UNIT, Bridge, UnitCall, explaining, forgetting, is_tensor, recording, refuse_escapes, use_plain

Tensor = Any


def _token() -> Tensor:
    return mindspore.Tensor([0.0], mindspore.float32)


class _Wholes(Function):
    """The trainable whole weights of one use, and a token. See Note [Frozen weights]."""

    @staticmethod
    def forward(ctx: Any, call: UnitCall, anchor: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        return (*call.trainable, _token())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        call, ctx.call = ctx.call, None
        call.tape.guard(lambda: call.after_backward(gradients[:-1]))
        return None, None


class _Gate(Function):
    """The outputs of one use, and a token."""

    @staticmethod
    def forward(ctx: Any, call: UnitCall, token: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        return (*outputs, token)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        call, ctx.call = ctx.call, None
        call.tape.guard(call.use.before_backward)
        return None, _token(), *gradients[:-1]  # else the engine would not reach the weights' node


class _Leaf(Function):
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


class _Linear(Function):
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
    """Returns ``forward(x)`` with this transpose. If it is None, the map may not be differentiated."""
    if not is_transformed([x]):
        return bridge.give(forward(bridge.hold(x)))
    if transpose is None:
        hint = "call it on mindspore.ops.stop_gradient(x)"
        raise UsageError(message("hpfunc", "this collective has no derivative", hint=hint))
    return _Linear.apply(_Maps(bridge, forward, transpose), x)


def is_transformed(tensors: Iterable[Tensor]) -> bool:
    """Returns whether one of the tensors takes part in a differentiation."""
    return executor.requires_grad() and any(is_tensor(tensor) and requires_grad(tensor) for tensor in tensors)


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
        """Number of units with a backward that were called so far."""
        return len(self._tokens)

    def close(self) -> None:
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
        # Its forward runs without gradients, and its backward never reaches a unit's node: only the stack tells.
        if is_called_by("_RecomputeCell."):
            raise _no_recomputation("a unit is called by mindspore.recompute")

    def guard(self, work: Callable[[], None]) -> None:
        """Does a node's work. MindSpore may wrap what it raises: `differentiate` raises the error itself."""
        try:
            work()
        except BaseException as error:
            self._error = error
            raise

    def use_unit(self, fn: Callable[..., Any], use: UnitUse, *args: Any, **kwargs: Any) -> Any:
        if executor.is_saved_tensor_hook_active():
            rule = "a unit is called where mindspore.recompute, or another pair of saved-tensor hooks, is at work"
            raise _no_recomputation(rule)
        wholes = use.before_forward()
        inputs = [leaf for leaf in optree.tree_leaves(cast(Any, [args, kwargs])) if is_tensor(leaf)]
        use.needs_backward = any(use.trainable) or any(requires_grad(x) for x in inputs)
        if not use.needs_backward:
            return use_plain(self.bridge, fn, wholes, use.names, *args, **kwargs)
        call = UnitCall(self, use, wholes)
        *weights, token = _Wholes.apply(call, self._anchor)
        record = forgetting if use.remat else recording
        with explaining(use.names):
            outputs = record(fn, call, call.weights(weights), args, kwargs)
            self.bridge.drain()  # so that the whole weights may be released now; see Note [Queued operators]
        refuse_escapes(call.wholes, outputs, use.names)
        call.forget()
        return self._gated(call, token, outputs)

    def _gated(self, call: UnitCall, token: Tensor, outputs: Any) -> Any:
        leaves, put_back = taken_apart(outputs, lambda leaf: is_tensor(leaf) and requires_grad(leaf))
        *gated, token = _Gate.apply(call, token, *leaves)
        self._tokens.append(token)
        return put_back(gated)

    def recompute_unit(self, fn: Callable[..., Any], use: UnitUse, *args: Any, **kwargs: Any) -> Any:
        """Not supported on MindSpore, whose recomputation begins in the middle of a unit's backward."""
        raise _no_recomputation("a unit is called again during backward, by mindspore.recompute")

    def differentiate(self, forward: Callable[[], Tensor]) -> list[Tensor | None]:
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


def _no_recomputation(rule: str) -> UsageError:
    return UsageError(message(UNIT, rule, hint="recompute by units: hpfunc.unit(fn, remat=True)"))


def _check_loss(loss: Any) -> None:
    if not is_tensor(loss) or loss.size != 1 or "float" not in str(loss.dtype).lower():
        found = f"shape {tuple(loss.shape)}, {str(loss.dtype).lower()}" if is_tensor(loss) else type(loss).__name__
        raise refuse_loss(found)
