"""`Reductions`: reduce-scatter, all-reduce, scale and deliver gradients, overlapped with the backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from .accumulation import Carried, carries_shards
from .builder import Draft
from .ops import Communicator, Region
from .program import Program, Weight
from .reduce_buffers import Bundle, Key, Member, Share, buckets_of, key_of, lay_out, shares

# Note [The four steps of a backward]
# k counts units down. After its backward, the gradients of unit k are ready. Then, in this order:
#   step 1  launch the reduce-scatter of k, into its slices of the reduce buffer;
#   step 2  await the reduce-scatter of k+1: form its sums, and free the whole gradients that it has sent;
#   step 3  deliver the gradients of k+1, if no axis is left to reduce;
#   step 4  launch the all-reduce of k+1 on its whole reduce buffer, in place.
# So while unit k-1 computes, k is reduce-scattered and k+1 all-reduced. At most two units have whole gradients at any
# time. Step 1 precedes step 2 for hosts that wait themselves (gloo): the network has work during the wait, at the cost
# of one more staging buffer. On a device their order does not matter.
# The steps of the last unit, and the wait for all all-reduces, are at the end of the backward. Units that share a
# reduce buffer (`Policy.reduce_bucket_bytes`) take step 4 together, after the last of them.
#
# A backward that carries shards (Note [Carried gradients]) has no steps 2 and 4. Its last reduce-scatter is awaited in
# the next backward, so that it overlaps with a forward.
#
# If sums must be formed in rank order (`Traits.ordered_sums`), an all-reduce over three or more replicas is an
# exchange, a sum and a gather. The sum and the gather follow one unit later, so that the host never waits for a
# collective that it has just launched.


def finals(program: Program) -> list[tuple[int, ...]]:
    """Returns for each event the weights whose whole gradient is complete after it, and is to be scattered.

    This is the event of their last use. For weights of earlier backwards that carry wholes, which the last backward
    does not use, it is the end of the last backward.
    """
    result: list[dict[int, None]] = [{} for _ in program.events]
    last: dict[int, int] = {}
    begin = 0  # first event of the present backward
    for index, event in enumerate(program.events):
        weights = program.unit_of(event).weights if event.kind == "backward" else ()
        last |= {w: index for w in weights if program.weights[w].trainable}
        if event.kind != "end_backward":
            continue
        if event.carry != "wholes":
            for weight, use in last.items():
                result[use if use >= begin else index][weight] = None
            last = {}
        begin = index
    return [_in_order(program, index, weights) for index, weights in enumerate(result)]


def _in_order(program: Program, event: int, weights: Collection[int]) -> tuple[int, ...]:
    unit = program.events[event].unit
    order = sorted(weights) if unit is None else dict.fromkeys(program.units[unit].weights)
    return tuple(w for w in order if w in weights)


@dataclass(frozen=True, slots=True)
class _Message:
    """One reduce-scatter to be launched, of whole gradients in `sent`. `target` receives the reduced blocks."""

    of: str
    first: Weight
    sent: Region
    target: Region


@dataclass(slots=True)
class _Group:
    """The reduce-scatters of one event, and the work that remains once they have arrived.

    Attributes:
        members: the parts of reduce buffers that the event fills.
        complete: the reduce buffers whose last slice the event fills.
        carries: whether the shards are carried to the next backward.
        sums: calls that issue the sums of exchanged blocks.
        spent: what is to be freed then.
    """

    label: str
    carries: bool
    members: list[tuple[Bundle, Member]] = field(default_factory=list)
    complete: list[Bundle] = field(default_factory=list)
    sums: list[Callable[[], None]] = field(default_factory=list)
    spent: list[Region] = field(default_factory=list)


class Reductions:
    """Reduces gradients in the order of the backward. See Note [The four steps of a backward]."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._program = draft.program
        self._finals = finals(draft.program)
        self._carries = carries_shards(draft.program)
        self._shares = shares(draft.program, self._finals, self._carries, draft.policy)
        self._open: dict[Share, Bundle] = {}
        self._gradients: dict[int, Region] = {}
        self._carried = Carried(draft)
        self._pending: _Group | None = None
        self._to_carry: set[int] = set()  # weights that were scattered last, and will be carried
        self._exchanged: list[tuple[Bundle, Region]] = []
        self._parts: list[Region] = []
        self._reduced: list[Bundle] = []

    def gradients(self, event: int) -> list[Region]:
        """Returns new buffers for the whole gradients that a backward writes, in the order of its weights."""
        weights = self._program.weights
        members = self._program.unit_of(self._program.events[event]).weights
        return [self._whole("gradient", w, weights[w].dtype) for w in members if weights[w].trainable]

    def after(self, event: int, gradients: list[Region]) -> None:
        """Adds the gradients of a backward to those of earlier ones, and reduces those that are complete."""
        unit = self._program.events[event].unit
        assert unit is not None, event
        weights = [w for w in self._program.units[unit].weights if self._program.weights[w].trainable]
        for weight, gradient in zip(weights, gradients, strict=True):
            self._accumulate(weight, gradient)
        if self._finals[event]:
            self._advance(event, self._draft.units[unit])

    def _advance(self, event: int, label: str) -> None:
        """Runs the four steps."""
        previous, self._pending = self._pending, _Group(label, self._carries[event])
        carrying = previous.members if previous and previous.carries else []
        self._to_carry = {w for _, member in carrying for w in member.slices}
        self._scatter(self._pending, event)
        self._carried.free_spent()
        if previous:
            self._await(previous)
            self._deliver([bundle for bundle in previous.complete if bundle.first.num_replicas == 1])
            self._all_reduce(previous.complete)

    def end(self, event: int) -> None:
        """Finishes and delivers everything at the end of a backward, unless it carries its gradients."""
        if self._finals[event]:
            self._advance(event, "the rest")
        if self._program.events[event].carry:
            return
        complete: list[Bundle] = []
        if last := self._pending:
            self._await(last)
            complete += last.complete
        complete += self._carried.rest()
        self._all_reduce(complete)
        self._collect()
        self._free_parts()
        self._carried.free_spent()
        self._deliver(self._reduced + [bundle for bundle in complete if bundle.first.num_replicas == 1])
        self._pending, self._reduced = None, []
        assert not self._gradients, "a gradient was never complete"

    def _whole(self, kind: Literal["gradient", "total"], weight: int, dtype: str) -> Region:
        w = self._program.weights[weight]
        return self._draft.buffer(kind, self._draft.weights[weight], w.whole_numel, dtype, "compute", weight)

    def _accumulate(self, weight: int, gradient: Region) -> None:
        """Adds a whole gradient to those before it. In place from the third on, because the first is borrowed."""
        if weight in self._gradients:
            earlier = total = self._gradients[weight]
            if self._draft.buffers[earlier.buffer].kind == "gradient":
                total = self._whole("total", weight, self._program.weights[weight].accum_dtype)
            name = f"accumulate {self._draft.weights[weight]}"
            self._draft.local(name, "accumulate", "compute", [earlier, gradient], [total], weights=(weight,))
            if total != earlier:
                self._draft.free(earlier)
            self._draft.free(gradient)
            gradient = total
        self._gradients[weight] = gradient

    # ----------------------------------------------------------------------------------------- step 1: reduce-scatter

    def _scatter(self, group: _Group, event: int) -> None:
        """Launches the reduce-scatter of an event: one launch per communicator, for all bundles."""
        keys: defaultdict[Key, list[int]] = defaultdict(list)
        taken = [index for index in self._finals[event] if self._is_alone(group, index)]
        for index in self._finals[event]:
            if index not in taken:
                keys[key_of(self._program.weights[index])].append(index)
        self._take(group, taken)
        launches: defaultdict[tuple[str, ...], list[_Message]] = defaultdict(list)
        for key, weights in keys.items():
            for message in self._fill(group, event, key, weights):
                launches[message.first.gather_axes].append(message)
        for launch in launches.values():
            self._launch_scatter(group, launch)

    def _is_alone(self, group: _Group, index: int) -> bool:
        """Returns whether a whole gradient can be delivered without reduction, cast, or sum with carried shards."""
        weight = self._program.weights[index]
        if weight.num_shards > 1 or weight.num_replicas > 1 or group.carries or weight.divides_first:
            return False
        if index in self._carried or index in self._to_carry:
            return False
        return self._draft.buffers[self._gradients[index].buffer].dtype == weight.reduce_dtype

    def _take(self, group: _Group, weights: list[int]) -> None:
        """Takes whole gradients that need no reduction: totals themselves, and divided copies of borrowed ones."""
        lent: defaultdict[int, list[tuple[int, Region, Region]]] = defaultdict(list)
        for index in weights:
            weight, region, name = self._program.weights[index], self._gradients.pop(index), self._draft.weights[index]
            borrowed = self._draft.buffers[region.buffer].kind == "gradient"
            if borrowed:
                own = self._draft.buffer("reduce", name, weight.block_numel, weight.reduce_dtype, "compute", index)
                lent[weight.divisor].append((index, region, own))
                region = own
            member = Member({index: region}, [region])
            bundle = Bundle(name, weight, region, [member], is_scaled=borrowed)
            group.members.append((bundle, member))
            group.complete.append(bundle)
        for divisor, rows in lent.items():
            indices, sources, targets = zip(*rows, strict=True)
            name = f"own {group.label if len(rows) > 1 else self._draft.weights[indices[0]]}"
            self._draft.local(name, "own", "compute", sources, targets, weights=indices, divisor=divisor)
            for region in sources:
                self._draft.free(region)

    def _fill(self, group: _Group, event: int, key: Key, weights: list[int]) -> Iterator[_Message]:
        """Copies local parts into the reduce buffer. Yields the messages whose collectives write the rest of it."""
        alone = Share((event,), (buckets_of(self._program, weights, self._draft.policy),))
        share = self._shares.get((event, key), alone)
        if share.events[0] == event:
            units = [self._program.events[part].unit for part in share.events]
            labels = [group.label if unit is None else self._draft.units[unit] for unit in units]
            self._open[share] = lay_out(self._draft, labels, share)
        bundle, part = self._open[share], share.events.index(event)
        if share.events[-1] == event:
            group.complete.append(self._open.pop(share))
        member = bundle.members[part]
        group.members.append((bundle, member))
        for bucket, region in zip(share.buckets[part], member.regions, strict=True):
            if message := self._message(group, bucket, region):
                yield message

    def _message(self, group: _Group, bucket: tuple[int, ...], target: Region) -> _Message | None:
        """Copies or packs gradients if that is needed. Returns the message to send, or None."""
        first = self._program.weights[bucket[0]]
        gradients = [self._gradients.pop(w) for w in bucket]
        group.spent += gradients
        of = self._draft.weights[bucket[0]] if len(bucket) == 1 else group.label
        divides = first.divides_first
        if first.num_shards == 1 and not divides:
            self._draft.local(f"copy {of}", "copy", self._draft.reduced, gradients, [target])
            return None
        fits = first.even and first.direct and self._draft.buffers[gradients[0].buffer].dtype == first.reduce_dtype
        if len(bucket) == 1 and fits and not divides:
            return _Message(of, first, gradients[0], target)
        sent = target
        if first.num_shards > 1:
            numel = target.numel * first.num_shards
            sent = self._draft.buffer("send", of, numel, first.reduce_dtype, "reduce_scatter")
            group.spent.append(sent)
        name, divisor = f"pack gradient {of}", first.divisor if divides else 1
        stream = "reduce_scatter" if first.num_shards > 1 else self._draft.reduced
        self._draft.local(name, "pack_gradients", stream, gradients, [sent], weights=bucket, divisor=divisor)
        return _Message(of, first, sent, target) if first.num_shards > 1 else None

    def _launch_scatter(self, group: _Group, launch: list[_Message]) -> None:
        name, first = f"reduce_scatter {group.label}", launch[0].first
        communicator = Communicator("reduce_scatter", first.gather_axes)
        sources, targets = [message.sent for message in launch], [message.target for message in launch]
        if not self._draft.ordered_sums:
            self._draft.launch(name, "reduce_scatter", communicator, sources, targets)
            return
        staged = [
            self._draft.buffer("staging", m.of, m.sent.numel, m.first.reduce_dtype, "reduce_scatter") for m in launch
        ]
        self._draft.launch(name, "all_to_all", communicator, sources, staged)
        name, stream = f"sum {group.label}", self._draft.reduced
        issue_sum = partial(self._draft.local, name, "sum_parts", stream, staged, targets, parts=first.num_shards)
        group.sums.append(issue_sum)
        group.spent += staged

    # ------------------------------------------------------------------------------------ steps 2 to 4, and the end

    def _await(self, group: _Group) -> None:
        for issue_sum in group.sums:
            issue_sum()
        for region in group.spent:
            self._draft.free(region)
        if group.carries:
            self._carried.add(group.complete)
            group.complete = []
        else:
            self._carried.finish(group.label, group.members)

    def _deliver(self, bundles: Iterable[Bundle]) -> None:
        """Scales the sums, casts them to the accumulation dtype, and delivers them in order."""
        delivered: dict[int, Region] = {}
        for bundle in bundles:
            if bundle.first.divisor > 1 and not bundle.is_scaled and not bundle.first.divides_first:
                regions, divisor = bundle.filled, bundle.first.divisor
                self._draft.local(f"scale {bundle.label}", "scale", "compute", regions, regions, divisor=divisor)
            casts = {w: self._output(w) for w in bundle.slices if self._casts(bundle, w)}
            if casts:
                sources = [bundle.slices[w] for w in casts]
                self._draft.local(f"cast {bundle.label}", "copy", "compute", sources, list(casts.values()))
            if all(w in casts or region.buffer != bundle.buffer.buffer for w, region in bundle.slices.items()):
                self._draft.free(bundle.buffer)
            delivered |= bundle.slices | casts
        for weight in sorted(delivered):
            self._draft.deliver(weight, delivered[weight])

    def _casts(self, bundle: Bundle, index: int) -> bool:
        return self._draft.buffers[bundle.slices[index].buffer].dtype != self._program.weights[index].accum_dtype

    def _output(self, index: int) -> Region:
        w = self._program.weights[index]
        return self._draft.buffer("output", self._draft.weights[index], w.block_numel, w.accum_dtype, "compute", index)

    def _all_reduce(self, bundles: list[Bundle]) -> None:
        """Launches the all-reduce of each bundle that has replicas, after all ops of the previous bundle."""
        self._collect()
        for bundle in bundles:
            if bundle.first.num_replicas == 1:
                continue
            communicator = Communicator("all_reduce", bundle.first.reduce_axes)
            target = bundle.buffer
            if self._draft.ordered_sums and bundle.first.num_replicas > 2:
                dtype = bundle.first.reduce_dtype
                target = self._draft.buffer("staging", f"all {bundle.label}", target.numel, dtype, "all_reduce")
                self._exchanged.append((bundle, target))
            collective = "all_reduce" if target == bundle.buffer else "all_to_all"
            self._draft.launch(f"all_reduce {bundle.label}", collective, communicator, [bundle.buffer], [target])
            self._reduced.append(bundle)

    def _collect(self) -> None:
        """Sums the parts that the last all-reduce has exchanged, and gathers the sums of all replicas."""
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
