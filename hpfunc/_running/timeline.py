"""`Timeline`: time spans of compute and of each kind of communication, and their picture."""

from __future__ import annotations

from dataclasses import dataclass

from ..backends.protocol import Mark, Pending

LANES = ("compute", "gather", "reduce_scatter", "all_reduce")
_COLORS = {"compute": "#4C72B0", "gather": "#55A868", "reduce_scatter": "#DD8452", "all_reduce": "#C44E52"}


@dataclass(frozen=True, slots=True)
class Span:
    """A time span of compute or of one collective.

    Attributes:
        lane: ``"compute"``, or the kind of communication.
        name: name of the op in the schedule.
        start_s: seconds since the first span began. Communication begins when it is launched, on a device when its
            stream begins it.
        stop_s: likewise, of the completion, on a CPU as gloo reports it.
    """

    lane: str
    name: str
    start_s: float
    stop_s: float


class Timeline:
    """Spans of the planned steps that ran inside `record_timeline`, on this rank."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._marked: list[tuple[str, str, Mark, Mark]] = []
        self._begun: dict[str, Mark] = {}
        self._origin: Mark | None = None

    @property
    def spans(self) -> list[Span]:
        """The spans, in the order in which they were recorded. Waits until a device has done what is recorded."""
        for lane, name, start, stop in self._marked:
            assert self._origin is not None
            self._spans.append(Span(lane, name, start.seconds_after(self._origin), stop.seconds_after(self._origin)))
        self._marked.clear()
        return self._spans

    def begin(self, name: str, moment: Mark) -> None:
        """A use of a unit begins to compute."""
        self._origin = self._origin or moment
        self._begun[name] = moment

    def end(self, name: str, moment: Mark) -> None:
        """The use has computed."""
        if name in self._begun:
            self._marked.append(("compute", name, self._begun.pop(name), moment))

    def launched(self, lane: str, name: str, pending: Pending) -> None:
        """A collective was launched."""
        self._origin = self._origin or pending.begun
        self._marked.append((lane, name, pending.begun, pending.completed))

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
