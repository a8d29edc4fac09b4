"""The ops of a schedule: all kinds of ops, and the buffers and regions that they use.

Every op has a `name`, a `stream` on which it runs, and the names of the ops that it `waits` for. It declares the
regions that it `reads` and `writes`, so that code that orders ops need not know their kinds.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import ClassVar, Literal, NamedTuple, TypeAlias

Stream = Literal["compute", "gather", "reduce_scatter", "all_reduce"]
Purpose = Literal["gather", "reduce_scatter", "all_reduce"]
Collective = Literal["all_gather", "reduce_scatter", "all_to_all", "all_reduce"]
LocalKind = Literal[
    "pack_shards", "unpack_wholes", "accumulate", "pack_gradients", "zero", "sum_parts", "own", "copy", "scale"
]
BufferKind = Literal[
    "shard", "send", "gathered", "whole", "gradient", "total", "staging", "reduce", "carry", "part", "output"
]

ALIGN_BYTES = 512


@cache
def itemsize(dtype: str) -> int:
    """Returns the bytes of one element; the first number in a dtype's name is its bits.

    >>> itemsize("bfloat16"), itemsize("float8_e4m3fn"), itemsize("complex64"), itemsize("bool")
    (2, 1, 8, 1)
    """
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory with a lifetime. It begins with the first op that writes it and ends with its `Free` or `Deliver`.

    The caller owns and writes a ``shard`` (`Caller`); all other ops only read it. A ``gradient`` is borrowed from
    autograd: the backward's `Compute` writes it. It may have any strides or share its memory, so no other op may write
    or deliver it. The runtime owns all other buffers. A ``total`` is the sum of the whole gradients of several uses.

    Attributes:
        stream: the stream whose memory the buffer is taken from and returned to. Its `Free` is on this stream. See Note
            [Whose memory].
        weight: the weight that the buffer belongs to, if it belongs to only one.
    """

    name: str
    kind: BufferKind
    numel: int
    dtype: str
    stream: Stream
    weight: int | None = None

    @property
    def size_bytes(self) -> int:
        """Size of the buffer's elements in bytes."""
        return self.numel * itemsize(self.dtype)


