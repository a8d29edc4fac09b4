"""The training loop of ``train_text.py``, which is the same on every framework: what a user of hpfunc writes."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import text
from transformer import Config, Layers

import hpfunc as hp

Tensor = Any
Say = Callable[[str], None]


@dataclass(frozen=True)
class Framework:
    """What differs between the frameworks.

    Attributes:
        plain: the functions of the model.
        init: makes its weights.
        loss: takes the functions, or units of them, the weights, inputs and labels.
        generate: draws text from whole weights.
        seed: seeds the generator that `init` draws from.
        tensor: makes a tensor of an array.
        without_grad: nothing in it is differentiated.
    """

    plain: Layers
    init: Callable[[Config], Any]
    loss: Callable[[Layers, Any, Tensor, Tensor], Tensor]
    generate: Callable[[Any, bytes, int, int, int], bytes]
    seed: Callable[[int], Any]
    tensor: Callable[[np.ndarray], Tensor]
    without_grad: Callable[[], AbstractContextManager[Any]]

    def units(self) -> Layers:
        """Returns the model's functions, each a unit: its weights are gathered together and dropped together."""
        return Layers(*map(hp.unit, self.plain))


def options(description: str | None, num_steps: int) -> argparse.Namespace:
    """Reads the command line; `num_steps` is the number of steps where it does not say."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--mesh", default="2,2", help="ranks as REPLICATE,SHARD (default 2,2)")
    add("--steps", type=int, default=num_steps)
    add("--batch", type=int, default=4, help="sequences a rank and step")
    add("--context", type=int, default=128, help="bytes a sequence")
    add("--dim", type=int, default=256)
    add("--layers", type=int, default=3)
    add("--rate", type=float, default=3e-3, help="the highest learning rate")
    add("--prefetch", type=int, default=1, help="units whose weights are gathered ahead")
    add("--release", choices=["forward", "backward", "never"], default="forward", help="when whole weights are dropped")
    add("--pack-below-bytes", type=float, help="smaller weights share a message (default: measured)")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("build/train_text"), help="where the picture and the schedule go")
    add("--quick", action="store_true", help="a tiny model and a few steps, to see that everything works")
    add("--check", action="store_true", help="compare 20 steps with one process on the same data")
    args = parser.parse_args()
    if args.quick:
        args.dim, args.layers, args.context, args.batch, args.steps = 32, 2, 32, 4, min(args.steps, 12)
    return args


def make_step(framework: Framework, optimizer: hp.optim.Optimizer, mesh: hp.Mesh, policy: hp.Policy) -> hp.ShardedStep:
    """Returns the training step."""
    layers = framework.units()

    def loss_fn(params: Any, inputs: Tensor, labels: Tensor) -> Tensor:
        return framework.loss(layers, params, inputs, labels)

    def step_fn(params: Any, state: Any, inputs: Tensor, labels: Tensor) -> tuple[Any, Any, Tensor]:
        loss, grads = hp.value_and_grad(loss_fn)(params, inputs, labels)
        updates, state = optimizer.update(grads, state, params)
        return hp.apply_updates(params, updates), state, hp.pmean(loss, mesh.data_axes)

    return hp.sharded(step_fn, mesh, policy=policy, donate_argnums=(0, 1))


def batch(args: argparse.Namespace, data: text.Text, framework: Framework, step: int, rank: int) -> list[Tensor]:
    """Returns the inputs and labels of a rank in a step."""
    return [framework.tensor(x) for x in data.batch(args.seed, step, rank, args.batch, args.context)]


def evaluate(framework: Framework, params: Any, mesh: hp.Mesh, inputs: np.ndarray, labels: np.ndarray) -> float:
    """Returns the bits per byte; every rank looks at its own part of the windows."""
    layers = framework.units()

    def eval_fn(params: Any, inputs: Tensor, labels: Tensor) -> Tensor:
        with framework.without_grad():
            return hp.pmean(framework.loss(layers, params, inputs, labels), mesh.data_axes)

    cut = hp.P(("replicate", "shard"))
    step = hp.sharded(eval_fn, mesh, in_specs=(None, cut, cut))
    starts = range(0, len(inputs), 64)
    losses = [step(params, *(framework.tensor(x[start : start + 64]) for x in (inputs, labels))) for start in starts]
    return sum(map(float, losses)) / len(losses) / math.log(2)


@contextmanager
def progress(show: bool, total: int) -> Iterator[Callable[[str], None]]:
    """Yields a function that moves a progress bar on by one step."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
    with Progress(*columns, disable=not show) as bar:
        task = bar.add_task("", total=total)
        yield lambda line: bar.update(task, advance=1, description=line)


