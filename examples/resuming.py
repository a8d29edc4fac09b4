"""What the ``resume.py`` of every framework share: a run that may end at any time and go on on other ranks.

All that a step depends on is one tree, which a checkpoint holds: weights, the optimizer's state (its step with it), the
place in the text, and the state of the generator that the noise is drawn from. A step's batch is the same for any
number of ranks, each of which takes its rows of it; so the losses are too, but for the order of sums.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import text
from training import Framework, Say, make_step, progress
from transformer import Config

import hpfunc as hp

NUM_SEQUENCES = 12  # a step, over all ranks: 1, 2, 3, 4, 6 or 12 of them
NOISE = 0.1  # of the bytes that the model sees are others than those of the text
CURVE = "losses.json"


def options(description: str | None, arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line, or these arguments."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=Path("build/resume"), help="where checkpoints and the curve are, and go to")
    add("--steps", type=int, default=60)
    add("--every", type=int, default=10, help="steps from one checkpoint to the next")
    add("--kill-at", type=int, help="after this step rank 0 kills itself, as a machine does that fails")
    add("--compare", type=Path, help="the folder of another run: say how far apart the losses are, and draw them")
    add("--tolerance", type=float, default=1e-4, help="how far apart they may be, relatively")
    add("--dim", type=int, default=64)
    add("--layers", type=int, default=2)
    add("--context", type=int, default=64, help="bytes a sequence")
    add("--dtype", choices=["float32", "float64"], default="float32")
    return parser.parse_args(arguments)


def fresh_state(args: argparse.Namespace, mesh: hp.Mesh, framework: Framework, optimizer: hp.optim.Optimizer) -> Any:
    """Returns the state of a run that begins. What a checkpoint has is loaded like it."""
    framework.seed(0)
    config = Config(args.dim, args.layers, args.context, args.dtype)
    params = hp.init(lambda: framework.init(config), mesh, hp.P("shard"))
    return {
        "params": params,
        "optimizer": optimizer.init(params),
        "position": 0,
        "random": _to_text(np.random.default_rng(0)),
        "losses": "[]",
        "saved by": f"{mesh.size} ranks of {mesh.framework}",
    }


def _to_text(generator: np.random.Generator) -> str:
    return json.dumps(generator.bit_generator.state)


def _to_generator(state: str) -> np.random.Generator:
    generator = np.random.default_rng()
    generator.bit_generator.state = json.loads(state)
    return generator


def batch(data: text.Text, position: int, generator: np.random.Generator, context: int) -> tuple[Any, Any, int]:
    """Returns the inputs and labels of a step over all ranks, and where the next one begins."""
    end = position + NUM_SEQUENCES * context
    if end >= len(data.train):
        position, end = 0, NUM_SEQUENCES * context
    labels = data.train[position + 1 : end + 1].reshape(NUM_SEQUENCES, context)
    inputs = data.train[position:end].reshape(NUM_SEQUENCES, context)
    noise = generator.integers(0, text.NUM_BYTES, inputs.shape)
    inputs = np.where(generator.random(inputs.shape) < NOISE, noise, inputs)
    return inputs.astype(np.int64), labels.astype(np.int64), end


def train(args: argparse.Namespace, mesh: hp.Mesh, data: text.Text, framework: Framework, say: Say) -> list[float]:
    """Trains from the last checkpoint on, or from the beginning, and returns the losses of all steps."""
    schedule = hp.optim.warmup_cosine(3e-3, args.steps // 20, args.steps)
    optimizer = hp.optim.chain(hp.optim.clip_by_global_norm(1.0), hp.optim.adamw(schedule))
    state = fresh_state(args, mesh, framework, optimizer)
    if (found := hp.checkpoint.latest(args.out)) is not None:
        state = hp.checkpoint.load(args.out, like=state)
        say(f"resumed after step {found} on {mesh.size} ranks of {mesh.framework}; saved by {state['saved by']}")

    step = make_step(framework, optimizer, mesh, hp.Policy())
    params, opt_state, position = state["params"], state["optimizer"], state["position"]
    generator, losses = _to_generator(state["random"]), json.loads(state["losses"])
    mine = NUM_SEQUENCES // mesh.size
    rows = slice(mesh.rank * mine, (mesh.rank + 1) * mine)
    with progress(mesh.rank == 0, args.steps - len(losses)) as advance:
        while len(losses) < args.steps:
            inputs, labels, position = batch(data, position, generator, args.context)
            tensors = framework.tensor(inputs[rows]), framework.tensor(labels[rows])
            params, opt_state, loss = step(params, opt_state, *tensors)
            losses.append(float(loss))
            advance(f"step {len(losses)}, loss {losses[-1]:.4f}")
            if len(losses) % args.every == 0:
                now = {"params": params, "optimizer": opt_state, "position": position, "losses": json.dumps(losses)}
                now |= {"random": _to_text(generator), "saved by": f"{mesh.size} ranks of {mesh.framework}"}
                hp.checkpoint.save(args.out, now, step=len(losses), keep=2)
            if len(losses) == args.kill_at and mesh.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    return losses


def compare(args: argparse.Namespace, losses: list[float], say: Say) -> int:
    """Says how far apart two runs are, draws both, and returns 1 if that is too far."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    others = json.loads((args.compare / CURVE).read_text())
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses, others, strict=True))
    say(f"losses differ by {apart:.1e} of {args.compare / CURVE}, relatively (at most {args.tolerance:g})")
    _, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    axes.plot(others, linewidth=5, alpha=0.4, label=str(args.compare))
    axes.plot(losses, label=str(args.out))
    axes.set(xlabel="step", ylabel="loss, nats a byte")
    axes.legend()
    plt.savefig(args.out / "losses.png", dpi=150)
    return int(not apart <= args.tolerance)


def main(description: str | None, framework: Framework) -> int:
    """Runs what the command line asks for."""
    args = options(description)
    mesh = hp.make_mesh((-1,), ("shard",))
    if NUM_SEQUENCES % mesh.size:
        raise SystemExit(f"{NUM_SEQUENCES} sequences are not the same number on each of {mesh.size} ranks")

    def say(line: str) -> None:
        if mesh.rank == 0:
            print(line, flush=True)

    losses = train(args, mesh, text.standard_library(), framework, say)
    say("losses: " + " ".join(f"{loss:.3f}" for loss in losses))
    if mesh.rank != 0:
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / CURVE).write_text(json.dumps(losses))
    return compare(args, losses, say) if args.compare else 0
