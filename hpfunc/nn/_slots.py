"""The copy of a module, as far as frameworks share it: the call that runs, and the places that it fills.

See Note [The copy] in `nn.torch.skeleton`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .._errors import LeafError, UsageError, message
from .._running.context import module_call, module_unit
from .._transforms.unshard import unshard
from .._values.array import is_sharded

Tensor = Any
NAME = "hpfunc.from_module"


@dataclass(frozen=True, slots=True)
class Slot:
    """A place of a module that holds a parameter or a buffer, and the path of the parameter or buffer."""

    tensors: dict[str, Any]
    name: str
    path: str


@dataclass(frozen=True, slots=True)
class Part:
    """A unit: its module, the modules in it by their index in the copy, and their parameters and buffers."""

    path: str
    module: Any
    modules: tuple[tuple[int, Any], ...]
    weights: tuple[Slot, ...]
    buffers: tuple[Slot, ...]


@contextmanager
def filled(slots: Sequence[Slot], values: Mapping[str, Any]) -> Iterator[None]:
    """Puts values into places of a copy while the body runs."""
    before = [slot.tensors[slot.name] for slot in slots]
    for slot in slots:
        slot.tensors[slot.name] = values[slot.path]
    try:
        yield
    finally:
        for slot, value in zip(slots, before, strict=True):
            slot.tensors[slot.name] = value


@contextmanager
def computing(
    part: Part, weights: Mapping[str, Any], buffers: Mapping[str, Any], modes: Sequence[bool]
) -> Iterator[None]:
    """Sets a unit's values, modes, and its name for errors while the body runs."""
    before = [module.training for _, module in part.modules]
    token = module_unit.set(part.path)
    try:
        with filled(part.weights, weights), filled(part.buffers, buffers):
            set_modes(part.modules, modes)
            yield
    finally:
        module_unit.reset(token)
        for (_, module), mode in zip(part.modules, before, strict=True):
            module.training = mode


def set_modes(modules: Any, modes: Sequence[bool]) -> None:
    """Gives each of the modules (place, module) its mode."""
    for place, module in modules:
        module.training = modes[place]


def whole_of(path: str) -> Tensor:
    """Returns the values of a parameter that is used outside of its unit.

    Raises:
        UsageError: no call runs, or the use is inside of another unit.
    """
    call, inside = module_call.get(), module_unit.get()
    if inside is not None:
        rule = f"the unit {inside!r} uses a parameter of another module, which is not gathered with it"
        hint = "choose units such that the parameter is in this one, or pass it as an argument of the module's call"
        raise UsageError(message(NAME, rule, [path], hint=hint))
    if call is None:
        hint = "call what from_module returned, with its parameters: apply(params, ...)"
        raise UsageError(message(NAME, "a module's copy is used outside of a call", [path], hint=hint))
    return call.whole(path)


def refuse_writes(paths: Sequence[str]) -> UsageError:
    """Returns the error for parameters that the module writes into."""
    hint = "parameters are read-only; write `w = w + ...`, or make what changes a buffer"
    return UsageError(message(NAME, "the module writes into a parameter", paths, hint=hint))


def replacements(
    tensors: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    params: Mapping[str, Any],
    buffers: Mapping[str, Tensor] | None,
) -> list[tuple[str, Tensor, Any]]:
    """Returns path, tensor and new value for the parameters of a module, and for its buffers if there are new ones.

    Raises:
        LeafError: paths or shapes are not those of the module.
    """
    pairs = [(tensors[0], params)] if buffers is None else [(tensors[0], params), (tensors[1], buffers)]
    if bad := [line for own, given in pairs for line in _misfits(own, given)]:
        raise LeafError(message("hpfunc.to_module", "the weights are not those of the module", bad))
    return [(path, x, given[path]) for own, given in pairs for path, x in own.items()]


def whole(value: Any) -> Tensor:
    """Returns the values of an array, whole, or a plain tensor itself."""
    return unshard(value, value.mesh.axis_names) if is_sharded(value) else value


def _misfits(own: Mapping[str, Tensor], given: Mapping[str, Any]) -> list[str]:
    missing = [f"{path}: missing" for path in own if given.get(path) is None]
    unexpected = [f"{path}: unexpected" for path in given if path not in own]
    shapes = [
        f"{path}: shape {tuple(given[path].shape)}, the module has {tuple(x.shape)}"
        for path, x in own.items()
        if given.get(path) is not None and tuple(given[path].shape) != tuple(x.shape)
    ]
    return missing + unexpected + shapes


def copy_of(module: Any, memo: dict[int, Any], kind: str) -> Any:
    """Returns a copy of a module, with the objects of `memo` in place of those with these identities.

    Raises:
        UsageError: the module cannot be copied.
    """
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        hint = f"make the attribute that cannot be copied outside of the {kind}"
        raise UsageError(message(NAME, f"the {kind} cannot be copied: {error}", hint=hint)) from error


def owners_of_hooks(parts: Iterable[Any], tables: Iterable[Mapping[Any, Any]]) -> dict[int, Any]:
    """Returns, by identity, the objects that a copy shares: hooks of the user, or the objects that have them."""
    modules = {id(part) for part in parts}
    owners = [getattr(hook, "__self__", hook) for table in tables for hook in table.values() if callable(hook)]
    return {id(owner): owner for owner in owners if id(owner) not in modules}
