"""A schedule in which no message is sent from where it lies, and none is received where it belongs.

The planner of hpfunc is zero-copy: a shard is sent from itself, a gather lands in the whole weight, a whole gradient is
sent from itself, and its reduced shard is written straight into the buffer of the fused all-reduce. What that saves can
only be seen beside a schedule without it. `staged` makes one: each of these four goes through a buffer of its own. It
is written in the language of schedules, so that `hpfunc.check` proves it right and the executor runs it.

What has a buffer of its own anyway stays as it is: packed messages, and those that are cast or padded. All-reduces too:
they work in place, in the one buffer that is theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hpfunc import Schedule
from hpfunc.planning.builder import derive_waits
from hpfunc.planning.ops import Buffer, BufferKind, Free, Launch, Local, Op, Region, Slot, Stream


def staged(schedule: Schedule) -> Schedule:
    """Returns a schedule of the same program that copies every message on its way out and on its way in."""
    rewriting = _Rewriting(schedule)
    slots = [replace(slot, ops=tuple(rewriting.slot(slot))) for slot in schedule.slots]
    return replace(schedule, buffers=tuple(rewriting.buffers), slots=derive_waits(slots, rewriting.buffers))


@dataclass(frozen=True, slots=True)
class _Arrival:
    """What is to be done before anybody touches what a collective has received.

    Attributes:
        target: where it belongs.
        landed: where it has landed, if that is elsewhere.
        sent: the buffer out of which it was sent, if that was made here.
    """

    target: Region
    landed: Region | None
    sent: Region | None


class _Rewriting:
    """The buffers so far, and what is under way."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.buffers = list(schedule.buffers)
        self._arrivals: list[_Arrival] = []

    def slot(self, slot: Slot) -> Iterator[Op]:
        for op in slot.ops:
            yield from self._arrived(op)
            match op:
                case Launch() if op.communicator.purpose != "all_reduce":
                    yield from self._launch(op)
                case Local(kind="sum_parts"):
                    yield from self._sum(op)
                case Free():
                    yield replace(op, stream=self.buffers[op.buffer].stream)
                case _:
                    yield op

    def _belongs(self, region: Region) -> bool:
        """Returns whether what a message brings stays there."""
        return self.buffers[region.buffer].kind in ("whole", "reduce", "carry")

    def _buffer(self, kind: BufferKind, target: Region, numel: int, stream: Stream) -> Region:
        """Returns the whole of a new buffer, named after where its content belongs in the end."""
        dtype = self.buffers[target.buffer].dtype
        self.buffers.append(Buffer(f"{kind} for {self._schedule.name(target)}", kind, numel, dtype, stream))
        return Region(len(self.buffers) - 1, 0, numel)

    def _free(self, region: Region) -> Free:
        buffer = self.buffers[region.buffer]
        return Free(f"free {buffer.name}", region.buffer, buffer.stream)

    def _launch(self, op: Launch) -> Iterator[Op]:
        reads, writes = list(op.reads), list(op.writes)
        for i, (read, write) in enumerate(zip(op.reads, op.writes, strict=True)):
            if not read.numel:
                continue  # an empty message has nowhere to be
            sent = landed = None
            source = self.buffers[read.buffer]
            if source.kind in ("shard", "gradient", "total"):
                reads[i] = sent = self._buffer("send", write, read.numel, op.stream)
                kind = "pack_shards" if source.kind == "shard" else "pack_gradients"
                assert source.weight is not None, source
                name = f"fill {self.buffers[sent.buffer].name}"
                yield Local(name, kind, op.stream, (read,), (sent,), weights=(source.weight,))
            if self._belongs(write):
                writes[i] = landed = self._land(op, write)
            if sent or landed:
                self._arrivals.append(_Arrival(write, landed, sent))
        yield replace(op, reads=tuple(reads), writes=tuple(writes))

    def _land(self, op: Launch, target: Region) -> Region:
        buffer = self.buffers[target.buffer]
        if buffer.kind == "whole":  # as unpacked weights: copied on the stream of compute, where nothing waits for it
            self.buffers[target.buffer] = replace(buffer, stream="compute")
            return self._buffer("gathered", target, target.numel, op.stream)
        return self._buffer("part", target, target.numel, op.stream)

    def _arrived(self, op: Op) -> Iterator[Op]:
        """Copies what an op touches to where it belongs, and frees what was needed to send and receive it."""
        touched = (*op.reads, *op.writes)
        for arrival in [a for a in self._arrivals if any(map(a.target.overlaps, touched))]:
            self._arrivals.remove(arrival)
            if arrival.landed is not None:
                stream = self.buffers[arrival.target.buffer].stream
                yield self._copy(arrival.landed, arrival.target, stream)
                yield self._free(arrival.landed)
            if arrival.sent is not None:
                yield self._free(arrival.sent)

    def _sum(self, op: Local) -> Iterator[Op]:
        """Forms sums in buffers of their own, if they would be formed where they belong."""
        targets = [region for region in op.writes if region.numel and self._belongs(region)]
        parts = {target: self._buffer("part", target, target.numel, op.stream) for target in targets}
        yield replace(op, writes=tuple(parts.get(region, region) for region in op.writes))
        for target, part in parts.items():
            yield self._copy(part, target, op.stream)
            yield self._free(part)

    def _copy(self, source: Region, target: Region, stream: Stream) -> Local:
        return Local(f"copy into {self._schedule.name(target)}", "copy", stream, (source,), (target,))
