"""Adam, and AdamW."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .._values.argument_names import names_of_others
from ..backends.foreach import Foreach
from ._leaves import Leaves, by_groups, check_state, leaves_of, like, needed, pick, writable
from ._optimizer import Optimizer, decays_of
from ._schedules import LearningRate, as_schedule, check_number

Tensor = Any
# A function of the places of some leaves and their gradients. It returns new tensors in the same dtypes, to which Adam
# adds its part.
Base = Callable[[Sequence[int], list[Tensor]], list[Tensor]]


class AdamState(NamedTuple):
    """State of `adamw` and `scale_by_adam`.

    Attributes:
        step: number of updates so far, an int.
        mu: running mean of the gradients, cut like the weights, in their dtypes, at least float32.
        nu: running mean of their squares, likewise.
    """

    step: int
    mu: Any
    nu: Any


@dataclass(frozen=True, slots=True)
class _Adam:
    """The part that both share."""

    function: str
    b1: float
    b2: float
    eps: float

    def __post_init__(self) -> None:
        check_number(self.function, "b1", self.b1, 0.0, 1.0)
        check_number(self.function, "b2", self.b2, 0.0, 1.0)
        check_number(self.function, "eps", self.eps)

    def init(self, params: Any) -> AdamState:
        weights, ops = leaves_of(self.function, "params", params)
        mu, nu = (weights.wrap(ops.zeros(weights.locals)) for _ in range(2))
        return AdamState(0, mu, nu)

    def update(
        self, gradients: Leaves, ops: Foreach, state: AdamState, step_size: float, base: Base
    ) -> tuple[Any, AdamState]:
        """Returns ``base + step_size * mu / (sqrt(nu) + eps)``, of corrected moments, in torch.optim's order."""
        check_state(self.function, state, AdamState)
        old_mu = like(self.function, "state.mu", state.mu, gradients)
        old_nu = like(self.function, "state.nu", state.nu, gradients)
        step, changes = state.step + 1, gradients.locals
        mu, nu = writable(self.function, old_mu, ops), writable(self.function, old_nu, ops)
        step_size, correction = step_size / (1 - self.b1**step), (1 - self.b2**step) ** 0.5

        def moved(places: list[int]) -> list[Tensor]:
            m, v = pick(mu, places), pick(nu, places)
            g = ops.cast(pick(changes, places), m)
            ops.lerp_(m, g, 1 - self.b1)
            ops.scale_(v, self.b2)
            ops.add_square_(v, g, 1 - self.b2)
            divisors = ops.roots(v)
            ops.divide_(divisors, correction)
            ops.shift_(divisors, self.eps)
            total = base(places, g)
            ops.add_quotient_(total, m, divisors, step_size)
            return total

        updates = gradients.wrap(by_groups(ops, changes, moved))
        return updates, AdamState(step, gradients.wrap(mu), gradients.wrap(nu))


@names_of_others("hpfunc.optim.scale_by_adam", betas="b1=... and b2=...")
def scale_by_adam(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Optimizer:
    """Returns the optimizer that divides the mean of gradients by the root of the mean of their squares.

    Args:
        b1: decay of the mean.
        b2: decay of the mean of squares.
        eps: is added to the root.

    Raises:
        PolicyError: a hyperparameter is out of its range.

    Communication: none.

    Source: Kingma and Ba, Adam: a method for stochastic optimization (2015).

    >>> import torch
    >>> adam = hpfunc.optim.scale_by_adam()
    >>> adam.update(torch.tensor([0.25, -4.0]), adam.init(torch.zeros(2)))[0]
    tensor([ 1.0000, -1.0000])
    """
    adam = _Adam("hpfunc.optim.scale_by_adam", b1, b2, eps)

    def update(grads: Any, state: AdamState, params: Any = None) -> tuple[Any, AdamState]:
        gradients, ops = leaves_of(adam.function, "grads", grads)
        return adam.update(gradients, ops, state, 1.0, lambda places, g: ops.zeros(g))

    return Optimizer(adam.init, update)


@names_of_others("hpfunc.optim.adamw", lr="learning_rate", betas="b1=... and b2=...")
def adamw(
    learning_rate: LearningRate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    mask: Any = None,
) -> Optimizer:
    """Returns Adam with decoupled weight decay, with the formulas and defaults of ``torch.optim.AdamW``.

    In one pass it does the same as a chain of `scale_by_adam`, `add_decayed_weights` and `scale_by_learning_rate`.

    Args:
        learning_rate: a number, or a function of the step.
        b1: decay of the mean of the gradients.
        b2: decay of the mean of their squares.
        eps: is added to the root of the mean of squares.
        weight_decay: each step subtracts ``weight_decay * learning_rate * weight`` from the weight.
        mask: which weights decay: None for all, a tree prefix of bools, or a function from params to one.

    Raises:
        PolicyError: a hyperparameter is out of its range.
        UsageError: `update` is called without params, and there is a weight decay.

    Communication: none.

    Source: Loshchilov and Hutter, Decoupled weight decay regularization (2019).

    >>> import torch
    >>> optimizer = hpfunc.optim.adamw(0.1, weight_decay=0.5)
    >>> weights = torch.tensor([1.0, 4.0])
    >>> updates, state = optimizer.update(torch.tensor([0.25, -8.0]), optimizer.init(weights), weights)
    >>> updates
    tensor([-0.1500, -0.1000])
    """
    adam = _Adam("hpfunc.optim.adamw", b1, b2, eps)
    schedule = as_schedule(adam.function, learning_rate)
    check_number(adam.function, "weight_decay", weight_decay)

    def update(grads: Any, state: AdamState, params: Any = None) -> tuple[Any, AdamState]:
        gradients, ops = leaves_of(adam.function, "grads", grads)
        rate = float(schedule(getattr(state, "step", 0)))
        base: Base = lambda places, g: ops.zeros(g)  # noqa: E731 - one of two
        if weight_decay:
            weights = like(adam.function, "params", needed(adam.function, params, "weight_decay is not 0"), gradients)
            held = weights.locals
            factors = [-rate * decay for decay in decays_of(adam.function, weight_decay, mask, weights)]
            base = lambda places, g: ops.scaled(ops.cast(pick(held, places), g), pick(factors, places))  # noqa: E731
        return adam.update(gradients, ops, state, -rate, base)

    return Optimizer(adam.init, update)
