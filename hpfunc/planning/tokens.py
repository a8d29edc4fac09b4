"""Names, words and values in the text of a schedule: how they are written, and how they are read line by line."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import lru_cache
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from .._errors import ScheduleError, message
from .policy import Policy

T = TypeVar("T")
_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_PLAIN_WORD = r"[A-Za-z0-9_.-]+"
_ENDS = ("", "  ", ", ", " -> ", " as weight ", "[0:1]")
"""What may follow a name."""
_NAME = re.compile(
    rf"(?P<quoted>{_QUOTED})|(?P<plain>(?!\(\)|\d+ bytes|buffer -?\d)[^\s'\"](?:.*?\S)??)"
    r"(?=  |, | -> | as weight |\[-?\d+:-?\d+\]|$)"
)


@lru_cache(maxsize=4096)
def name(name: str) -> str:
    """Writes a name; quoted as in Python if it could not be told from the text that may follow it."""
    found = (_NAME.match(name + end) for end in _ENDS)
    return name if name.isprintable() and all(match and match["plain"] == name for match in found) else repr(name)


def word(word: str) -> str:
    """Writes a word, quoted unless it has plain characters only."""
    return word if re.fullmatch(_PLAIN_WORD, word) else repr(word)


def call(value: Any) -> str:
    """Writes a dataclass in its Python form, without fields that have their default."""
    found = [(field.name, getattr(value, field.name), field.default) for field in fields(value)]
    shown = [f"{name}={given!r}" for name, given, default in found if given != default]
    return f"{type(value).__name__}({', '.join(shown)})"


class Line:
    """A line that is read from left to right."""

    def __init__(self, number: int, text: str) -> None:
        self._number, self.text, self.place = number, text.rstrip(), 0

    def find(self, pattern: str) -> re.Match[str] | None:
        """Reads a match of the pattern if it comes next, else returns None."""
        match = re.compile(pattern).match(self.text, self.place)
        self.place = match.end() if match else self.place
        return match

    def take(self, pattern: str, expected: str) -> re.Match[str]:
        """Reads a match of the pattern, which must come next."""
        if match := self.find(pattern):
            return match
        raise self.wrong(expected)

    def option(self, options: tuple[T, ...], what: str) -> T:
        """Reads one of the words `options`."""
        table = {str(option): option for option in options}
        return table[self.take(rf"(?:{'|'.join(table)})\b", f"{what}: {', '.join(table)}")[0]]

    def number(self, before: str) -> int:
        """Reads a number, and what stands before it."""
        return int(self.take(rf"{re.escape(before)}(-?\d+)", f"{before!r} and a number")[1])

    def name(self, what: str) -> str:
        """Reads a `name`."""
        match = self.take(_NAME.pattern, what)
        return self._unquoted(match["quoted"], what) if match["quoted"] else match["plain"]

    def word(self, what: str) -> str:
        """Reads a `word`."""
        word = self.take(rf"{_PLAIN_WORD}|{_QUOTED}", what)[0]
        return self._unquoted(word, what) if word[0] in "'\"" else word

    def call(self, kind: type[T]) -> T:
        """Reads the rest of the line, a `call` of this class; its fields must have the types that it declares."""
        expected = f"{kind.__name__}(...) as Python writes it"
        try:
            call = ast.parse(self.text[self.place :], mode="eval").body
            if not isinstance(call, ast.Call) or call.args or ast.unparse(call.func) != kind.__name__:
                raise self.wrong(expected)
            value = kind(**{str(keyword.arg): _literal(keyword.value) for keyword in call.keywords})
        except (SyntaxError, ValueError, TypeError) as error:
            raise self.wrong(f"{expected} ({error})") from error
        hints = {} if kind is Policy else get_type_hints(kind)  # a policy validates itself
        if bad := [name for name, hint in hints.items() if not _fits(getattr(value, name), hint)]:
            raise self.wrong(f"{expected}, with another {' and '.join(bad)}")
        self.place = len(self.text)
        return value

    def _unquoted(self, quoted: str, what: str) -> str:
        try:
            return ast.literal_eval(quoted)
        except (SyntaxError, ValueError):
            raise self.wrong(f"{what}, quoted as in Python") from None

    def wrong(self, expected: str) -> ScheduleError:
        """Returns the error that `expected` was expected here."""
        rest = self.text[self.place :]
        why = f"at character {self.place}: expected {expected}, found {repr(rest) if rest else 'the end of the line'}"
        rule, shown = f"line {self._number} is not that of a schedule", f"line {self._number}: {self.text}"
        hint = "the text is that of str(schedule), with every line in one piece"
        return ScheduleError(message("hpfunc.Schedule.parse", rule, [shown, why], hint=hint))


class Lines:
    """The lines of a text that are not empty, followed by one for its end."""

    def __init__(self, text: str) -> None:
        numbered = [Line(number, line) for number, line in enumerate(text.split("\n"), 1)]
        self._lines = iter([line for line in numbered if line.text])
        self._end = Line(len(numbered) + 1, "")
        self.line = next(self._lines, self._end)

    def next(self) -> Line:
        """Moves to the next line."""
        self.line = next(self._lines, self._end)
        return self.line

    def rows(self) -> Iterator[Line]:
        """Yields the indented lines that follow. Each must be read to its end."""
        while self.line.find("  +"):
            yield self.line
            self.line.take("$", "the end of the line")
            self.next()

    def numbered_rows(self) -> Iterator[Line]:
        """Yields the numbered lines that follow, after their number. Numbers start at 0."""
        for number, line in enumerate(self.rows()):
            line.take(rf"{number}  +", f"the number {number}")
            yield line

    def title(self, title: str, expected: str | None = None) -> None:
        """Reads the title of a section."""
        self.line.take(f"{title}$", expected or f"{title!r}, or a line of the section before it")
        self.next()


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
