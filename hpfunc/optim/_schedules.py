"""Learning rates as functions of the step, and the checks of hyperparameters. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .._errors import ArgumentError, PolicyError, message
from .._values.not_a_tensor import shortened

LearningRate = float | Callable[[int], float]

# Note [Steps are Python integers]
# The state counts steps with a Python int, not with a tensor. Learning rate and bias corrections are then computed in
# float64 on the host, as torch.optim does it, without a read from the device. They have a value even under `lower`,
# where tensors have none. The signature of a step leaves the values of int leaves out: another count needs no new plan.


def check_number(function: str, name: str, value: Any, low: float = 0.0, below: float = math.inf) -> float:
    """Returns `value`.

    Raises:
        PolicyError: it is not a number with ``low <= value < below``.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value < below:
        bounds = f">= {low:g}" if below == math.inf else f">= {low:g} and < {below:g}"
        raise PolicyError(message(function, f"{name} must be a number {bounds}, got {value!r}"))
    return value


def as_schedule(function: str, learning_rate: LearningRate) -> Callable[[int], float]:
    """Returns the learning rate as a function of the step.

    Raises:
        PolicyError: it is a number below 0.
        ArgumentError: it is neither a number nor a function.
    """
    if callable(learning_rate) and not isinstance(learning_rate, type):
        return learning_rate
    if not isinstance(learning_rate, (int, float)):
        rule = f"learning_rate must be a number or a function of the step, got {shortened(repr(learning_rate))}"
        hint = f"weights are given later: optimizer = {function}(1e-3); state = optimizer.init(params)"
        raise ArgumentError(message(function, rule, hint=hint))
    return constant(check_number(function, "learning_rate", learning_rate))


def constant(value: float) -> Callable[[int], float]:
    """Returns the schedule that is always `value`.

    >>> constant(0.1)(1000)
    0.1
    """
    return lambda step: value


def linear(start: float, end: float, num_steps: int) -> Callable[[int], float]:
    """Returns the schedule that goes linearly from `start` to `end` in `num_steps` steps, and stays there.

    Raises:
        PolicyError: `num_steps` is not positive.

    >>> [linear(1.0, 0.0, 4)(step) for step in (0, 1, 4, 9)]
    [1.0, 0.75, 0.0, 0.0]
    """
    check_number("hpfunc.optim.linear", "num_steps", num_steps, 1)
    return lambda step: start + (end - start) * min(max(step / num_steps, 0.0), 1.0)


def warmup_cosine(
    peak: float, warmup_steps: int, num_steps: int, *, start: float = 0.0, end: float = 0.0
) -> Callable[[int], float]:
    """Returns the schedule that rises linearly from `start` to `peak`, then falls to `end` on half a cosine.

    Args:
        peak: the highest value, at step `warmup_steps`.
        warmup_steps: length of the rise.
        num_steps: length of both together; `end` is reached at this step and kept.
        start: value at step 0 (if there is a rise).
        end: the last value.

    Raises:
        PolicyError: not ``0 <= warmup_steps < num_steps``.

    >>> [round(warmup_cosine(1.0, 2, 6)(step), 3) for step in range(8)]
    [0.0, 0.5, 1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    """
    check_number("hpfunc.optim.warmup_cosine", "num_steps", num_steps, 1)
    check_number("hpfunc.optim.warmup_cosine", "warmup_steps", warmup_steps, 0, num_steps)

    def schedule(step: int) -> float:
        if step < warmup_steps:
            return start + (peak - start) * step / warmup_steps
        done = min((step - warmup_steps) / (num_steps - warmup_steps), 1.0)
        return end + (peak - end) * 0.5 * (1.0 + math.cos(math.pi * done))

    return schedule
