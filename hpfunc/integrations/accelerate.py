"""The `Accelerator` of accelerate, with hpfunc in the place of DDP and FSDP."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

import torch

from .._errors import UsageError, message
from ._module import ShardedModule
from ._sharding import Sharding, host, refuse
from ._waiting import Waiting

if TYPE_CHECKING:
    from accelerate.accelerator import Accelerator as Host
else:
    _METHODS = [
        *("prepare", "prepare_model", "clip_grad_norm_", "unwrap_model", "get_state_dict", "save_state", "load_state"),
        *("backward", "join_uneven_inputs", "register_load_state_pre_hook"),
    ]
    Host = host("hpfunc.integrations.accelerate", "accelerate", "accelerate", "Accelerator", _METHODS)

_NAME = "hpfunc.integrations.accelerate.Accelerator"
_FOLDER = "hpfunc"


class Prepared(ShardedModule):
    """A model that is called in one place of a loop, and differentiated in another. See `Waiting`."""

    def __init__(self, module: torch.nn.Module, sharding: Sharding, device: torch.device, bf16: bool) -> None:
        super().__init__(module, sharding, device)
        self._autocast = device.type if bf16 else None
        self.pending: Waiting | None = None
        self._step = self.differentiated(lambda pending, args, kwargs: pending.between(self._computed(args, kwargs)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the outputs of the module. With gradients, they wait for ``accelerator.backward``.

        Raises:
            UsageError: the model is called a second time before that.
        """
        if not torch.is_grad_enabled():
            return self._evaluate(self.bound.params, args, kwargs)
        if self.pending is not None:
            rule = "the model is called with gradients a second time before accelerator.backward(loss)"
            hint = "one call for each backward: join the inputs of several; evaluate under torch.no_grad()"
            raise UsageError(message(_NAME, rule, hint=hint))
        self.pending = pending = Waiting(_NAME)
        try:
            return pending.begin(lambda: self._step(self.bound.params, pending, args, kwargs)[1])
        except BaseException:
            self.pending = None
            raise

    def _computed(self, args: Any, kwargs: Any) -> Any:
        if self._autocast is None:
            return super()._computed(args, kwargs)
        from accelerate.utils import convert_to_fp32  # what accelerate's own wrapper does to outputs

        with torch.autocast(self._autocast, torch.bfloat16, cache_enabled=False):
            return convert_to_fp32(super()._computed(args, kwargs))