class Region(NamedTuple):
    """Elements ``start`` to ``stop`` of a buffer (an index into `Schedule.buffers`)."""

    buffer: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements of the region."""
        return self.stop - self.start

    def overlaps(self, other: Region) -> bool:
        """Returns whether the two regions share an element."""
        return self.buffer == other.buffer and self.start < other.stop and other.start < self.stop

    def split(self, sizes: Iterable[int]) -> list[Region]:
        """Returns regions of these sizes, one after another, from the start of this one."""
        return [Region(self.buffer, *ends) for ends in pairwise(accumulate(sizes, initial=self.start))]


def entire(buffer: int) -> Region:
    """Returns a region that overlaps every region of a buffer, even an empty one."""
    return Region(buffer, -1, sys.maxsize)


@dataclass(frozen=True, slots=True)
class Communicator:
    """A group of ranks for one kind of collective. Two kinds on one communicator would queue behind each other."""

    purpose: Purpose
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.purpose}@{'*'.join(self.axes)}"


@dataclass(frozen=True, slots=True)
class Compute:
    """A use of a unit: the caller's code. It reads whole weights; a backward also writes whole gradients.

    In a ``backward``, `writes` has one region per trainable weight, in the order of the unit's weights, else none.
    `reads` has one region per weight of the unit: a ``whole`` buffer, or the ``shard`` if no axis cuts the weight.
    """

    name: str
    event: int
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()
    waits: tuple[str, ...] = ()
    stream: Stream = "compute"


@dataclass(frozen=True, slots=True)
class Caller:
    """All work of the caller on the compute stream up to here, which has written some shards.

    The first op of a step is one that writes the shards of the step's arguments. The last op is one that writes all
    shards again: from then on the caller may overwrite or drop them. Others precede the first use of arrays that the
    step itself makes, or are inserted for Note [Whose memory].
    """

    name: str
    writes: tuple[Region, ...] = ()
    waits: tuple[str, ...] = ()
    stream: Stream = "compute"
    reads: ClassVar[tuple[Region, ...]] = ()


@dataclass(frozen=True, slots=True)
class Exchange:
    """The sizes of a collective. A message has one part for, or from, each rank; all parts have equal sizes.

    Attributes:
        sends_parts: whether a rank sends a message of parts, else one part.
        receives_parts: whether a rank receives a message of parts, else one part.
        rounds: the least number of times that a rank must send all parts but its own.
        in_place: whether the receive buffer is the send buffer. Then parts need not have equal sizes.
    """

    sends_parts: bool
    receives_parts: bool
    rounds: int = 1
    in_place: bool = False

    def fits(self, read: Region, write: Region, num_ranks: int) -> bool:
        """Returns whether the sizes of the sent and the received region fit the collective."""
        if self.in_place:
            return read == write
        sent, received = (num_ranks if parts else 1 for parts in (self.sends_parts, self.receives_parts))
        return read.numel % sent == 0 and write.numel == read.numel // sent * received

    def sent_bytes(self, size_bytes: int, num_ranks: int) -> int:
        """Returns the least number of bytes that a rank must send for messages of `size_bytes`."""
        return size_bytes * (num_ranks - 1) * self.rounds // (num_ranks if self.sends_parts else 1)


COLLECTIVES: Mapping[Collective, Exchange] = {
    "all_gather": Exchange(sends_parts=False, receives_parts=True),
    "reduce_scatter": Exchange(sends_parts=True, receives_parts=False),  # the sum of the parts for this rank
    "all_to_all": Exchange(sends_parts=True, receives_parts=True),  # part r comes from rank r
    "all_reduce": Exchange(sends_parts=True, receives_parts=True, rounds=2, in_place=True),  # the sum
}


@dataclass(frozen=True, slots=True)
class Launch:
    """Collectives over one communicator, launched together. ``reads[i]`` is sent, and ``writes[i]`` is received.

    `COLLECTIVES` says what a rank sends and receives, and the sizes.
    """

    name: str
    collective: Collective
    communicator: Communicator
    stream: Stream
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    waits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Local:
    """Work of one rank on its own memory.

    pack_shards: packs the shards of `weights` (short ones padded with zeros), cast to their `dtype`, one after another
        into one message.
    unpack_wholes: unpacks a gathered message (ranks * blocks of `weights`) into one whole weight per write.
    accumulate: writes ``reads[2i] + reads[2i + 1]`` into ``writes[i]``. The earlier term comes first; both are first
        cast to the dtype of the write. In place if the write is one of the two. With `weights`, adds whole gradients.
    pack_gradients: cuts whole gradients of `weights` into blocks, divides them by `divisor`, casts them to the dtype of
        the message, and packs them into one message (ranks * blocks of `weights`).
    zero: fills every write with zeros.
    sum_parts: ``reads[i]`` holds `parts` equal parts; writes their sum, in that order, into ``writes[i]``.
    own: writes the whole gradients of `weights`, divided by `divisor`, into ``writes[i]``. The executor may skip the
        copy of a gradient that nobody else holds.
    copy: copies ``reads[i]`` into ``writes[i]``, and casts if their dtypes differ.
    scale: divides every write by `divisor` in place; `reads` equals `writes`.
    """

    name: str
    kind: LocalKind
    stream: Stream
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    waits: tuple[str, ...] = ()
    weights: tuple[int, ...] = ()
    parts: int = 1
    divisor: int = 1

    @property
    def fits(self) -> bool:
        """Whether its regions and numbers fit its kind. Their contents are not checked."""
        reads, writes, num_weights = self.reads, self.writes, len(self.weights)
        one_to_one = len(reads) == len(writes) > 0
        parts = self.parts if self.kind == "sum_parts" else 1
        sizes_fit = all(read.numel == write.numel * parts for read, write in zip(reads, writes, strict=False))
        match self.kind:
            case "scale":
                return one_to_one and reads == writes and self.divisor > 0
            case "copy":
                return one_to_one and sizes_fit
            case "sum_parts":
                return one_to_one and sizes_fit and self.parts > 0
            case "own":
                return one_to_one and sizes_fit and len(writes) == num_weights and self.divisor > 0
            case "zero":
                return len(writes) > 0 and not reads
            case "pack_shards" | "pack_gradients":
                return len(reads) == num_weights > 0 and len(writes) == 1 and self.divisor > 0
            case "unpack_wholes":
                return len(writes) == num_weights > 0 and len(reads) == 1
            case "accumulate":
                sums = list(zip(reads[::2], reads[1::2], writes, strict=False))
                fits = len(reads) == 2 * len(writes) == 2 * len(sums) > 0 and num_weights in (0, len(writes))
                fits = fits and all(a.numel == b.numel == total.numel for a, b, total in sums)
                return fits and all(num_weights > 0 or total in (a, b) for a, b, total in sums)


@dataclass(frozen=True, slots=True)
class Free:
    """Frees a buffer, which ends its life. Counts as a write of all of it."""

    name: str
    buffer: int
    stream: Stream
    waits: tuple[str, ...] = ()
    reads: ClassVar[tuple[Region, ...]] = ()

    @property
    def writes(self) -> tuple[Region, ...]:
        """The whole buffer: no other op may touch it any more."""
        return (entire(self.buffer),)


@dataclass(frozen=True, slots=True)
class Deliver:
    """Delivers the gradient of a weight to the caller, who owns the memory from then on. Counts as a write."""

    name: str
    weight: int
    region: Region
    waits: tuple[str, ...] = ()
    stream: Stream = "compute"
    reads: ClassVar[tuple[Region, ...]] = ()

    @property
    def writes(self) -> tuple[Region, ...]:
        """The gradient."""
        return (self.region,)


Op: TypeAlias = Compute | Caller | Launch | Local | Free | Deliver


@dataclass(frozen=True, slots=True)
class Slot:
    """The ops to issue before or after one event of the program.

    A compute event's `Compute` is the last op before it.
    """

    event: int
    when: Literal["before", "after"]
    ops: tuple[Op, ...]
