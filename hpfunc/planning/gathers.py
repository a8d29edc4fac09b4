"""`Gathers`: when whole weights are gathered and released."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from .builder import Draft
from .messages import is_received_in_place
from .ops import Communicator, Region, Stream
from .program import COMPUTES
from .windows import Windows


@dataclass(frozen=True, slots=True)
class _Message:
    """One gather in flight: `received` holds the blocks of `weights`, or is the whole weight itself."""

    weights: tuple[int, ...]
    sent: Region
    received: Region


class Gathers:
    """Gathers units ahead of their use and releases them after it. See Note [The units near an event]."""

    def __init__(self, draft: Draft, windows: Windows) -> None:
        self._draft = draft
        self._program = draft.program
        self._policy = draft.policy
        self._windows = windows
        self._wholes: dict[int, dict[int, Region]] = {}
        self._flying: dict[int, list[_Message]] = {}
        self._called: set[int] = set()
        self._made: set[int] = set()

    def before(self, event: int) -> list[Region]:
        """Makes the unit of a compute event whole, and gathers ahead. Returns the regions that the event reads."""
        index = self._unit(event)
        if index not in self._called:
            self._called.add(index)
            self._take_made(index)
        if not self._windows.in_place[index] and index not in self._wholes:
            self._launch(index)
        self._launch_ahead(event)  # units that became near, or whose arrays the step has just made
        self._finish(index)
        wholes = self._wholes.get(index, {})
        return [wholes[w] if w in wholes else self._draft.shard(w) for w in self._program.units[index].weights]

    def after(self, event: int) -> None:
        """Releases the unit of a compute event if the policy says so, and gathers units that become near."""
        index = self._unit(event)
        if index in self._wholes and not self._keeps(index, event):
            self._release(index)
        if event + 1 < len(self._program.events) and self._program.events[event + 1].kind in COMPUTES:
            self._launch_ahead(event + 1)

    def end(self) -> None:
        """Releases every unit that is still whole."""
        for index in tuple(self._wholes):
            self._release(index)

    def _launch_ahead(self, event: int) -> None:
        """Issues the gathers that should be in flight while the unit of an event computes."""
        own, near = self._unit(event), self._windows.near(event)
        depth = self._policy.depth(self._program.events[event].kind)
        for unit in near[: depth + (own in near[:1])]:
            if unit != own and unit not in self._wholes and self._known(unit):
                self._launch(unit)

    def _keeps(self, unit: int, event: int) -> bool:
        release = self._windows.releases[unit]
        if release == "never" or unit in self._windows.near(event + 1):
            return True
        return release == "backward" and not self._windows.is_last_of_backward(unit, event)

    def _unit(self, event: int) -> int:
        index = self._program.events[event].unit
        assert index is not None, event
        return index

    def _known(self, unit: int) -> bool:
        """Returns whether the unit's shards exist. An array that the step makes exists once its unit is called."""
        weights = self._program.units[unit].weights
        return unit in self._called or all(self._program.weights[w].origin is not None for w in weights)

    def _take_made(self, unit: int) -> None:
        """Issues a `Caller` for the shards that the step has made for a unit, when the unit is first called."""
        made = [w for w in self._program.units[unit].weights if self._program.weights[w].origin is None]
        if fresh := [w for w in dict.fromkeys(made) if w not in self._made]:
            self._made.update(fresh)
            self._draft.caller(f"made for {self._draft.units[unit]}", fresh)

    def _launch(self, unit: int) -> None:
        """Issues the gather of a unit: casts of weights that no axis cuts, then one launch per communicator."""
        program, draft = self._program, self._draft
        label = draft.units[unit]
        weights = tuple(dict.fromkeys(program.units[unit].weights))
        cut = tuple(w for w in weights if program.weights[w].num_shards > 1)
        buckets = self._windows.messages[unit]
        packed = {w for bucket in buckets if not is_received_in_place(program, bucket) for w in bucket}
        wholes = self._wholes[unit] = {
            w: self._whole(w, "compute" if w in packed else "gather")
            for w in weights
            if not program.weights[w].shard_is_whole
        }
        if casts := [w for w in wholes if w not in cut]:
            draft.local(f"cast {label}", "copy", "gather", [draft.shard(w) for w in casts], [wholes[w] for w in casts])
        flying = [self._message(label, bucket, wholes) for bucket in buckets]
        launches: defaultdict[tuple[str, ...], list[_Message]] = defaultdict(list)
        for message in flying:
            launches[program.weights[message.weights[0]].gather_axes].append(message)
        for axes, group in launches.items():
            sent, received = [message.sent for message in group], [message.received for message in group]
            draft.launch(f"gather {label}", "all_gather", Communicator("gather", axes), sent, received)
        self._flying[unit] = flying

    def _message(self, label: str, bucket: tuple[int, ...], wholes: dict[int, Region]) -> _Message:
        """Packs the shards of a bucket, and makes a buffer for the received message, if either is needed."""
        draft, first = self._draft, self._program.weights[bucket[0]]
        shards = [draft.shard(w) for w in bucket]
        alone = len(bucket) == 1
        of = draft.weights[bucket[0]] if alone else label
        numel = sum(shard.numel for shard in shards)
        if alone and first.even and first.dtype == first.shard_dtype:
            sent = shards[0]
        else:
            sent = draft.buffer("send", of, numel, first.dtype, "gather")
            draft.local(f"pack {of}", "pack_shards", "gather", shards, [sent], weights=bucket)
        if is_received_in_place(self._program, bucket):
            return _Message(bucket, sent, wholes[bucket[0]])
        return _Message(bucket, sent, draft.buffer("gathered", of, numel * first.num_shards, first.dtype, "gather"))

    def _finish(self, unit: int) -> None:
        """Unpacks the gathered messages of a unit.

        This runs on the compute stream, where it does not delay later gathers. A host that unpacks by itself has issued
        them before it waits.
        """
        wholes = self._wholes.get(unit, {})
        for message in self._flying.pop(unit, ()):
            if message.received != wholes[message.weights[0]]:
                of = self._draft.weights[message.weights[0]] if len(message.weights) == 1 else self._draft.units[unit]
                targets = [wholes[w] for w in message.weights]
                self._draft.local(
                    f"unpack {of}", "unpack_wholes", "compute", [message.received], targets, weights=message.weights
                )
                self._draft.free(message.received)
            if message.sent != self._draft.shard(message.weights[0]):
                self._draft.free(message.sent)

    def _whole(self, weight: int, stream: Stream) -> Region:
        w = self._program.weights[weight]
        return self._draft.buffer("whole", self._draft.weights[weight], w.whole_numel, w.dtype, stream, weight)

    def _release(self, unit: int) -> None:
        for region in self._wholes.pop(unit).values():
            self._draft.free(region)
