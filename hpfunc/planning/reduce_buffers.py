"""Reduce buffers: which gradients share a buffer, and their positions in it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .builder import Draft
from .messages import messages
from .ops import ALIGN_BYTES, Region, itemsize
from .policy import Policy
from .program import Program, Weight

Key = tuple[tuple[str, ...], str, int]


def key_of(weight: Weight) -> Key:
    """Returns the key of a gradient. Gradients with equal keys may share a reduce buffer."""
    return (weight.reduce_axes if weight.num_replicas > 1 else (), weight.reduce_dtype, weight.divisor)


@dataclass(slots=True)
class Bundle:
    """Gradients that share a reduce buffer, from their reduce-scatter to their delivery.

    Attributes:
        first: one of its weights, for the properties that all of them share.
        buffer: the region of the whole reduce buffer.
        members: its parts, each filled by one event.
        is_scaled: whether the gradients were divided when the buffer was filled.
    """

    label: str
    first: Weight
    buffer: Region
    members: list[Member] = field(default_factory=list)
    is_scaled: bool = False

    @property
    def slices(self) -> dict[int, Region]:
        """The region of the gradient of each weight."""
        return {weight: region for member in self.members for weight, region in member.slices.items()}

    @property
    def filled(self) -> tuple[Region, ...]:
        """The regions that are filled, as few as possible."""
        if self.first.num_replicas > 1:
            return (self.buffer,)  # the gaps are zero
        return tuple(merged(self.slices.values()))


@dataclass(slots=True)
class Member:
    """The part of a reduce buffer that one event fills.

    Attributes:
        slices: the region of the gradient of each weight.
        regions: the region that receives each message.
    """

    slices: dict[int, Region]
    regions: list[Region]


@dataclass(frozen=True, slots=True)
class Share:
    """The events that fill one reduce buffer, in order, and for each event the weights of its messages."""

    events: tuple[int, ...]
    buckets: tuple[tuple[tuple[int, ...], ...], ...]


def buckets_of(program: Program, weights: Sequence[int], policy: Policy) -> tuple[tuple[int, ...], ...]:
    """Returns the weights of each message. A weight that no axis cuts has one to itself."""
    cut = tuple(w for w in weights if program.weights[w].num_shards > 1)
    return (*messages(program, cut, policy), *((w,) for w in weights if w not in cut))


def shares(
    program: Program, finals: Sequence[Sequence[int]], carries: Sequence[bool], policy: Policy
) -> dict[tuple[int, Key], Share]:
    """Returns the `Share` of each (event, key), for the weights that have replicas.

    Args:
        program: the program.
        finals: the weights whose whole gradient is complete after each event.
        carries: for each event, whether its shards are carried to the next backward. Those never share a buffer.
        policy: `Policy.reduce_bucket_bytes` says when a buffer is full.
    """
    found: dict[tuple[int, Key], Share] = {}
    gathered: dict[Key, list[tuple[int, list[int]]]] = {}

    def close(key: Key) -> None:
        parts = gathered.pop(key)
        events = tuple(event for event, _ in parts)
        share = Share(events, tuple(buckets_of(program, weights, policy) for _, weights in parts))
        found.update({(event, key): share for event in events})

    for event, weights in enumerate(finals):
        keys: dict[Key, list[int]] = {}
        for index in weights:
            if program.weights[index].num_replicas > 1:
                keys.setdefault(key_of(program.weights[index]), []).append(index)
        for key, members in keys.items():
            gathered.setdefault(key, []).append((event, members))
            numel = sum(program.weights[w].block_numel for _, part in gathered[key] for w in part)
            if carries[event] or numel * itemsize(key[1]) >= policy.reduce_bucket_bytes:
                close(key)
        if program.events[event].kind == "end_backward" and not program.events[event].carry:
            for key in tuple(gathered):
                close(key)
    return found


def lay_out(draft: Draft, labels: Sequence[str], share: Share) -> Bundle:
    """Makes a reduce buffer with one aligned slice for each message. Zeroes the gaps if they are all-reduced."""
    program = draft.program
    first = program.weights[share.buckets[0][0][0]]
    sizes = [sum(program.weights[w].block_numel for w in bucket) for part in share.buckets for bucket in part]
    starts, numel = _layout(sizes, first)
    label = labels[0] if len(labels) == 1 else f"{labels[0]} to {labels[-1]}"
    buffer = draft.buffer("reduce", label, numel, first.reduce_dtype, "compute")  # it may be delivered
    slices = iter([Region(buffer.buffer, start, start + size) for start, size in zip(starts, sizes, strict=True)])
    bundle = Bundle(label, first, buffer)
    for part in share.buckets:
        member = Member({}, [next(slices) for _ in part])
        for bucket, region in zip(part, member.regions, strict=True):
            blocks = region.split([program.weights[w].block_numel for w in bucket])
            member.slices |= zip(bucket, blocks, strict=True)
        bundle.members.append(member)
    empty = _gaps([region for member in bundle.members for region in member.regions], buffer)
    if empty and first.num_replicas > 1:
        draft.local(f"zero {label}", "zero", draft.reduced, [], empty)
    return bundle


def _layout(sizes: list[int], first: Weight) -> tuple[list[int], int]:
    """Returns the aligned start of each slice of a reduce buffer, and the number of elements of the buffer."""
    align = ALIGN_BYTES // itemsize(first.reduce_dtype)
    starts: list[int] = []
    end = 0
    for size in sizes:
        starts.append(_round_up(end, align))
        end = starts[-1] + size
    return starts, _round_up(end, math.lcm(align, first.num_replicas)) if first.num_replicas > 1 else end


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _gaps(slices: Sequence[Region], buffer: Region) -> list[Region]:
    """Returns the parts of a buffer that no slice covers. Slices are in order."""
    ends = [buffer.start, *(region.stop for region in slices)]
    starts = [*(region.start for region in slices), buffer.stop]
    return [Region(buffer.buffer, *gap) for gap in zip(ends, starts, strict=True) if gap[0] < gap[1]]


def merged(regions: Iterable[Region]) -> list[Region]:
    """Returns the regions, with adjacent ones joined."""
    found: list[Region] = []
    for region in regions:
        if found and (found[-1].buffer, found[-1].stop) == (region.buffer, region.start):
            found[-1] = found[-1]._replace(stop=region.stop)
        else:
            found.append(region)
    return found
