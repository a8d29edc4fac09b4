"""The step time that a schedule would have if nothing but compute and the wire took time.

The schedule of the run is replayed as the executor follows it: ops are issued in their order, an op waits for what it
touches, one link takes messages one after another at its full rate. Compute times come from a process that is alone,
the rate of the link from a probe of its own; nothing is fitted. Packing, sums, memory, Python and the processor time of
communication cost nothing here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from variants import LEARNING_RATE, WEIGHT_DECAY, Task

import hpfunc as hp


@dataclass(frozen=True, slots=True)
class Step:
    """One op of a schedule, as far as the replay needs it.

    Attributes:
        kind: ``"launch"``, ``"forward"``, ``"backward"``, or ``"local"`` for what takes no time.
        touches: the buffers that it reads, writes or frees.
        sent_bytes: bytes that a rank sends, for a launch.
    """

    kind: str
    touches: tuple[int, ...]
    sent_bytes: float = 0.0


def summary(schedule: hp.Schedule) -> list[dict[str, Any]]:
    """Returns the steps of a schedule as plain values."""
    return [asdict(_step(schedule, op)) for op in schedule.ops]


def sent_bytes(schedule: hp.Schedule) -> float:
    """Returns the bytes that a rank sends in a step."""
    return sum(_step(schedule, op).sent_bytes for op in schedule.ops)


def _step(schedule: hp.Schedule, op: Any) -> Step:
    match type(op).__name__:
        case "Launch":
            touches = tuple(sorted({region.buffer for region in (*op.reads, *op.writes)}))
            return Step("launch", touches, _sent_bytes(schedule, op))
        case "Compute":
            kind = schedule.program.events[op.event].kind
            return Step(kind, tuple(region.buffer for region in (*op.reads, *op.writes)))
        case "Local":
            return Step("local", tuple(region.buffer for region in (*op.reads, *op.writes)))
        case "Caller":
            return Step("local", tuple(region.buffer for region in op.writes))
        case "Free":
            return Step("local", (op.buffer,))
        case _:
            return Step("local", (op.region.buffer,))


def _sent_bytes(schedule: hp.Schedule, op: Any) -> float:
    axes = op.communicator.axes
    sizes = {w.gather_axes: w.num_shards for w in schedule.program.weights}
    sizes |= {w.reduce_axes: w.num_replicas for w in schedule.program.weights}
    size = sizes[axes]
    share = {"all_gather": size - 1.0, "all_reduce": 2 * (size - 1) / size}.get(op.collective, (size - 1) / size)
    buffers = schedule.buffers
    per_element = (buffers[r.buffer].size_bytes / buffers[r.buffer].numel for r in op.reads)
    return share * sum(region.numel * size_bytes for region, size_bytes in zip(op.reads, per_element, strict=True))


def replay(steps: list[Step], compute: dict[str, float], bytes_per_s: float) -> float:
    """Returns the seconds of a step.

    Args:
        steps: see `summary`.
        compute: what `compute_times` returned.
        bytes_per_s: what `probe_link` returned.
    """
    now = link_free = 0.0
    arrives: dict[int, float] = {}  # when the last message that touches a buffer has arrived
    for step in steps:
        now = max([now, *(arrives.get(buffer, 0.0) for buffer in step.touches if step.kind != "launch")])
        if step.kind == "launch":
            link_free = max(now, link_free) + step.sent_bytes / bytes_per_s
            arrives |= dict.fromkeys(step.touches, link_free)
        elif step.kind != "local":
            now += compute[step.kind]
    return max(now, link_free) + compute["update"]


def compute_times(task: Task, repetitions: int = 15) -> dict[str, float]:
    """Returns the seconds of a block's ``"forward"`` and ``"backward"``, and of AdamW's ``"update"`` of a rank's share.

    For a process that is alone, with whole weights and nothing to send.
    """
    blocks = [{n: w.requires_grad_() for n, w in block.items()} for block in task.model.weights()]
    share = torch.nn.Parameter(torch.zeros(task.model.whole_bytes // 4 // task.mesh[-1]))
    share.grad = torch.zeros_like(share)
    optimizer = torch.optim.AdamW([share], LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    taken: dict[str, list[float]] = {"forward": [], "backward": [], "update": []}
    for _ in range(repetitions + 2):
        losses: list[torch.Tensor] = []
        taken["forward"].append(_seconds(lambda losses=losses: losses.append(_loss(task, blocks))) / len(blocks))
        taken["backward"].append(_seconds(losses[0].backward) / len(blocks))
        taken["update"].append(_seconds(optimizer.step))
        for weight in (w for block in blocks for w in block.values()):
            weight.grad = None
    return {name: statistics.median(times[2:]) for name, times in taken.items()}


def _loss(task: Task, blocks: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    x = task.model.batch(0)
    for block in blocks:
        x = task.model.block(block, x)
    return x.pow(2).mean()


def _seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def probe_link(message_bytes: int = 1 << 22, in_flight: int = 3, count: int = 24) -> float:
    """Returns the bytes that a rank sends in a second while several all-gathers are under way; the best of three.

    Communication: 72 all-gathers of 4 MiB over all ranks.
    """
    size = dist.get_world_size()
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    sends = [torch.zeros(message_bytes // 4 // size) for _ in range(in_flight)]
    receives = [torch.zeros(message_bytes // 4 // size * size) for _ in range(in_flight)]

    def run() -> None:
        works: list[Any] = [None] * in_flight
        for i in range(count):
            slot = i % in_flight
            if works[slot] is not None:
                works[slot].wait()
            works[slot] = gather(receives[slot], sends[slot], async_op=True)
        for work in works:
            work.wait()

    def taken_s() -> float:
        dist.barrier()
        return _seconds(run)

    sent = count * (size - 1) * sends[0].nbytes
    return sent / min(taken_s() for _ in range(3))
