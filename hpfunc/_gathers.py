"""When whole weights are gathered, and when they are released."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from ._draft import Draft
from ._policy import Policy
from ._program import COMPUTES, Program, Unit, Weight
from ._schedule import Communicator, Region, itemsize

# Note [The units near an event]
# The units *near* event i are the first `prefetch + 1` different ones that are used from i on; units that need no
# gather do not count. Before event i the near units are gathered, in the order of their use. After it, its own unit is
# released unless it is near event i + 1. So every unit that is whole or in flight is near the current event, hence
# there are at most `prefetch + 1` of them: the units near i + 1 include all units near i but that of event i, because
# taking the first use off a list moves no other first use back. What is released is always what is used again last, or
# never: no choice of the same size gathers less. At the turn from forward to backward the last `prefetch + 1` units
# stay whole. Where the unit of event i needs no gather, one unit less is gathered ahead: `prefetch` counts the same.


def in_place(weight: Weight) -> bool:
    """Returns whether the shard itself is the whole weight."""
    return weight.num_shards == 1 and weight.dtype == weight.shard_dtype


def messages(program: Program, weights: tuple[int, ...], policy: Policy) -> list[tuple[int, ...]]:
    """Returns which cut weights share a message: small ones of the same axes and dtype do, others travel alone."""
    buckets: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for index in weights:
        weight = program.weights[index]
        packs = weight.whole_numel * itemsize(weight.dtype) < policy.pack_below_bytes
        buckets[(weight.gather_axes, weight.dtype, None if packs else index)].append(index)
    return [tuple(bucket) for bucket in buckets.values()]


@dataclass(frozen=True, slots=True)
class _Message:
    """One gather in flight: `received` holds the blocks of `weights`, or is the whole weight itself."""

    weights: tuple[int, ...]
    sent: Region
    received: Region


class Gathers:
    """Gathers units ahead of their use and releases them after it. See Note [The units near an event]."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._program = draft.program
        self._policy = draft.policy
        self._wholes: dict[int, dict[int, Region]] = {}
        self._flying: dict[int, list[_Message]] = {}
        self._called: set[int] = set()

    def before(self, event: int) -> list[Region]:
        """Makes the unit of a compute event whole and gathers ahead; returns what the event reads."""
        index = self._unit(event)
        near = self._near(event)
        ahead = near[: self._policy.prefetch + (index in near[:1])]
        if self._needs_gather(self._program.units[index]) and index not in self._wholes:
            self._launch(index)
        self._called.add(index)
        self._finish(index)
        for other in ahead:
            if other not in self._wholes and self._known(other):
                self._launch(other)
        wholes = self._wholes.get(index, {})
        return [wholes[w] if w in wholes else self._draft.shard(w) for w in self._program.units[index].weights]

    def after(self, event: int) -> None:
        """Releases the unit of a compute event if the policy says so."""
        index = self._unit(event)
        if index in self._wholes and not self._keeps(index, event):
            self._release(index)

    def end(self) -> None:
        """Releases every unit that is still whole."""
        for index in tuple(self._wholes):
            self._release(index)

    def _keeps(self, unit: int, event: int) -> bool:
        release = self._policy.release
        if release == "never" or unit in self._near(event + 1):
            return True
        return release == "backward" and unit in self._units_until_end_backward(event + 1)

    def _near(self, event: int) -> list[int]:
        units: list[int] = []
        for later in self._program.events[event:]:
            if later.kind not in COMPUTES or later.unit is None or later.unit in units:
                continue
            if self._needs_gather(self._program.units[later.unit]):
                units.append(later.unit)
            if len(units) > self._policy.prefetch:
                break
        return units

    def _units_until_end_backward(self, event: int) -> Iterator[int]:
        for later in self._program.events[event:]:
            if later.kind == "end_backward":
                return
            if later.unit is not None:
                yield later.unit

    def _unit(self, event: int) -> int:
        index = self._program.events[event].unit
        assert index is not None, event
        return index

    def _needs_gather(self, unit: Unit) -> bool:
        return not all(in_place(self._program.weights[w]) for w in unit.weights)

    def _known(self, unit: int) -> bool:
        """Returns whether the unit's shards exist: an array that the step makes does when its unit is called."""
        weights = self._program.units[unit].weights
        return unit in self._called or all(self._program.weights[w].origin is not None for w in weights)

    def _launch(self, unit: int) -> None:
        """Issues the gather of a unit: casts of weights that nobody cuts, then one launch over each communicator."""
        program, draft = self._program, self._draft
        label = draft.unit(unit)
        weights = tuple(dict.fromkeys(program.units[unit].weights))
        cut = tuple(w for w in weights if program.weights[w].num_shards > 1)
        wholes = self._wholes[unit] = {w: self._whole(w) for w in weights if not in_place(program.weights[w])}
        if casts := [w for w in wholes if w not in cut]:
            draft.local(f"cast {label}", "copy", "gather", [draft.shard(w) for w in casts], [wholes[w] for w in casts])
        flying = [self._message(label, bucket, wholes) for bucket in messages(program, cut, self._policy)]
        launches: defaultdict[tuple[str, ...], list[_Message]] = defaultdict(list)
        for message in flying:
            launches[program.weights[message.weights[0]].gather_axes].append(message)
        for axes, group in launches.items():
            sent, received = [message.sent for message in group], [message.received for message in group]
            draft.launch(f"gather {label}", "all_gather", Communicator("gather", axes), sent, received)
        self._flying[unit] = flying

    def _message(self, label: str, bucket: tuple[int, ...], wholes: dict[int, Region]) -> _Message:
        """Packs the shards of a bucket, and makes room for what will be received, as far as either is needed."""
        draft, first = self._draft, self._program.weights[bucket[0]]
        shards = [draft.shard(w) for w in bucket]
        alone = len(bucket) == 1
        of = draft.weight(bucket[0]) if alone else label
        numel = sum(shard.numel for shard in shards)
        if alone and first.even and first.dtype == first.shard_dtype:
            sent = shards[0]
        else:
            sent = draft.buffer("send", of, numel, first.dtype, "gather")
            draft.local(f"pack {of}", "pack_shards", "gather", shards, [sent], weights=bucket)
        if alone and first.direct:
            return _Message(bucket, sent, wholes[bucket[0]])
        return _Message(bucket, sent, draft.buffer("gathered", of, numel * first.num_shards, first.dtype, "gather"))

    def _finish(self, unit: int) -> None:
        """Issues what follows the launch: late, because where the host does it, it has to wait for the launch."""
        wholes = self._wholes.get(unit, {})
        for message in self._flying.pop(unit, ()):
            if message.received != wholes[message.weights[0]]:
                of = self._draft.weight(message.weights[0]) if len(message.weights) == 1 else self._draft.unit(unit)
                targets = [wholes[w] for w in message.weights]
                self._draft.local(
                    f"unpack {of}", "unpack_wholes", "gather", [message.received], targets, weights=message.weights
                )
                self._draft.free(message.received)
            if message.sent != self._draft.shard(message.weights[0]):
                self._draft.free(message.sent)

    def _whole(self, weight: int) -> Region:
        w = self._program.weights[weight]
        return self._draft.buffer("whole", self._draft.weight(weight), w.whole_numel, w.dtype, "gather", weight)

    def _release(self, unit: int) -> None:
        for region in self._wholes.pop(unit).values():
            self._draft.free(region)
