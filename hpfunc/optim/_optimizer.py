"""`Optimizer`, how optimizers are put together, and the parts that need little state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from .._errors import ArgumentError, LeafError, message
from .._running.context import current_session
from .._values.array import is_sharded
from .._values.foreign_names import OPTIMIZER, missing
from .._values.not_a_tensor import shortened
from .._values.tree import broadcast_prefix
from ._leaves import Leaves, by_groups, leaves_of, like, needed, pick, writable
from ._schedules import LearningRate, as_schedule, check_number

Params = Any
State = Any
Updates = Any


@dataclass(frozen=True, slots=True)
class Optimizer:
    """A pair of pure functions. Write your own by giving these two.

    Attributes:
        init: ``init(params)`` returns the state to begin with, a pytree; its arrays are cut like the weights.
        update: ``update(grads, state, params=None)`` returns ``(updates, state)``. It reads gradients and
            weights; arrays of the state that the step owns (``donate_argnums``) are updated in place and
            consumed. The updates are what `apply_updates` adds to the weights.

    >>> descend = hpfunc.optim.Optimizer(lambda params: (), lambda grads, state, params=None: (grads, state))
    >>> hpfunc.optim.chain(descend, hpfunc.optim.scale(-0.1)).init({})
    ((), ())
    """

    init: Callable[[Params], State]
    update: Callable[..., tuple[Updates, State]]

    if not TYPE_CHECKING:  # a type checker should find a wrong name by itself

        def __getattr__(self, name: str) -> Any:
            raise missing("hpfunc.optim.Optimizer", name, OPTIMIZER, dir(type(self)))

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises: an optimizer is a pair of functions, and none itself."""
        rule = "an optimizer is a pair of functions, init and update, and is not called itself"
        hint = "updates, opt_state = optimizer.update(grads, opt_state, params)"
        raise ArgumentError(message("hpfunc.optim.Optimizer", rule, hint=hint))


def apply_updates(params: Params, updates: Updates) -> Params:
    """Returns ``params + updates``, leaf by leaf, in the dtypes of `params`.

    Where the two dtypes differ, the sum is made in the wider one and rounded once.

    Args:
        params: pytree of `ShardedArray` (or plain tensors). Arrays that the step owns are updated in place
            and consumed. Frozen ones (see `freeze`), which have no update, are returned as they are.
        updates: the same tree, as an optimizer's `update` returns it.

    Raises:
        SpecError: trees, shapes or specs differ.
        LeafError: a leaf is not a floating array.

    Communication: none.

    >>> import torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> w = hpfunc.shard(torch.ones(2), mesh, hpfunc.P("shard"))
    >>> hpfunc.optim.apply_updates(w, w).local
    tensor([2., 2.])
    """
    name = "hpfunc.apply_updates"
    weights, ops = leaves_of(name, "params", params)
    changes = like(name, "updates", updates, weights).locals
    values = writable(name, weights, ops)
    for places in ops.groups(values):
        ops.add_(pick(values, places), pick(changes, places))
    if (session := current_session()) is not None:
        session.has_updates = True
    return weights.restore(name, values)


def chain(*optimizers: Optimizer) -> Optimizer:
    """Returns the optimizer that gives the updates of each one to the next. Its state is a tuple of theirs.

    Raises:
        LeafError: an argument is not an `Optimizer`.

    >>> clipped = hpfunc.optim.chain(hpfunc.optim.clip_by_global_norm(1.0), hpfunc.optim.sgd(0.1))
    >>> clipped.init({})
    ((), SgdState(step=0, momentum=None))
    """
    bad = [f"argument {i}: {type(x).__name__}" for i, x in enumerate(optimizers) if not isinstance(x, Optimizer)]
    if bad:
        raise LeafError(message("hpfunc.optim.chain", "an argument is not an Optimizer", bad))

    def init(params: Params) -> State:
        return tuple(optimizer.init(params) for optimizer in optimizers)

    def update(grads: Updates, state: State, params: Params = None) -> tuple[Updates, State]:
        if not isinstance(state, tuple) or len(state) != len(optimizers):
            rule = f"the state is not a tuple of {len(optimizers)} states"
            raise LeafError(message("hpfunc.optim.chain", rule, hint="take it from init, or from the last update"))
        kept = []
        for optimizer, part in zip(optimizers, state, strict=True):
            grads, new_part = optimizer.update(grads, part, params)
            kept.append(new_part)
        return grads, tuple(kept)

    return Optimizer(init, update)


