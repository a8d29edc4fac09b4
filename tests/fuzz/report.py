"""What a run of the fuzzer says: finds by kind, features drawn, and a list for machines."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.cases import Case
from tests.fuzz.drive import Result
from tests.fuzz.features import features
from tests.fuzz.shrink import size


@dataclass
class Report:
    """Counts of a run.

    Attributes:
        path: where failures are written as they are found, one in a line.
        smallest: of each kind of finds, the smallest case, and what was seen.
    """

    path: Path | None = None
    num_cases: int = 0
    failures: list[Result] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    smallest: dict[str, tuple[Case, str]] = field(default_factory=dict)
    features: Counter[str] = field(default_factory=Counter)
    failing: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    refused_by: dict[str, Case] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)

    def add(self, result: Result) -> None:
        """Counts a result."""
        drawn = features(result.case)
        self.num_cases += 1
        self.features.update(drawn)
        self.notes.update(result.notes)
        for text in result.refused:
            self.refused[text] += 1
            known = self.refused_by.get(text)
            if known is None or size(result.case) < size(known):
                self.refused_by[text] = result.case
        if result.finds:
            self.failures.append(result)
            self._write(result)
            self.failing.update(drawn)
        for rank, find in result.finds:
            self.kinds[find.key] += 1
            known = self.smallest.get(find.key)
            if known is None or size(result.case) < size(known[0]):
                self.smallest[find.key] = result.case, f"rank {rank}: {find.text}"

    def summary(self, *, with_features: bool = True) -> str:
        """Returns all of it as text."""
        lines = []
        if with_features:
            lines += [f"drawn in {self.num_cases} cases (in brackets: how many of these failed)"]
            groups: dict[str, list[str]] = {}
            for name, count in sorted(self.features.items()):
                group, _, rest = name.partition(" ")
                shown = f"{rest or group} {count}" + (f" ({self.failing[name]})" if self.failing[name] else "")
                groups.setdefault(group if rest else "flags", []).append(shown)
            lines += [f"  {group}: {', '.join(shown)}" for group, shown in groups.items()]
        lines += [f"{count} cases: {note}" for note, count in self.notes.most_common()]
        for text, count in self.refused.most_common():
            lines.append(f"refused {count}: {text} (seed {self.refused_by[text].seed})")
        for key, count in self.kinds.most_common():
            case, text = self.smallest[key]
            lines += ["", f"FOUND {count}: {key}", f"  {text[-1200:]}", f"{case}"]
        lines.append(f"{self.num_cases} cases, {len(self.failures)} with finds, of {len(self.kinds)} kinds")
        return "\n".join(lines)

    def _write(self, result: Result) -> None:
        if self.path is None:
            return
        finds = [{"kind": f.kind, "stage": f.stage, "rank": rank, "text": f.text} for rank, f in result.finds]
        case = result.case
        line = {"seed": case.seed, "ranks": case.num_ranks, "finds": finds, "program": str(case)}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
