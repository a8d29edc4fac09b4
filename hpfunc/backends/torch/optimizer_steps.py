"""What an optimizer of torch is about to do to this rank's parts of weights, seen before its step.

# Note [Gradients of parts]
A gradient that `Bound.set_grads` hands over is this rank's part. torch's own clipping takes the norm of that part, and
`GradScaler` looks for an overflow in it, so ranks would scale by other factors, or only some of them skip. No function
of torch asks hpfunc then. But what is written into a tensor raises its version, which is compared before each step. A
`GradScaler` does not raise it; it is seen only where it tells the optimizer what it has found.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from ..._errors import HpfuncWarning, UsageError, message
from . import private

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class _Noted:
    """What is known of the gradient of a part."""

    name: str
    gradient: TensorWeakRef
    version: int
    is_unscaled: bool


_noted: Any = WeakTensorKeyDictionary()


def note_gradients(parameters: Iterable[Tensor], names: Iterable[str], *, is_unscaled: bool = False) -> None:
    """Notes the gradients that parts of weights have: a step with others is refused. See Note [Gradients of parts].

    Args:
        parameters: parts of weights.
        names: their paths.
        is_unscaled: whether a `GradScaler` has looked at them, and all ranks know what it found.
    """
    for parameter, name in zip(parameters, names, strict=True):
        if (gradient := parameter.grad) is not None:
            _noted[parameter] = _Noted(name, TensorWeakRef(gradient), private.version_of(gradient), is_unscaled)


def _look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    noted = [(parameter, _noted.get(parameter)) for parameter in parameters if parameter.grad is not None]
    known = [(parameter, its) for parameter, its in noted if its is not None]
    changed = [
        its.name for x, its in known if x.grad is not its.gradient() or private.version_of(x.grad) != its.version
    ]
    if changed:
        rule = "gradients were changed between set_grads and the optimizer's step: each rank saw its own part"
        hint = (
            "for clip_grad_norm_: hpfunc.clip_with_norm(grads, 1.0, hpfunc.global_norm(grads)) before set_grads; for "
            "what is done to each element: optree.tree_map before set_grads, or bound.note_gradients() after it"
        )
        raise UsageError(message("hpfunc.optim.bind", rule, changed, hint=hint))
    if getattr(optimizer, "found_inf", None) is not None and not all(its.is_unscaled for _, its in known):
        rule = "a GradScaler has looked for an overflow in this rank's part alone: ranks may skip differently"
        hint = "bound.unscale(scaler, optimizer) before scaler.step(optimizer)"
        raise UsageError(message("hpfunc.optim.bind", rule, [its.name for _, its in known], hint=hint))
    if parameters and not any(parameter.grad is not None or parameter.requires_grad for parameter in parameters):
        _warn_of_nothing_to_do()


def _warn_of_nothing_to_do() -> None:
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    rule = "an optimizer of torch steps, and none of its parameters has a gradient, nor can have one"
    hint = "leaves of a tree of arrays are plain tensors: give it hpfunc.optim.bind(params).parameters"
    warnings.warn(message("hpfunc.optim.bind", rule, hint=hint), HpfuncWarning, stacklevel=4)


@cache
def look_before_steps() -> None:
    """Looks at every optimizer of torch before its step, from now on."""
    register_optimizer_step_pre_hook(_look)
