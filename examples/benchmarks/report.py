"""Tables, plots and targets of the benchmarks, from what `worker.py` wrote."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure
from cases import Case, Target

Found = dict[str, Any]
BASE = "hpfunc"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a target is met.

    Attributes:
        what: in words.
        value: what was found.
        bound: what was asked for.
        at_least: the bound is a lower one.
        detail: minimum, median and maximum, or where the value comes from.
    """

    what: str
    value: float
    bound: float
    at_least: bool
    detail: str = ""

    @property
    def is_met(self) -> bool:
        """Whether it is."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def row(self) -> list[str]:
        """Returns it as a row of a table."""
        sign = "at least" if self.at_least else "at most"
        return [self.what, f"{self.value:.2f}", self.detail, f"{sign} {self.bound:.2f}", "yes" if self.is_met else "NO"]


VERDICT_HEAD = ["target", "found", "min median max", "asked for", "met"]


def table_of(case: Case, found: Found) -> str:
    """Returns the table of a case: a row for each variant."""
    results = measure.Results.of(found)
    head = ["variant", "quiet", "step ms: min median max", "step / hpfunc: min median max", "MB sent", "CPU ms"]
    head += ["MB copied", "blocked ms", "foreign %"]
    rows = []
    for name, taken in results.repetitions.items():
        quiet, counters = results.quiet(name), found["counters"].get(name)
        rows.append([
            name,
            f"{0 if results.is_disturbed(name) else len(quiet)}/{len(taken)}",
            measure.spread([1e3 * r.time_s for r in quiet], 0),
            measure.spread(results.ratios(name, BASE)) if BASE in results.repetitions else "",
            f"{results.median(name, 'sent_bytes') / 1e6:.1f}",
            f"{1e3 * results.median(name, 'cpu_s'):.0f}",
            "" if counters is None else f"{counters['bytes_copied'] / 1e6:.1f}",
            "" if counters is None else f"{1e3 * counters['wait_s']:.0f}",
            f"{100 * results.median(name, 'foreign'):.0f}",
        ])  # fmt: skip
    return measure.table(head, rows)


def verdicts(case: Case, found: Found) -> list[Verdict]:
    """Returns the targets of a case, and what was found."""
    results = measure.Results.of(found)
    wanted = [target for target in case.targets if all(name in results.repetitions for name in (*target.others, BASE))]
    return [_verdict(results, target) for target in wanted]


def _verdict(results: measure.Results, target: Target) -> Verdict:
    best = min(target.others, key=lambda name: results.median(name, "time_s"))
    ratios = results.ratios(best, BASE)
    label = f"{best} / {BASE}" + ("" if target.goal is None else f" (goal {target.goal})")
    return Verdict(label, statistics.median(ratios), target.must, True, measure.spread(ratios))


def plot(cases: dict[str, Case], founds: dict[str, Found], folder: Path) -> list[Path]:
    """Draws the step times of each case; returns the files."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    paths = []
    for key, found in founds.items():
        results = measure.Results.of(found)
        names = list(results.repetitions)[::-1]
        figure = Figure(figsize=(8, 0.36 * len(names) + 1.2), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        times_ms = [[1e3 * r.time_s for r in results.quiet(name)] for name in names]
        medians = [statistics.median(times) for times in times_ms]
        spread = [[m - min(t) for m, t in zip(medians, times_ms, strict=True)]]
        spread += [[max(t) - m for m, t in zip(medians, times_ms, strict=True)]]
        colors = ["#C44E52" if name.startswith("hpfunc") else "#8C8C8C" for name in names]
        axes.barh(names, medians, xerr=spread, color=colors, height=0.7, error_kw={"lw": 1})
        axes.set_xlabel("ms a step: median, minimum and maximum")
        axes.set_title(f"({key}) {cases[key].title}", loc="left", fontsize=10)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        paths.append(folder / f"case_{key}.png")
        figure.savefig(paths[-1], dpi=110)
    return paths


def verdict_table(found: Sequence[Verdict]) -> str:
    """Returns a table of targets."""
    return measure.table(VERDICT_HEAD, [verdict.row() for verdict in found])
