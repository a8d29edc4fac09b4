"""The parser of the text of a schedule, which `planning.text` writes: `parsed` reads it line by line."""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from .._errors import ScheduleError, message
from .ops import (
    Buffer,
    BufferKind,
    Caller,
    Collective,
    Communicator,
    Compute,
    Deliver,
    Free,
    Launch,
    Local,
    LocalKind,
    Op,
    Purpose,
    Region,
    Slot,
    Stream,
)
from .policy import Policy
from .program import COMPUTES, Event, Program, Unit, Weight
from .text import NAME, PLAIN_WORD, QUOTED

T = TypeVar("T")
When = Literal["before", "after"]

_AT = re.compile(r"buffer (-?\d+)")
"""A buffer whose name is not its own, or that does not exist."""
_ACTIONS: tuple[Any, ...] = ("free", "deliver", "caller", "event", *get_args(Collective), *get_args(LocalKind))
_FIELDS = re.compile(
    r"( \((weights (?P<weights>-?\d+(, -?\d+)*))?(; )?((?P<parts>-?\d+) parts)?(; )?(divisor (?P<divisor>-?\d+))?\))?: "
)


def parsed(text: str) -> tuple[Program, Policy, tuple[Buffer, ...], tuple[Slot, ...]]:
    """Returns the program, the policy, the buffers and the slots.

    Raises:
        ScheduleError: a line is wrong.
    """
    found = _Lines(text)
    found.line.take("schedule of ", "'schedule of'")
    found.next().take(r"program\b", "'program' and a fingerprint")
    policy = _value(found.next(), Policy)
    found.next()
    buffers = tuple(map(_buffer, found.numbered_rows()))
    slots: list[Slot] = []
    reader = _Reader(buffers)
    while match := found.line.find(r"(before|after) .*\(event (-?\d+)\)$"):
        found.next()
        when: When = "before" if match[1] == "before" else "after"
        slots.append(Slot(int(match[2]), when, tuple(map(reader.op, found.rows()))))
    found.title("weights", "'before' or 'after' and an event, or 'weights'")
    weights = tuple(_value(line, Weight) for line in found.numbered_rows())
    found.title("units")
    units = tuple(_unit(line, len(weights)) for line in found.numbered_rows())
    found.title("events")
    events = tuple(_event(line, len(units)) for line in found.numbered_rows())
    found.line.take("$", "the end of the text")
    return Program(weights, units, events), policy, buffers, tuple(slots)


class _Line:
    """A line that is read from left to right."""

    def __init__(self, number: int, text: str) -> None:
        self._number, self.text, self.place = number, text.rstrip(), 0

    def find(self, pattern: str | re.Pattern[str]) -> re.Match[str] | None:
        """Reads a match of the pattern if it comes next, else returns None."""
        match = re.compile(pattern).match(self.text, self.place)
        self.place = match.end() if match else self.place
        return match

    def take(self, pattern: str | re.Pattern[str], expected: str) -> re.Match[str]:
        """Reads a match of the pattern, which must come next."""
        if match := self.find(pattern):
            return match
        raise self.wrong(expected)

    def option(self, options: tuple[T, ...], what: str) -> T:
        """Reads one of the words `options`."""
        table = {str(option): option for option in options}
        return table[self.take(rf"(?:{'|'.join(table)})\b", f"{what}: {', '.join(table)}")[0]]

    def name(self, what: str) -> str:
        """Reads a name."""
        match = self.take(NAME, what)
        return self._unquoted(match["quoted"], what) if match["quoted"] else match["plain"]

    def word(self, what: str) -> str:
        """Reads a word, quoted or not."""
        word = self.take(rf"{PLAIN_WORD}|{QUOTED}", what)[0]
        return self._unquoted(word, what) if word[0] in "'\"" else word

    def _unquoted(self, quoted: str, what: str) -> str:
        try:
            return ast.literal_eval(quoted)
        except (SyntaxError, ValueError):
            raise self.wrong(f"{what}, quoted as in Python") from None

    @property
    def rest(self) -> str:
        """The part of the line that is not read yet."""
        return self.text[self.place :]

    def wrong(self, expected: str) -> ScheduleError:
        """Returns the error that `expected` was expected here."""
        found = repr(self.rest) if self.rest else "the end of the line"
        why = f"at character {self.place}: expected {expected}, found {found}"
        rule, shown = f"line {self._number} is not that of a schedule", f"line {self._number}: {self.text}"
        hint = "the text is that of str(schedule), with every line in one piece"
        return ScheduleError(message("hpfunc.Schedule.parse", rule, [shown, why], hint=hint))


