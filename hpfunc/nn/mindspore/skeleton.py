"""A cell's copy without its weights, whose chosen parts run as units. See Note [The copy] in `nn.torch.skeleton`.

# Note [Parameters of a copy]
A cell looks its parameters up in a dict of its own. In the copy that dict is one of ours: inside of the unit that a
parameter belongs to it gives the whole weight, elsewhere it gathers the parameter by itself, as a unit with its name.
So, unlike on torch, even a read of a shape gathers.

# Note [Writes on MindSpore]
MindSpore does not count writes into a tensor. So buffers are compared by value whenever their changes would be lost,
and weights are compared in the first call in each mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mindspore
import numpy as np
from mindspore import nn, ops

from ... import backends
from ..._errors import UsageError, message
from ..._running.context import module_call
from ..._transforms.unit import unit
from ..._values.array import is_sharded
from ...backends.mindspore.private import TABLES, buffers_of, executor, is_recomputed, params_of, put_params
from .._choose import Choice
from .._slots import NAME, Part, Slot, computing, copy_of, filled, owners_of_hooks, refuse_writes, set_modes, whole_of
from .parts import PARTS, is_state

Tensor = Any
Tensors = dict[str, Any]


def named_tensors(cell: nn.Cell) -> tuple[Tensors, Tensors]:
    """Returns parameters and buffers by path, tied ones once. See Note [State of a cell].

    Raises:
        UsageError: some have no values yet.
    """
    every = dict(cell.parameters_and_names())
    empty = [path for path, x in every.items() if x.has_init]
    if empty:
        hint = "cell.init_parameters_data() gives them their values"
        raise UsageError(message(NAME, "parameters are not initialised yet", empty, hint=hint))
    state = {path for path, x in every.items() if is_state(path.rpartition(".")[2], x)}
    buffers = {path: x for path, x in every.items() if path in state} | dict(cell.named_buffers())
    return {path: x for path, x in every.items() if path not in state}, buffers


def plain(tensor: Tensor) -> Tensor:
    """Returns a copy of a tensor or parameter as a plain tensor."""
    return ops.stop_gradient(tensor).copy()


@dataclass(frozen=True, slots=True)
class StandIn:
    """The object that a copy holds instead of a parameter."""

    path: str


class Parameters(dict[str, Any]):
    """The parameters of one cell of a copy. See Note [Parameters of a copy].

    Attributes:
        held: values or stand-ins, by name.
    """

    def __init__(self, held: dict[str, Any]) -> None:
        super().__init__(held)
        self.held = held
        self._paths = {name: x.path for name, x in held.items() if isinstance(x, StandIn)}

    def __getitem__(self, name: str) -> Any:
        value = self.held[name]
        return whole_of(value.path) if isinstance(value, StandIn) else value

    def __setitem__(self, name: str, value: Any) -> None:
        raise refuse_writes([self._paths.get(name, name)])


@dataclass(slots=True)
class CellCall:
    """One call of a cell's copy.

    Attributes:
        params: by path.
        modes: of each cell, whether it trains.
        looks: whether this call looks for writes into weights.
        wholes: parameters that were used outside of their units; by path and grad mode.
    """

    params: Mapping[str, Any]
    modes: tuple[bool, ...]
    looks: bool = False
    wholes: dict[tuple[str, bool], Tensor] = field(default_factory=dict)
    digests: dict[tuple[str, bool], int] = field(default_factory=dict)

    def whole(self, path: str) -> Tensor:
        """Returns a parameter's values, for use outside of the unit that it belongs to: as a unit of its own."""
        key = path, executor.requires_grad()
        if key not in self.wholes:
            array = self.params[path]
            self.wholes[key] = unit(mindspore.Tensor.copy, name=path)(array) if is_sharded(array) else array.copy()
            if self.looks:
                self.digests[key] = _digest(self.wholes[key])
        return self.wholes[key]

    def check_unwritten(self) -> None:
        """Raises UsageError if one of those was written to."""
        written = sorted({path for path, _ in self.digests if self.digests[path, _] != _digest(self.wholes[path, _])})
        if written:
            raise refuse_writes(written)


def _digest(tensor: Tensor) -> int:
    return backends.get("mindspore").digest(tensor)


