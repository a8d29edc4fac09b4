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

from ._adam import AdamState as AdamState
from ._adam import adamw as adamw
from ._adam import scale_by_adam as scale_by_adam
from ._bind import Bound as Bound
from ._bind import bind as bind
from ._finite import ApplyIfFiniteState as ApplyIfFiniteState
from ._finite import all_finite as all_finite
from ._finite import apply_if_finite as apply_if_finite
from ._from_torch import TorchState as TorchState
from ._from_torch import from_torch as from_torch
from ._loss_scale import DynamicLossScale as DynamicLossScale
from ._loss_scale import LossScaleState as LossScaleState
from ._norm import clip_by_global_norm as clip_by_global_norm
from ._norm import global_norm as global_norm
from ._optimizer import Optimizer as Optimizer
from ._optimizer import add_decayed_weights as add_decayed_weights
from ._optimizer import apply_updates as apply_updates
from ._optimizer import chain as chain
from ._optimizer import scale as scale
from ._optimizer import scale_by_learning_rate as scale_by_learning_rate
from ._optimizer import scale_by_schedule as scale_by_schedule
from ._schedules import constant as constant
from ._schedules import linear as linear
from ._schedules import warmup_cosine as warmup_cosine
from ._sgd import SgdState as SgdState
from ._sgd import sgd as sgd

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