class _Lines:
    """The lines of a text that are not empty, followed by one for its end."""

    def __init__(self, text: str) -> None:
        numbered = [_Line(number, line) for number, line in enumerate(text.split("\n"), 1)]
        self._lines = iter([line for line in numbered if line.text])
        self._end = _Line(len(numbered) + 1, "")
        self.line = next(self._lines, self._end)

    def next(self) -> _Line:
        """Moves to the next line."""
        self.line = next(self._lines, self._end)
        return self.line

    def rows(self) -> Iterator[_Line]:
        """Yields the indented lines that follow."""
        while self.line.find("  +"):
            yield self.line
            self.line.take("$", "the end of the line")
            self.next()

    def numbered_rows(self) -> Iterator[_Line]:
        """Yields the numbered lines that follow, after their number. Numbers start at 0."""
        for number, line in enumerate(self.rows()):
            line.take(rf"{number}  +", f"the number {number}")
            yield line

    def title(self, title: str, expected: str | None = None) -> None:
        """Reads the title of a section."""
        self.line.take(f"{title}$", expected or f"{title!r}, or a line of the section before it")
        self.next()


def _value(line: _Line, kind: type[T]) -> T:
    """Reads a `Policy`, `Weight`, `Unit` or `Event` in its Python form."""
    expected = f"{kind.__name__}(...) as Python writes it"
    try:
        call = ast.parse(line.rest, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or ast.unparse(call.func) != kind.__name__:
            raise line.wrong(expected)
        value = kind(**{str(keyword.arg): _literal(keyword.value) for keyword in call.keywords})
    except (SyntaxError, ValueError, TypeError) as error:
        raise line.wrong(f"{expected} ({error})") from error
    hints = {} if kind is Policy else get_type_hints(kind)  # a policy validates itself
    if bad := [name for name, hint in hints.items() if not _fits(getattr(value, name), hint)]:
        raise line.wrong(f"{expected}, with another {' and '.join(bad)}")
    line.take(".*", expected)
    return value


def _literal(node: ast.expr) -> Any:
    return math.inf if isinstance(node, ast.Name) and node.id == "inf" else ast.literal_eval(node)


def _fits(value: Any, hint: Any) -> bool:
    """Returns whether a value has the type of a field."""
    args = get_args(hint)
    if get_origin(hint) is Literal:
        return value in args
    if get_origin(hint) is UnionType:
        return any(_fits(value, arg) for arg in args)
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(item, args[0]) for item in value)
    return type(value) is hint


def _unit(line: _Line, num_weights: int) -> Unit:
    unit = _value(line, Unit)
    if not all(0 <= weight < num_weights for weight in unit.weights):
        raise line.wrong(f"a unit of some of the {num_weights} weights above")
    return unit


def _event(line: _Line, num_units: int) -> Event:
    event = _value(line, Event)
    if (event.unit is not None) != (event.kind in COMPUTES) or not 0 <= (event.unit or 0) < max(num_units, 1):
        raise line.wrong(f"an event, which has one of the {num_units} units above if it is a use of a unit")
    return event


def _buffer(line: _Line) -> Buffer:
    name, _ = line.name("the name of a buffer"), line.find("  +")
    kind: BufferKind = line.option(get_args(BufferKind), "a kind of buffer")
    numel = int(line.take(r"  +(-?\d+) ", "its number of elements")[1])
    dtype = line.word("a dtype")
    line.take(r"  +-?\d+ bytes  +", "its size in bytes")
    stream: Stream = line.option(get_args(Stream), "a stream")
    weight = line.find(r"  +weight (-?\d+)")
    return Buffer(name, kind, numel, dtype, stream, int(weight[1]) if weight else None)


