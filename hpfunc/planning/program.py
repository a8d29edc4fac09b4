"""`Program`: the uses of units in one run of a step, in order. A pure value, equal on all ranks.

A step is *recorded* as a flat list of `Event` over `Unit` and `Weight`. A program has global facts only: sizes are
those of padded blocks, never of one rank's short shard. So all ranks record the same value and fingerprint.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

EventKind = Literal["forward", "backward", "recompute", "collective", "end_backward", "end_step"]
Carry = Literal["", "shards", "wholes"]
COMPUTES = ("forward", "backward", "recompute")


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight, as the planner sees it: its sizes and dtypes, and the axes of its gather and its reduction.

    The *blocks* of a weight are its shards, padded to equal size: `num_shards` blocks of `block_numel` elements.

    Attributes:
        name: path of the weight, for display.
        block_numel: number of elements of one padded block.
        dtype: dtype of the whole weight that the unit computes with (`Numerics.param_dtype`).
        shard_dtype: dtype of the caller's shard.
        reduce_dtype: dtype in which its gradient is reduced.
        accum_dtype: dtype in which gradients of several uses and backwards are added up, and in which the gradient is
            delivered.
        gather_axes: data axes that cut it and over which its unit gathers, in mesh order. Its blocks are gathered, and
            its gradient is reduce-scattered, over these axes.
        num_shards: number of ranks along `gather_axes`.
        reduce_axes: data axes that do not cut it. Its gradient is all-reduced over these axes.
        num_replicas: number of ranks along `reduce_axes`.
        divisor: number by which the reduced gradient is divided (1 for a sum).
        even: whether no block is padded.
        direct: whether the blocks in rank order form the whole weight, with any padding at the end.
        trainable: whether it gets a gradient.
        origin: index among the leaves of the step's arguments; None if the step made the array, which then
            cannot be gathered before the unit is called.
        rows: the row of that array (the row of the row, ...) that it is; empty for the array itself.
    """

    name: str
    block_numel: int
    dtype: str
    shard_dtype: str
    reduce_dtype: str
    accum_dtype: str
    gather_axes: tuple[str, ...]
    num_shards: int
    reduce_axes: tuple[str, ...]
    num_replicas: int
    divisor: int = 1
    even: bool = True
    direct: bool = True
    trainable: bool = True
    origin: int | None = 0
    rows: tuple[int, ...] = ()

    @property
    def whole_numel(self) -> int:
        """Number of elements of the whole weight, including padding."""
        return self.num_shards * self.block_numel

    @property
    def shard_is_whole(self) -> bool:
        """Whether the shard itself is the whole weight that units see."""
        return self.num_shards == 1 and self.dtype == self.shard_dtype

    @property
    def divides_first(self) -> bool:
        """Whether gradients are divided before they are reduced."""
        return self.divisor > 1 and sums_overflow(self.reduce_dtype)


def sums_overflow(dtype: str) -> bool:
    """Returns whether a sum over many ranks can overflow a dtype, so that a mean must divide before it."""
    return dtype == "float16"


@dataclass(frozen=True, slots=True)
class Unit:
    """Weights that are gathered, and whose gradients are reduced, together. `weights` index `Program.weights`."""

    name: str
    weights: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """One point of the program.

    Attributes:
        kind: ``forward``, ``backward`` and ``recompute`` are uses of a unit; ``collective`` is one of the caller
            (`psum`, ...), pinned at its place; ``end_backward`` ends a `value_and_grad`; ``end_step`` is the last one.
        unit: index into `Program.units`, for the first three kinds.
        use: number of the call of that unit in this step, from 0; a ``backward`` has the number of its ``forward``.
        name: description of a ``collective``, for display and for the fingerprint.
        carry: what an ``end_backward`` carries to the next backward instead of delivering gradients: reduce-scattered
            ``"shards"``, to which the next ones are added, or ``"wholes"``, for which nothing is sent.
    """

    kind: EventKind
    unit: int | None = None
    use: int = 0
    name: str = ""
    carry: Carry = ""


@dataclass(frozen=True, slots=True)
class Program:
    """The uses of units in one step, in program order."""

    weights: tuple[Weight, ...]
    units: tuple[Unit, ...]
    events: tuple[Event, ...]

    def unit_of(self, event: Event) -> Unit:
        """Returns the unit that a compute event uses."""
        assert event.unit is not None, event
        return self.units[event.unit]

    @property
    def used(self) -> tuple[int, ...]:
        """The weights that units use, in the order of the first use."""
        units = [self.units[event.unit] for event in self.events if event.unit is not None]
        return tuple(dict.fromkeys(w for unit in units for w in unit.weights))

    def describe(self, event: Event) -> str:
        """Returns the event for display: ``forward embed``, ``backward block#1`` for a second use."""
        if event.unit is None:
            carry = f" (carries {event.carry})" if event.carry else ""
            return f"{event.kind.replace('_', ' ')}{' ' + event.name if event.name else ''}{carry}"
        return f"{event.kind} {self.units[event.unit].name}{f'#{event.use}' if event.use else ''}"

    def spell(self, event: Event) -> str:
        """Returns the event with the weights that it uses: ``forward block of params['w'], params['b']``."""
        names = [self.weights[w].name for w in self.unit_of(event).weights] if event.unit is not None else []
        return self.describe(event) + (f" of {', '.join(names)}" if names else "")

    @property
    def fingerprint(self) -> str:
        """A digest that is equal on two ranks exactly if they recorded the same program."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def matches(self, unit: int, pattern: str) -> bool:
        """Returns whether a glob fits the name of a unit, or the path of one of its weights.

        A path is written with dots, with or without its first part: ``params['layers'][0]['w']`` is
        ``params.layers.0.w`` or ``layers.0.w``.
        """
        paths = [dotted(self.weights[w].name) for w in self.units[unit].weights]
        names = [self.units[unit].name, *paths, *(path.partition(".")[2] for path in paths)]
        return any(fnmatchcase(name, pattern) for name in names)

    def __str__(self) -> str:
        lines = [f"program of {len(self.units)} units, {len(self.weights)} weights, {len(self.events)} events"]
        lines += [f"  {index:3d} {self.describe(event)}" for index, event in enumerate(self.events)]
        return "\n".join(lines)


def dotted(path: str) -> str:
    """Returns the dotted form of the path of a leaf.

    >>> dotted("params['layers'][0].w")
    'params.layers.0.w'
    """
    return re.sub(r"\[['\"]?([^'\"\]]*)['\"]?\]", r".\1", path)


# Note [Carried gradients]
# `accumulate` makes one gradient of several backwards. All but the last end with an `end_backward` that carries
# gradients. A backward that carries wholes does not end the reduction of its gradients: each whole gradient is added to
# those before, and the sum is reduced after the last use of the weight in all these backwards. A backward that carries
# shards reduce-scatters its whole gradients, and adds the shards to those before. Only the last backward all-reduces,
# scales and delivers.


def segments(program: Program) -> Iterator[tuple[int, int]]:
    """Yields for each event the number of earlier backwards that delivered gradients, and that scattered them.

    See Note [Carried gradients].
    """
    delivered = scattered = 0
    for event in program.events:
        yield delivered, scattered
        if event.kind == "end_backward":
            delivered += event.carry == ""
            scattered += event.carry != "wholes"
