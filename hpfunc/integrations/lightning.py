"""A strategy of Lightning, with hpfunc in the place of DDP and FSDP: ``Trainer(strategy=ShardedStrategy())``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch

from .._errors import UsageError, message
from ._module import ShardedModule
from ._sharding import Sharding, host, refuse

_METHODS = [
    *("setup_optimizers", "model_to_device", "lightning_module_state_dict", "load_model_state_dict", "teardown"),
    *("optimizer_state", "load_optimizer_state_dict", "configure_ddp", "training_step", "validation_step"),
    *("test_step", "predict_step", "setup"),
]
_NAME = "hpfunc.integrations.lightning.ShardedStrategy"
if TYPE_CHECKING:
    from lightning.pytorch.plugins.precision import MixedPrecision, Precision
    from lightning.pytorch.strategies import DDPStrategy as Host
else:
    Host = host("hpfunc.integrations.lightning", "lightning.pytorch.strategies", "lightning", "DDPStrategy", _METHODS)
    from lightning.pytorch.plugins.precision import MixedPrecision, Precision


class _ByGlobalNorm(Precision):
    """A precision plugin that clips by the norm over all ranks: the host's own sees parts."""

    cut: ShardedModule

    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        """See `Precision.clip_grad_by_norm`."""
        self.cut.clip(float(clip_val))


class _Full(_ByGlobalNorm):
    pass


class _Mixed(_ByGlobalNorm, MixedPrecision):
    pass


