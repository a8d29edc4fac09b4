"""What became of a script: findings by line, and their text."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Literal

Verdict = Literal["write", "remove", "keep", "missing", "unknown"]

_SAYS: dict[Verdict, str] = {
    "write": "write",
    "remove": "remove",
    "keep": "keep",
    "missing": "no counterpart",
    "unknown": "not known here",
}
_WIDTH = 92
_INDENT = " " * 8


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One construct of a script.

    Attributes:
        line: where its statement begins, from 1.
        column: where it stands in that line, from 0.
        construct: what it is, such as ``fully_shard(reshard_after_forward=)``.
        verdict: whether it is written otherwise, removed, kept, has no counterpart, or is not known here.
        code: what to write instead; may have several lines.
        reason: why, or what to know.
    """

    line: int
    column: int
    construct: str
    verdict: Verdict
    code: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """All findings of a script, in its order, and its training loop anew.

    Attributes:
        filename: the script.
        source: its text.
        findings: what was found.
        loop: the program to begin with, or "" where the script has no loop with a backward.
    """

    filename: str
    source: str
    findings: tuple[Finding, ...]
    loop: str = ""

    @property
    def missing(self) -> tuple[Finding, ...]:
        """What hpfunc has no counterpart for, and what this helper does not know."""
        return tuple(finding for finding in self.findings if finding.verdict in ("missing", "unknown"))

    def __str__(self) -> str:
        return "\n\n".join(part for part in (self._head(), self._lines(), self._missing(), self._loop()) if part)

    def to_json(self) -> str:
        """The same for a program: an object with the fields of `Report`, but for the source."""
        findings = [asdict(finding) for finding in self.findings]
        return json.dumps({"filename": self.filename, "findings": findings, "loop": self.loop}, indent=2)

    def _head(self) -> str:
        if not self.findings:
            return f"{self.filename}: nothing of FSDP2, torch.distributed or accelerate found"
        counts = Counter(_SAYS[finding.verdict] for finding in self.findings)
        return f"{self.filename}: " + ", ".join(f"{counts[text]} {text}" for text in _SAYS.values() if counts[text])

    def _lines(self) -> str:
        source = self.source.splitlines()
        blocks = []
        for line, findings in groupby(self.findings, key=lambda finding: finding.line):
            blocks.append("\n".join([f"{line:>6}  {source[line - 1].strip()}", *_paragraphs(findings)]))
        return "\n\n".join(blocks)

    def _missing(self) -> str:
        if not self.missing:
            return ""
        lines: dict[tuple[str, str], list[int]] = {}
        for finding in self.missing:
            lines.setdefault((finding.construct, finding.reason), []).append(finding.line)
        rows = [
            f"  {construct}: {reason} (line {', '.join(map(str, at))})" for (construct, reason), at in lines.items()
        ]
        fill = textwrap.TextWrapper(_WIDTH, subsequent_indent=" " * 4, break_long_words=False).fill
        return "Without a counterpart, or not known here:\n" + "\n".join(map(fill, rows))

    def _loop(self) -> str:
        if not self.loop:
            return ""
        return (
            "The training loop, to begin with; what else it does stays:\n\n"
            + textwrap.indent(self.loop, "    ").rstrip()
        )


def _paragraphs(findings: Iterable[Finding]) -> list[str]:
    """What to do about the constructs of one statement; the same advice stands once."""
    fill = textwrap.TextWrapper(_WIDTH, initial_indent=_INDENT + "  ", subsequent_indent=_INDENT + "  ").fill
    texts = []
    for finding in findings:
        option = f"  # {finding.construct}" if finding.construct.endswith("=)") else ""
        texts += [_INDENT + f"> {line}{option}" for line in finding.code.splitlines()]
        texts += [_INDENT + f"{_SAYS[finding.verdict]}: {finding.construct}"] if not finding.code else []
        texts += [fill(finding.reason)] if finding.reason else []
    return list(dict.fromkeys(texts))
