"""What packing, prefetch and zero-copy bring, phase by phase, on a mesh of 2 replicas x 2 shards.

Every combination trains the same transformer: nothing, everything, or what the network suggests is packed; 0, 1 or 2
units are gathered ahead; messages go out and come in where they lie, or through buffers of their own (`staged`). Once
with short sequences, where the network decides, and once with long ones, where compute does.
``launch.sh 4 1gbit,250mbit,2 experiments.py`` prints the tables.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import measure
import worker
from cases import Case
from measure import Results
from models import Model
from report import Verdict, verdict_table
from staged import staged
from variants import Task, Variant, train_hpfunc

import hpfunc as hp
from hpfunc import backends
from hpfunc._running.planned import Planned, Prepared
from hpfunc._transforms.plans import Plans
from hpfunc.planning.ops import Local, Op

NETWORK = "1gbit,250mbit,2"
LENGTHS = {
    "short": Task(Model(num_blocks=4, width=256, num_tokens=64), (2, 2)),
    "long": Task(Model(num_blocks=4, width=256, num_tokens=768), (2, 2)),
}
NUM_STEPS = {"short": 2, "long": 1}  # in a repetition: a phase of 0.1 s is noisy
PACKINGS: dict[str, float | None] = {"nothing": 0, "everything": math.inf, "by itself": None}
PREFETCHES = (0, 1, 2)
PHASES = ("forward", "backward", "update")
Record = dict[str, dict[str, Any]]
SLOWER_AT_LEAST, SLOWER_IN_THE_MIDDLE = 1.02, 1.05
PAYS, COSTS = 0.98, 1.02


@dataclass(frozen=True, slots=True)
class Choice:
    """One combination."""

    packing: str
    prefetch: int
    zero_copy: bool

    def __str__(self) -> str:
        return f"{self.packing}, {self.prefetch}, {'zero-copy' if self.zero_copy else 'copies'}"

    @property
    def name(self) -> str:
        """As a variant of hpfunc."""
        return f"hpfunc: {self}"

    @property
    def policy(self) -> hp.Policy:
        """What it asks of the planner."""
        return hp.Policy(prefetch=self.prefetch, pack_below_bytes=PACKINGS[self.packing])


# What packs differently is compared, and so measured side by side.
CHOICES = tuple(
    Choice(packing, prefetch, zero_copy)
    for zero_copy, prefetch, packing in product((True, False), PREFETCHES, PACKINGS)
)


# ------------------------------------------------------------------------------------------------------------- one step


class Watch:
    """Where the seconds of a step go: for each phase all of them, those of copies, and those of waits."""

    def __init__(self) -> None:
        self._counters = backends.get("torch").counters
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self.phases: dict[str, float] = {}
        self.windows: dict[str, tuple[float, float]] = {}
        self._start = self._origin = time.perf_counter()
        self._copied_s, self._waited_s = 0.0, self._counters.wait_s

    def mark(self, phase: str) -> None:
        """A phase has ended."""
        now = time.perf_counter()
        self.windows[phase] = self._start - self._origin, now - self._origin
        self.phases[phase] = now - self._start
        self.phases[f"{phase} copies"] = self._copied_s
        self.phases[f"{phase} waits"] = self._counters.wait_s - self._waited_s
        self._start, self._copied_s, self._waited_s = now, 0.0, self._counters.wait_s

    def copying(self, work: Callable[[Planned, Any], Any]) -> Callable[[Planned, Any], Any]:
        """Returns the work of an op, timed."""

        def timed(planned: Planned, op: Op) -> Any:
            begin = time.perf_counter()
            done = work(planned, op)
            self._copied_s += time.perf_counter() - begin
            return done

        return timed


class _Timed(Prepared):
    """A schedule whose copies are timed: packing, unpacking, and what `staged` adds. Sums of gradients are none."""

    def __init__(self, schedule: hp.Schedule, watch: Watch) -> None:
        super().__init__(schedule)
        for i, (op, work) in enumerate(zip(self.ops, self.works, strict=True)):
            if work is not None and isinstance(op, Local) and op.kind in _COPIES:
                self.works[i] = watch.copying(work)


_COPIES = ("pack_shards", "unpack_wholes", "pack_gradients", "copy")


class WatchedStep(hp.ShardedStep):
    """A planned step that may run a rewritten schedule, and whose copies are timed.

    hpfunc runs no other schedules than its own. So this overrides how it plans and what it keeps, which are private: it
    serves this experiment and nothing else.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: hp.Mesh,
        *,
        policy: hp.Policy,
        donate_argnums: tuple[int, ...],
        watch: Watch,
        zero_copy: bool,
    ) -> None:
        super().__init__(fn, mesh, None, None, policy, donate_argnums, False)
        self._plans = WatchedPlans(mesh, policy, watch, zero_copy)