def scale(factor: float) -> Optimizer:
    """Returns the optimizer that multiplies by a number.

    >>> import torch
    >>> hpfunc.optim.scale(-0.5).update(torch.ones(2), ())[0]
    tensor([-0.5000, -0.5000])
    """

    def update(grads: Updates, state: State, params: Params = None) -> tuple[Updates, State]:
        return scaled_tree("hpfunc.optim.scale", grads, factor), state

    return Optimizer(lambda params: (), update)


def scale_by_schedule(schedule: Callable[[int], float]) -> Optimizer:
    """Returns the optimizer that multiplies by ``schedule(step)``. Its state is the step, an int; the first is 0.

    >>> import torch
    >>> halving = hpfunc.optim.scale_by_schedule(lambda step: 0.5**step)
    >>> halving.update(torch.ones(2), 1)
    (tensor([0.5000, 0.5000]), 2)
    """

    def update(grads: Updates, step: int, params: Params = None) -> tuple[Updates, int]:
        return scaled_tree("hpfunc.optim.scale_by_schedule", grads, float(schedule(step))), step + 1

    return Optimizer(lambda params: 0, update)


def scale_by_learning_rate(learning_rate: LearningRate) -> Optimizer:
    """Returns the optimizer that multiplies by minus the learning rate: the last one of a chain.

    Args:
        learning_rate: a number, or a function of the step.

    Raises:
        PolicyError: the learning rate is neither a number >= 0 nor a function.

    >>> import torch
    >>> hpfunc.optim.scale_by_learning_rate(0.5).update(torch.ones(2), 0)
    (tensor([-0.5000, -0.5000]), 1)
    """
    schedule = as_schedule("hpfunc.optim.scale_by_learning_rate", learning_rate)
    return scale_by_schedule(lambda step: -schedule(step))


def add_decayed_weights(weight_decay: float, mask: Any = None) -> Optimizer:
    """Returns the optimizer that adds ``weight_decay * params``.

    Args:
        weight_decay: a number >= 0.
        mask: which weights: None for all, a tree prefix of bools, or a function from params to one.

    Raises:
        PolicyError: `weight_decay` is negative.
        UsageError: `update` is called without params.

    >>> import torch
    >>> hpfunc.optim.add_decayed_weights(0.1).update(torch.zeros(2), (), torch.ones(2))[0]
    tensor([0.1000, 0.1000])
    """
    name = "hpfunc.optim.add_decayed_weights"
    check_number(name, "weight_decay", weight_decay)

    def update(grads: Updates, state: State, params: Params = None) -> tuple[Updates, State]:
        gradients, ops = leaves_of(name, "grads", grads)
        weights = like(name, "params", needed(name, params, "it adds weights"), gradients)
        decays, values, changes = decays_of(name, weight_decay, mask, weights), weights.locals, gradients.locals

        def decayed(places: list[int]) -> list[Any]:
            wide = ops.widened(pick(changes, places))
            added = ops.scaled(ops.cast(pick(values, places), wide), pick(decays, places))
            ops.add_(added, wide)
            return added

        return gradients.wrap(by_groups(ops, values, decayed)), state

    return Optimizer(lambda params: (), update)


def decays_of(function: str, weight_decay: float, mask: Any, weights: Leaves) -> list[float]:
    """Returns the weight decay of each leaf.

    Raises:
        SpecError: the mask is not a tree prefix of the weights.
        ArgumentError: it has a leaf that is not a bool.
    """
    if mask is None:
        return [float(weight_decay)] * len(weights.leaves)
    tree = mask(weights.tree) if callable(mask) else mask
    found = broadcast_prefix(
        function,
        tree,
        weights.tree,
        argument="mask",
        name="params",
        is_prefix_leaf=lambda x: isinstance(x, bool),
        is_leaf=is_sharded,
    )
    if bad := [shortened(repr(chosen)) for chosen, _ in found if type(chosen).__name__ not in ("bool", "bool_")]:
        hint = "mask=lambda params: optree.tree_map(lambda w: w.ndim > 1, params) lets matrices decay alone"
        raise ArgumentError(message(function, f"mask must be a tree of bools, got {bad[0]}", hint=hint))
    return [float(weight_decay) if chosen else 0.0 for chosen, _ in found]


def scaled_tree(function: str, grads: Updates, factor: Any) -> Updates:
    gradients, ops = leaves_of(function, "grads", grads)
    values = gradients.locals
    return gradients.wrap(by_groups(ops, values, lambda places: ops.scaled(pick(values, places), factor)))
