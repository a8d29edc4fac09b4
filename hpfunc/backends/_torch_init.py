"""torch without data: abstract execution for `lower`, deferred execution for `init`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import optree
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from .._errors import LoweringError, message

_UNKNOWN_VALUE = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


Keep = Callable[[int, torch.Tensor], Any]


def is_abstract(value: Any) -> bool:
    """Returns whether a tensor has no data."""
    return isinstance(value, FakeTensor)


@contextmanager
def abstract() -> Iterator[Callable[[Any], Any]]:
    """Yields the map from tensors to abstract ones; inside, operators compute shapes only.

    Raises:
        LoweringError: the code asks for a value.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with mode:
            yield lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor) else x
    except _UNKNOWN_VALUE as error:
        hint = "keep `.item()` and branches on values out of the step, or call the step once instead"
        raise LoweringError(
            message("hpfunc.lower", f"the step needs the value of a tensor: {error}", hint=hint)
        ) from error


class _Recorder(TorchDispatchMode):
    """Writes down every operator that runs, with abstract tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def deferred(init_fn: Callable[[], Any], prepare: Callable[[Any], Keep]) -> Any:
    """Returns ``init_fn()`` with ``keep(index, leaf)`` in the place of each tensor leaf.

    ``prepare(tree)`` sees the tree without data and returns `keep`. `init_fn` runs once without data while its
    operators are recorded. They are then replayed in their order, so that random numbers come out as in a plain call,
    and each leaf goes to `keep` as soon as no further operator touches it.
    """
    recorder = _Recorder()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), recorder:
            tree = init_fn()
    except _UNKNOWN_VALUE as error:
        hint = "compute such values outside of init_fn"
        raise LoweringError(
            message("hpfunc.init", f"init_fn needs the value of a tensor: {error}", hint=hint)
        ) from error
    leaves, treedef = optree.tree_flatten(tree)
    return optree.tree_unflatten(treedef, _replay(recorder.calls, leaves, prepare(tree)))


def _replay(calls: list[Any], leaves: list[Any], keep: Keep) -> list[Any]:
    last = {_storage(t): i for i, (_, args, kwargs, out) in enumerate(calls) for t in _tensors((args, kwargs, out))}
    results = list(leaves)
    due: dict[int, list[int]] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, FakeTensor):
            due.setdefault(last[_storage(leaf)], []).append(index)
        elif isinstance(leaf, torch.Tensor):
            results[index] = keep(index, leaf)
    values: dict[int, torch.Tensor] = {}
    done: dict[int, list[int]] = {}
    for i, (func, args, kwargs, out) in enumerate(calls):
        real_args = optree.tree_map(lambda x: values.get(id(x), x), args)
        real_kwargs = optree.tree_map(lambda x: values.get(id(x), x), kwargs)
        real = func(*real_args, **real_kwargs)
        for fake_out, real_out in zip(_tensors(out), _tensors(real), strict=True):
            values[id(fake_out)] = real_out
            done.setdefault(last[_storage(fake_out)], []).append(id(fake_out))
        for index in due.get(i, ()):
            results[index] = keep(index, values[id(leaves[index])].detach())
        for dead in done.pop(i, ()):
            values.pop(dead, None)
    return results