class CellSkeleton:
    """See `Skeleton`, and Note [The copy]."""

    def __init__(self, cell: nn.Cell, choice: Choice, initial: Tensors, *, remat: bool) -> None:
        params, buffers = named_tensors(cell)
        _refuse_own_ways(cell)
        if remat:
            _refuse_dropout(cell)
        self.module = _copy(cell, params, buffers)
        self.choice, self.params, self._remat = choice, tuple(params), remat
        self.frozen = frozenset(path for path, x in params.items() if not x.requires_grad)
        named = PARTS.named(self.module)
        self._cells = tuple(named.values())
        self._held = {id(part): _made_ready(part) for part in self._cells}
        self._kinds = {path: isinstance(x, mindspore.Parameter) for path, x in buffers.items()}
        self._is_buffer = frozenset(initial)
        self._buffers = self._slots(self._cells, is_buffer=True)
        self._looked: set[tuple[tuple[bool, ...], str]] = set()
        self.modes = self._read_modes()
        for chosen in choice.modules:
            self._make_unit(chosen.path, named[chosen.path])

    def _read_modes(self) -> tuple[bool, ...]:
        return tuple(part.training for part in self._cells)

    def modes_after(self, modes: tuple[bool, ...], change: str) -> tuple[bool, ...]:
        set_modes(enumerate(self._cells), modes)
        self.module.set_train(change == "train")
        return self._read_modes()

    def _slots(self, cells: Sequence[nn.Cell], *, is_buffer: bool) -> tuple[Slot, ...]:
        tables = [table for cell in cells for table in (self._held[id(cell)], buffers_of(cell))]
        found = [Slot(table, name, x.path) for table in tables for name, x in table.items() if isinstance(x, StandIn)]
        return tuple(slot for slot in found if (slot.path in self._is_buffer) == is_buffer)

    # --- a call -------------------------------------------------------------------------------------------------------
    def call(self, params: Mapping[str, Any], modes: tuple[bool, ...]) -> CellCall:
        return CellCall(params, modes)

    def run(
        self, call: CellCall, buffers: Mapping[str, Tensor], entry: str, args: Any, kwargs: Any
    ) -> tuple[Any, Tensors]:
        call.looks = (call.modes, entry) not in self._looked
        token = module_call.set(call)
        try:
            with filled(self._buffers, self._places(buffers)), _explaining_writes():
                set_modes(enumerate(self._cells), call.modes)
                method = self.module if entry == PARTS.method else getattr(self.module, entry)
                outputs = method(*args, **kwargs)
                after = {slot.path: plain(slot.tensors[slot.name]) for slot in self._buffers}
        finally:
            module_call.reset(token)
        call.check_unwritten()
        self._looked.add((call.modes, entry))
        return outputs, after

    def trained(self, params: Mapping[str, Any], leaves: Sequence[Tensor] | None) -> list[str]:
        known = {id(x) for x in leaves or ()}
        return [path for path, x in params.items() if id(x) in known]

    def lost(self, call: CellCall, entry: str, before: Mapping[str, Tensor], after: Tensors) -> list[str]:
        """See Note [Writes on MindSpore]."""
        return sorted(path for path, x in after.items() if not np.array_equal(x.asnumpy(), before[path].asnumpy()))

    def _places(self, buffers: Mapping[str, Tensor]) -> Tensors:
        """Returns copies of buffers that a cell may write into, as the cell has them: parameters or tensors."""
        return {
            path: mindspore.Parameter(x, name=path, requires_grad=False) if self._kinds[path] else plain(x)
            for path, x in buffers.items()
        }

    # --- units --------------------------------------------------------------------------------------------------------
    def _make_unit(self, path: str, cell: nn.Cell) -> None:
        inside = tuple(PARTS.named(cell).values())
        places = {id(part): place for place, part in enumerate(self._cells)}
        weights, buffers = (self._slots(inside, is_buffer=kind) for kind in (False, True))
        part = Part(path or "cell", cell, tuple((places[id(p)], p) for p in inside), weights, buffers)
        original = cell.construct
        vars(cell)["construct"] = lambda *args, **kwargs: self._use(part, original, args, kwargs)

    def _use(self, part: Part, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        call = module_call.get()
        if call is None:
            raise UsageError(message(NAME, f"the unit {part.path!r} is used outside of a call"))
        weights = {slot.path: call.params[slot.path] for slot in part.weights}
        buffers = {slot.path: slot.tensors[slot.name] for slot in part.buffers}

        def body(weights: Tensors, buffers: Tensors, args: Any, kwargs: Any) -> tuple[Any, Tensors]:
            before = {path: _digest(x) for path, x in weights.items()} if call.looks else {}
            with computing(part, weights, self._places(buffers), call.modes):
                outputs = original(*args, **kwargs)
                after = {slot.path: plain(slot.tensors[slot.name]) for slot in part.buffers}
            if written := [path for path, digest in before.items() if _digest(weights[path]) != digest]:
                raise refuse_writes(written)
            return outputs, after

        run = body
        if any(is_sharded(x) for x in weights.values()):
            run = unit(body, name=part.path, remat=self._remat)
        outputs, after = run(weights, {path: plain(x) for path, x in buffers.items()}, args, kwargs)
        placed = self._places(after)
        for slot in self._buffers:
            if slot.path in placed:
                slot.tensors[slot.name] = placed[slot.path]
        return outputs


# --- the copy ---------------------------------------------------------------------------------------------------------
def _copy(cell: nn.Cell, params: Tensors, buffers: Tensors) -> nn.Cell:
    parts = list(PARTS.named(cell).values())
    memo: dict[int, Any] = {id(x): StandIn(path) for path, x in {**params, **buffers}.items()}
    attributes = [(name, x) for part in parts for name, x in vars(part).items()]
    memo |= owners_of_hooks(parts, (x for name, x in attributes if "hook" in name and isinstance(x, dict)))
    return copy_of(cell, memo, "cell")


def _made_ready(cell: nn.Cell) -> dict[str, Any]:
    """Gives a copied cell its dict of parameters, and returns the values in it."""
    held = dict(params_of(cell))
    # Names were checked when the original was called; and no cell begins a differentiation of its own here.
    put_params(cell, Parameters(held))
    vars(cell)["requires_grad"] = False
    return held


def _refuse_own_ways(cell: nn.Cell) -> None:
    """Raises UsageError for cells whose gradients would not reach their weights."""
    bad = []
    for path, part in PARTS.named(cell).items():
        attributes, own = vars(part), PARTS.own(part)
        listed = [name for name, x in attributes.items() if name not in TABLES and _has_parameters(x)]
        bad += [f"{path}.{name}".lstrip(".") + ": parameters in a list, tuple or dict" for name in listed]
        if is_recomputed(part):
            bad.append(f"{path or 'the cell'}: recomputes by itself; from_module(cell, remat=True) does that by units")
        if part.has_bprop and own:
            bad.append(f"{path or 'the cell'}: has a bprop and parameters")
    if bad:
        raise UsageError(message(NAME, "cells whose parameters cannot be given from outside", bad))


def _refuse_dropout(cell: nn.Cell) -> None:
    """Raises UsageError for cells that draw other random numbers when they are recomputed on a CPU."""
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
    dropouts: list[tuple[str, Any]] = [(path, x) for path, x in PARTS.named(cell).items() if isinstance(x, kinds)]
    bad = [f"{path}: {type(x).__name__}" for path, x in dropouts if (x.keep_prob < 1 if x.p is None else x.p > 0)]
    if bad and mindspore.get_context("device_target") == "CPU":
        rule = (
            "with remat=True dropout would draw other numbers in backward: MindSpore restores no state of it on a CPU"
        )
        raise UsageError(message(NAME, rule, bad, hint="leave remat out, or set p=0"))


def _has_parameters(value: Any) -> bool:
    if isinstance(value, dict):
        value = tuple(value.values())
    return isinstance(value, list | tuple) and any(isinstance(x, mindspore.Parameter) for x in value)


@contextmanager
def _explaining_writes() -> Iterator[None]:
    """Explains an error in which a whole weight lacks an attribute that only parameters have."""
    try:
        yield
    except AttributeError as error:
        if error.name != "set_data":
            raise
        raise refuse_writes(["an attribute that is a parameter is assigned a tensor"]) from error