class ShardedStrategy(Host):
    """Cuts weights, gradients and optimizer state of a LightningModule over all ranks.

    # Note [A step of Lightning]
    ``training_step`` of the module is one functional step. It runs on the copy that `from_module` makes, which shares
    all attributes of the module but its tensors and submodules, so that ``self.log`` and ``self.trainer`` are there.
    The loss that the host gets has its gradients already; its ``backward`` adds them to the ``.grad`` of the parts.

    Checkpoints are those of one process: whole weights and optimizer state, which the first rank writes. Any number of
    ranks loads them, with this strategy or another.

    Args:
        sharding: how the module is cut and scheduled.
        process_group_backend: as for `DDPStrategy`.
        timeout: as for `DDPStrategy`.

    Raises:
        UsageError: (in ``fit``) module or trainer ask for what hpfunc does not do. All of it is named.
    """

    strategy_name = "hpfunc"

    def __init__(self, sharding: Sharding | None = None, **options: Any) -> None:
        known = ("process_group_backend", "timeout", "accelerator", "parallel_devices", "cluster_environment")
        known += ("checkpoint_io", "precision_plugin", "start_method")
        instead = "sharding=Sharding(...) says how to cut and to schedule"
        refuse(_NAME, [(name not in known, f"{name}={value!r}", instead) for name, value in options.items()])
        super().__init__(**options)
        self._sharding, self._cut = sharding or Sharding(), cast(Any, None)

    # --- setting up ---------------------------------------------------------------------------------------------------
    def setup(self, trainer: Any) -> None:
        """See `Strategy.setup`. The module is cut once; a later fit or test goes on with its parts."""
        module = cast(Any, self.lightning_module)
        refuse(_NAME, _refused(self, module, trainer))
        cast(Any, self.accelerator).setup(trainer)
        if self._cut is None or self._cut.module is not module:
            self.model_to_device()
            self._cut = ShardedModule(module, self._sharding, self.root_device)
            self._steps = {
                name: self._cut.planned(lambda args, kwargs, name=name: self._called(name, args, kwargs))
                for name in ("validation_step", "test_step", "predict_step")
            }
            self._train = self._cut.differentiated(self._loss, has_aux=True)
        self.precision_plugin = self._clipping()
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                self._cut.check(_NAME, optimizer)
        self.setup_precision_plugin()

    def _clipping(self) -> Any:
        plugin = self.precision_plugin
        made = plugin if isinstance(plugin, _ByGlobalNorm) else _Full()
        if type(plugin) is MixedPrecision:
            made = _Mixed("bf16-mixed", plugin.device)
        made.cut = self._cut
        return made

    # --- steps --------------------------------------------------------------------------------------------------------
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the module's ``training_step`` returns, with a loss that knows its gradients."""
        with self.precision_plugin.train_step_context():
            (loss, output), grads = self._train(self._cut.bound.params, args, kwargs)
        loss = self._cut.delivered(loss, grads)
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    def _loss(self, args: Any, kwargs: Any) -> Any:
        output = self._called("training_step", args, kwargs)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, torch.Tensor):
            rule = f"training_step returns no loss but {type(loss).__name__}"
            raise UsageError(message(_NAME, rule, hint="return a loss for each batch, such as one times zero"))
        return loss, {k: v for k, v in output.items() if k != "loss"} if isinstance(output, Mapping) else None

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """See `Strategy.validation_step`."""
        with self.precision_plugin.val_step_context():
            return self._steps["validation_step"](self._cut.bound.params, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """See `Strategy.test_step`."""
        with self.precision_plugin.test_step_context():
            return self._steps["test_step"](self._cut.bound.params, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """See `Strategy.predict_step`."""
        with self.precision_plugin.predict_step_context():
            return self._steps["predict_step"](self._cut.bound.params, args, kwargs)

    def _called(self, name: str, args: Any, kwargs: Any) -> Any:
        return self._cut.method(name, self._cut.module.training)(*args, **kwargs)

    # --- checkpoints --------------------------------------------------------------------------------------------------
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns whole weights on the first rank, nothing on others."""
        return self._cut.whole_state_dict(keep=self.is_global_zero) or {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """See `Strategy.load_model_state_dict`. The host calls it before the module is cut, but in a later fit."""
        if self._cut is None or self._cut.module is not self.lightning_module:
            super().load_model_state_dict(checkpoint, strict)
        else:
            self._cut.load_whole_state_dict(checkpoint["state_dict"], strict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Returns the whole state of an optimizer on the first rank, nothing on others."""
        return self._cut.whole_optimizer_state(_plain(optimizer), keep=self.is_global_zero) or {}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Cuts whole states."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            self._cut.load_whole_optimizer_state(_plain(optimizer), state)

    def teardown(self) -> None:
        """Ends the run. Parts and state stay where they are, and can be saved; the host would move them to the CPU."""
        module, optimizers = self._lightning_module, self._optimizers
        self._lightning_module, self._optimizers, self.model = None, [], None
        super().teardown()
        self._lightning_module, self._optimizers = module, optimizers


def _plain(optimizer: Any) -> Any:
    return getattr(optimizer, "_optimizer", optimizer)


def _refused(strategy: Any, module: Any, trainer: Any) -> list[tuple[bool, str, str]]:
    """Returns what hpfunc does not do, whether module or trainer ask for it, and what does it."""
    plugin = strategy.precision_plugin
    is_known = isinstance(plugin, _ByGlobalNorm) or type(plugin) is Precision
    is_known |= type(plugin) is MixedPrecision and plugin.precision == "bf16-mixed"
    numerics = "'32-true', 'bf16-mixed', or Sharding(numerics=hpfunc.Numerics(param_dtype='bfloat16'))"
    return [
        (not module.automatic_optimization, "automatic_optimization=False", "one optimizer, stepped by the host"),
        (not is_known, f"precision={plugin.precision!r}", numerics),
        (strategy._layer_sync is not None, "sync_batchnorm", "layers without statistics of a batch"),
        (
            bool(trainer.callbacks and any(type(x).__name__ == "StochasticWeightAveraging" for x in trainer.callbacks)),
            "StochasticWeightAveraging",
            "a mean of bound.params; see docs/howto/training-loop.md",
        ),
        (
            type(module).backward is not _host_module().backward,
            "LightningModule.backward",
            "compute what it adds in training_step",
        ),
    ]


def _host_module() -> Any:
    from lightning.pytorch import LightningModule

    return LightningModule
