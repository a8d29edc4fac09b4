"""`from_module`, `init_module` and `to_module` for torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from ..._errors import LeafError, UsageError, message
from ..._transforms.shard import init
from ..._values.mesh import Mesh, PartitionSpec
from ...backends.torch import private
from .._choose import choose
from .._function import ModuleFunction
from .._parts import Parts
from .._slots import replacements, whole
from .skeleton import ModuleSkeleton, named_tensors

Tensor = torch.Tensor
PARTS = Parts(
    kind=nn.Module,
    method="forward",
    lists=(nn.ModuleList, nn.Sequential, nn.ModuleDict),
    unset=(nn.Module.forward,),
    named=lambda module: dict(module.named_modules()),
    children=lambda module: module.named_children(),
    own=lambda module: {name: x for name, x in private.parameters_of(module).items() if x is not None},
    size_bytes=lambda parameter: parameter.numel() * parameter.element_size(),
    computes_own=is_parametrized,
    compiled=private.compiled,
)
_FROM, _INIT, _TO = "hpfunc.from_module", "hpfunc.init_module", "hpfunc.to_module"


def _checked(function: str, module: Any) -> nn.Module:
    """Returns a module, or the one that it calls compiled. See Note [Compiled modules] in `nn.torch.skeleton`."""
    if not isinstance(module, nn.Module):
        raise LeafError(message(function, f"a torch.nn.Module is wanted, got {type(module).__name__}"))
    compiled = private.compiled(module)
    return module if compiled is None else compiled


def from_module(module: nn.Module, units: Any, remat: bool) -> tuple[ModuleFunction, dict[str, Tensor]]:
    """See `hpfunc.from_module`."""
    given_module, module = module, _checked(_FROM, module)
    params, buffers = named_tensors(module)
    _refuse_shared_memory(_FROM, params)
    # Parameters: a tensor that wants no gradient is a frozen array only if it is one. See `_transforms.freeze`.
    given: dict[str, Tensor] = {path: nn.Parameter(x.detach(), x.requires_grad) for path, x in params.items()}
    initial = {path: x.detach().clone() for path, x in buffers.items()}
    return _function(module, units, initial, remat, is_compiled=module is not given_module), given


def _refuse_shared_memory(function: str, params: Mapping[str, Tensor]) -> None:
    """Refuses parameters that are different objects in the same memory: torch's optimizers change both at once."""
    spans: list[tuple[int, int, int, str]] = []
    for path, x in params.items():
        if x.layout == torch.strided and x.numel() and not private.is_wrapper(x):
            last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
            start, size = int(x.storage_offset()), x.element_size()
            spans.append((private.storage_id(x.untyped_storage()), start * size, (start + last + 1) * size, path))
    spans.sort()
    pairs = pairwise(spans)
    bad = [f"{one} and {two}" for (a, _, end, one), (b, start, _, two) in pairs if a == b and start < end]
    if bad:
        hint = "tie them as one parameter: head.weight = embed.weight; or give each memory of its own (clone)"
        raise UsageError(message(function, "parameters share memory, and are not one parameter", bad, hint=hint))


def _function(
    module: nn.Module, units: Any, buffers: dict[str, Tensor], remat: bool, *, is_compiled: bool = False
) -> ModuleFunction:
    choice = choose(PARTS, module, units)
    uncompiled = ["the whole module"] if is_compiled else []
    uncompiled += [path or "the whole module" for path, x in module.named_modules() if private.is_compiled_in_place(x)]
    if uncompiled:
        rule = "these are compiled around units, or in place, and run uncompiled"
        hint = "compile each layer, which is kept: model.layers[i] = torch.compile(model.layers[i])"
        choice = replace(choice, advice=(*choice.advice, message(_FROM, rule, uncompiled, hint=hint)))
    skeleton = ModuleSkeleton(module, choice, buffers, remat=remat)
    return ModuleFunction(skeleton, buffers, skeleton.modes, PARTS.method)


def init_module(
    source: Any, mesh: Mesh, specs: Any, units: Any, init_fn: Callable[[nn.Module], None] | None, remat: bool
) -> tuple[ModuleFunction, dict[str, Any]]:
    """See `hpfunc.init_module`."""
    built: list[nn.Module] = []

    def build() -> Any:
        module = _initialised(source, mesh, init_fn) if isinstance(source, nn.Module) else source()
        params, buffers = named_tensors(_checked(_INIT, module))
        built.append(module)
        # Not detached: a `detach` here would be the last recorded operator, and keep all of them whole until then.
        return {"params": params, "buffers": buffers}

    made = init(build, mesh, {"params": specs, "buffers": PartitionSpec()})
    module = _checked(_INIT, built[0])
    _refuse_shared_memory(_INIT, named_tensors(module)[0])
    buffers = {path: array.local for path, array in made["buffers"].items()}
    return _function(module, units, buffers, remat, is_compiled=module is not built[0]), made["params"]


def _initialised(source: nn.Module, mesh: Mesh, init_fn: Callable[[nn.Module], None] | None) -> nn.Module:
    placed = [path for found in named_tensors(source) for path, x in found.items() if not x.is_meta]
    if placed:
        hint = "build it `with torch.device('meta')`, or give a function that builds it"
        raise UsageError(message(_INIT, "parts of the module are not on the meta device", placed, hint=hint))
    params, buffers = named_tensors(source)
    module = copy.deepcopy(source, {id(x): x for x in (*params.values(), *buffers.values())})
    made: dict[Tensor, Tensor] = {}  # a tensor is a key by its identity
    versions: dict[Tensor, int] = {}
    visited: set[nn.Module] = set()

    def initialise(part: nn.Module) -> None:  # its tensors are made just before; all earlier ones are final
        if part in visited:
            return
        visited.add(part)
        for slots in (private.parameters_of(part), private.buffers_of(part)):
            for name, x in slots.items():
                if x is not None:
                    if x not in made:
                        made[x] = _made(x, mesh.device)
                        versions[made[x]] = private.version_of(made[x])
                    slots[name] = made[x]
        (init_fn or _reset)(part)

    module.apply(initialise)
    after = {path: x for found in named_tensors(module) for path, x in found.items()}
    unwritten = [path for path, x in after.items() if private.version_of(x) == versions.get(x)]
    if unwritten:
        hint = "give init_fn=, which initialises the module; or a function that builds it, instead of a module"
        raise UsageError(message(_INIT, "no reset_parameters or init_fn has written these", unwritten, hint=hint))
    return module


def _made(x: Tensor, device: str) -> Tensor:
    empty = torch.empty_like(x, device=device)
    return nn.Parameter(empty, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else empty


def _reset(part: nn.Module) -> None:
    reset = private.reset_method(part)
    if callable(reset):
        reset()


def to_module(params: Mapping[str, Any], module: nn.Module, buffers: Mapping[str, Tensor] | None) -> nn.Module:
    """See `hpfunc.to_module`."""
    pairs = replacements(named_tensors(_checked(_TO, module)), params, buffers)
    meta = [path for path, x, _ in pairs if x.is_meta]
    if meta:
        hint = "module.to_empty(device=...) gives it memory"
        raise UsageError(message(_TO, "the module is on the meta device", meta, hint=hint))
    with torch.no_grad():
        for _, x, value in pairs:
            x.copy_(whole(value))
    return module
