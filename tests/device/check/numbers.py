"""Rows i and v: the numbers of one rank, and of several."""

from __future__ import annotations

from tests.device.all_cases import CASES

from .found import Answer, Skip, Task, Wrong
from .programs import compare, group_of

NEED_SEVERAL = {  # programs that name a second rank
    *("permuted", "ring", "loss_scaled", "tensor_parallel", "experts", "saved_for_another_mesh"),
    *("tensor_parallel_example", "expert_parallel_example", "context_parallel_example"),
}


def one_rank(task: Task) -> Answer:
    """All programs on one rank, against one rank on a CPU."""
    names = [name for name in CASES if name not in NEED_SEVERAL]
    count, far, wrong = compare(task, names, 1)
    _judge(count, len(names), wrong)
    return Answer("done", f"{count} programs, {_farthest(task, far)}", {"programs": count, "farthest": far})


def several_ranks(task: Task) -> Answer:
    """All programs on as many ranks as they are for, against as many ranks on CPUs."""
    groups = {group_of(task, world) for world in (2, 4)}
    parts = [compare(task, [name for name, (_, size) in CASES.items() if size == world], world) for world in (4, 2)]
    count, wrong = sum(part[0] for part in parts), [text for part in parts for text in part[2]]
    far = max(part[1] for part in parts)
    _judge(count, len(CASES), wrong)
    text = f"{count} programs by {' and '.join(sorted(groups))}, {_farthest(task, far)}"
    return Answer("done", text, {"programs": count, "farthest": far})


def _judge(count: int, total: int, wrong: list[str]) -> None:
    if wrong:
        raise Wrong(f"{len(wrong)} of {count} programs: " + "; ".join(wrong))
    if count < total:
        raise Skip(f"out of time after {count} of {total} programs, which were right")


def _farthest(task: Task, far: float) -> str:
    return "the same bits" if task.device == "sim" else f"in float64 at most {far:.1e} off"
