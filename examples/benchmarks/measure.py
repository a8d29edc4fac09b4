"""Interleaved timing of steps that several processes take together, on a machine that others use too.

Every repetition notes how much processor time went to anybody but the ranks. One that was disturbed is repeated, a few
times, and left out of the figures if it never was quiet. Variants alternate, so that the slow drift of a shared machine
hits all of them alike, and are compared by the ratios of repetitions that were taken side by side.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Step = Callable[[], Mapping[str, float] | None]
"""Takes a step; may return quantities of it, as the seconds of its phases."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_NUM_CORES = os.cpu_count() or 1


def start() -> tuple[int, int]:
    """Joins the ranks that `launch.sh` started; returns this rank and their number."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{os.environ['BENCH_STORE']}", rank=rank, world_size=size)
    return rank, size


def finish(record: Any, path: Path | None, text: Callable[[], str]) -> None:
    """Rank 0 writes the record as JSON, or prints the text if there is no path; then all leave."""
    if dist.get_rank() == 0 and path is not None:
        path.write_text(json.dumps(record))
    elif dist.get_rank() == 0:
        print(text(), flush=True)
    dist.barrier()
    dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class Repetition:
    """One measurement of one variant, per step.

    Attributes:
        time_s: wall time of the slowest rank.
        cpu_s: processor time of a rank, its communication threads included; the mean over ranks.
        sent_bytes: bytes that this rank's network device sent, headers included.
        foreign: share of the machine's processor time that went to anybody but the ranks.
        phases: the quantities that the step returned, each on the rank where it is largest.
    """

    time_s: float
    cpu_s: float
    sent_bytes: float
    foreign: float
    phases: dict[str, float] = field(default_factory=dict)

    def value(self, quantity: str) -> float:
        """Returns an attribute or a phase by its name."""
        return self.phases[quantity] if quantity in self.phases else getattr(self, quantity)


@dataclass(frozen=True, slots=True)
class Options:
    """How to measure.

    Attributes:
        repetitions: rounds over all variants.
        steps: steps in a repetition.
        max_foreign: a repetition with more foreign load was disturbed.
        attempts: times that a disturbed repetition is taken.
        patience_s: how long to wait for a quiet machine before each attempt.
    """

    repetitions: int = 7
    steps: int = 1
    max_foreign: float = 0.06
    attempts: int = 3
    patience_s: float = 4.0


@dataclass(slots=True)
class Results:
    """Every repetition of every variant, in the order in which they were taken."""

    options: Options
    repetitions: dict[str, list[Repetition]] = field(default_factory=dict)

    def quiet(self, name: str) -> list[Repetition]:
        """Returns the repetitions that nobody disturbed; all of them if there is none."""
        found = [r for r in self.repetitions[name] if self._is_quiet(r)]
        return found or self.repetitions[name]

    def is_disturbed(self, name: str) -> bool:
        """Returns whether a variant was never measured on a quiet machine."""
        return not any(map(self._is_quiet, self.repetitions[name]))

    def median(self, name: str, quantity: str) -> float:
        """Returns the median of an attribute or a phase of `Repetition`."""
        return statistics.median(r.value(quantity) for r in self.quiet(name))

    def ratios(self, name: str, base: str, quantity: str = "time_s") -> list[float]:
        """Returns the step times (or another quantity) as multiples of another variant's, paired, smallest first."""
        pairs = list(zip(self.repetitions[name], self.repetitions[base], strict=True))
        quiet = [(a, b) for a, b in pairs if self._is_quiet(a) and self._is_quiet(b)]
        return sorted(a.value(quantity) / b.value(quantity) for a, b in quiet or pairs)

    @classmethod
    def of(cls, record: dict[str, Any]) -> Results:
        """Returns what `record` wrote down."""
        taken = {name: [Repetition(**r) for r in each] for name, each in record["repetitions"].items()}
        return cls(Options(**record["options"]), taken)

    def record(self) -> dict[str, Any]:
        """Returns everything as plain values, for a file."""
        found = {name: [asdict(r) for r in taken] for name, taken in self.repetitions.items()}
        return {"options": asdict(self.options), "repetitions": found}

    def _is_quiet(self, repetition: Repetition) -> bool:
        return repetition.foreign <= self.options.max_foreign


