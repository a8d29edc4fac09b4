"""A module's copy without its weights, whose chosen parts run as units.

# Note [The copy]
The caller's module is never changed. Its copy has stand-ins for parameters. Each unit in the copy has a `forward` of
ours, which calls `hpfunc.unit` with the parameters of the unit and puts the whole weights into their places during the
call. Hooks are called as before: they are the caller's own objects, not copies.

# Note [Compiled modules]
A layer that `torch.compile` made is a unit as a whole: the compiled call reads the weights of the module in it, where
the whole ones are while the unit runs. Nothing inside of it can be a unit, because a graph cannot gather. So a model
that is compiled as a whole counts as the module in it, with the names of that one; and `Module.compile` is lost in a
copy. Both are warned of.

# Note [Buffers of a unit]
A unit may run a second time in backward, after its call has ended. So it gets its buffers as arguments, works on copies
of them, and returns the copies: a second run starts from the same values, and counts nothing twice.

# Note [Buffers that change unseen]
Most writes raise a tensor's version; those of batch_norm into its running statistics do not. So where changes of
buffers would be lost, values are compared too, but only in the first call in each mode: the host waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ..._errors import UsageError, message
from ..._running.context import module_call
from ..._transforms.unit import unit_around
from ..._values.array import ShardedArray, is_sharded
from ...backends.torch import private
from ...backends.torch.abstract import is_abstract
from ...backends.torch.saved_tensors import storage_of
from .._choose import Choice
from .._slots import NAME, Part, Slot, computing, copy_of, filled, owners_of_hooks, refuse_writes
from .inside import Home, Reopening, refuse_own_backward
from .stand_in import ModuleCall, StandIn

Tensor = torch.Tensor
Tensors = dict[str, Tensor]


def named_tensors(module: nn.Module) -> tuple[Tensors, Tensors]:
    """Returns parameters and buffers by path, tied ones once.

    Raises:
        UsageError: some have no shape yet.
    """
    params: Tensors = dict(module.named_parameters())
    buffers = dict(module.named_buffers())
    every = [*params.items(), *buffers.items()]
    lazy = [path for path, x in every if isinstance(x, UninitializedParameter | UninitializedBuffer)]
    if lazy:
        hint = "call the module once on an example batch first; that gives them their shapes"
        raise UsageError(message(NAME, "parameters are not initialised yet", lazy, hint=hint))
    return params, buffers


def _copied(module: nn.Module, params: Tensors, buffers: Tensors, initial: Tensors) -> nn.Module:
    memo: dict[int, Any] = {id(x): StandIn.of(path, x) for path, x in params.items()}
    memo |= {id(x): initial[path] for path, x in buffers.items()}
    parts = list(module.modules())
    memo |= owners_of_hooks(parts, (x for part in parts for x in vars(part).values() if isinstance(x, dict)))
    for part in parts:
        values = vars(part).values()
        if private.compiled(part) is not None:  # how it is compiled is the caller's own object, not a copy
            memo |= {id(x): x for x in values if callable(x) and not isinstance(x, nn.Module)}
        memo |= {id(x): x.detach().clone() for x in values if isinstance(x, Tensor) and x.grad_fn is not None}
    return copy_of(module, memo, "module")


class ModuleSkeleton:
    """See `Skeleton`, and Note [The copy]."""

    def __init__(self, module: nn.Module, choice: Choice, initial: Tensors, *, remat: bool) -> None:
        params, buffers = named_tensors(module)
        self.module = _copied(module, params, buffers, initial)
        self.choice, self.params, self._remat = choice, tuple(params), remat
        self.frozen = frozenset(path for path, x in params.items() if not x.requires_grad)
        self._modules = tuple(self.module.modules())
        self._home = Home(self._modules)
        self._names = {id(x): path for path, x in initial.items()}
        self._buffers = self._slots(self._modules, private.buffers_of)
        self._settle(initial)
        self._repeated: ModuleCall | None = None
        self._moved: dict[str, tuple[Tensor, int | None, Tensor]] = {}  # by path: a buffer, its version, it on a device
        self._compared: set[tuple[tuple[bool, ...], str]] = set()
        self.modes = self._read_modes()
        named = dict(self.module.named_modules())
        for chosen in choice.modules:
            self._make_unit(chosen.path, named[chosen.path])
        del self._names  # keyed by identity of tensors that are held up to here only

    def _settle(self, initial: Tensors) -> None:
        # A call gets buffers of its own. Outside of a call nobody may read or write the buffers of the start.
        for slot in self._buffers:
            slot.tensors[slot.name] = StandIn.of(slot.path, initial[slot.path], self._home, is_param=False)
        for slot in self._slots(self._modules, private.parameters_of):
            cast(StandIn, slot.tensors[slot.name]).home = self._home

    def _read_modes(self) -> tuple[bool, ...]:
        return tuple(module.training for module in self._modules)

    def modes_after(self, modes: tuple[bool, ...], change: str) -> tuple[bool, ...]:
        self._home.take(modes)
        self._home.modes = None
        getattr(self.module, change)()
        return self._read_modes()

    def _slots(self, modules: Sequence[nn.Module], tensors_of: Callable[[nn.Module], Any]) -> tuple[Slot, ...]:
        return tuple(
            Slot(tensors, name, x.path if isinstance(x, StandIn) else self._names[id(x)])
            for tensors in (tensors_of(module) for module in modules)
            for name, x in tensors.items()
            if x is not None
        )

    # --- a call -------------------------------------------------------------------------------------------------------
    def call(self, params: Mapping[str, Any], modes: tuple[bool, ...]) -> ModuleCall:
        first = next(iter(params.values()), None)
        device = first.mesh.device if isinstance(first, ShardedArray) else getattr(first, "device", "cpu")
        return ModuleCall(params, device, modes)

    def run(
        self, call: ModuleCall, buffers: Mapping[str, Tensor], entry: str, args: Any, kwargs: Any
    ) -> tuple[Any, Tensors]:
        self._home.close()
        held = {path: self._copied_to(call.device, path, x) for path, x in buffers.items()}
        call.placed = {path: (x, private.version_of(x)) for path, x in held.items()}
        token = module_call.set(call)
        try:
            with filled(self._buffers, held):
                self._home.take(call.modes)
                method = self.module if entry == "forward" else getattr(self.module, entry)
                outputs = method(*args, **kwargs)
                after = {slot.path: slot.tensors[slot.name] for slot in self._buffers}
        finally:
            module_call.reset(token)
        call.check_unwritten()
        call.changed |= _written(after, call.placed)
        return outputs, {path: x.detach() for path, x in after.items()}

    def _copied_to(self, device: Any, path: str, buffer: Tensor) -> Tensor:
        """Returns a copy of a buffer on a device. One that lies elsewhere, and stays the same, is moved there once."""
        if buffer.device != torch.device(device):
            version = None if buffer.is_inference() else private.version_of(buffer)
            source, known, moved = self._moved.get(path, (None, None, None))
            if moved is None or source is not buffer or known != version or moved.device != torch.device(device):
                moved = buffer.detach().to(device)
                self._moved[path] = buffer, version, moved
            buffer = moved
        return buffer.detach().clone()

    def trained(self, params: Mapping[str, Any], leaves: Sequence[Tensor] | None) -> list[str]:
        if not torch.is_grad_enabled():
            return []
        known = None if leaves is None else {id(x) for x in leaves}
        plain = [(path, x) for path, x in params.items() if not is_sharded(x)]
        # A leaf tensor that value_and_grad does not differentiate is a constant.
        return [path for path, x in plain if x.requires_grad and (known is None or not x.is_leaf or id(x) in known)]

    def lost(self, call: ModuleCall, entry: str, before: Mapping[str, Tensor], after: Tensors) -> list[str]:
        """See Note [Buffers that change unseen]."""
        key = call.modes, entry
        if (call.changed or key not in self._compared) and not any(map(is_abstract, after.values())):
            call.changed |= {path for path, x in after.items() if not torch.equal(x, before[path].to(x.device))}
            self._compared.add(key)
        return sorted(call.changed)

    # --- units --------------------------------------------------------------------------------------------------------
    def _make_unit(self, path: str, module: nn.Module) -> None:
        inside = tuple(module.modules())
        places = {id(m): place for place, m in enumerate(self._modules)}
        weights, buffers = self._slots(inside, private.parameters_of), self._slots(inside, private.buffers_of)
        part = Part(path or "module", module, tuple((places[id(m)], m) for m in inside), weights, buffers)
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._use(part, original, args, kwargs)

        module.forward = forward

    def _use(self, part: Part, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        call, is_repeated = module_call.get(), False
        if call is None:  # activation checkpointing calls parts again in backward, when the call has ended
            call, is_repeated = self._repeated, True
        if call is None:
            if private.graph_task() != -1:
                raise refuse_own_backward([slot.path for slot in part.weights])
            raise UsageError(message(NAME, f"the unit {part.path!r} is used outside of a call"))
        if private.enclosing_hooks(True):
            self._repeated = call
        weights = {slot.path: call.params[slot.path] for slot in part.weights}
        if is_repeated:
            buffers = call.starts[part.path]
        else:
            buffers = {slot.path: slot.tensors[slot.name] for slot in part.buffers}
            call.starts.setdefault(part.path, buffers)
        spec: Any = None
        changed: set[str] = set()

        def body(weights: Tensors, *args: Any, hpfunc_buffers: Tensors, **kwargs: Any) -> tuple[list[Any], Tensors]:
            nonlocal spec, changed
            outputs, after, changed = _compute(part, original, call, weights, hpfunc_buffers, args, kwargs)
            leaves, spec = private.tree_flatten(outputs, is_leaf=_is_opaque)
            return _without_weights(leaves, weights), after

        run = body
        if any(is_sharded(x) for x in weights.values()):
            inside = Reopening(self._home, part, call.modes, buffers)
            run = unit_around(body, part.path, self._remat, inside=inside)
        leaves, after = run(weights, *args, hpfunc_buffers=buffers, **kwargs)
        if after and not is_repeated:
            call.changed |= changed
            self._place(call, {path: x.detach() for path, x in after.items()})
        return private.tree_unflatten(leaves, spec)

    def _place(self, call: ModuleCall, buffers: Tensors) -> None:
        for slot in self._buffers:
            if slot.path in buffers:
                slot.tensors[slot.name] = buffers[slot.path]
        call.placed |= {path: (x, private.version_of(x)) for path, x in buffers.items()}


def _written(after: Tensors, before: Mapping[str, tuple[Tensor, int]]) -> set[str]:
    return {path for path, x in after.items() if x is not before[path][0] or private.version_of(x) != before[path][1]}


def _is_opaque(value: Any) -> bool:
    # Outputs are taken apart so that backward sees their tensors; a cache that a unit fills must stay the same object.
    return not isinstance(value, tuple | list | dict)


def _without_weights(leaves: list[Any], weights: Tensors) -> list[Any]:
    # A module of position embeddings returns its parameter, and a whole weight does not outlive the unit.
    known = {storage_of(x) for x in weights.values()}
    return [x.clone() if isinstance(x, Tensor) and storage_of(x) in known else x for x in leaves]


def _compute(
    part: Part,
    original: Callable[..., Any],
    call: ModuleCall,
    weights: Tensors,
    buffers: Tensors,
    args: Any,
    kwargs: Any,
) -> tuple[Any, Tensors, set[str]]:
    """See Note [Buffers of a unit]."""
    held = {path: x.clone() for path, x in buffers.items()}
    versions = {path: (x, private.version_of(x)) for path, x in held.items()}
    with computing(part, weights, held, call.modes):
        outputs = original(*args, **kwargs)
        replaced = [s.path for s in part.weights if s.tensors.get(s.name) is not weights[s.path]]
        after = {slot.path: slot.tensors[slot.name] for slot in part.buffers}
    if replaced:
        raise refuse_writes(replaced)
    return outputs, after, _written(after, versions)