class Accelerator(Host):
    """accelerate's `Accelerator`, whose ``prepare`` cuts the model, its gradients and the optimizer's state.

    A step has one call of the model, and one ``accelerator.backward``: see `Prepared`.

    Args:
        args: and all other arguments: as for accelerate's.
        sharding: how the model is cut and scheduled.

    Raises:
        UsageError: an argument asks for what hpfunc does not do. All of them are named.
    """

    def __init__(self, *args: Any, sharding: Sharding | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sharding = sharding or Sharding()
        refuse(_NAME, _refused(self))

    # --- preparing ----------------------------------------------------------------------------------------------------
    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Prepares objects as the host does; the one model becomes a `Prepared`, and optimizers get its parts."""
        models = [x for x in args if isinstance(x, torch.nn.Module) and not isinstance(x, ShardedModule)]
        refuse(_NAME, [(len(models) + len(self._models) > 1, "a second model", "an Accelerator for each model")])
        before = {id(x): (path, x) for model in models for path, x in model.named_parameters()}
        cuts = {id(model): self._prepared(model) for model in models}
        for optimizer in (x for x in args if isinstance(x, torch.optim.Optimizer)):
            self._switch(optimizer, before, next(iter(cuts.values()), None))
        return super().prepare(*(cuts.get(id(x), x) for x in args), device_placement=device_placement)

    def prepare_model(self, model: Any, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        """Returns a model as a `Prepared`."""
        cut = model if isinstance(model, ShardedModule) else self._prepared(model)
        if cut not in self._models:
            self._models.append(cut)
        return cut

    def _prepared(self, model: torch.nn.Module) -> Prepared:
        return Prepared(model.to(self.device), self._sharding, self.device, self.mixed_precision == "bf16")

    def _switch(self, optimizer: Any, before: dict[int, Any], cut: Prepared | None) -> None:
        """Gives an optimizer the parts of the parameters that it was made of."""
        cut = cut or next(iter(self._models), None)
        parts = dict(cut.bound.named_parameters) if cut is not None else {}
        known = {id(x) for x in parts.values()}
        given = [x for group in optimizer.param_groups for x in group["params"]]
        foreign = any(id(x) not in known and id(x) not in before for x in given)
        advice = "prepare(model, optimizer) together, or make it of the prepared model's parameters"
        refuse(_NAME, [
            (foreign, "an optimizer of other parameters", advice),
            (any(optimizer.state.values()) and bool(before), "an optimizer that has state already", advice),
        ])  # fmt: skip
        for group in optimizer.param_groups:
            pairs = [(x, before.get(id(x), ("", x))[0]) for x in group["params"]]
            group["params"] = [parts.get(path, x) for x, path in pairs if path in parts or id(x) in known]
        cast(Prepared, cut).check(_NAME, optimizer)

    # --- a step -------------------------------------------------------------------------------------------------------
    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Differentiates a loss, as the host does: in the loop first, and in the step of the model then."""
        waiting = [model for model in self._models if model.pending is not None]
        super().backward(loss, **kwargs)
        for model in waiting:
            pending, model.pending = model.pending, None
            model.add_grads(pending.finish())

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clips the gradients of the model by their norm over all ranks, and returns the norm."""
        cut = next(iter(self._models), None)
        is_whole = cut is not None and {id(x) for x in parameters} >= {id(x) for x in cut.bound.parameters}
        refuse(f"{_NAME}.clip_grad_norm_", [
            (not is_whole, "a part of the parameters", "give model.parameters()"),
            (norm_type != 2, f"norm_type={norm_type}", "norm_type=2"),
        ])  # fmt: skip
        return cast(Prepared, cut).clip(max_norm)

    def join_uneven_inputs(self, joinables: Any, even_batches: Any = None) -> Any:
        """Is refused: all ranks take part in each step."""
        refuse(_NAME, [(True, "join_uneven_inputs", "even_batches=True, which is the default")])

    # --- checkpoints --------------------------------------------------------------------------------------------------
    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """Returns the model that was given to ``prepare``. Its parameters are parts."""
        model = model.module if isinstance(model, ShardedModule) else model
        return super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Returns whole weights on the main process, None on others."""
        if not isinstance(model, ShardedModule):
            return super().get_state_dict(model, unwrap)
        return model.whole_state_dict(keep=self.is_main_process)

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Saves what the host saves; model and optimizer in a checkpoint of hpfunc, which any number of ranks loads."""
        models, optimizers = self._models, self._optimizers
        self._models, self._optimizers = [], []
        try:
            where = super().save_state(output_dir, safe_serialization, **kwargs)
        finally:
            self._models, self._optimizers = models, optimizers
        cut, optimizer = self._trained()
        cut.save(os.path.join(str(where), _FOLDER), optimizer)
        return where

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """Loads what `save_state` has saved."""
        models, optimizers, found = self._models, self._optimizers, []
        handle = self.register_load_state_pre_hook(lambda _, folder: found.append(folder))
        self._models, self._optimizers = [], []
        try:
            super().load_state(input_dir, load_kwargs, **kwargs)
        finally:
            self._models, self._optimizers = models, optimizers
            handle.remove()
        cut, optimizer = self._trained()
        cut.load(_NAME, os.path.join(str(found[-1]), _FOLDER), optimizer)

    def _trained(self) -> tuple[Prepared, Any]:
        counts = f"{len(self._models)} models and {len(self._optimizers)} optimizers are prepared"
        is_one = len(self._models) == 1 and len(self._optimizers) <= 1
        refuse(_NAME, [(not is_one, counts, "one model and one optimizer have a state")])
        cut = self._models[0]
        return cut, self._optimizers[0].optimizer if self._optimizers else torch.optim.SGD(cut.bound.parameters)


def _refused(accelerator: Any) -> list[tuple[bool, str, str]]:
    """Returns what hpfunc does not do, whether this accelerator is asked for it, and what does it."""
    state, plan = accelerator.state, "sharding=Sharding(mesh=..., policy=...) is what hpfunc has in its place"
    plugins = ("fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin", "torch_tp_plugin")
    bf16 = "mixed_precision='bf16', or Sharding(numerics=hpfunc.Numerics(param_dtype='bfloat16'))"
    precision = accelerator.mixed_precision
    return [
        *((getattr(state, name, None) is not None, name, plan) for name in plugins),
        (accelerator.parallelism_config is not None, "parallelism_config", plan),
        (accelerator.ddp_handler is not None, "DistributedDataParallelKwargs", plan),
        (precision not in ("no", "bf16"), f"mixed_precision={precision!r}", bf16),
        (str(state.dynamo_plugin.backend) not in ("NO", "DynamoBackend.NO"), "torch.compile (dynamo)",
         "compile functions inside of units; see docs/howto/compile.md"),
        (not accelerator.even_batches, "even_batches=False", "all ranks take part in each step"),
        (accelerator.project_configuration.save_on_each_node, "save_on_each_node", "storage that all ranks share"),
    ]  # fmt: skip