def measure(steps: Mapping[str, Step], options: Options) -> Results:
    """Times every variant in each round, each round beginning with another one. The steps have run before.

    Communication: each step's own, and a few small messages between repetitions.
    """
    names, results = list(steps), Results(options)
    results.repetitions = {name: [] for name in names}
    gc.collect()
    gc.freeze()  # so that the collections before each repetition are quick
    for i in range(options.repetitions):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            results.repetitions[name].append(_quiet_repetition(steps[name], options))
    gc.unfreeze()  # the caller may let go of the steps
    return results


def _quiet_repetition(step: Step, options: Options) -> Repetition:
    best: Repetition | None = None
    for _ in range(options.attempts):
        _wait_until_quiet(options)
        taken = _repetition(step, options.steps)
        best = taken if best is None or taken.foreign < best.foreign else best
        if best.foreign <= options.max_foreign:
            break
    assert best is not None
    return best


def _repetition(step: Step, num_steps: int) -> Repetition:
    gc.collect()
    dist.barrier()
    time.sleep(0.05)
    dist.barrier()
    machine, own, sent, begin = _machine_cpu_s(), _own_cpu_s(), _sent_bytes(), time.perf_counter()
    phases = Counter[str]()
    for _ in range(num_steps):
        phases.update(step() or {})
    elapsed_s, own, sent = time.perf_counter() - begin, _own_cpu_s() - own, _sent_bytes() - sent
    dist.barrier()
    machine, window_s = _machine_cpu_s() - machine, time.perf_counter() - begin
    slowest, ranks_cpu = torch.tensor([elapsed_s], dtype=torch.float64), torch.tensor([own], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(ranks_cpu)
    foreign = torch.tensor([max(0.0, machine - ranks_cpu.item()) / (window_s * _NUM_CORES)], dtype=torch.float64)
    dist.broadcast(foreign, 0)  # so that all ranks judge a repetition alike
    cpu_s = ranks_cpu.item() / dist.get_world_size() / num_steps
    largest = torch.tensor(list(phases.values()), dtype=torch.float64)
    if phases:
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    each = dict(zip(phases, (largest / num_steps).tolist(), strict=True))
    return Repetition(slowest.item() / num_steps, cpu_s, sent / num_steps, foreign.item(), each)


def peak_bytes(step: Step) -> dict[str, int]:
    """Returns the resident bytes before a step, and by how much they rise at most in it; the median of three.

    Set ``MALLOC_MMAP_THRESHOLD_=65536``, so that freed memory goes back to the system. Linux only.

    Communication: that of five steps.
    """
    found = []
    for _ in range(5):
        gc.collect()
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        before = _status_bytes("VmRSS")
        step()
        found.append((_status_bytes("VmHWM") - before, before))
    rise, before = statistics.median_low(found[2:]), statistics.median(b for _, b in found[2:])
    return {"before": int(before), "rise": rise[0]}


def _status_bytes(field_name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field_name))


def _wait_until_quiet(options: Options) -> None:
    deadline = time.monotonic() + options.patience_s
    while True:
        before = _machine_cpu_s()
        time.sleep(0.2)
        busy = torch.tensor([(_machine_cpu_s() - before) / (0.2 * _NUM_CORES), time.monotonic() - deadline])
        dist.broadcast(busy, 0)
        if busy[0].item() <= options.max_foreign or busy[1].item() > 0:
            return


def _machine_cpu_s() -> float:
    """Returns the processor time of all processes since the machine started; interrupts are nobody's."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    return sum(map(int, fields[:3])) / _TICKS_PER_S


def _own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _sent_bytes() -> float:
    """Returns the bytes that this rank has sent; on loopback, which all share, the mean over the ranks."""
    device = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    names = ["eth0", "eth1"] if device == "eth0" else [device]
    counters = [Path("/sys/class/net") / name / "statistics/tx_bytes" for name in names]
    sent = sum(int(counter.read_text()) for counter in counters if counter.exists())
    return sent / int(os.environ["WORLD_SIZE"]) if device == "lo" else sent


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown, the first column flush left."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (
            f"{cell:{'<' if i == 0 else '>'}{width}}" for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join([first, *rest])} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(head), line(rule), *map(line, rows)])


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Returns minimum, median and maximum of some ratios."""
    ordered = sorted(values)
    return " ".join(f"{v:.{digits}f}" for v in (ordered[0], statistics.median(ordered), ordered[-1]))