class WatchedPlans(Plans):
    """Plans whose execution is watched, and which copy between staging buffers unless `zero_copy`."""

    def __init__(self, mesh: hp.Mesh, policy: hp.Policy, watch: Watch, zero_copy: bool) -> None:
        super().__init__(mesh, policy)
        self._watch, self._zero_copy = watch, zero_copy

    def make(self, program: hp.Program, *, measures: bool) -> hp.Schedule:
        """Plans a program, and puts staging buffers in unless it is to copy nothing."""
        schedule = super().make(program, measures=measures)
        if not self._zero_copy:
            schedule = staged(schedule)
            hp.check(schedule)
        return schedule

    def learn(self, session: Any, history: Any, expected: str) -> hp.Schedule:
        """Keeps what a call ran, watched from the next call on."""
        schedule = super().learn(session, history, expected)
        for program, prepared in self.kept.items():
            if not isinstance(prepared, _Timed):
                self.kept[program] = _Timed(prepared.schedule, self._watch)
        return schedule


def train(task: Task, choice: Choice) -> Variant:
    """Returns the variant of a choice. Its steps return the seconds of their phases."""
    watch = Watch()
    sharded = partial(WatchedStep, watch=watch, zero_copy=choice.zero_copy)
    variant = train_hpfunc(task, choice.policy, mark=watch.mark, sharded=sharded)

    def step() -> dict[str, float]:
        with hp.record_timeline() as timeline:
            watch.begin()
            variant.step()
            watch.mark("update")
        gathers = [(span.start_s, span.stop_s) for span in timeline.spans if span.lane == "gather"]
        return watch.phases | {f"{phase} gathers": covered_s(gathers, watch.windows[phase]) for phase in PHASES}

    return replace(variant, step=step)


def covered_s(spans: Iterable[tuple[float, float]], window: tuple[float, float]) -> float:
    """Returns how much of a window is covered by one span at least."""
    total, reached = 0.0, window[0]
    for start, stop in sorted(spans):
        begin, end = max(start, reached), min(stop, window[1])
        total += max(0.0, end - begin)
        reached = max(reached, end)
    return total


# ----------------------------------------------------------------------------------------------------- what was found


def base_of(choice: Choice) -> Choice:
    """Returns the choice that packs nothing and is the same otherwise."""
    return replace(choice, packing="nothing")


def is_slower(ratios: Sequence[float]) -> bool:
    """Returns whether paired ratios show more than noise: every pair by 2 % at least, half of them by 5 %."""
    return min(ratios) > SLOWER_AT_LEAST and statistics.median(ratios) > SLOWER_IN_THE_MIDDLE


def table_of(results: Results) -> str:
    """Returns the table of one length of sequences: a row for each choice."""
    head = ["packed, prefetch, messages", *(f"{phase} ms" for phase in (*PHASES, "step"))]
    head += ["forward / unpacked: min median max", "backward / unpacked: min median max"]
    head += ["forward: copies ms", "gathers ms", "waits ms", "backward: copies ms", "gathers ms", "waits ms", "quiet"]
    rows = []
    for choice in CHOICES:
        name, base = choice.name, base_of(choice)
        ms = partial(_ms, results, name)
        row = [str(choice), *(ms(quantity) for quantity in (*PHASES, "time_s"))]
        for phase in PHASES[:2]:
            row.append("" if choice == base else measure.spread(results.ratios(name, base.name, phase)))
        row += [ms(f"{phase} {part}") for phase in PHASES[:2] for part in ("copies", "gathers", "waits")]
        taken = results.repetitions[name]
        rows.append([*row, f"{0 if results.is_disturbed(name) else len(results.quiet(name))}/{len(taken)}"])
    return measure.table(head, rows)


def _ms(results: Results, name: str, quantity: str) -> str:
    return f"{1e3 * results.median(name, quantity):.1f}"


EFFECTS: dict[str, Callable[[Choice], Choice | None]] = {
    "everything / nothing packed": lambda c: replace(c, packing="nothing") if c.packing == "everything" else None,
    "packed by itself / nothing": lambda c: replace(c, packing="nothing") if c.packing == "by itself" else None,
    "prefetch 1 / 0": lambda c: replace(c, prefetch=0) if c.prefetch == 1 else None,
    "prefetch 2 / 1": lambda c: replace(c, prefetch=1) if c.prefetch == 2 else None,
    "zero-copy / copies": lambda c: replace(c, zero_copy=False) if c.zero_copy else None,
}


def effect(results: Results, of: str, quantity: str) -> list[float]:
    """Returns what a choice makes of a quantity: the median paired ratio for each setting of the other choices."""
    pairs = [(choice, other) for choice in CHOICES if (other := EFFECTS[of](choice)) is not None]
    return [statistics.median(results.ratios(choice.name, other.name, quantity)) for choice, other in pairs]


def effects_table(founds: dict[str, Results]) -> str:
    """Returns the table of what each choice brings: ratios over all settings of the others, smallest and largest."""
    head = ["min median max", *(f"{phase}, {length}" for length in founds for phase in (*PHASES[:2], "step"))]
    quantities = (*PHASES[:2], "time_s")
    rows = [
        [name, *(measure.spread(effect(results, name, q)) for results in founds.values() for q in quantities)]
        for name in EFFECTS
    ]
    return measure.table(head, rows)


