"""What a row of the table is, and how the table is written."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

State = Literal["done", "skipped", "wrong"]


class Wrong(Exception):
    """Something is not as it must be; the text says what."""


class Skip(Exception):
    """This machine cannot show it; the text says why."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a row has found."""

    state: State
    text: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """What a row is told.

    Attributes:
        device: ``"cuda"`` or ``"sim"``.
        is_planted: whether the row puts a fault into what it looks at.
        limit_s: after so many seconds the process is ended.
        note: says what the row is about to do, for the case that it hangs.
    """

    device: Literal["cuda", "sim"]
    is_planted: bool = False
    limit_s: float = 60.0
    note: Callable[[str], None] = lambda text: None
    begun: float = field(default_factory=time.monotonic)

    @property
    def framework(self) -> Literal["cuda", "simulated"]:
        """The ranks' name for the device."""
        return "cuda" if self.device == "cuda" else "simulated"

    def left_s(self) -> float:
        """Returns the seconds that are left for this row."""
        return self.limit_s - (time.monotonic() - self.begun)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        number: its name for ``--rows``.
        title: what it shows.
        limit_s: how long it may take.
        run: finds the answer; raises `Wrong` or `Skip`. Given as ``"module:function"``, so that only the process of the
            row imports it.
    """

    number: str
    title: str
    limit_s: float
    run: str


@dataclass(frozen=True, slots=True)
class Line:
    """A row with its answer."""

    row: Row
    answer: Answer
    time_s: float

    def as_json(self) -> dict[str, Any]:
        """Returns plain values."""
        return {"row": self.row.number, "title": self.row.title, "time_s": round(self.time_s, 1), **asdict(self.answer)}


def exit_code(lines: Sequence[Line], *, is_planted: bool = False) -> int:
    """Returns 1 if a row is wrong; where faults were planted, if a row has not found its own."""
    return int(any(line.answer.state == ("done" if is_planted else "wrong") for line in lines))


def to_json(head: dict[str, Any], lines: Sequence[Line]) -> str:
    """Returns the table for machines."""
    return json.dumps({**head, "rows": [line.as_json() for line in lines]}, indent=1)


def print_table(head: str, lines: Sequence[Line]) -> None:
    """Prints the table: with colours on a terminal that has `rich`, as plain text elsewhere."""
    cells = [(x.row.number, x.row.title, x.answer.state, f"{x.time_s:.0f}", x.answer.text) for x in lines]
    if not (sys.stdout.isatty() and _print_rich(head, cells)):
        print(plain_table(head, cells))


def plain_table(head: str, cells: Sequence[tuple[str, ...]]) -> str:
    """Returns the table as text; the last cell of a line may be of any length."""
    rows = [("row", "what", "state", "s", "found"), *cells]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    padded = [[*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[4]] for row in rows]
    return "\n".join([head, "", *("  ".join(row).rstrip() for row in padded)])


def _print_rich(head: str, cells: Sequence[tuple[str, ...]]) -> bool:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return False
    colours = {"done": "green", "skipped": "yellow", "wrong": "bold red"}
    table = Table("row", "what", "state", "s", "found", title=head, title_justify="left")
    for number, title, state, seconds, text in cells:
        table.add_row(number, title, f"[{colours[state]}]{state}[/]", seconds, _escaped(text))
    Console(width=None if os.environ.get("COLUMNS") else 160).print(table)
    return True


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
