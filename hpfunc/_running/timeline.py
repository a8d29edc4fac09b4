"""`Timeline`: time spans of compute and of each kind of communication, and their picture."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

LANES = ("compute", "gather", "reduce_scatter", "all_reduce")
_COLORS = {"compute": "#4C72B0", "gather": "#55A868", "reduce_scatter": "#DD8452", "all_reduce": "#C44E52"}


@dataclass(frozen=True, slots=True)
class Span:
    """A time span of compute or of one collective.

    Attributes:
        lane: ``"compute"``, or the kind of communication.
        name: name of the op in the schedule.
        start_s: seconds since the timeline began; for communication, of the launch.
        stop_s: likewise; for communication, of the completion, on a CPU as gloo reports it.
    """

    lane: str
    name: str
    start_s: float
    stop_s: float


@dataclass(slots=True)
class Timeline:
    """Spans of the planned steps that ran inside `record_timeline`, on this rank."""

    spans: list[Span] = field(default_factory=list)
    _origin: float = field(default_factory=time.perf_counter)
    _open: dict[str, float] = field(default_factory=dict)

    def begin(self, name: str) -> None:
        """A use of a unit begins to compute."""
        self._open[name] = self._now()

    def end(self, name: str) -> None:
        """The use has computed."""
        start = self._open.pop(name, None)
        if start is not None:
            self.spans.append(Span("compute", name, start, self._now()))

    def launched(self, lane: str, name: str, pending: Any) -> None:
        """A collective was launched; its span ends when it completes."""
        start = self._now()
        pending.when_done(lambda: self.spans.append(Span(lane, name, start, self._now())))

    def _now(self) -> float:
        return time.perf_counter() - self._origin

    def overlap_s(self) -> dict[str, tuple[float, float]]:
        """Returns, for each kind of communication, its seconds and those of them during which a unit computed."""
        compute = [span for span in self.spans if span.lane == "compute"]
        found = {}
        for lane in LANES[1:]:
            spans = [span for span in self.spans if span.lane == lane]
            hidden = sum(max(0.0, min(s.stop_s, c.stop_s) - max(s.start_s, c.start_s)) for s in spans for c in compute)
            found[lane] = sum(s.stop_s - s.start_s for s in spans), hidden
        return found

    def save(self, path: str, title: str = "") -> None:
        """Draws the spans as one lane each for compute, gather, reduce-scatter and all-reduce.

        Args:
            path: ends in ``.svg``, ``.png`` or another format that matplotlib writes.
            title: title of the picture.

        Raises:
            ImportError: matplotlib is not installed (it comes with ``hpfunc[examples]``).
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 2.8), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for place, lane in enumerate(LANES):
            bars = [(1e3 * s.start_s, 1e3 * (s.stop_s - s.start_s)) for s in self.spans if s.lane == lane]
            axes.broken_barh(
                bars, (len(LANES) - 1 - place - 0.38, 0.76), facecolors=_COLORS[lane], edgecolor="white", lw=0.4
            )
        axes.set_yticks(range(len(LANES)), [lane.replace("_", "-") for lane in reversed(LANES)])
        axes.set_ylim(-0.6, len(LANES) - 0.4)
        axes.set_xlabel("ms")
        axes.set_title(title or "one step", loc="left")
        axes.grid(axis="x", alpha=0.3)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        figure.savefig(path, dpi=150)
