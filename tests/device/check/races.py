"""Row ii: no race is found, and slow streams change no bit."""

from __future__ import annotations

import itertools

import torch

from tests.device.harness import Conditions, Observed

from .found import Answer, Skip, Task, Wrong
from .programs import distance, group_of, on_cpus, on_ranks

# One for each way in which streams meet: prefetch, buckets, recomputation, carried gradients, norms, leaving a plan.
PROGRAMS = ("far_prefetch", "bucketed", "checkpoint", "accumulate_scatter", "clipped", "leaving")
DELAYS = {"compute": 100, "gather": 1500, "reduce_scatter": 1500}  # microseconds
FORGETS = {"forgotten_event_wait": 3}


def races(task: Task) -> Answer:
    """Each program as it is, with each stream late, and with a look at all accesses to memory."""
    world = 2
    group = group_of(task, world)
    if group.startswith("gloo"):
        raise Skip("gloo makes the host wait for each collective, so no stream can be ahead of another one")
    faults = FORGETS if task.is_planted else {}
    late = [Conditions(delays={stream: delay_us}, faults=faults) for stream, delay_us in DELAYS.items()]
    looks = Conditions(faults=faults, finds_races=True)  # last of all: what looks on CUDA looks from then on
    runs, right = 0, {}
    for name, conditions in [*itertools.product(PROGRAMS, late), *((name, looks) for name in PROGRAMS)]:
        if task.left_s() < 10:
            raise Skip(f"out of time after {runs} runs, in which nothing was found")
        how = f"{name}, late: {', '.join(conditions.delays) or 'none'}"
        task.note(how)
        if name not in right:
            right[name] = _right(task, name, world)
        _judge(how, right[name], on_ranks(task, name, world, conditions))
        runs += 1
    finder = "vector clocks" if task.device == "sim" else "torch's sanitizer"
    return Answer("done", f"{runs} runs by {group}: the same bits, and {finder} found nothing", {"runs": runs})


def _right(task: Task, name: str, world: int) -> list[list[torch.Tensor]]:
    """Returns the numbers that must not change: the CPU's, and those of the GPU itself where these have other bits."""
    if task.device == "sim":
        return on_cpus(task, name, world)
    return [each.result for each in on_ranks(task, name, world, Conditions())]


def _judge(how: str, want: list[list[torch.Tensor]], observed: list[Observed]) -> None:
    found = [text for each in observed for text in each.races + each.errors]
    if found:
        raise Wrong(f"{how}: {len(found)} found, first: {found[0].splitlines()[0]}")
    for rank, (each, right) in enumerate(zip(observed, want, strict=True)):
        if distance(each.result, right) > 0:
            raise Wrong(f"{how}: rank {rank} has other bits")
