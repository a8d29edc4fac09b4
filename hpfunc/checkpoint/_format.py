"""The safetensors format: eight bytes with the length of a header, the header in JSON, then the bytes of all tensors.

The `safetensors` library is not used, because it returns tensors of one framework; numpy, which all frameworks share,
has no bfloat16. A file is data only; nothing in it is ever run. Other tools can read the files that are written here.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._errors import CheckpointError, message

Shape = tuple[int, ...]
Buffer = Any  # a flat numpy array of bytes; `import hpfunc` loads no numpy

# Bytes under one checksum. A block is always read as a whole, even for one byte.
BLOCK_BYTES = 1 << 20

CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
}
DTYPES = {code: dtype for dtype, code in CODES.items()}
ITEM_BYTES = {
    dtype: 8 if dtype == "complex64" else max(1, int("".join(c for c in code.split("_")[0] if c.isdigit()) or 8) // 8)
    for dtype, code in CODES.items()
}


def num_bytes(shape: Sequence[int], dtype: str) -> int:
    """Returns the bytes of a tensor.

    >>> num_bytes((2, 3), "bfloat16"), num_bytes((), "bool"), num_bytes((0, 3), "float8_e5m2")
    (12, 1, 0)
    """
    return math.prod(shape) * ITEM_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to write.

    Attributes:
        name: its name in the file.
        data: its elements in row-major order.
    """

    name: str
    dtype: str
    shape: Shape
    data: Buffer


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file.

    Attributes:
        offset: of its first byte in the file.
        blocks: a checksum for each `BLOCK_BYTES` of its bytes; None if there are no checksums.
    """

    file: str
    dtype: str
    shape: Shape
    offset: int
    blocks: tuple[str, ...] | None = None


def checksum(data: Any) -> str:
    """Returns 64 bits that depend on all bytes.

    >>> checksum(b"abc")
    'd8bb14d833d59559'
    """
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def header(tensors: Iterable[tuple[str, str, Shape]], metadata: dict[str, str] | None = None) -> bytes:
    """Returns the first bytes of a file of tensors (name, dtype, shape), padded so that the data is aligned.

    >>> header([("w", "float32", (2,))])[8:]
    b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}  '
    """
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    start = 0
    for name, dtype, shape in tensors:
        stop = start + num_bytes(shape, dtype)
        entries[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True, slots=True)
class Written:
    """The contents of a file.

    Attributes:
        tensors: by name.
        heads: size of the file, length of its header, and checksum of its header.
    """

    tensors: dict[str, Stored]
    heads: dict[str, tuple[int, int, str]]


def write_file(path: Path, tensors: Sequence[Tensor]) -> Written:
    """Writes a file. It is on the disk (fsync) when this returns.

    Raises:
        OSError: it cannot be written.
    """
    # Wide elements first: then each tensor is aligned to its own element, as readers expect.
    tensors = sorted(tensors, key=lambda tensor: -ITEM_BYTES[tensor.dtype])
    head = header((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)
    stored, offset = {}, len(head)
    with path.open("wb", buffering=0) as file:
        _write(file, head)
        for tensor in tensors:
            data, sums = memoryview(tensor.data), []
            for start in range(0, len(data), BLOCK_BYTES):
                block = data[start : start + BLOCK_BYTES]
                _write(file, block)
                sums.append(checksum(block))
            stored[tensor.name] = Stored(path.name, tensor.dtype, tensor.shape, offset, tuple(sums))
            offset += len(data)
        os.fsync(file.fileno())
    return Written(stored, {path.name: (offset, len(head), checksum(head))})


def _write(file: Any, data: Any) -> None:
    # One call may write fewer bytes than it was given, such as the last that fit on a disk. The next call then raises.
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def write_text(path: Path, text: str) -> None:
    """Writes a text file. It is on the disk (fsync) when this returns."""
    with path.open("wb", buffering=0) as file:
        _write(file, text.encode())
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_header(function: str, path: Path) -> dict[str, Stored]:
    """Returns the contents of a safetensors file of any tool.

    Raises:
        CheckpointError: it is not a complete safetensors file, or has an unknown dtype.
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= size - 8:
            raise _broken(function, path, "it does not begin with a header")
        text = file.read(length)
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        found = {name: _stored(path, 8 + length, entry) for name, entry in entries.items()}
        end = max([entry["data_offsets"][1] for entry in entries.values()], default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise _broken(function, path, f"its header cannot be read: {type(error).__name__} {error}") from None
    if size != 8 + length + end:
        raise _broken(function, path, f"it has {size} bytes, its header tells of {8 + length + end}")
    return found


def _stored(path: Path, start: int, entry: dict[str, Any]) -> Stored:
    dtype, shape = DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))
    first, last = entry["data_offsets"]
    if first < 0 or last - first != num_bytes(shape, dtype):
        raise ValueError(f"offsets {first}, {last} do not fit {dtype}{list(shape)}")
    return Stored(path.name, dtype, shape, start + first)


def _broken(function: str, path: Path, what: str) -> CheckpointError:
    return CheckpointError(message(function, "a file is not a whole safetensors file", [f"{path}: {what}"]))
