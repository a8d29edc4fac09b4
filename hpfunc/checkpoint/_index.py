"""The index of a checkpoint, a value; and the folder that holds checkpoints.

# Note [Complete]
A checkpoint is the folder ``step-00000012`` of a path. It is written as ``step-00000012.partial-...``, its files first,
its ``index.json`` last, each forced to the disk, and then gets its name by one rename. So a folder of that name is
complete, whenever the processes end. A checkpoint that `keep` removes is renamed to ``step-00000012.removed`` before
its files are deleted. Readers ignore both kinds of leftovers, and the next save deletes them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .._errors import CheckpointError, message
from ._format import Shape, Stored, checksum
from ._read import Part

FORMAT, VERSION = "hpfunc.checkpoint", 1
INDEX = "index.json"
_COMPLETE = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"step-\d{8,}\.(partial-\d+|removed)")


@dataclass(frozen=True, slots=True)
class Array:
    """A global array: its boxes in files."""

    shape: Shape
    dtype: str
    parts: tuple[Part, ...]

    def __str__(self) -> str:
        return f"shape {self.shape}, {self.dtype}"


@dataclass(frozen=True, slots=True)
class Value:
    """A number, a bool or a string."""

    value: Any

    def __str__(self) -> str:
        return f"{type(self.value).__name__} {self.value!r}"


@dataclass(frozen=True, slots=True)
class RankValues:
    """The values of a `PerRank` leaf, in rank order of the mesh."""

    entries: tuple[Array | Value, ...]

    def __str__(self) -> str:
        return f"PerRank of {len(self.entries)} ranks"


Entry = Array | Value | RankValues


@dataclass(frozen=True, slots=True)
class Index:
    """The contents of a checkpoint.

    Attributes:
        leaves: by dotted path.
        heads: for each file its size, the length of its header, and the checksum of its header.
    """

    step: int
    leaves: Mapping[str, Entry]
    heads: Mapping[str, tuple[int, int, str]]

    def to_json(self) -> str:
        """Returns the text of an index, with a checksum of itself."""
        body = {
            "step": self.step,
            "files": {name: list(head) for name, head in self.heads.items()},
            "leaves": {key: to_data(entry) for key, entry in self.leaves.items()},
        }
        sealed = {"format": FORMAT, "version": VERSION, "checksum": checksum(_text(body).encode()), **body}
        return json.dumps(sealed, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, function: str, path: Path, text: bytes) -> Index:
        """Returns the index in a file.

        Raises:
            CheckpointError: a byte differs from what was written, or another program or version wrote it.
        """
        try:
            data = json.loads(text)
            kind = (data.pop("format"), data.pop("version"))
            sealed = data.pop("checksum") == checksum(_text(data).encode())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _unreadable(function, path, f"{type(error).__name__} {error}") from None
        if kind != (FORMAT, VERSION):
            raise _unreadable(function, path, f"format {kind[0]!r}, version {kind[1]!r}, not {FORMAT!r}, {VERSION}")
        if not sealed:
            raise _unreadable(function, path, "wrong checksum")
        leaves = {key: from_data(entry) for key, entry in data["leaves"].items()}
        return cls(data["step"], leaves, {name: (head[0], head[1], head[2]) for name, head in data["files"].items()})


def _text(body: Any) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _unreadable(function: str, path: Path, why: str) -> CheckpointError:
    hint = "take an earlier step"
    return CheckpointError(message(function, "the index of a checkpoint is damaged", [f"{path}: {why}"], hint=hint))


def to_data(entry: Entry) -> dict[str, Any]:
    """Returns an entry as JSON data.

    >>> to_data(Value(0.5)), from_data(to_data(Value(float("inf"))))
    ({'float': 0.5}, Value(value=inf))
    """
    if isinstance(entry, Array):
        return {"shape": entry.shape, "dtype": entry.dtype, "parts": [asdict(part) for part in entry.parts]}
    if isinstance(entry, RankValues):
        return {"ranks": [to_data(each) for each in entry.entries]}
    # JSON has no infinities and no NaN: they travel as text.
    finite = not isinstance(entry.value, float) or math.isfinite(entry.value)
    return {type(entry.value).__name__: entry.value if finite else repr(entry.value)}


def from_data(data: dict[str, Any]) -> Entry:
    """Returns the entry that `to_data` wrote."""
    if "ranks" in data:
        return RankValues(tuple(_one(each) for each in data["ranks"]))
    return _one(data)


def _one(data: dict[str, Any]) -> Array | Value:
    if "parts" not in data:
        ((kind, value),) = data.items()
        return Value({"bool": bool, "int": int, "float": float, "str": str}[kind](value))
    parts = (Part(tuple(part["start"]), Stored(**_with_tuples(part["stored"]))) for part in data["parts"])
    return Array(tuple(data["shape"]), data["dtype"], tuple(parts))


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


# --- the folder -------------------------------------------------------------------------------------------------------
def folder(path: Path, step: int) -> Path:
    """Returns the folder of the checkpoint of a step."""
    return path / f"step-{step:08d}"


def steps(path: Path) -> list[int]:
    """Returns the steps of the complete checkpoints of a path, in order.

    Raises:
        OSError: the path cannot be read.
    """
    if not path.exists():
        return []
    found = [_COMPLETE.fullmatch(entry.name) for entry in path.iterdir()]
    return sorted(int(match[1]) for match in found if match)


def leftovers(path: Path) -> list[Path]:
    """Returns the leftovers of saves that did not finish."""
    return [entry for entry in path.iterdir() if _LEFTOVER.fullmatch(entry.name)]


def read_index(function: str, path: Path, step: int) -> Index:
    """Returns the index of a step.

    Raises:
        CheckpointError: there is none, or it is damaged.
        OSError: it cannot be read.
    """
    where = folder(path, step)
    if not where.is_dir():
        have = ", ".join(map(str, steps(path))) or "none"
        raise CheckpointError(message(function, f"there is no step {step} in {path}", hint=f"steps there: {have}"))
    if not (where / INDEX).exists():
        raise _unreadable(function, where / INDEX, "it is missing")
    return Index.from_json(function, where / INDEX, (where / INDEX).read_bytes())


def latest(path: str | Path) -> int | None:
    """Returns the step of the newest complete checkpoint in a folder, None if there is none.

    Leftovers of killed or unfinished saves do not count.

    Args:
        path: the folder that `save` was given; it need not exist.

    Raises:
        CheckpointError: the folder cannot be read.

    Communication: none. While a save ends, ranks may get different answers; `load` compares them.

    >>> import tempfile
    >>> hpfunc.checkpoint.latest(tempfile.mkdtemp()) is None
    True
    """
    try:
        return max(steps(Path(path)), default=None)
    except OSError as error:
        raise CheckpointError(message("hpfunc.checkpoint.latest", f"cannot read {path}", [str(error)])) from error
