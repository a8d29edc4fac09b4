"""`Diagnosis`: rows with verdicts, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Verdict = Literal["ok", "warn", "wrong"]


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was looked at.

    Attributes:
        name: what it is.
        value: what was found.
        verdict: ``"ok"``; ``"warn"``: it works, but perhaps slowly or not always; ``"wrong"``: it does not work.
        remedy: what to change; "" if the verdict is ok.
        source: the page that the verdict rests on; "" if it rests on hpfunc itself.
    """

    name: str
    value: str
    verdict: Verdict = "ok"
    remedy: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        assert self.verdict in get_args(Verdict)
        assert bool(self.remedy) == (self.verdict != "ok"), f"{self.name}: a remedy belongs to every problem"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What `hpfunc.doctor` has found. Print it for a table that ends with what to change.

    Attributes:
        rows: everything that was looked at. A row has a name, a value, a verdict (``"ok"``, ``"warn"`` or ``"wrong"``),
            a remedy if the verdict is not ``"ok"``, and a source if the verdict rests on a page of others.

    >>> print(Diagnosis((Row("LOCAL_RANK", "5 of 4", "wrong", "start 4 processes"), Row("device", "cpu"))))
    wrong  LOCAL_RANK  5 of 4
    ok     device      cpu
    <BLANKLINE>
    What to change (1 wrong, 0 warnings):
      wrong  LOCAL_RANK: start 4 processes
    """

    rows: tuple[Row, ...]

    @property
    def problems(self) -> tuple[Row, ...]:
        """The rows that are not ok, what is wrong first."""
        return tuple(row for verdict in ("wrong", "warn") for row in self.rows if row.verdict == verdict)

    @property
    def is_wrong(self) -> bool:
        """Whether anything is wrong. Warnings do not count."""
        return any(row.verdict == "wrong" for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Returns the rows as plain values, for JSON."""
        return {"is_wrong": self.is_wrong, "rows": [asdict(row) for row in self.rows]}

    def to_json(self) -> str:
        """Returns `as_dict` as JSON."""
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        width = max((len(_plain(row.name)) for row in self.rows), default=0)
        lines = [f"{row.verdict:<5}  {_plain(row.name):<{width}}  {_plain(row.value)}".rstrip() for row in self.rows]
        counts = {verdict: sum(row.verdict == verdict for row in self.rows) for verdict in ("wrong", "warn")}
        lines += ["", _summary(counts)]
        for row in self.problems:
            lines.append(f"  {row.verdict}  {_plain(row.name)}: {_plain(row.remedy)}")
            lines += [f"         see {_plain(row.source)}"] if row.source else []
        return "\n".join(lines)


def _summary(counts: Mapping[str, int]) -> str:
    if not any(counts.values()):
        return "Nothing to change."
    warnings = f"{counts['warn']} warning{'' if counts['warn'] == 1 else 's'}"
    return f"What to change ({counts['wrong']} wrong, {warnings}):"


def _plain(text: str) -> str:
    """Returns a text on one line, in letters that every terminal has."""
    return " ".join(text.split()).encode("ascii", "backslashreplace").decode()
