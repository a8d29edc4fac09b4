"""torch without data: abstract execution for `lower`, deferred execution for `init`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import optree
import torch

from ..._errors import LoweringError, message
from .private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    UnsupportedOperatorException,
    disable_current_modes,
    storage_id,
)

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
    hint = "keep `.item()` and branches on values out of the step, or call the step once instead"
    with _without_data("hpfunc.lower", "the step", hint) as mode:
        yield lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor) else x


@contextmanager
def _without_data(function: str, what: str, hint: str) -> Iterator[Any]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with mode:
            yield mode
    except _UNKNOWN_VALUE as error:
        raise LoweringError(message(function, f"{what} needs the value of a tensor: {error}", hint=hint)) from error


def random_states(device: str) -> list[bytes]:
    """Returns the states of the global generators: of the CPU, and of another device."""
    states = [torch.get_rng_state()]
    if device != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return [_bytes(state) for state in states]


def set_random_state(device: str, place: int, state: bytes) -> None:
    """Sets one of those."""
    tensor = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    if place == 0:
        torch.set_rng_state(tensor)
    else:
        torch.get_device_module(device).set_rng_state(tensor, device)


# Note [Random numbers of init]
# While `init_fn` is recorded no numbers are drawn for its tensors, so a generator state that it reads or restores
# (`fork_rng`) is not the real one. Instead each recorded draw takes one number, so that a state identifies a place in
# the sequence of draws. At replay a state that was set is looked up: if it identifies a place, the generator gets the
# state that the replay had there; any other state is a seed.
class _Recorder(TorchDispatchMode):
    """Records every operator that runs, with abstract tensors, and every state that a generator is set to."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any, torch.dtype]] = []
        self._place: dict[torch.Generator, bytes] = {}
        self._were_set: set[bytes] = set()
        self._states: dict[bytes, torch.Tensor] = {}
        self._start = torch.default_generator.get_state()
        self._look(torch.default_generator)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            self._note(func, args, kwargs or {}, out)
            return out
        generator = (kwargs or {}).get("generator") or torch.default_generator
        with disable_current_modes():
            self._look(generator)
            self._note(func, args, kwargs or {}, out)
            torch.rand(1, generator=generator, device=generator.device)
            place = self._place[generator] = _bytes(generator.get_state())
            self._note(self._reach, (generator, place), {}, None)
        return out

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        # An operator that is given no dtype takes the default one, which init_fn may set for a while.
        self.calls.append((func, args, kwargs, out, torch.get_default_dtype()))

    def _look(self, generator: torch.Generator) -> None:
        state = generator.get_state()
        if self._place.get(generator) != _bytes(state):
            self._place[generator] = _bytes(state)
            self._were_set.add(_bytes(state))
            self._note(self._set, (generator, state), {}, None)

    def end(self) -> None:
        """Records a generator state that was set after the last draw."""
        for generator in list(self._place):
            self._look(generator)

    def undo(self) -> None:
        """Restores the default generator."""
        torch.default_generator.set_state(self._start)

    def _reach(self, generator: torch.Generator, place: bytes) -> None:
        if place in self._were_set:
            self._states[place] = generator.get_state()

    def _set(self, generator: torch.Generator, state: torch.Tensor) -> None:
        generator.set_state(self._states.get(_bytes(state), state))


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return storage_id(tensor.untyped_storage())


def deferred(init_fn: Callable[[], Any], prepare: Callable[[Any], Keep]) -> Any:
    """Returns ``init_fn()`` with ``keep(index, leaf)`` in the place of each tensor leaf.

    ``prepare(tree)`` sees the tree without data and returns `keep`. `init_fn` runs once without data while its
    operators are recorded. They are then replayed in their order, so that random numbers come out as in a plain call,
    and each leaf goes to `keep` as soon as no further operator touches it. See Note [Random numbers of init].
    """
    recorder = _Recorder()
    try:
        with _without_data("hpfunc.init", "init_fn", "compute such values outside of init_fn"), recorder:
            tree = init_fn()
        recorder.end()
    finally:
        recorder.undo()
    leaves, treedef = optree.tree_flatten(tree)
    keep, before = prepare(tree), torch.get_default_dtype()
    try:
        return optree.tree_unflatten(treedef, _replay(recorder.calls, leaves, keep))
    finally:
        torch.set_default_dtype(before)


def _replay(calls: list[Any], leaves: list[Any], keep: Keep) -> list[Any]:
    last = {_storage(t): i for i, (_, args, kwargs, out, _) in enumerate(calls) for t in _tensors((args, kwargs, out))}
    results = list(leaves)
    due: dict[int, list[int]] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, FakeTensor):
            due.setdefault(last[_storage(leaf)], []).append(index)
        elif isinstance(leaf, torch.Tensor):
            results[index] = keep(index, leaf)
    values: dict[int, torch.Tensor] = {}
    done: dict[int, list[int]] = {}
    for i, (func, args, kwargs, out, dtype) in enumerate(calls):
        torch.set_default_dtype(dtype)
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
