"""Arguments by the names that other libraries have for them, or in another order: refused, with ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, cast

from .._errors import ArgumentError, message
from .mesh import Mesh, PartitionSpec
from .not_a_tensor import named, shortened

Params = ParamSpec("Params")
Result = TypeVar("Result")
_DEVICE_MESH = "mesh = hpfunc.Mesh.from_device_mesh(device_mesh)"


def names_of_others(function: str, **ours: str) -> Callable[[Callable[Params, Result]], Callable[Params, Result]]:
    """Returns a decorator for a function whose arguments have other names in torch, JAX or optax.

    Args:
        function: its public name.
        **ours: for each name of another library, how the argument is given here.

    The decorated function raises ArgumentError for such a name.
    """

    def refuse(given: dict[str, Any]) -> None:
        wrong = [name for name in given if name in ours]
        rule = f"takes {', '.join(ours[name] for name in wrong)}, not {', '.join(wrong)}"
        raise ArgumentError(message(function, rule)) from None

    def decorate(fn: Callable[Params, Result]) -> Callable[Params, Result]:
        foreign = ours.keys()

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return fn(*args, **kwargs)
            except TypeError:  # Python's own, before `fn` begins: right calls pay for no check
                if not foreign.isdisjoint(kwargs):
                    refuse(kwargs)
                raise

        # With the globals of `fn` it is a function of that module, as doctest asks.
        inner = cast(FunctionType, fn)
        known = FunctionType(call.__code__, inner.__globals__, inner.__name__, None, call.__closure__)
        return cast(Any, functools.update_wrapper(known, inner))

    return decorate


def check_mesh(function: str, mesh: object, form: str) -> None:
    """Raises ArgumentError if `mesh` is something else, with the `form` of a right call."""
    if isinstance(mesh, Mesh):
        return
    hint = form
    if hasattr(mesh, "mesh_dim_names"):
        hint = f"a DeviceMesh of torch is made one by {_DEVICE_MESH}; {form}"
    elif isinstance(mesh, str):
        hint = f"mesh = hpfunc.make_mesh((-1,), ({mesh!r},)); {form}"
    elif isinstance(mesh, PartitionSpec):
        hint = f"the mesh comes before the specs: {form}"
    raise ArgumentError(message(function, f"mesh must be a hpfunc.Mesh, got {named(mesh)}", hint=hint))


def check_kind(function: str, name: str, value: object, kind: type, hint: str) -> None:
    """Raises ArgumentError if an argument is neither None nor of its class."""
    if value is not None and not isinstance(value, kind):
        rule = f"{name} must be a hpfunc.{kind.__name__}, got {shortened(repr(value))}"
        raise ArgumentError(message(function, rule, hint=hint))


def check_indices(function: str, name: str, value: object) -> None:
    """Raises ArgumentError if what selects positional arguments is not a number or a sequence of numbers."""
    every = value if isinstance(value, (tuple, list)) else (value,)
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in every):
        rule = f"{name} must be the numbers of positional arguments, got {shortened(repr(value))}"
        raise ArgumentError(
            message(function, rule, hint=f"{name}=0 is the first argument, {name}=(0, 1) the first two")
        )


def check_function(function: str, name: str, value: object, hint: str) -> None:
    """Raises ArgumentError if an argument cannot be called."""
    if not callable(value):
        rule = f"{name} must be a function, got {shortened(repr(value))}"
        raise ArgumentError(message(function, rule, hint=hint))
