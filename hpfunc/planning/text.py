"""The text of a schedule: `lines` writes it, and `planning.parsing` reads it back.

Each buffer and each op has one line, so that `diff` shows the effect of a change of policy. The program is at the end.
The text is exact: different schedules have different texts. Counts, sizes in bytes, the fingerprint, descriptions of
events, and comments are redundant; they are written for the reader, and not parsed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import lru_cache

from .ops import (
    Buffer,
    Caller,
    Compute,
    Deliver,
    Free,
    Launch,
    Local,
    Op,
    Region,
    Slot,
    itemsize,
)
from .policy import Policy
from .program import Event, Program, Unit, Weight

QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
PLAIN_WORD = r"[A-Za-z0-9_.-]+"
_ENDS = ("", "  ", ", ", " -> ", " as weight ", "[0:1]")
"""What may follow a name."""
NAME = re.compile(
    rf"(?P<quoted>{QUOTED})|(?P<plain>(?!\(\)|\d+ bytes|buffer -?\d)[^\s'\"](?:.*?\S)??)"
    r"(?=  |, | -> | as weight |\[-?\d+:-?\d+\]|$)"
)
_NOWHERE = Buffer("", "part", 0, "bool", "compute")
"""Stands for a buffer that does not exist: the text of a schedule that `check` refuses is exact, too."""


def lines(program: Program, policy: Policy, buffers: Sequence[Buffer], slots: Sequence[Slot]) -> Iterator[str]:
    """Yields the lines of the text."""
    writer, events = _Writer(buffers), dict(enumerate(program.events))
    ops = [op for slot in slots for op in slot.ops]
    yield f"schedule of {len(program.events)} events: {len(buffers)} buffers, {len(ops)} ops"
    yield f"program {program.fingerprint}"
    yield str(policy)
    yield ""
    yield from _table([_buffer_row(index, buffer) for index, buffer in enumerate(buffers)])
    streams = max((len(op.stream) for op in ops), default=0)
    names = max((len(_name(op.name)) for op in ops), default=0)
    for slot in slots:
        event = events.get(slot.event)
        yield ""
        yield f"{slot.when} {_name(program.describe(event)) if event else 'nothing'} (event {slot.event})"
        step = ""
        for op in slot.ops:
            steps = event is not None and event.kind == "backward" and slot.when == "after"
            previous, step = step, writer.step(op) if steps else ""
            comment = f"  # {step}" if step and step != previous else ""
            yield f"  {op.stream:{streams}}  {_name(op.name):{names}}  {writer.describe(op)}{comment}"
    for title, values in (("weights", program.weights), ("units", program.units), ("events", program.events)):
        yield ""
        yield title
        yield from _table([(str(index), _call(value)) for index, value in enumerate(values)])


@lru_cache(maxsize=4096)
def _name(name: str) -> str:
    """Returns the name; quoted as in Python if it could not be told from the text that may follow it."""
    found = (NAME.match(name + end) for end in _ENDS)
    return name if name.isprintable() and all(match and match["plain"] == name for match in found) else repr(name)


def _word(word: str) -> str:
    return word if re.fullmatch(PLAIN_WORD, word) else repr(word)


def _call(value: Weight | Unit | Event) -> str:
    """Returns the Python form of a value, without fields that have their default."""
    found = [(field.name, getattr(value, field.name), field.default) for field in fields(value)]
    shown = [f"{name}={given!r}" for name, given, default in found if given != default]
    return f"{type(value).__name__}({', '.join(shown)})"


def _buffer_row(index: int, buffer: Buffer) -> tuple[str, ...]:
    weight = "" if buffer.weight is None else f"weight {buffer.weight}"
    size, numel = f"{buffer.size_bytes} bytes", f"{buffer.numel} {_word(buffer.dtype)}"
    return (str(index), _name(buffer.name), buffer.kind, numel, size, buffer.stream, weight)


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
        yield f"  {'  '.join(cells)}".rstrip()


class _Writer:
    """Writes ops on some buffers."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        counts = Counter(buffer.name for buffer in buffers)
        self._buffers = dict(enumerate(buffers))
        self._names = {i: _name(buffer.name) for i, buffer in self._buffers.items() if counts[buffer.name] == 1}

    def describe(self, op: Op) -> str:
        """Returns the description of an op: what it does, its bytes, and its waits."""
        waits = f", waits for {', '.join(map(_name, op.waits))}" if op.waits else ""
        match op:
            case Free():
                what, size = f"free {op.buffer}", self._buffer(op.buffer).size_bytes
            case Deliver():
                what, size = f"deliver {self._region(op.region)} as weight {op.weight}", self._size(op.writes)
            case _:
                action, reads = _action(op), "" if isinstance(op, Caller) else f"{self._regions(op.reads)} "
                what, size = f"{action}: {reads}-> {self._regions(op.writes)}", self._size(op.writes or op.reads)
        return f"{what}, {size} bytes{waits}"

    def step(self, op: Op) -> str:
        """Returns the step to which an op belongs: see Note [The four steps of a backward]."""
        kind = self._buffer(op.buffer).kind if isinstance(op, Free) else op.kind if isinstance(op, Local) else ""
        if op.stream == "gather" or kind == "accumulate":
            return ""
        fills = isinstance(op, Local) and all(self._buffer(region.buffer).kind == "reduce" for region in op.writes)
        if op.stream == "all_reduce" and not fills:
            return "step 4"
        if isinstance(op, Deliver) or kind in ("scale", "reduce") or (op.stream, kind) == ("compute", "copy"):
            return "step 3"
        return "step 2" if isinstance(op, Free) or kind == "sum_parts" else "step 1"

    def _buffer(self, index: int) -> Buffer:
        return self._buffers.get(index, _NOWHERE)

    def _regions(self, regions: Sequence[Region]) -> str:
        return ", ".join(map(self._region, regions)) or "()"

    def _region(self, region: Region) -> str:
        name = self._names.get(region.buffer, f"buffer {region.buffer}")
        whole = region == (region.buffer, 0, self._buffer(region.buffer).numel) and region.buffer in self._buffers
        return name if whole else f"{name}[{region.start}:{region.stop}]"

    def _size(self, regions: Sequence[Region]) -> int:
        return sum(region.numel * itemsize(self._buffer(region.buffer).dtype) for region in regions)


def _action(op: Compute | Caller | Launch | Local) -> str:
    match op:
        case Compute():
            return f"event {op.event}"
        case Caller():
            return "caller"
        case Launch():
            return f"{op.collective} over {op.communicator.purpose}@{'*'.join(map(_word, op.communicator.axes))}"
        case Local():
            shown = [f"weights {', '.join(map(str, op.weights))}"] if op.weights else []
            shown += [f"{op.parts} parts"] if op.parts != 1 else []
            shown += [f"divisor {op.divisor}"] if op.divisor != 1 else []
            return f"{op.kind} ({'; '.join(shown)})" if shown else op.kind