def train(args: argparse.Namespace, mesh: hp.Mesh, data: text.Text, framework: Framework, say: Say) -> None:
    """Trains, evaluates, generates, and draws a step."""
    config = Config(args.dim, args.layers, args.context)
    framework.seed(args.seed)
    params = hp.init(lambda: framework.init(config), mesh, hp.P("shard"))
    schedule = hp.optim.warmup_cosine(args.rate, args.steps // 20, args.steps, start=args.rate / 20, end=args.rate / 20)
    optimizer = hp.optim.chain(hp.optim.clip_by_global_norm(1.0), hp.optim.adamw(schedule, weight_decay=0.01))
    state = optimizer.init(params)
    policy = hp.Policy(args.prefetch, args.release, args.pack_below_bytes)
    step = make_step(framework, optimizer, mesh, policy)
    num_weights = sum(math.prod(x.shape) for x in leaves(params))
    say(f"{mesh}, {num_weights / 1e6:.1f} million weights, {len(data.train) / 1e6:.1f} MB of text, {policy}")

    begin, tokens = time.perf_counter(), mesh.size * args.batch * args.context
    with progress(mesh.rank == 0, args.steps) as advance:
        for number in range(args.steps):
            params, state, loss = step(params, state, *batch(args, data, framework, number, mesh.rank))
            rate = tokens * (number + 1) / (time.perf_counter() - begin)
            sent = sum(step.last_counters.bytes_sent.values()) / 1e6 if step.last_counters else 0.0
            advance(f"loss {float(loss) / math.log(2):.3f} bits/byte, {rate:,.0f} tokens/s, {sent:.1f} MB sent a rank")
    say(f"trained {args.steps} steps in {time.perf_counter() - begin:.0f} s; step {step.last_counters}")

    inputs, labels = data.held_out_windows(64 if args.quick else 512, args.context)
    bits = evaluate(framework, params, mesh, inputs, labels)
    bigram = text.bigram_bits_per_byte(data.train, inputs, labels)
    say(f"held out: {bits:.3f} bits per byte; a bigram model has {bigram:.3f} ({100 * (bits / bigram - 1):+.1f} %)")

    with hp.record_timeline() as timeline:
        params, state, _ = step(params, state, *batch(args, data, framework, args.steps, mesh.rank))
    whole = hp.unshard(params)
    if mesh.rank == 0:
        report(args, step, timeline)
        prompt = b"def main(args):\n    "
        count = 40 if args.quick else 240
        say("a sample:\n" + framework.generate(whole, prompt, count, args.context, args.seed).decode(errors="replace"))


def leaves(tree: Any) -> list[Any]:
    """Returns the sharded arrays of a tree."""
    import optree

    return optree.tree_leaves(tree, is_leaf=lambda x: isinstance(x, hp.ShardedArray))


def report(args: argparse.Namespace, step: hp.ShardedStep, timeline: hp.Timeline) -> None:
    """Saves the schedule and the picture of a step, and says how much of the communication was hidden."""
    args.out.mkdir(parents=True, exist_ok=True)
    assert step.last_schedule is not None
    (args.out / "schedule.txt").write_text(str(step.last_schedule))
    timeline.save(
        str(args.out / "timeline.png"), f"one training step, rank 0 of {args.mesh}, {step.last_schedule.policy}"
    )
    for lane, (total_s, hidden_s) in timeline.overlap_s().items():
        print(f"{lane}: {1e3 * total_s:.0f} ms, of which {1e3 * hidden_s:.0f} ms passed while a unit computed")
    print(f"peak of the plan: {hp.check(step.last_schedule).peak_bytes / 1e6:.1f} MB beside shards and activations")
    print(f"schedule: {args.out / 'schedule.txt'}, picture: {args.out / 'timeline.png'}")


def main(description: str | None, framework: Framework, check: Callable[..., int], num_steps: int = 200) -> int:
    """Runs what the command line asks for."""
    args = options(description, num_steps)
    sizes = tuple(int(size) for size in args.mesh.split(","))
    mesh = hp.make_mesh(sizes, ("replicate", "shard"), timeout_s=120)

    def say(line: str) -> None:
        if mesh.rank == 0:
            print(line, flush=True)

    if args.check:
        return check(args, mesh, text.standard_library(), say)
    train(args, mesh, text.standard_library(), framework, say)
    return 0