class _Reader:
    """Reads ops on some buffers."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        counts = Counter(buffer.name for buffer in buffers)
        self._buffers = buffers
        self._indices = {buffer.name: i for i, buffer in enumerate(buffers) if counts[buffer.name] == 1}

    def op(self, line: _Line) -> Op:
        """Reads an op."""
        stream: Stream = line.option(get_args(Stream), "a stream")
        line.take("  +", "two spaces")
        name = line.name("the name of an op")
        line.take("  +", "two spaces, and what the op does")
        op = self._action(line, name, stream)
        line.take(r", -?\d+ bytes", "', ' and a size in bytes")
        waits: list[str] = []
        separator = ", waits for "
        while line.find(separator):
            waits.append(line.name("the name of an op"))
            separator = ", "
        line.find("  #.*")
        return replace(op, waits=tuple(waits))

    def _action(self, line: _Line, name: str, stream: Stream) -> Op:
        word = line.option(_ACTIONS, "what the op does")
        match word:
            case "free":
                return Free(name, int(line.take(r" (-?\d+)", "the number of a buffer")[1]), stream)
            case "deliver":
                line.take(" ", "the place of a gradient")
                region = self._region(line)
                weight = line.take(r" as weight (-?\d+)", "' as weight ' and a number")[1]
                return Deliver(name, int(weight), region, stream=stream)
            case "caller":
                line.take(": -> ", "': -> ' and what has been written")
                return Caller(name, self._regions(line), stream=stream)
            case "event":
                event = line.take(r" (-?\d+): ", "the number of an event, and ': '")[1]
                reads, writes = self._reads_and_writes(line)
                return Compute(name, int(event), reads, writes, stream=stream)
        if word in get_args(Collective):
            communicator = _communicator(line)
            line.take(": ", "'*' and another axis, or ': '")
            return Launch(name, word, communicator, stream, *self._reads_and_writes(line))
        shown = line.take(_FIELDS, "the fields of the op, as in (weights 0, 1; 2 parts; divisor 4), and ': '")
        weights = tuple(map(int, shown["weights"].split(", "))) if shown["weights"] else ()
        numbers = {"weights": weights, "parts": int(shown["parts"] or 1), "divisor": int(shown["divisor"] or 1)}
        return Local(name, word, stream, *self._reads_and_writes(line), **numbers)

    def _reads_and_writes(self, line: _Line) -> tuple[tuple[Region, ...], tuple[Region, ...]]:
        reads = self._regions(line)
        line.take(" -> ", "', ' and another place that is read, or ' -> '")
        return reads, self._regions(line)

    def _regions(self, line: _Line) -> tuple[Region, ...]:
        if line.find(r"\(\)"):
            return ()
        found = [self._region(line)]
        while line.find(r", (?!-?\d+ bytes)"):
            found.append(self._region(line))
        return tuple(found)

    def _region(self, line: _Line) -> Region:
        expected = "the name of a buffer that is listed above, once"
        start, at = line.place, line.find(_AT)
        name = "" if at else line.name(expected)
        index = int(at[1]) if at else self._indices.get(name)
        if index is None:
            line.place = start
            raise line.wrong(expected)
        part = line.find(r"\[(-?\d+):(-?\d+)\]")
        if not part and not 0 <= index < len(self._buffers):
            raise line.wrong("elements of it, as in [0:4]")
        return Region(index, int(part[1]), int(part[2])) if part else Region(index, 0, self._buffers[index].numel)


def _communicator(line: _Line) -> Communicator:
    line.take(" over ", "' over ' and a communicator")
    purpose: Purpose = line.option(get_args(Purpose), "a purpose")
    line.take("@", "'@' and the axes")
    axes: list[str] = []
    while line.find(r"\*" if axes else "(?!:)"):
        axes.append(line.word("an axis"))
    return Communicator(purpose, tuple(axes))
