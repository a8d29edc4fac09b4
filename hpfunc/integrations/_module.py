"""A host's model with each rank's parts in the place of its parameters."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from .. import checkpoint
from .._errors import CheckpointError, UsageError, message
from .._running.make_mesh import make_mesh
from .._transforms.grad import value_and_grad
from .._transforms.shard import shard
from .._transforms.sharded import ShardedStep, sharded
from .._values.array import is_sharded
from .._values.mesh import PartitionSpec
from .._values.tree import flatten
from ..nn import from_module
from ..optim import bind, global_norm
from ..optim._from_torch import ELEMENTWISE
from ._sharding import Sharding

Tensor = torch.Tensor


class ShardedModule(torch.nn.Module):
    """A module that computes with whole weights, and whose parameters are this rank's parts of them.

    # Note [The host's model]
    A host makes its optimizer of the parameters of the model that it was given. So these become the parameters of
    `Bound`, in all places of the model, and the whole ones are gone. What computes is the copy that `from_module` has
    made. The model itself can no longer be called: its forward would see parts.

    Attributes:
        bound: the weights, and the parameters in their memory.
        module: the host's model. Its buffers are those of the start.
    """

    def __init__(self, module: torch.nn.Module, sharding: Sharding, device: Any) -> None:
        super().__init__()
        self.mesh = sharding.mesh or make_mesh((-1,), ("shard",), device=str(device))
        self._function, params = from_module(module, sharding.units, remat=sharding.remat)
        specs = {path: sharding.spec if x.ndim else PartitionSpec() for path, x in params.items()}
        self.bound = bind(shard(params, self.mesh, specs, broadcast_from=0))
        self._sharding, self._tracked = sharding, cast(Any, None)
        parts = dict(self.bound.named_parameters)
        parts |= {p: torch.nn.Parameter(x.local, False) for p, x in self.bound.params.items() if x.is_frozen}
        first = {id(x): path for path, x in module.named_parameters()}
        self._paths = {path: first[id(x)] for path, x in module.named_parameters(remove_duplicate=False)}
        for path, known in self._paths.items():
            parent, _, name = path.rpartition(".")
            module.get_submodule(parent).register_parameter(name, parts[known])
        self.module = module
        self._evaluate = self.planned(self._computed)

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the host's model, if there is none here: its configuration, or a part."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def _computed(self, args: Any, kwargs: Any) -> Any:
        return (self._function.train() if self.training else self._function.eval())(self._tracked, *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the outputs of the module.

        Raises:
            UsageError: gradients are recorded, and this is not the loss of a step.
        """
        if self._tracked is not None:
            return self._computed(args, kwargs)
        if torch.is_grad_enabled():
            rule = "the model is called with gradients, outside of the host's training step"
            hint = "a backward of a part of a step has no weights to differentiate: evaluate under torch.no_grad()"
            raise UsageError(message("hpfunc.integrations", rule, hint=hint))
        return self._evaluate(self.bound.params, args, kwargs)

    # --- steps --------------------------------------------------------------------------------------------------------
    def planned(self, fn: Callable[..., Any]) -> ShardedStep:
        """Returns a step ``(params, *args)`` of a function of ``*args`` that calls this module."""
        return sharded(self._within(fn), self.mesh, policy=self._sharding.policy)

    def differentiated(self, loss_fn: Callable[..., Any], *, has_aux: bool = False) -> ShardedStep:
        """Returns a step ``(params, *args) -> (loss, gradients)`` of a loss that calls this module."""
        grad_fn = value_and_grad(self._within(loss_fn), has_aux=has_aux, numerics=self._sharding.numerics)
        return sharded(grad_fn, self.mesh, policy=self._sharding.policy)

    def _within(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        def within(params: Any, *args: Any) -> Any:
            before, self._tracked = self._tracked, params  # an evaluation may stand within a step that waits
            try:
                return fn(*args)
            finally:
                self._tracked = before

        return within

    def method(self, name: str, training: bool) -> Callable[..., Any]:
        """Returns a method of the module, as `planned` and `differentiated` functions may call it.

        It runs on the copy of the module, which shares the attributes of the module that are not tensors or modules.
        """
        function = (self._function.train() if training else self._function.eval()).method(name)
        copy = cast(Any, function._skeleton.module)

        def call(*args: Any, **kwargs: Any) -> Any:
            _share_attributes(self.module, copy)
            outputs = function(self._tracked, *args, **kwargs)
            _share_attributes(copy, self.module)
            return outputs

        return call

    def delivered(self, loss: Tensor, grads: Any) -> Tensor:
        """Returns a loss whose ``backward()`` adds these gradients, times its own, to those of the parameters."""
        leaf = torch.zeros((), device=loss.device, dtype=loss.dtype, requires_grad=True)
        return cast(Tensor, _Delivered.apply(loss, leaf, self, grads))

    def add_grads(self, grads: Any, scale: Tensor | None = None) -> None:
        """Adds gradients, times `scale`, to the ``.grad`` of the parameters, as a backward of torch does."""
        earlier = [x.grad for x in self.bound.parameters]
        self.bound.set_grads(grads)
        for x, before in zip(self.bound.parameters, earlier, strict=True):
            assert x.grad is not None
            if scale is not None:
                x.grad.mul_(scale)
            if before is not None:
                x.grad.add_(before)
        self.bound.note_gradients()

    def clip(self, max_norm: float) -> Tensor:
        """Scales the ``.grad`` to a global norm, as `torch.nn.utils.clip_grad_norm_`, and returns the norm before."""
        arrays = [x for x in flatten(self.bound.params, is_sharded)[0] if not x.is_frozen]
        pairs = zip(arrays, self.bound.parameters, strict=True)
        norm = global_norm([array.with_local(x.grad) for array, x in pairs if x.grad is not None])
        torch.nn.utils.clip_grads_with_norm_(self.bound.parameters, max_norm, norm)
        self.bound.note_gradients()
        return norm

    def check(self, function: str, optimizer: Any) -> Any:
        """Returns an optimizer of the parameters of this module.

        Raises:
            UsageError: it has others, or its step on parts may not be the part of its step.
        """
        parts = {id(x) for x in self.bound.parameters}
        if any(id(x) not in parts for group in optimizer.param_groups for x in group["params"]):
            hint = "make it of the parameters that the model has after it was cut, where the host makes its optimizer"
            raise UsageError(
                message(function, "an optimizer has parameters that are not parts of the model", hint=hint)
            )
        kind = type(optimizer)
        known = self._sharding.elementwise
        known = f"{kind.__module__}.{kind.__qualname__}" in ELEMENTWISE if known is None else known
        if not known and self.mesh.axis_size(self._sharding.spec.axes) > 1:
            rule = f"{kind.__module__}.{kind.__qualname__} is not known to be element-wise, and weights are cut"
            hint = (
                "take an element-wise class of torch.optim; or say Sharding(elementwise=True) if its step on a part is "
            )
            raise UsageError(message(function, rule, hint=hint + "the part of its step"))
        return optimizer

    # --- checkpoints --------------------------------------------------------------------------------------------------
    def save(self, folder: str, optimizer: Any, step: int | None = None) -> None:
        """Saves weights and optimizer as a checkpoint of hpfunc, in the place of one that an earlier run has left."""
        if self.mesh.rank == self.mesh.ranks[0]:
            shutil.rmtree(folder, ignore_errors=True)
        checkpoint.save(folder, self.bound.state(optimizer), step=step)

    def load(self, function: str, folder: str, optimizer: Any) -> None:
        """Loads what `save` has saved."""
        if checkpoint.latest(folder) is None:
            rule, hint = (
                f"there is no state of hpfunc in {folder}",
                "load the host's whole weights, and begin anew",
            )
            raise CheckpointError(message(function, rule, hint=hint))
        like = self.bound.state_like(optimizer)
        try:
            state = checkpoint.load(folder, like, allow={"cast"})
        except CheckpointError as error:
            try:  # it was saved before the optimizer's first step
                state = checkpoint.load(folder, like | {"slots": {}}, allow={"cast"})
            except CheckpointError:
                raise error from None
        self.bound.load_state(optimizer, state)

    def whole_state_dict(self, keep: bool) -> dict[str, Tensor] | None:
        """Returns the state dict of the host's model with whole weights on the CPU, on ranks that `keep` it."""
        wholes: dict[str, Tensor] = {}
        for path, array in self.bound.params.items():
            whole = array.full()
            if keep:
                wholes[path] = whole.cpu()
        if not keep:
            return None
        state = self.module.state_dict()
        state.update({key: wholes[path] for key, path in self._paths.items() if key in state})
        return state

    def load_whole_state_dict(self, state: Mapping[str, Tensor], strict: bool) -> None:
        """Writes this rank's parts of whole weights into the parameters."""
        cut = {key: self._part(self._paths[key], x) if key in self._paths else x for key, x in state.items()}
        self.module.load_state_dict(cut, strict=strict)

    def whole_optimizer_state(self, optimizer: Any, keep: bool) -> dict[str, Any] | None:
        """Returns the ``state_dict()`` of an optimizer with whole tensors on the CPU, on ranks that `keep` it."""
        state, names = optimizer.state_dict(), self._names_of(optimizer)
        for slot, tree in self.bound.state(optimizer)["slots"].items():
            for place, name in enumerate(names):
                if is_sharded(array := tree.get(name)):
                    whole = array.full()
                    state["state"][place] = state["state"][place] | {slot: whole.cpu() if keep else None}
        return state if keep else None

    def load_whole_optimizer_state(self, optimizer: Any, state: Mapping[str, Any]) -> None:
        """Loads what `whole_optimizer_state` gives, or the state of an optimizer of one process."""
        names = self._names_of(optimizer)
        cut = {
            place: {slot: self._part(names[place], x) for slot, x in slots.items()}
            for place, slots in state["state"].items()
        }
        optimizer.load_state_dict({**state, "state": cut})

    def _names_of(self, optimizer: Any) -> list[str]:
        name_of = {id(x): name for name, x in self.bound.named_parameters}
        return [name_of[id(x)] for group in optimizer.param_groups for x in group["params"]]

    def _part(self, name: str, whole: Any) -> Any:
        """Returns this rank's part of a tensor like a weight; anything else is for the whole weight."""
        layout = self.bound.params[name].layout
        if not layout.shape or getattr(whole, "shape", None) != layout.shape:
            return whole
        return whole[layout.local_slices(self.mesh.coordinate)].clone()


def _share_attributes(source: torch.nn.Module, target: torch.nn.Module) -> None:
    tables = vars(torch.nn.Module())
    vars(target).update({key: value for key, value in vars(source).items() if key not in tables})


class _Delivered(torch.autograd.Function):
    """A loss that was differentiated already, for hosts that call its ``backward`` later, and may scale it before."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, leaf: Tensor, module: ShardedModule, grads: Any) -> Tensor:
        ctx.module, ctx.grads = module, grads
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.grads is None:
            rule = "the backward of one loss is called a second time"
            raise UsageError(message("hpfunc.integrations", rule, hint="compute the loss again"))
        ctx.module.add_grads(ctx.grads, grads[0])
        ctx.grads = None
        return (None,) * 4
