"""How gradients become reduced shards: reduce-scatter, all-reduce, scale and deliver, hidden behind the backward."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ._draft import Draft
from ._gathers import messages
from ._program import Program, Weight
from ._schedule import ALIGN_BYTES, Communicator, Region, itemsize

# Note [The four steps of a backward]
# k counts units down; the gradients of unit k are ready after its backward. Then, in this order:
#   step 1  the reduce-scatter of k+1 is awaited: its sums are formed, the whole gradients that it has sent are freed;
#   step 2  the gradients of k+1 are delivered, if no axis is left to reduce;
#   step 3  the reduce-scatter of k is launched, into its slices of the reduce buffer;
#   step 4  the all-reduce of k+1 is launched, on its whole reduce buffer, in place.
# So while unit k-1 computes, k is scattered and k+1 all-reduced. At most two units have whole gradients at any time.
# The last unit's steps, and the wait for all all-reduces, are at the end of the backward.
#
# Where sums must be formed in rank order (`Traits.ordered_sums`), an all-reduce over three or more replicas is an
# exchange, a sum and a collection. The second and third follow one unit later, so that the host never waits for what it
# has just begun.


def prescaled(weight: Weight) -> bool:
    """Returns whether gradients are divided before they are reduced: float16 could overflow in their sum."""
    return weight.reduce_dtype == "float16" and weight.divisor > 1


def finals(program: Program) -> list[tuple[int, ...]]:
    """Returns for each event the weights whose gradient is complete after it: their last use in this backward."""
    seen: set[int] = set()
    result: list[tuple[int, ...]] = []
    for event in reversed(program.events):
        if event.kind == "end_backward":
            seen = set()
        weights = dict.fromkeys(program.unit_of(event).weights) if event.kind == "backward" else ()
        fresh = tuple(w for w in weights if program.weights[w].trainable and w not in seen)
        seen |= set(fresh)
        result.append(fresh)
    return result[::-1]


@dataclass(slots=True)
class _Bundle:
    """Gradients that share a reduce buffer, from their reduce-scatter to their delivery.

    Attributes:
        first: one of its weights, for what they have in common.
        buffer: the whole of the reduce buffer.
        slices: where in it the gradient of each weight is.
        filled: the parts of it that hold anything.
    """

    label: str
    first: Weight
    buffer: Region
    slices: dict[int, Region]
    filled: tuple[Region, ...]


@dataclass(frozen=True, slots=True)
class _Message:
    """One reduce-scatter to be launched: whole gradients in `sent`, of which `target` gets the reduced blocks."""

    of: str
    first: Weight
    sent: Region
    target: Region


@dataclass(frozen=True, slots=True)
class _Sums:
    """Exchanged blocks, of which sums are to be formed."""

    parts: int
    staged: list[Region]
    targets: list[Region]


@dataclass(slots=True)
class _Group:
    """The bundles of one event, and what is to be done once their reduce-scatters have arrived."""

    label: str
    bundles: list[_Bundle] = field(default_factory=list)
    sums: list[_Sums] = field(default_factory=list)
    spent: list[Region] = field(default_factory=list)


class Reductions:
    """Reduces gradients in the order of the backward. See Note [The four steps of a backward]."""

    def __init__(self, draft: Draft, *, ordered_sums: bool) -> None:
        self._draft = draft
        self._program = draft.program
        self._ordered = ordered_sums
        self._finals = finals(draft.program)
        self._gradients: dict[int, Region] = {}
        self._pending: _Group | None = None
        self._exchanged: list[tuple[_Bundle, Region]] = []
        self._parts: list[Region] = []
        self._reduced: list[_Bundle] = []

    def gradients(self, event: int) -> list[Region]:
        """Returns new buffers for the whole gradients that a backward writes, in the order of its weights."""
        weights = self._program.unit_of(self._program.events[event]).weights
        return [self._gradient(w) for w in weights if self._program.weights[w].trainable]

    def after(self, event: int, gradients: list[Region]) -> None:
        """Adds the gradients of a backward to those of earlier ones, and reduces those that are complete."""
        unit = self._program.events[event].unit
        assert unit is not None, event
        weights = [w for w in self._program.units[unit].weights if self._program.weights[w].trainable]
        for weight, gradient in zip(weights, gradients, strict=True):
            self._accumulate(weight, gradient)
        if not self._finals[event]:
            return
        previous, self._pending = self._pending, _Group(self._draft.unit(unit))
        if previous:
            self._await(previous)
            self._deliver([bundle for bundle in previous.bundles if bundle.first.num_replicas == 1])
        self._scatter(self._pending, self._finals[event])
        if previous:
            self._all_reduce(previous)

    def end(self) -> None:
        """Finishes and delivers everything: the end of the backward."""
        if last := self._pending:
            self._await(last)
            self._all_reduce(last)
            self._collect()
            self._reduced += [bundle for bundle in last.bundles if bundle.first.num_replicas == 1]
        self._free_parts()
        self._deliver(self._reduced)
        self._pending, self._reduced = None, []
        assert not self._gradients, "a gradient was never complete"

    def _gradient(self, weight: int) -> Region:
        w = self._program.weights[weight]
        return self._draft.buffer("gradient", self._draft.weight(weight), w.whole_numel, w.dtype, "compute", weight)

    def _accumulate(self, weight: int, gradient: Region) -> None:
        if weight in self._gradients:
            earlier, total = self._gradients[weight], self._gradient(weight)
            name = f"accumulate {self._draft.weight(weight)}"
            self._draft.local(name, "accumulate", "compute", [earlier, gradient], [total], weights=(weight,))
            self._draft.free(earlier)
            self._draft.free(gradient)
            gradient = total
        self._gradients[weight] = gradient

    # ----------------------------------------------------------------------------------------- step 3: reduce-scatter

    def _scatter(self, group: _Group, weights: tuple[int, ...]) -> None:
        """Launches the reduce-scatter of an event: one launch over each communicator, whatever the bundles."""
        bundles: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
        for index in weights:
            if not self._in_place(group, index):
                weight = self._program.weights[index]
                replicas = weight.reduce_axes if weight.num_replicas > 1 else ()
                bundles[(replicas, weight.reduce_dtype, weight.divisor)].append(index)
        launches: defaultdict[tuple[str, ...], list[_Message]] = defaultdict(list)
        for members in bundles.values():
            for message in self._bundle(group, tuple(members)):
                launches[message.first.gather_axes].append(message)
        for launch in launches.values():
            self._launch_scatter(group, launch)

    def _in_place(self, group: _Group, index: int) -> bool:
        """Takes the gradient itself for the reduce buffer, if nobody else has a part of it."""
        weight = self._program.weights[index]
        alone = weight.num_shards == weight.num_replicas == 1
        if not alone or weight.dtype != weight.reduce_dtype or prescaled(weight):
            return False
        region = self._gradients.pop(index)
        group.bundles.append(_Bundle(self._draft.weight(index), weight, region, {index: region}, (region,)))
        return True

    def _bundle(self, group: _Group, weights: tuple[int, ...]) -> Iterator[_Message]:
        """Lays out a reduce buffer and fills what no collective fills; yields the messages that do."""
        first = self._program.weights[weights[0]]
        buckets = self._buckets(weights)
        sizes = [sum(self._program.weights[w].block_numel for w in bucket) for bucket in buckets]
        starts, numel = _layout(sizes, first)
        buffer = self._draft.buffer("reduce", group.label, numel, first.reduce_dtype, "reduce_scatter")
        slices = [Region(buffer.buffer, start, start + size) for start, size in zip(starts, sizes, strict=True)]
        gaps = list(_gaps(slices, buffer))
        if gaps and first.num_replicas > 1:
            self._draft.local(f"zero {group.label}", "zero", "reduce_scatter", [], gaps)
        filled = (buffer,) if not gaps or first.num_replicas > 1 else tuple(slices)
        bundle = _Bundle(group.label, first, buffer, {}, filled)
        group.bundles.append(bundle)
        for bucket, region in zip(buckets, slices, strict=True):
            bundle.slices |= zip(bucket, self._split(bucket, region), strict=True)
            if message := self._message(group, bucket, region):
                yield message

    def _buckets(self, weights: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Returns the weights of each message, a weight that nobody cuts by itself."""
        cut = tuple(w for w in weights if self._program.weights[w].num_shards > 1)
        uncut = [(w,) for w in weights if w not in cut]
        return [*messages(self._program, cut, self._draft.policy), *uncut]

    def _split(self, bucket: tuple[int, ...], region: Region) -> Iterator[Region]:
        start = region.start
        for w in bucket:
            stop = start + self._program.weights[w].block_numel
            yield Region(region.buffer, start, stop)
            start = stop

    def _message(self, group: _Group, bucket: tuple[int, ...], target: Region) -> _Message | None:
        """Copies or packs gradients where that is needed; returns what is to be sent, if anything."""
        first = self._program.weights[bucket[0]]
        gradients = [self._gradients.pop(w) for w in bucket]
        group.spent += gradients
        of = self._draft.weight(bucket[0]) if len(bucket) == 1 else group.label
        divides = prescaled(first)
        if first.num_shards == 1 and not divides:
            self._draft.local(f"copy {of}", "copy", "reduce_scatter", gradients, [target])
            return None
        if len(bucket) == 1 and first.even and first.direct and first.dtype == first.reduce_dtype and not divides:
            return _Message(of, first, gradients[0], target)
        sent = target
        if first.num_shards > 1:
            numel = target.numel * first.num_shards
            sent = self._draft.buffer("send", of, numel, first.reduce_dtype, "reduce_scatter")
            group.spent.append(sent)
        name, divisor = f"pack gradient {of}", first.divisor if divides else 1
        self._draft.local(name, "pack_gradients", "reduce_scatter", gradients, [sent], weights=bucket, divisor=divisor)
        return _Message(of, first, sent, target) if first.num_shards > 1 else None

    def _launch_scatter(self, group: _Group, launch: list[_Message]) -> None:
        name, first = f"reduce_scatter {group.label}", launch[0].first
        communicator = Communicator("reduce_scatter", first.gather_axes)
        sources, targets = [message.sent for message in launch], [message.target for message in launch]
        if not self._ordered:
            self._draft.launch(name, "reduce_scatter", communicator, sources, targets)
            return
        staged = [
            self._draft.buffer("staging", m.of, m.sent.numel, m.first.reduce_dtype, "reduce_scatter") for m in launch
        ]
        self._draft.launch(name, "all_to_all", communicator, sources, staged)
        group.sums.append(_Sums(first.num_shards, staged, targets))
        group.spent += staged

    # ------------------------------------------------------------------------------------ steps 1, 2 and 4, and the end

    def _await(self, group: _Group) -> None:
        for sums in group.sums:
            name = f"sum {group.label}"
            self._draft.local(name, "sum_parts", "reduce_scatter", sums.staged, sums.targets, parts=sums.parts)
        for region in group.spent:
            self._draft.free(region)

    def _deliver(self, bundles: Iterable[_Bundle]) -> None:
        """Scales the sums, casts them to the dtype of the shard, and hands them over in the order of the weights."""
        delivered: dict[int, Region] = {}
        for bundle in bundles:
            if bundle.first.divisor > 1 and not prescaled(bundle.first):
                regions, divisor = bundle.filled, bundle.first.divisor
                self._draft.local(f"scale {bundle.label}", "scale", "compute", regions, regions, divisor=divisor)
            casts = {w: self._output(w) for w in bundle.slices if self._casts(w)}
            if casts:
                sources = [bundle.slices[w] for w in casts]
                self._draft.local(f"cast {bundle.label}", "copy", "compute", sources, list(casts.values()))
            if len(casts) == len(bundle.slices):
                self._draft.free(bundle.buffer)
            delivered |= bundle.slices | casts
        for weight in sorted(delivered):
            self._draft.deliver(weight, delivered[weight])

    def _casts(self, index: int) -> bool:
        return self._program.weights[index].reduce_dtype != self._program.weights[index].shard_dtype

    def _output(self, index: int) -> Region:
        w = self._program.weights[index]
        return self._draft.buffer("output", self._draft.weight(index), w.block_numel, w.shard_dtype, "compute", index)

    def _all_reduce(self, group: _Group) -> None:
        """Launches the all-reduce of each bundle that has replicas, after the rest of the previous one's."""
        self._collect()
        for bundle in group.bundles:
            if bundle.first.num_replicas == 1:
                continue
            communicator = Communicator("all_reduce", bundle.first.reduce_axes)
            target = bundle.buffer
            if self._ordered and bundle.first.num_replicas > 2:
                dtype = bundle.first.reduce_dtype
                target = self._draft.buffer("staging", f"all {bundle.label}", target.numel, dtype, "all_reduce")
                self._exchanged.append((bundle, target))
            collective = "all_reduce" if target == bundle.buffer else "all_to_all"
            self._draft.launch(f"all_reduce {bundle.label}", collective, communicator, [bundle.buffer], [target])
            self._reduced.append(bundle)

    def _collect(self) -> None:
        """Sums what the last all-reduce has exchanged, and collects the sums of all replicas."""
        self._free_parts()
        for bundle, staged in self._exchanged:
            first, label = bundle.first, bundle.label
            part = self._draft.buffer(
                "part", label, staged.numel // first.num_replicas, first.reduce_dtype, "all_reduce"
            )
            parts = first.num_replicas
            self._draft.local(f"sum all {label}", "sum_parts", "all_reduce", [staged], [part], parts=parts)
            self._draft.free(staged)
            communicator = Communicator("all_reduce", first.reduce_axes)
            self._draft.launch(f"collect {label}", "all_gather", communicator, [part], [bundle.buffer])
            self._parts.append(part)
        self._exchanged = []

    def _free_parts(self) -> None:
        for part in self._parts:
            self._draft.free(part)
        self._parts = []


def _layout(sizes: list[int], first: Weight) -> tuple[list[int], int]:
    """Returns where each slice of a reduce buffer begins, aligned, and how many elements the buffer has."""
    align = ALIGN_BYTES // itemsize(first.reduce_dtype)
    starts: list[int] = []
    end = 0
    for size in sizes:
        starts.append(_round_up(end, align))
        end = starts[-1] + size
    return starts, _round_up(end, math.lcm(align, first.num_replicas)) if first.num_replicas > 1 else end


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _gaps(slices: list[Region], buffer: Region) -> Iterator[Region]:
    """Yields the parts of a buffer that no slice covers."""
    end = 0
    for region in [*slices, Region(buffer.buffer, buffer.stop, buffer.stop)]:
        if region.start > end:
            yield Region(buffer.buffer, end, region.start)
        end = region.stop
