"""Stochastic gradient descent."""

from __future__ import annotations

from typing import Any, NamedTuple

from .._errors import PolicyError, message
from .._values.argument_names import names_of_others
from ._leaves import by_groups, check_state, leaves_of, like, needed, pick, writable
from ._optimizer import Optimizer
from ._schedules import LearningRate, as_schedule, check_number

Tensor = Any
_NAME = "hpfunc.optim.sgd"


class SgdState(NamedTuple):
    """State of `sgd`.

    Attributes:
        step: number of updates so far, an int.
        momentum: running sum of the gradients, cut like the weights, in their dtypes, at least float32; None without
            momentum.
    """

    step: int
    momentum: Any


@names_of_others(_NAME, lr="learning_rate")
def sgd(
    learning_rate: LearningRate, momentum: float = 0.0, *, nesterov: bool = False, weight_decay: float = 0.0
) -> Optimizer:
    """Returns stochastic gradient descent, with the formulas of ``torch.optim.SGD``.

    Args:
        learning_rate: a number, or a function of the step.
        momentum: factor of the running sum of gradients; 0 keeps none.
        nesterov: look ahead by one step of momentum.
        weight_decay: adds this times the weight to its gradient.

    Raises:
        PolicyError: a hyperparameter is out of its range.
        UsageError: `update` is called without params, and there is a weight decay.

    Communication: none.

    >>> import torch
    >>> optimizer = hpfunc.optim.sgd(0.5, momentum=0.9)
    >>> updates, state = optimizer.update(torch.ones(2), optimizer.init(torch.zeros(2)))
    >>> updates, state
    (tensor([-0.5000, -0.5000]), SgdState(step=1, momentum=tensor([1., 1.])))
    """
    schedule = as_schedule(_NAME, learning_rate)
    check_number(_NAME, "momentum", momentum)
    check_number(_NAME, "weight_decay", weight_decay)
    if nesterov and not momentum:
        raise PolicyError(message(_NAME, "nesterov needs a momentum above 0", hint="sgd(0.1, momentum=0.9)"))

    def init(params: Any) -> SgdState:
        weights, ops = leaves_of(_NAME, "params", params)
        return SgdState(0, weights.wrap(ops.zeros(weights.locals)) if momentum else None)

    def update(grads: Any, state: SgdState, params: Any = None) -> tuple[Any, SgdState]:
        gradients, ops = leaves_of(_NAME, "grads", grads)
        check_state(_NAME, state, SgdState)
        changes, weights, sums = gradients.locals, [], []
        if weight_decay:
            weights = like(_NAME, "params", needed(_NAME, params, "weight_decay is not 0"), gradients).locals
        step_size = -float(schedule(state.step))
        if momentum:
            sums = writable(_NAME, like(_NAME, "state.momentum", state.momentum, gradients), ops)

        def changed(places: list[int]) -> list[Tensor]:
            step = ops.widened(pick(changes, places))
            if weight_decay:
                step = ops.added(step, pick(weights, places), weight_decay)
            if momentum:
                held = pick(sums, places)
                ops.scale_(held, momentum)
                ops.add_(held, step)
                step = ops.added(step, held, momentum) if nesterov else held
            return ops.scaled(step, step_size)

        updates = gradients.wrap(by_groups(ops, changes, changed))
        return updates, SgdState(state.step + 1, gradients.wrap(sums) if momentum else None)

    return Optimizer(init, update)
