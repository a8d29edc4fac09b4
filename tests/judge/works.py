"""What one rank's host issues: the works of some steps, with the caller's own in between, and the memory they touch.

Note [The world of the judge]. The caller's arrays, its optimizer and whatever it computes between two uses of units
live on the stream of compute: it writes the shards before a step and writes them again after it, an array that the step
makes is written just before its first use, and what is delivered is read when it is delivered, and once more by the
optimizer, unless the caller drops it at once. None of this waits for another stream unless an op of the schedule does.
With `beginnings=False` everything waits for the caller and the caller for everything: the world in which schedules have
neither beginning nor end.

Memory is kept by stream: a buffer takes that of its own (`Buffer.stream`) when the host issues its first op, and gives
it back when the host issues its `Free`, or drops what was delivered, whatever is still under way. With `pressure`
somebody takes at once, and keeps, what was given back, and somebody has just given back what is taken. With beginnings,
memory of compute is left out of the latter: there only the caller gives something back, between two events, as always.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from hpfunc.planning.ops import Compute, Deliver, Free, Launch, Local, Op, Region, Slot
from hpfunc.planning.schedule import Schedule
from tests.judge.world import World


@dataclass(frozen=True, slots=True)
class Rules:
    """What the judge demands, and how hard it tries.

    Attributes:
        beginnings: the caller's stream orders nothing by itself. See Note [The world of the judge].
        borrowed: gradients are autograd's: nobody else may write into them, or hand them over.
        pressure: memory is never idle. See Note [The world of the judge].
        num_steps: how often the schedule runs, one step right after another.
        max_states: after so many states in which more than one action was to be tried, the judge gives up.
        all_of: the ranks of which nothing is left out that Note [What the judge leaves out] leaves out.
    """

    beginnings: bool = True
    borrowed: bool = True
    pressure: bool = False
    num_steps: int = 2
    max_states: int = 2000
    all_of: tuple[int, ...] = ()


class Span(NamedTuple):
    """Elements of a cell: of a buffer in one step, or of a shard."""

    cell: int
    start: int
    stop: int


@dataclass(slots=True)
class Work:
    """Something that takes time on a stream.

    Attributes:
        kind: ``update`` writes all shards, and reads what was delivered; ``made`` writes those that the step makes;
            ``other`` just takes memory for itself.
        step: which step it is in, or before.
        event: of its slot.
        segment: which gradient its `Deliver` is part of.
        waits: the works that have to be complete before it starts.
        scratch: the cell of the memory that it takes and gives back by itself, if any.
        kept: for a `Deliver`, the span that its caller may keep; for an ``update``, all of those.
    """

    kind: Literal["op", "update", "made", "other"]
    name: str
    stream: str
    step: int
    op: Op | None = None
    event: int = 0
    segment: int = 0
    waits: list[int] = field(default_factory=list)
    reads: list[Span] = field(default_factory=list)
    writes: list[Span] = field(default_factory=list)
    scratch: int | None = None
    kept: list[tuple[Span, int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Life:
    """Memory that is taken from a pool by the work `taken`, and may be another's once the work `given` is issued.

    `taken` is None for what the caller keeps: it was taken as what it drops.
    """

    cell: int
    pool: str
    numel: int
    taken: int | None
    given: int | None = None


class Rank:
    """The works of one rank, in the order in which its host issues them.

    Attributes:
        sizes: elements of each cell.
        lives: of the cells that are taken from a pool.
        twins: by cell, the cell that the caller sees if it keeps what is delivered.
        shards: the cell of each shard, by buffer; the caller's.
        buffers: the buffer of each cell.
        made: the event before which the step makes the array of a shard, by buffer, for those that it makes.
    """

    def __init__(self, schedule: Schedule, world: World, rules: Rules) -> None:
        self.schedule, self.world = schedule, world
        self.beginnings, self.pressure = rules.beginnings, rules.pressure
        self.works: list[Work] = []
        self.sizes: list[int] = []
        self.lives: dict[int, Life] = {}
        self.twins: dict[int, int] = {}
        self._mains: dict[int, int] = {}
        self.shards = {i: self._cell(b.numel) for i, b in enumerate(schedule.buffers) if b.kind == "shard"}
        self.buffers = {cell: i for i, cell in self.shards.items()}
        first_uses = {i: self._first_use(i) for i in self.shards}
        self.made = {i: event for i, event in first_uses.items() if event is not None}
        self._kept: list[tuple[Span, int, int]] = []
        self._cells: dict[int, int] = {}
        self._update(0)
        for step in range(rules.num_steps):
            self._step(step)
            self._update(step + 1)

    def _cell(self, numel: int) -> int:
        self.sizes.append(numel)
        return len(self.sizes) - 1

    def _first_use(self, buffer: int) -> int | None:
        """Returns the event before which the step makes the array of a shard; None if it is there before."""
        weight = self.schedule.buffers[buffer].weight
        if weight is None or self.world.program.weights[weight].origin is not None:
            return None
        return self.world.first_uses.get(weight)

    # ------------------------------------------------------------------------------------------------------ the caller

    def _update(self, step: int) -> None:
        writes = [Span(cell, 0, self.sizes[cell]) for cell in self.shards.values()]
        work = Work("update", f"update {step}", "compute", step, writes=writes, kept=self._kept)
        work.reads = [span for span, _, _ in self._kept]
        for twin, main in ((span.cell, self._mains[span.cell]) for span in work.reads):  # dropped as the host goes on
            pool, numel = self.lives[main].pool, self.sizes[main]
            self.lives[twin] = Life(twin, pool, numel if self.beginnings else 0, None, len(self.works))
        self._kept = []
        if not self.beginnings:
            work.waits = list(range(len(self.works)))
        self._scratch(work)
        self.works.append(work)

    def _scratch(self, work: Work) -> None:
        """Lets a work take memory of its stream for itself, and give it back, while the host issues it."""
        work.scratch = self._cell(1)
        here = len(self.works)
        self.lives[work.scratch] = Life(work.scratch, work.stream, 1, here, here)

    def _other(self, step: int, stream: str, *, keeps: bool = False) -> None:
        work = Work("other", f"other {len(self.works)}", stream, step)
        self._scratch(work)
        if keeps and work.scratch is not None:
            self.lives[work.scratch].given = None
        self.works.append(work)

    def _make(self, step: int, event: int) -> None:
        cells = [self.shards[buffer] for buffer, first in self.made.items() if first == event]
        writes = [Span(cell, 0, self.sizes[cell]) for cell in cells]
        self.works.append(Work("made", f"made {step}.{event}", "compute", step, writes=writes))

    # -------------------------------------------------------------------------------------------------------- the step

    def _step(self, step: int) -> None:
        self._cells = dict(self.shards)
        numbers: dict[str, int] = {}
        begin = len(self.works)
        last: Slot | None = None
        to_make = sorted(set(self.made.values()), reverse=True) if self.beginnings else []
        for event, slot, op in in_order(self.schedule):
            if slot is not last and slot.when == "before":
                self._other(step, "compute")
            last = slot
            while to_make and to_make[-1] <= event:
                self._make(step, to_make.pop())
            self._press_before(op, step)
            work = Work("op", f"{op.name} {step}", op.stream, step, op, event)
            numbers[op.name] = len(self.works)
            work.segment = self.world.segment(event, slot.when)
            self._touch(work, op)
            self.works.append(work)
            if self.pressure and isinstance(op, (Free, Deliver)):
                given = op.buffer if isinstance(op, Free) else op.region.buffer
                self._other(step, self.schedule.buffers[given].stream, keeps=True)
        for work in self.works[begin:]:
            if work.op is not None:
                work.waits = [numbers[name] for name in work.op.waits]
            if not self.beginnings:
                work.waits.append(begin - 1)

    def _press_before(self, op: Op, step: int) -> None:
        """Lets somebody give back what an op is going to take."""
        writes = op.writes if self.pressure and isinstance(op, (Compute, Launch, Local)) else ()
        pools = {self.schedule.buffers[r.buffer].stream for r in writes if r.buffer not in self._cells}
        for stream in sorted(pools - {"compute"} if self.beginnings else pools):
            self._other(step, stream)

    def _touch(self, work: Work, op: Op) -> None:
        here = len(self.works)
        match op:
            case Free():
                self.lives[self._cells[op.buffer]].given = here
            case Deliver():
                span = self._span(op.region, here)
                work.reads, work.writes = [span], [span]
                twin = self.twins.setdefault(span.cell, -1)
                if twin < 0:
                    twin = self.twins[span.cell] = self._cell(self.sizes[span.cell])
                    self._mains[twin] = span.cell
                kept = (Span(twin, span.start, span.stop), work.segment, op.weight)
                work.kept = [kept]
                self._kept.append(kept)
                if self.beginnings:
                    self.lives[span.cell].given = here
            case Compute() | Launch() | Local():
                work.reads = [self._span(region, here) for region in op.reads]
                work.writes = [self._span(region, here) for region in op.writes]
                if isinstance(op, Compute):
                    self._scratch(work)

    def _span(self, region: Region, here: int) -> Span:
        if region.buffer not in self._cells:
            cell = self._cells[region.buffer] = self._cell(self.schedule.buffers[region.buffer].numel)
            self.buffers[cell] = region.buffer
            self.lives[cell] = Life(cell, self.schedule.buffers[region.buffer].stream, self.sizes[cell], here)
        return Span(self._cells[region.buffer], region.start, region.stop)


def in_order(schedule: Schedule) -> Iterator[tuple[int, Slot, Op]]:
    """Yields the ops as the host issues them: the work of a `Compute` is the caller's, after all else in its slot."""
    for slot in schedule.slots:
        last = [op for op in slot.ops if isinstance(op, Compute)]
        for op in [op for op in slot.ops if not isinstance(op, Compute)] + last:
            yield slot.event, slot, op
