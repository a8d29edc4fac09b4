"""The text of a schedule: `lines` writes it, and `parsed` reads it back.

Each buffer and each op has one line, so that `diff` shows the effect of a change of policy. The program is at the end.
The text is exact: different schedules have different texts. What is redundant is written for the reader only: see
`Schedule.parse`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from string import Formatter
from typing import Any, Literal, get_args

from . import ops, tokens
from .ops import Buffer, Communicator, Op, Region, Slot
from .policy import Policy
from .program import COMPUTES, Event, Program, Unit, Weight

_FORMS: dict[str, tuple[type[Any], str]] = {
    "free": (ops.Free, "free {buffer}"),
    "deliver": (ops.Deliver, "deliver {region} as weight {weight}"),
    "caller": (ops.Caller, "caller: -> {writes}"),
    "event": (ops.Compute, "event {event}: {reads} -> {writes}"),
    **dict.fromkeys(get_args(ops.Collective), (ops.Launch, "{collective} over {communicator}: {reads} -> {writes}")),
    **dict.fromkeys(get_args(ops.LocalKind), (ops.Local, "{kind}{settings}: {reads} -> {writes}")),
}
"""By the first word of what an op does: its class, and the text of its fields, which `_Fields` writes and reads."""
_FORM_OF = {kind: [part[:2] for part in Formatter().parse(form)] for kind, form in _FORMS.values()}
_SETTINGS = (
    r"( \((weights (?P<weights>-?\d+(, -?\d+)*))?(; )?((?P<parts>-?\d+) parts)?(; )?"
    r"(divisor (?P<divisor>-?\d+))?\))?(?=: )"
)
_NOWHERE = Buffer("", "part", 0, "bool", "compute")
"""Stands for a buffer that does not exist: the text of a schedule that `check` refuses is exact, too."""


def lines(program: Program, policy: Policy, buffers: Sequence[Buffer], slots: Sequence[Slot]) -> Iterator[str]:
    """Yields the lines of the text."""
    writer, events = _Fields(buffers), dict(enumerate(program.events))
    issued = [op for slot in slots for op in slot.ops]
    yield f"schedule of {len(program.events)} events: {len(buffers)} buffers, {len(issued)} ops"
    yield f"program {program.fingerprint}"
    yield str(policy)
    yield ""
    yield from _table([_buffer_row(index, buffer) for index, buffer in enumerate(buffers)])
    streams = max((len(op.stream) for op in issued), default=0)
    names = max((len(tokens.name(op.name)) for op in issued), default=0)
    for slot in slots:
        event = events.get(slot.event)
        yield ""
        yield f"{slot.when} {tokens.name(program.describe(event)) if event else 'nothing'} (event {slot.event})"
        step = ""
        for op in slot.ops:
            steps = event is not None and event.kind == "backward" and slot.when == "after"
            previous, step = step, writer.step(op) if steps else ""
            comment = f"  # {step}" if step and step != previous else ""
            yield f"  {op.stream:{streams}}  {tokens.name(op.name):{names}}  {writer.write_op(op)}{comment}"
    for title, values in (("weights", program.weights), ("units", program.units), ("events", program.events)):
        yield ""
        yield title
        yield from _table([(str(index), tokens.call(value)) for index, value in enumerate(values)])


def parsed(text: str) -> tuple[Program, Policy, tuple[Buffer, ...], tuple[Slot, ...]]:
    """Returns the program, the policy, the buffers and the slots.

    Raises:
        ScheduleError: a line is wrong.
    """
    found = tokens.Lines(text)
    found.line.take("schedule of ", "'schedule of'")
    found.next().take(r"program\b", "'program' and a fingerprint")
    policy = found.next().call(Policy)
    found.next()
    buffers = tuple(map(_read_buffer, found.numbered_rows()))
    slots: list[Slot] = []
    reader = _Fields(buffers)
    while match := found.line.find(r"(before|after) .*\(event (-?\d+)\)$"):
        found.next()
        when: Literal["before", "after"] = "before" if match[1] == "before" else "after"
        slots.append(Slot(int(match[2]), when, tuple(map(reader.read_op, found.rows()))))
    found.title("weights", "'before' or 'after' and an event, or 'weights'")
    weights = tuple(line.call(Weight) for line in found.numbered_rows())
    found.title("units")
    units = tuple(_read_unit(line, len(weights)) for line in found.numbered_rows())
    found.title("events")
    events = tuple(_read_event(line, len(units)) for line in found.numbered_rows())
    found.line.take("$", "the end of the text")
    return Program(weights, units, events), policy, buffers, tuple(slots)


def _read_unit(line: tokens.Line, num_weights: int) -> Unit:
    unit = line.call(Unit)
    if not all(0 <= weight < num_weights for weight in unit.weights):
        raise line.wrong(f"a unit of some of the {num_weights} weights above")
    return unit


def _read_event(line: tokens.Line, num_units: int) -> Event:
    event = line.call(Event)
    if (event.unit is not None) != (event.kind in COMPUTES) or not 0 <= (event.unit or 0) < max(num_units, 1):
        raise line.wrong(f"an event, which has one of the {num_units} units above if it is a use of a unit")
    return event


def _buffer_row(index: int, buffer: Buffer) -> tuple[str, ...]:
    weight = "" if buffer.weight is None else f"weight {buffer.weight}"
    size, numel = f"{buffer.size_bytes} bytes", f"{buffer.numel} {tokens.word(buffer.dtype)}"
    return (str(index), tokens.name(buffer.name), buffer.kind, numel, size, buffer.stream, weight)


def _read_buffer(line: tokens.Line) -> Buffer:
    name, _ = line.name("the name of a buffer"), line.find("  +")
    kind: ops.BufferKind = line.option(get_args(ops.BufferKind), "a kind of buffer")
    numel = int(line.take(r"  +(-?\d+) ", "its number of elements")[1])
    dtype = line.word("a dtype")
    line.take(r"  +-?\d+ bytes  +", "its size in bytes")
    stream: ops.Stream = line.option(get_args(ops.Stream), "a stream")
    return Buffer(name, kind, numel, dtype, stream, line.number("weight ") if line.find("  +(?=weight )") else None)


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
        yield f"  {'  '.join(cells)}".rstrip()


class _Fields:
    """Writes and reads ops on some buffers: the fields of `_FORMS`, each in `_write` and in `_read`."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        counts = Counter(buffer.name for buffer in buffers)
        self._buffers = dict(enumerate(buffers))
        self._indices = {buffer.name: i for i, buffer in self._buffers.items() if counts[buffer.name] == 1}
        self._names = {i: tokens.name(name) for name, i in self._indices.items()}

    def write_op(self, op: Op) -> str:
        """Returns the description of an op: what it does, its bytes, and its waits."""
        what = "".join(text + (self._write(field, op) if field else "") for text, field in _FORM_OF[type(op)])
        waits = f", waits for {', '.join(map(tokens.name, op.waits))}" if op.waits else ""
        freed = (Region(op.buffer, 0, self._buffer(op.buffer).numel),) if isinstance(op, ops.Free) else ()
        touched = [(region.numel, self._buffer(region.buffer).dtype) for region in freed or op.writes or op.reads]
        return f"{what}, {sum(numel * ops.itemsize(dtype) for numel, dtype in touched)} bytes{waits}"

    def read_op(self, line: tokens.Line) -> Op:
        """Reads an op: its stream, its name, and its description."""
        stream = line.option(get_args(ops.Stream), "a stream")
        line.take("  +", "two spaces")
        name = line.name("the name of an op")
        line.take("  +", "two spaces, and what the op does")
        start = line.place
        kind, _ = _FORMS[line.option(tuple(_FORMS), "what the op does")]
        line.place = start
        fields: dict[str, Any] = {}
        for text, field in _FORM_OF[kind]:
            fields |= self._read(line, text, field)
        line.take(r", -?\d+ bytes", "', ' and a size in bytes")
        waits: list[str] = []
        while line.find(", " if waits else ", waits for "):
            waits.append(line.name("the name of an op"))
        line.find("  #.*")
        return replace(kind(name=name, stream=stream, **fields), waits=tuple(waits))

    def _write(self, field: str, op: Any) -> str:
        match field:
            case "reads" | "writes":
                return ", ".join(map(self._region, getattr(op, field))) or "()"
            case "region":
                return self._region(op.region)
            case "communicator":
                return f"{op.communicator.purpose}@{'*'.join(map(tokens.word, op.communicator.axes))}"
            case "settings":
                shown = [f"weights {', '.join(map(str, op.weights))}"] if op.weights else []
                shown += [f"{op.parts} parts"] if op.parts != 1 else []
                shown += [f"divisor {op.divisor}"] if op.divisor != 1 else []
                return f" ({'; '.join(shown)})" if shown else ""
        return str(getattr(op, field))

    def _read(self, line: tokens.Line, text: str, field: str | None) -> dict[str, Any]:
        """Reads a text and the field after it. Returns the attributes of the op that the field has."""
        if field in ("buffer", "event", "weight"):
            return {field: line.number(text)}
        line.take(re.escape(text), "', ' and another place that is read, or ' -> '" if text == " -> " else repr(text))
        match field:
            case "reads" | "writes":
                return {field: self._read_regions(line)}
            case "region":
                return {field: self._read_region(line)}
            case "communicator":
                purpose: ops.Purpose = line.option(get_args(ops.Purpose), "a purpose")
                line.take("@", "'@' and the axes")
                axes: list[str] = []
                while line.find(r"\*" if axes else "(?!:)"):
                    axes.append(line.word("an axis"))
                return {field: Communicator(purpose, tuple(axes))}
            case "settings":
                shown = line.take(_SETTINGS, "the fields of the op, as in (weights 0, 1; 2 parts; divisor 4), and ': '")
                weights = tuple(map(int, shown["weights"].split(", "))) if shown["weights"] else ()
                return {"weights": weights, "parts": int(shown["parts"] or 1), "divisor": int(shown["divisor"] or 1)}
            case "collective" | "kind":
                return {field: line.take(r"\w+", "what the op does")[0]}
        return {}

    def _read_regions(self, line: tokens.Line) -> tuple[Region, ...]:
        if line.find(r"\(\)"):
            return ()
        found = [self._read_region(line)]
        while line.find(r", (?!-?\d+ bytes)"):
            found.append(self._read_region(line))
        return tuple(found)

    def _read_region(self, line: tokens.Line) -> Region:
        expected = "the name of a buffer that is listed above, once"
        start, at = line.place, line.find(r"buffer (-?\d+)")  # its name is not its own, or it does not exist
        index = int(at[1]) if at else self._indices.get(line.name(expected))
        if index is None:
            line.place = start
            raise line.wrong(expected)
        part = line.find(r"\[(-?\d+):(-?\d+)\]")
        if not part and index not in self._buffers:
            raise line.wrong("elements of it, as in [0:4]")
        return Region(index, int(part[1]), int(part[2])) if part else Region(index, 0, self._buffers[index].numel)

    def _region(self, region: Region) -> str:
        name = self._names.get(region.buffer, f"buffer {region.buffer}")
        whole = region == (region.buffer, 0, self._buffer(region.buffer).numel) and region.buffer in self._buffers
        return name if whole else f"{name}[{region.start}:{region.stop}]"

    def _buffer(self, index: int) -> Buffer:
        return self._buffers.get(index, _NOWHERE)

    def step(self, op: Op) -> str:
        """Returns the step to which an op belongs: see Note [The four steps of a backward]."""
        is_local = isinstance(op, ops.Local)
        kind = self._buffer(op.buffer).kind if isinstance(op, ops.Free) else op.kind if is_local else ""
        if op.stream == "gather" or kind == "accumulate":
            return ""
        fills = is_local and all(self._buffer(region.buffer).kind == "reduce" for region in op.writes)
        if op.stream == "all_reduce" and not fills:
            return "step 4"
        if isinstance(op, ops.Deliver) or kind in ("scale", "reduce") or (op.stream, kind) == ("compute", "copy"):
            return "step 3"
        return "step 2" if isinstance(op, ops.Free) or kind == "sum_parts" else "step 1"
