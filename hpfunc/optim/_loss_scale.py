"""Loss scaling, so that gradients of float16, which has few exponents, neither vanish nor overflow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import optree

from .._errors import PolicyError, message
from ._finite import holds
from ._leaves import by_groups, leaves_of, pick
from ._schedules import check_number

_NAME = "hpfunc.optim.DynamicLossScale"


class LossScaleState(NamedTuple):
    """State of a `DynamicLossScale`: two numbers.

    Attributes:
        loss_scale: the loss is multiplied by it, a float.
        counter: finite steps since it last changed, an int.
    """

    loss_scale: float
    counter: int


@dataclass(frozen=True, slots=True)
class DynamicLossScale:
    """A loss scale that falls when gradients overflow, and grows after `period` finite steps.

    The names are those of DeepMind's jmp. A step scales its loss, unscales the gradients (before they are clipped),
    skips the update if they are not finite (`apply_if_finite`) and adjusts the scale.

    Attributes:
        period: number of finite steps in a row after which the scale grows.
        factor: the scale is multiplied or divided by it. With powers of two (also in `init`) scaling rounds nothing.
        min_loss_scale: lower bound of the scale.
        max_loss_scale: upper bound of the scale.

    Raises:
        PolicyError: a field has a value outside of its range.

    Source: Micikevicius et al., Mixed precision training (2018).

    >>> scaling = hpfunc.optim.DynamicLossScale(period=2)
    >>> state = scaling.init(1024.0)
    >>> state = scaling.adjust(scaling.adjust(state, True), True)
    >>> state, scaling.adjust(state, False)
    (LossScaleState(loss_scale=2048.0, counter=0), LossScaleState(loss_scale=1024.0, counter=0))
    """

    period: int = 2000
    factor: float = 2.0
    min_loss_scale: float = 1.0
    max_loss_scale: float = 2.0**24

    def __post_init__(self) -> None:
        if isinstance(self.period, bool) or not isinstance(self.period, int) or self.period < 1:
            raise PolicyError(message(_NAME, f"period must be an integer >= 1, got {self.period!r}"))
        if check_number(_NAME, "factor", self.factor, 1.0) == 1.0:
            raise PolicyError(message(_NAME, "factor must be a number > 1, got 1"))
        if check_number(_NAME, "min_loss_scale", self.min_loss_scale) == 0.0:
            raise PolicyError(message(_NAME, "min_loss_scale must be a number > 0, got 0"))
        check_number(_NAME, "max_loss_scale", self.max_loss_scale, self.min_loss_scale)

    def init(self, loss_scale: float = 2.0**15) -> LossScaleState:
        """Returns the state to begin with.

        Raises:
            PolicyError: the scale is not between its bounds.
        """
        check_number(f"{_NAME}.init", "loss_scale", loss_scale, self.min_loss_scale)
        if loss_scale > self.max_loss_scale:
            rule = f"loss_scale must be a number <= {self.max_loss_scale:g}, got {loss_scale!r}"
            raise PolicyError(message(f"{_NAME}.init", rule))
        return LossScaleState(float(loss_scale), 0)

    def scale(self, loss: Any, state: LossScaleState) -> Any:
        """Returns the loss, or a tree of tensors, times the scale, in its dtype: a loss of float16 overflows early."""
        return optree.tree_map(lambda x: x * state.loss_scale, loss)

    def unscale(self, grads: Any, state: LossScaleState) -> Any:
        """Returns a tree, such as the gradients, divided by the scale, in its dtypes, at least float32.

        The result is not float16, in which small gradients would vanish again. What is not finite stays so.

        Raises:
            LeafError: a leaf is not a floating array.

        >>> import torch
        >>> scaling = hpfunc.optim.DynamicLossScale()
        >>> scaling.unscale(torch.tensor([64.0], dtype=torch.float16), scaling.init(1024.0))
        tensor([0.0625])
        """
        gradients, ops = leaves_of(f"{_NAME}.unscale", "grads", grads)
        values, factor = gradients.locals, 1.0 / state.loss_scale
        scaled = by_groups(ops, values, lambda places: ops.scaled(ops.widened(pick(values, places)), factor))
        return gradients.wrap(scaled)

    def adjust(self, state: LossScaleState, finite: Any) -> LossScaleState:
        """Returns the state for the next step.

        Args:
            state: that of this step.
            finite: whether its gradients were finite, a bool or a 0-d tensor, equal on all ranks: from `all_finite`, or
                `ApplyIfFiniteState.is_finite`. A tensor without a value (in `ShardedStep.lower`) counts as
                True.
        """
        if not holds(f"{_NAME}.adjust", finite):
            return LossScaleState(max(state.loss_scale / self.factor, self.min_loss_scale), 0)
        if state.counter + 1 < self.period:
            return LossScaleState(state.loss_scale, state.counter + 1)
        return LossScaleState(min(state.loss_scale * self.factor, self.max_loss_scale), 0)
