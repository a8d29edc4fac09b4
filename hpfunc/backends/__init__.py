"""Frameworks: one folder each, loaded when an array of the framework, or `HPFUNC_BACKEND`, asks for it."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, TypeVar, cast

from .._errors import LeafError, MeshError, VersionError, message
from .installed import Installed
from .protocol import Backend as Backend
from .protocol import Counters as Counters
from .unit_use import Inside as Inside

# In order of precedence if several are imported: MindSpore's backend imports torch, but torch's not MindSpore.
_MODULES = {"mindspore": "mindspore.backend", "torch": "torch.backend", "torch_npu": "torch.npu"}


_uncompiled: list[Callable[..., Any]] = []
_loaded: list[Backend] = []
F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(fn: F) -> F:
    """Marks a function of a module or class that compilers of frameworks must call without tracing into it."""
    _uncompiled.append(fn)
    for backend in _loaded:
        backend.leave_alone(fn)
    return fn


@cache
def get(name: str) -> Backend:
    """Returns the backend of this name.

    Raises:
        MeshError: there is no such backend, or its framework is not installed.
        VersionError: the framework is too old, or lacks private names that hpfunc uses.
    """
    if name not in _MODULES:
        raise MeshError(message("hpfunc.backends", f"no backend {name!r}", hint=f"one of {', '.join(_MODULES)}"))
    try:
        module = importlib.import_module(f".{_MODULES[name]}", __package__)
    except VersionError:
        raise
    except ImportError as error:
        hint = f"pip install 'hpfunc[{name}]'"
        raise MeshError(message("hpfunc.backends", f"cannot load {name!r}: {error}", hint=hint)) from error
    backend = cast(Backend, module.BACKEND)
    for fn in _uncompiled:
        backend.leave_alone(fn)
    _loaded.append(backend)
    return backend


def default() -> Backend:
    """Returns the backend that `HPFUNC_BACKEND` names, else the first that is imported already, else torch."""
    return get(default_name())


def default_name() -> str:
    """Returns the name of `default`, without loading it. There may be no such backend."""
    named = os.environ.get("HPFUNC_BACKEND")
    return named or next((name for name in _MODULES if name in sys.modules), "torch")


def names() -> tuple[str, ...]:
    """Returns the names of all backends, which are also those of their packages."""
    return tuple(_MODULES)


def installed(name: str) -> Installed:
    """Returns what the framework of a backend says of itself. Imports it, but starts no device."""
    folder = _MODULES[name].partition(".")[0]
    return importlib.import_module(f".{folder}.installed", __package__).installed()


def of(function: str, leaves: Iterable[Any]) -> Backend:
    """Returns the backend of the tensors among `leaves`.

    Raises:
        LeafError: they belong to two frameworks.
    """
    loaded = [get(name) for name in _MODULES if name in sys.modules]
    leaves = list(leaves)
    found = [backend for backend in loaded if any(backend.is_tensor(leaf) for leaf in leaves)]
    if len(found) > 1:
        raise LeafError(message(function, f"tensors of {' and '.join(b.name for b in found)} in one tree"))
    return found[0] if found else default()