def findings(founds: dict[str, Results]) -> str:
    """Returns in a sentence for each length of sequences which choice pays."""
    lines = []
    for length, results in founds.items():
        medians = {name: statistics.median(effect(results, name, "time_s")) for name in EFFECTS}
        groups = {
            "pays": [name for name, ratio in medians.items() if ratio < PAYS],
            "costs": [name for name, ratio in medians.items() if ratio > COSTS],
            "makes less than 2 % of a step": [name for name, ratio in medians.items() if PAYS <= ratio <= COSTS],
        }
        said = [
            f"{what}: {', '.join(f'{n} ({medians[n]:.2f})' for n in names)}" for what, names in groups.items() if names
        ]
        lines.append(f"- {length} sequences, step time. " + "; ".join(said) + ".")
    return "\n".join(lines)


def verdicts(founds: dict[str, Results]) -> list[Verdict]:
    """Returns for each length and packing in how many phases it is slower than nothing packed; none is asked for."""
    found = []
    for length, results in founds.items():
        for packing in PACKINGS:
            choices = [choice for choice in CHOICES if choice.packing == packing != "nothing"]
            ratios = {
                f"{phase} of {choice}": results.ratios(choice.name, base_of(choice).name, phase)
                for choice in choices
                for phase in PHASES[:2]
            }
            slow = {what: each for what, each in ratios.items() if is_slower(each)}
            if ratios:
                detail = "; ".join(f"{what} {measure.spread(each)}" for what, each in slow.items()) or "none"
                what = f"slower phases of {len(ratios)}, packing {packing}, {length}"
                found.append(Verdict(what, len(slow), 0, False, detail))
    return found


def results_of(record: Record) -> dict[str, Results]:
    """Returns what was measured for each length of sequences."""
    return {length: Results.of(found) for length, found in record.items()}


def section(record: Record) -> str:
    """Returns all tables."""
    founds, parts = results_of(record), []
    for length, results in founds.items():
        model, below = LENGTHS[length].model, record[length]["pack_below_bytes"] // 1024
        size = f"{model.num_blocks} blocks, {model.whole_bytes / 1e6:.0f} MB of weights"
        head = f"{length.capitalize()} sequences: {model.num_tokens} tokens on a rank, {size}; by itself hpfunc packs"
        parts += [f"{head} weights below {below} KiB.", table_of(results)]
    return "\n\n".join([*parts, "What each choice brings:", effects_table(founds), findings(founds)])


def plot(founds: dict[str, Results], path: Path) -> None:
    """Draws the forward and the backward of each choice."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(founds), 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (length, results) in zip(figure.subplots(1, len(founds), squeeze=False)[0], founds.items(), strict=True):
        left = [0.0] * len(CHOICES)
        for phase, color in zip(PHASES, ("#4C72B0", "#DD8452", "#BBBBBB"), strict=True):
            times_ms = [1e3 * results.median(choice.name, phase) for choice in CHOICES]
            axes.barh([str(choice) for choice in CHOICES], times_ms, left=left, color=color, height=0.7, label=phase)
            left = [a + b for a, b in zip(left, times_ms, strict=True)]
        axes.invert_yaxis()
        axes.set_xlabel("ms of a step, median")
        axes.set_title(f"{length} sequences", loc="left", fontsize=10)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.axes[0].set_ylabel("packed, units gathered ahead, messages")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=3, frameon=False)
    figure.savefig(path, dpi=110)


# ------------------------------------------------------------------------------------------------------------ measuring


def measure_length(task: Task, options: measure.Options) -> dict[str, Any]:
    """Times every choice, after all have trained to the same bits; returns everything as plain values."""
    variants = {choice.name: train(task, choice) for choice in CHOICES}
    worker.check_weights(Case("experiments", NETWORK, task, tuple(variants)), variants)
    results = measure.measure({name: variant.step for name, variant in variants.items()}, options)
    schedule = variants[next(choice.name for choice in CHOICES if choice.packing == "by itself")].schedule()
    assert schedule is not None
    return results.record() | {"pack_below_bytes": schedule.policy.pack_below_bytes}


def main() -> None:
    """Measures; rank 0 prints the tables, or writes a file."""
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--lengths", default=",".join(LENGTHS), help="with commas between them; default: all")
    add("--repetitions", type=int, default=4, help="rounds over all choices")
    add("--max-foreign", type=float, default=0.06, help="share of the machine that others may use in a repetition")
    add("--attempts", type=int, default=2, help="times that a disturbed repetition is taken")
    add("--json", type=Path, help="write to this file")
    args = parser.parse_args()
    measure.start()
    record = {}
    for length in args.lengths.split(","):
        num_steps = NUM_STEPS[length]
        options = measure.Options(args.repetitions, num_steps, args.max_foreign, args.attempts)
        record[length] = measure_length(LENGTHS[length], options)
        gc.collect()
    measure.finish(record, args.json, lambda: f"{section(record)}\n\n{verdict_table(verdicts(results_of(record)))}")


if __name__ == "__main__":
    main()
