"""The `Trainer` of transformers, with hpfunc in the place of DDP and FSDP."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

import torch

from .. import checkpoint
from ._module import ShardedModule
from ._sharding import Sharding, host, refuse

if TYPE_CHECKING:
    from transformers.trainer import Trainer as Host
else:
    _METHODS = [
        *("_wrap_model", "create_optimizer", "training_step", "compute_loss", "floating_point_ops"),
        *("_clip_grad_norm", "_get_grad_norm", "_save", "_save_optimizer_and_scheduler"),
        *("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_best_model"),
    ]
    Host = host("hpfunc.integrations.transformers", "transformers", "transformers", "Trainer", _METHODS)

_NAME = "hpfunc.integrations.transformers.Trainer"
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
_FOLDER, _SCHEDULER = "hpfunc", "scheduler.pt"


class Sharded(Host if TYPE_CHECKING else object):
    """What `Trainer` adds to transformers' own, for other subclasses of it: ``class Mine(Sharded, SFTTrainer)``.

    # Note [A step of Trainer]
    Trainer computes a loss, calls its backward, and later clips and steps. Here ``training_step`` is one functional
    step: it differentiates ``compute_loss``, and adds reduced gradients to the ``.grad`` of this rank's parts. All that
    follows is the host's: clipping (by the norm over all ranks), optimizer, scheduler, logs, callbacks.

    Args:
        args: and all other arguments: as for transformers' Trainer.
        sharding: how the model is cut and scheduled.

    Raises:
        UsageError: an option asks for what hpfunc does not do. All of them are named.
    """

    def __init__(self, *args: Any, sharding: Sharding | None = None, **kwargs: Any) -> None:
        self._sharding, self._cut, self._num_parameters = sharding or Sharding(), None, 0
        super().__init__(*args, **kwargs)
        refuse(_NAME, _refused(self))

    def _sharded(self) -> ShardedModule:
        """Returns the model's `ShardedModule`. The first call cuts the model: the host has loaded it by then."""
        if self._cut is None or self._cut.module is not self.model:
            count = getattr(self.model, "num_parameters", None)
            self._num_parameters = count(exclude_embeddings=True) if count else 0
            self._cut = ShardedModule(cast(Any, self.model), self._sharding, self.args.device)
            self._step = self._cut.differentiated(self._loss)
        return self._cut

    # --- a step -------------------------------------------------------------------------------------------------------
    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Returns the optimizer of this rank's parts."""
        return self._sharded().check(_NAME, super().create_optimizer(model))

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        return self._sharded()

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Adds the gradient of one batch to the ``.grad`` of the parts, and returns this rank's loss."""
        cut = self._sharded()
        cut.train()
        loss, grads = self._step(cut.bound.params, self._prepare_inputs(inputs), num_items_in_batch)
        cut.add_grads(grads)
        return loss

    def _loss(self, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        with self.compute_loss_context_manager():
            loss: Any = self.compute_loss(cast(Any, self._cut), dict(inputs), num_items_in_batch=num_items_in_batch)
        is_scaled = self.loss_is_scaled_for_ga
        if is_scaled is None:  # as in the host's own step
            counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            is_scaled = counted or self.compute_loss_func is not None
        return loss if is_scaled else loss / self.current_gradient_accumulation_steps

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        """Returns the autocast of ``bf16=True``, which the host leaves to its own wrapper of the model."""
        return torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.args.bf16, cache_enabled=False)

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        return self._sharded().clip(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self._sharded().clip(float("inf")) if grad_norm is None else grad_norm

    def floating_point_ops(self, inputs: Any) -> int:
        """Returns the host's estimate, which counts parameters, for whole weights."""
        main = getattr(self.model, "main_input_name", "input_ids")
        return 6 * inputs[main].numel() * self._num_parameters if main in inputs else 0

    @property
    def _torch_optimizer(self) -> Any:
        """The optimizer, without the wrapper of accelerate, whose copies do not step."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    # --- saving -------------------------------------------------------------------------------------------------------
    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if state_dict is None and self._cut is not None:
            state_dict = self._cut.whole_state_dict(keep=self.args.should_save)
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._sharded().save(os.path.join(output_dir, _FOLDER), self._torch_optimizer, self.state.global_step)
        if self.args.should_save:
            torch.save(cast(Any, self.lr_scheduler).state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._cut is None or self._cut.module is not self.model:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        # A model that is cut already gets its parts with the state of the optimizer.

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self._sharded().load(_NAME, os.path.join(checkpoint, _FOLDER), self._torch_optimizer)
        saved = torch.load(os.path.join(checkpoint, _SCHEDULER), weights_only=True)
        cast(Any, self.lr_scheduler).load_state_dict(saved)

    def _load_best_model(self) -> None:
        bound = self._sharded().bound
        state = bound.state(self._torch_optimizer)
        folder = os.path.join(str(self.state.best_model_checkpoint), _FOLDER)
        best = checkpoint.load(folder, like={"params": state["params"]}, allow={"unexpected"})
        bound.load_state(self._torch_optimizer, state | best)


def _refused(trainer: Any) -> list[tuple[bool, str, str]]:
    """Returns what hpfunc does not do, whether this trainer asks for it, and what does it."""
    args, config = trainer.args, trainer.args.accelerator_config
    is_given = trainer.optimizer_cls_and_kwargs is not None
    ddp = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph")
    plan = "sharding=Sharding(mesh=..., policy=...) is what hpfunc has in its place"
    return [
        (bool(args.fsdp) or trainer.is_fsdp_enabled, "fsdp", plan),
        (bool(args.deepspeed) or trainer.is_deepspeed_enabled, "deepspeed", plan),
        *((getattr(args, name) is not None, name, plan) for name in ddp),
        (
            args.parallelism_config is not None,
            "parallelism_config",
            "data parallelism only; see docs/howto/parallelism.md",
        ),
        (trainer.is_model_parallel, "a device_map", "the model must be on one device before it is cut"),
        (args.n_gpu > 1, f"{args.n_gpu} devices in one process", "start a process for each: torchrun --nproc-per-node"),
        (args.fp16, "fp16", "bf16=True, or Sharding(numerics=hpfunc.Numerics(param_dtype='bfloat16'))"),
        (args.fp16_full_eval or args.bf16_full_eval, "a full evaluation in 16 bits", "bf16=True evaluates by autocast"),
        (args.torch_compile, "torch_compile", "compile functions inside of units; see docs/howto/compile.md"),
        (args.use_liger_kernel, "use_liger_kernel", "apply the kernels to the model before it is given"),
        (args.neftune_noise_alpha is not None, "neftune_noise_alpha", "add the noise in the model"),
        (
            args.auto_find_batch_size,
            "auto_find_batch_size",
            "give a batch that fits; Sharding(remat=True) saves memory",
        ),
        (args.torch_empty_cache_steps is not None, "torch_empty_cache_steps", "buffers are reused by the plan"),
        (bool(args.debug), f"debug={args.debug}", "hpfunc.debug has checks"),
        (args.enable_jit_checkpoint, "enable_jit_checkpoint", "save_steps"),
        (args.save_on_each_node, "save_on_each_node", "an output_dir on storage that all ranks share"),
        (
            args.load_best_model_at_end and args.save_only_model,
            "load_best_model_at_end with save_only_model",
            "save_only_model=False: the best weights are loaded from the parts",
        ),
        (not config.even_batches, "accelerator_config.even_batches=False", "all ranks take part in each step"),
        (
            trainer.optimizer is not None,
            "optimizers=(optimizer, ...)",
            "optimizer_cls_and_kwargs=(torch.optim.AdamW, {...}): the optimizer is made of this rank's parts",
        ),
        (not is_given and args.optim not in _OPTIMIZERS, f"optim={args.optim!s}", f"one of {', '.join(_OPTIMIZERS)}"),
    ]


class Trainer(Sharded, Host):
    """transformers' `Trainer`, whose weights, gradients and optimizer state are cut over all ranks. See `Sharded`."""
