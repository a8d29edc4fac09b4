"""What the ``fsdp_demo.py`` of every framework show: one model, one loss, and six ways to run a step of it.

The mesh and the policy decide which communication there is and when. They change no loss: those of HSDP are equal bit
for bit, and all agree with one process that computes in float64 without hpfunc.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import optree
import text
from training import Framework, Say, batch, make_step
from transformer import Config

import hpfunc as hp

TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
Judge = Callable[[Framework, argparse.Namespace, Config, int, text.Text, int], tuple[list[np.ndarray], list[float]]]


@dataclass(frozen=True)
class Way:
    """A mesh and a policy.

    Attributes:
        name: for people.
        replicates: whether there are two replicas, so HSDP.
        policy: how the step is scheduled.
    """

    name: str
    replicates: bool
    policy: hp.Policy


ALONE: dict[str, Any] = {"pack_below_bytes": 0}  # each weight in a message of its own, without a copy
WAYS = (
    Way("FSDP, ZeRO-3", False, hp.Policy.zero3(**ALONE)),
    Way("HSDP, ZeRO-3", True, hp.Policy.zero3(**ALONE)),
    Way("HSDP, ZeRO-2", True, hp.Policy.zero2(**ALONE)),
    Way("HSDP, ZeRO-1", True, hp.Policy.zero1(**ALONE)),
    Way("HSDP, two units ahead", True, hp.Policy(prefetch=2, **ALONE)),
    Way("HSDP, all fused", True, hp.Policy(pack_below_bytes=math.inf, reduce_bucket_bytes=math.inf)),
)


def options(description: str | None, arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line, or these arguments."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=5)
    add("--dim", type=int, default=256)
    add("--layers", type=int, default=4)
    add("--batch", type=int, default=4, help="sequences a rank and step")
    add("--context", type=int, default=64, help="bytes a sequence")
    add("--rate", type=float, default=0.125, help="of SGD")
    add("--dtype", choices=list(TOLERANCE), default="float32")
    add("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def run(
    way: Way, args: argparse.Namespace, mesh: hp.Mesh, data: text.Text, framework: Framework
) -> tuple[list[np.ndarray], list[float], hp.Schedule]:
    """Returns the whole weights after training, the losses, and the plan of a step."""
    framework.seed(args.seed)
    config = Config(args.dim, args.layers, args.context, args.dtype)
    params: Any = hp.init(lambda: framework.init(config), mesh, hp.P("shard"))
    optimizer = hp.optim.sgd(args.rate)
    step, state, losses = make_step(framework, optimizer, mesh, way.policy), optimizer.init(params), []
    for number in range(args.steps):
        params, state, loss = step(params, state, *batch(args, data, framework, number, mesh.rank))
        losses.append(float(loss))
    assert step.last_schedule is not None
    return [np.asarray(leaf) for leaf in optree.tree_leaves(hp.unshard(params))], losses, step.last_schedule


def middle_of_backward(schedule: hp.Schedule) -> str:
    """Returns what is issued from the backward of one block to that of the next, without copies and frees."""
    slots = [slot for slot in schedule.slots if schedule.program.events[slot.event].kind == "backward"]
    middle = [slot.when for slot in slots].index("after", len(slots) // 2 - 1)
    ops = [op for slot in slots[middle - 1 : middle + 2] for op in slot.ops]
    shown = [op for op in ops if op.name.startswith(("gather", "backward", "reduce_scatter", "all_reduce"))]
    return table([(op.stream, op.name, f"waits for {', '.join(op.waits)}" if op.waits else "") for op in shown])


def table(rows: list[tuple[str, ...]]) -> str:
    """Returns rows of cells as text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def row(way: Way, schedule: hp.Schedule) -> tuple[str, ...]:
    """Returns what a plan costs a rank."""
    report = hp.check(schedule)
    launches = f"{report.hidden_launches} of {sum(report.launches.values())}"
    sizes = report.peak_bytes, report.sent_bytes["all_gather"], sum(report.sent_bytes.values())
    return way.name, str(report.max_whole_units), *(f"{size / 1e6:.2f} MB" for size in sizes), launches


def main(args: argparse.Namespace, framework: Framework, judge: Judge, make_mesh: Any = hp.make_mesh) -> int:
    """Runs all ways, compares them, and returns 0 if they agree."""
    data, world = text.standard_library(), make_mesh((-1,), ("shard",))
    pairs = make_mesh((2, world.size // 2), ("replicate", "shard"))

    def say(line: str) -> None:
        if world.rank == 0:
            print(line, flush=True)

    rows: list[tuple[str, ...]] = [("", "units whole", "peak", "gathers", "all sent", "launches beside compute")]
    found = []
    for way in WAYS:
        weights, losses, schedule = run(way, args, pairs if way.replicates else world, data, framework)
        found.append((weights, losses))
        rows.append(row(way, schedule))
        if way is WAYS[1]:
            say(f"The middle of the backward, {way.name}:\n\n{middle_of_backward(schedule)}\n")
    say(f"A step on each of {world.size} ranks, {args.dtype}:\n\n{table(rows)}\n")
    config = Config(args.dim, args.layers, args.context, args.dtype)
    judged = judge(framework, args, config, world.size, data, args.steps) if world.rank == 0 else None
    good = judged is None or compare(found, judged, TOLERANCE[args.dtype], say)
    say("all agree" if good else "they DISAGREE")
    return 0 if good else 1


def compare(found: list[Any], judged: tuple[list[np.ndarray], list[float]], tolerance: float, say: Say) -> bool:
    """Says the losses of each way, and whether they are right."""
    rows = [("loss of step", *map(str, range(len(judged[1]))), "worst weight")]
    rows.append(("one process, float64", *(f"{loss:.8f}" for loss in judged[1]), ""))
    worst = 0.0
    for way, (weights, losses) in zip(WAYS, found, strict=True):
        pairs = zip(weights, judged[0], strict=True)
        apart = max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)
        worst = max(worst, apart, *(abs(a - b) / b for a, b in zip(losses, judged[1], strict=True)))
        rows.append((way.name, *(f"{loss:.8f}" for loss in losses), f"{apart:.1e}"))
    say(table(rows))
    _, first, *others = found
    equal = all(losses == first[1] and all(map(np.array_equal, weights, first[0])) for weights, losses in others)
    bits = "equal bits" if equal else "OTHER bits"
    say(f"\nworst difference {worst:.1e} (at most {tolerance:g}); HSDP in five ways: {bits}")
    return equal and worst <= tolerance
