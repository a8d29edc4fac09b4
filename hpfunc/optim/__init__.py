"""Optimizers as pairs of pure functions, in optax's protocol.

``init(params)`` makes a state, ``update(grads, state, params)`` returns updates and a new state, `apply_updates` adds
them to the weights. All of it works on each rank's own parts; only `global_norm`, `all_finite` and what uses them
communicate. An array that a `sharded` step owns (``donate_argnums``) is updated in place; any other is not changed.
Gradients are only read.

Weights, gradients and updates may differ in dtype. `sgd` and `adamw` compute in float32 at least, and keep moments in
the dtypes of the weights, or in float32 where those have fewer bits; `apply_updates` rounds the sum to the dtype of the
weight, once. So with weights of 16 bits a moment takes four bytes an element. Clipping and scaling keep the dtypes that
they are given.
"""

from typing import TYPE_CHECKING, Any

from .._errors import MissingNameError, message
from ._adam import AdamState, adamw, scale_by_adam
from ._bind import Bound, bind
from ._finite import ApplyIfFiniteState, all_finite, apply_if_finite
from ._from_torch import TorchState, from_torch
from ._loss_scale import DynamicLossScale, LossScaleState
from ._norm import clip_by_global_norm, clip_with_norm, global_norm
from ._optimizer import (
    Optimizer,
    add_decayed_weights,
    apply_updates,
    chain,
    scale,
    scale_by_learning_rate,
    scale_by_schedule,
)
from ._schedules import constant, linear, warmup_cosine
from ._sgd import SgdState, sgd

# For autodoc, which leaves out imported names without it.
__all__ = [
    "AdamState",
    "ApplyIfFiniteState",
    "Bound",
    "DynamicLossScale",
    "LossScaleState",
    "Optimizer",
    "SgdState",
    "TorchState",
    "adamw",
    "add_decayed_weights",
    "all_finite",
    "apply_if_finite",
    "apply_updates",
    "bind",
    "chain",
    "clip_by_global_norm",
    "clip_with_norm",
    "constant",
    "from_torch",
    "global_norm",
    "linear",
    "scale",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_schedule",
    "sgd",
    "warmup_cosine",
]

_ADAM = "hpfunc.optim.adamw(learning_rate, weight_decay=0.0) is Adam"
_OURS = {
    **{"adam": _ADAM, "Adam": _ADAM},
    **{"AdamW": "hpfunc.optim.adamw(learning_rate)", "SGD": "hpfunc.optim.sgd(learning_rate, momentum=...)"},
    **{"clip_grad_norm_": "hpfunc.optim.chain(hpfunc.optim.clip_by_global_norm(max_norm), optimizer)"},
}

if not TYPE_CHECKING:  # a type checker should find a wrong name by itself

    def __getattr__(name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module 'hpfunc.optim' has no attribute {name!r}", name=name)
        any_class = "hpfunc.optim.from_torch(torch.optim.Adagrad, lr=1e-2) takes any element-wise class of torch.optim"
        rule, hint = f"no optimizer {name!r}", _OURS.get(name, any_class)
        raise MissingNameError(message("hpfunc.optim", rule, hint=hint))
