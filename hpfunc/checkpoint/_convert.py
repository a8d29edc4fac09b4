"""Arrays in safetensors files, and what becomes of them: written into another file, or read box by box.

Of arrays that become others one group at a time is whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import backends
from .._errors import CheckpointError, message
from ._format import ITEM_BYTES, Buffer, Shape, header, num_bytes, read_header, sync_folder
from ._index import Array
from ._read import Box, Part, Reader

Tensor = Any  # of torch: only its libraries convert arrays
Kind = tuple[str, Shape]  # dtype and shape
Convert = Callable[[list[Tensor]], dict[str, Tensor]]
Make = Callable[[Reader], Tensor]


@dataclass(frozen=True, slots=True)
class Group:
    """Arrays that become others together.

    Attributes:
        sources: their names.
        targets: what they become, by name.
        convert: from the tensors of the sources, in order, to the targets; None if one array gets another name only.
    """

    sources: tuple[str, ...]
    targets: Mapping[str, Kind]
    convert: Convert | None = None


def stored_arrays(
    function: str, files: Sequence[Path], rename: Callable[[str], str | None] | None = None
) -> dict[str, Array]:
    """Returns the arrays in files, by name."""
    found: dict[str, Array] = {}
    for file in files:
        for name, stored in read_header(function, file).items():
            key = name if rename is None else rename(name)
            if key in found:
                hint = "parts of arrays, by torch.distributed.checkpoint, are read by its HuggingFaceStorageReader"
                fault = f"{key}: again in {file}"
                raise CheckpointError(message(function, "a name stands twice in the files", [fault], hint=hint))
            if key is not None:
                place = tuple(0 for _ in stored.shape)
                found[key] = Array(stored.shape, stored.dtype, (Part(place, stored),))
    return found


def check_names(function: str, kept: Sequence[tuple[str, str]]) -> None:
    """Raises CheckpointError if one name belongs to several arrays (key, name)."""
    by_name: dict[str, list[str]] = {}
    for key, name in kept:
        by_name.setdefault(name, []).append(key)
    bad = [f"{name}: of {', '.join(keys)}" for name, keys in by_name.items() if len(keys) > 1]
    if bad:
        raise CheckpointError(message(function, "rename gives one name to several arrays", bad))


@dataclass(frozen=True, slots=True)
class Found:
    """What files have for the leaves of a tree.

    Attributes:
        arrays: by the dotted path of a leaf, or by another name if no leaf takes it.
        optional: paths of leaves that may keep their values.
        make: what makes arrays that are not in the files as they are.
    """

    arrays: Mapping[str, Array]
    optional: Collection[str] = ()
    make: Mapping[str, Make] = field(default_factory=dict)


def whole(reader: Reader, name: str, array: Array) -> Tensor:
    """Returns an array of files as a tensor of torch."""
    # As it is stored: an array that is made may have the same name.
    data = Reader.read(reader, name, array.parts, _all(array.shape), array.dtype)
    return backends.get("torch").from_bytes(data, array.shape, array.dtype, "cpu")


def _all(shape: Shape) -> Box:
    return tuple(slice(0, n) for n in shape)


class MakingReader(Reader):
    """A reader that makes some arrays.

    Args:
        make: by key, what returns the whole tensor.
    """

    def __init__(self, function: str, folder: Path, make: Mapping[str, Make]) -> None:
        super().__init__(function, folder)
        self._make = make

    def read(self, key: str, parts: Sequence[Part], box: Box, dtype: str) -> Buffer:
        """See `Reader`."""
        make = self._make.get(key)
        if make is None or any(place.start == place.stop for place in box):
            return super().read(key, parts, box, dtype)
        return backends.get("torch").to_bytes(make(self)[box], copy=True)  # the whole tensor is not to be kept


def making(group: Group, arrays: Mapping[str, Array], wanted: Collection[str]) -> dict[str, Make]:
    """Returns what makes those targets of a group that are wanted. Each is made once, all of them together."""
    ready: dict[str, Tensor] = {}

    def make(reader: Reader, name: str) -> Tensor:
        if name not in ready:
            ready.update(_converted(group, arrays, reader))
            for other in set(ready).difference(wanted):
                del ready[other]
        return ready.pop(name)

    return {name: lambda reader, name=name: make(reader, name) for name in group.targets if name in wanted}


def _converted(group: Group, arrays: Mapping[str, Array], reader: Reader) -> dict[str, Tensor]:
    assert group.convert is not None
    return group.convert([whole(reader, name, arrays[name]) for name in group.sources])


def write(
    target: Path, groups: Sequence[Group], arrays: Mapping[str, Array], reader: Reader, *, is_for_torch: bool
) -> None:
    """Writes what arrays become into a safetensors file, which is there once it is complete.

    Raises:
        CheckpointError: a file that is read is damaged.
        OSError: one cannot be read or written.
    """
    kinds = [(name, *kind) for group in groups for name, kind in group.targets.items()]
    kinds.sort(key=lambda kind: -ITEM_BYTES[kind[1]])  # as in `write_file`
    head = header(kinds, {"format": "pt"} if is_for_torch else None)
    places, place = {}, len(head)
    for name, dtype, shape in kinds:
        places[name] = place
        place += num_bytes(shape, dtype)
    partial = target.with_name(f"{target.name}.partial")
    with partial.open("wb") as out:
        out.write(head)
        for group in groups:
            for name, data in _contents(group, arrays, reader):
                out.seek(places[name])
                out.write(memoryview(data))
        out.flush()
        os.fsync(out.fileno())
    partial.replace(target)
    sync_folder(target.parent)


def _contents(group: Group, arrays: Mapping[str, Array], reader: Reader) -> list[tuple[str, Buffer]]:
    if group.convert is None:
        (name,), (source,) = group.targets, group.sources
        array = arrays[source]
        return [(name, reader.read(source, array.parts, _all(array.shape), array.dtype))]
    to_bytes = backends.get("torch").to_bytes
    return [(name, to_bytes(x, copy=False)) for name, x in _converted(group, arrays, reader).items()]
