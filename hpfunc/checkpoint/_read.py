"""Reads boxes of tensors in files: only the blocks that hold them, each of which is compared with its checksum."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._errors import CheckpointError, message
from ._format import BLOCK_BYTES, ITEM_BYTES, Buffer, Shape, Stored, checksum, num_bytes

Box = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a global array, and where it is stored.

    Attributes:
        start: the place of its first element in the array.
    """

    start: Shape
    stored: Stored

    def overlap(self, box: Box) -> tuple[Box, Box] | None:
        """Returns the elements that a box of the array takes from this part: slices of the part, and slices of the box.

        >>> part = Part((4,), Stored("f", "float32", (4,), 0))
        >>> part.overlap((slice(6, 10),)), part.overlap((slice(0, 4),))
        (((slice(2, 4, None),), (slice(0, 2, None),)), None)
        """
        here, there = [], []
        for start, size, wanted in zip(self.start, self.stored.shape, box, strict=True):
            low, high = max(start, wanted.start), min(start + size, wanted.stop)
            if low >= high:
                return None
            here.append(slice(low - start, high - start))
            there.append(slice(low - wanted.start, high - wanted.start))
        return tuple(here), tuple(there)


def blocks_of(shape: Shape, box: Box, item_bytes: int, block_bytes: int = BLOCK_BYTES) -> list[int]:
    """Returns the blocks of a row-major tensor that hold a box, in order.

    >>> blocks_of((4, 8), (slice(1, 3), slice(0, 8)), 1, 8), blocks_of((4, 8), (slice(0, 4, 1), slice(0, 2)), 1, 4)
    ([1, 2], [0, 2, 4, 6])
    """
    found: dict[int, None] = {}
    for first, last in _runs(shape, box, item_bytes):
        found.update(dict.fromkeys(range(first // block_bytes, (last - 1) // block_bytes + 1)))
    return list(found)


def _runs(shape: Shape, box: Box, item_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields the ranges of bytes of a box, which is not empty."""
    strides, size = [], item_bytes
    for n in reversed(shape):
        strides.insert(0, size)
        size *= n
    inner = len(shape)  # from this dim on the box is as wide as the tensor
    while inner and box[inner - 1] == slice(0, shape[inner - 1]):
        inner -= 1
    outer = max(0, inner - 1)
    length = size if not inner else (box[outer].stop - box[outer].start) * strides[outer]
    first = box[outer].start * strides[outer] if inner else 0
    for place in itertools.product(*(range(part.start, part.stop) for part in box[:outer])):
        start = first + sum(index * stride for index, stride in zip(place, strides, strict=False))
        yield start, start + length


class Reader(ExitStack):
    """Files of one folder, opened when they are first needed; a context manager that closes them.

    Attributes:
        heads: of files, the size and the checksum of the header, which are compared at the first read.
        bytes_read: number of bytes read so far.
    """

    def __init__(self, function: str, folder: Path, heads: dict[str, tuple[int, int, str]] | None = None) -> None:
        super().__init__()
        self.function, self.folder = function, folder
        self.heads = heads or {}
        self.bytes_read = 0
        self._files: dict[str, int] = {}

    def read(self, key: str, parts: Sequence[Part], box: Box, dtype: str) -> Buffer:
        """Returns the bytes of a box of the array `key`.

        Raises:
            CheckpointError: a byte differs from what was written, or parts are missing.
            OSError: a file cannot be read.
        """
        import numpy as np

        shape, item = tuple(part.stop - part.start for part in box), ITEM_BYTES[dtype]
        target = np.empty((*shape, item), np.uint8)
        found = 0
        for part in parts if target.size else ():
            overlap = part.overlap(box)
            if overlap is not None:
                here, there = overlap
                target[there] = self._bytes(key, part.stored, here).reshape(*part.stored.shape, item)[here]
                found += math.prod(place.stop - place.start for place in here) * item
        if found != target.size:
            raise self._damaged(f"{key}: {found} of {target.size} bytes are in no file")
        return target.reshape(-1)

    def _bytes(self, key: str, stored: Stored, box: Box) -> Any:
        """Returns a buffer for the whole part. Only the blocks of the box are read, and only these take memory."""
        import numpy as np

        item = ITEM_BYTES[stored.dtype]
        buffer: Any = np.empty(num_bytes(stored.shape, stored.dtype), np.uint8)
        file = self._open(stored.file)
        for block in blocks_of(stored.shape, box, item):
            view = memoryview(buffer)[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
            where = f"{key}: bytes from {stored.offset + block * BLOCK_BYTES} of {self.folder / stored.file}"
            if _fill(file, view, stored.offset + block * BLOCK_BYTES) < len(view):
                raise self._damaged(f"{where} are missing: the file is cut")
            self.bytes_read += len(view)
            if stored.blocks is not None and checksum(view) != stored.blocks[block]:
                raise self._damaged(f"{where} to {stored.offset + block * BLOCK_BYTES + len(view)}: wrong checksum")
        return buffer

    def _open(self, name: str) -> int:
        if name not in self._files:
            file = self._files[name] = os.open(self.folder / name, os.O_RDONLY)
            self.callback(os.close, file)
            if name in self.heads:
                size, length, expected = self.heads[name]
                if os.fstat(file).st_size != size:
                    raise self._damaged(f"{self.folder / name}: {os.fstat(file).st_size} bytes, not {size}")
                head = bytearray(length)
                if _fill(file, memoryview(head), 0) < length or checksum(head) != expected:
                    raise self._damaged(f"{self.folder / name}: wrong checksum of the header")
        return self._files[name]

    def _damaged(self, what: str) -> CheckpointError:
        hint = "take an earlier step; the other files of this one may be whole"
        return CheckpointError(message(self.function, "a file differs from what was written", [what], hint=hint))


def _fill(file: int, view: memoryview, offset: int) -> int:
    """Reads until `view` is full or the file ends. Returns how many bytes that were."""
    done = 0
    while done < len(view):
        got = os.preadv(file, [view[done:]], offset + done)
        if not got:
            break
        done += got
    return done
