"""``train_text.py --check``: 20 steps over all ranks against 20 of plain MindSpore in one process, on the same data."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, cast

import mindspore
import model
import numpy as np
import optree
from text import Text
from training import Framework, batch, make_step
from transformer import Config

import hpfunc as hp

NUM_STEPS = 20
RATE = 0.1
LEAF_TOLERANCE = 1e-5
LOSS_TOLERANCE = 1e-5


def run(framework: Framework, args: argparse.Namespace, mesh: hp.Mesh, data: Text, say: Callable[[str], None]) -> int:
    """Compares, prints what it found, and returns 0 if all is well, on every rank alike."""
    config = Config(args.dim, args.layers, args.context)
    policy = hp.Policy(args.prefetch, args.release, args.pack_below_bytes)
    framework.seed(args.seed)
    params: Any = hp.init(lambda: framework.init(config), mesh, hp.P("shard"))
    optimizer = hp.optim.sgd(RATE)
    step, state, losses = make_step(framework, optimizer, mesh, policy), optimizer.init(params), []
    for number in range(NUM_STEPS):
        params, state, loss = step(params, state, *batch(args, data, framework, number, mesh.rank))
        losses.append(float(loss))
    whole = hp.unshard(params)

    say("float32 with SGD: relative difference of each leaf after 20 steps, and of each loss")
    worst = apart = 0.0
    if mesh.rank == 0:
        wanted, wanted_losses = _alone(framework, args, config, RATE, mesh.size, data, NUM_STEPS)
        for path, got, want in zip(optree.tree_paths(whole), optree.tree_leaves(whole), wanted, strict=True):
            difference = float(np.linalg.norm(got.asnumpy() - want) / np.linalg.norm(want))
            say(f"  {difference:.1e}  {'.'.join(map(str, path))}")
            worst = max(worst, difference)
        for number, (got, want) in enumerate(zip(losses, wanted_losses, strict=True)):
            say(f"  {number:2d}  {want:.6f}  {abs(got - want):.1e}")
            apart = max(apart, abs(got - want))
    found = hp.pmax(mindspore.Tensor.from_numpy(np.array([worst, apart])), mesh.axis_names, mesh=mesh)
    worst, apart = map(float, found)
    good = worst <= LEAF_TOLERANCE and apart <= LOSS_TOLERANCE
    say(f"worst leaf {worst:.1e} (at most {LEAF_TOLERANCE:g}), worst loss {apart:.1e} (at most {LOSS_TOLERANCE:g})")
    say("check passed" if good else "check FAILED")
    return 0 if good else 1


def _alone(
    framework: Framework,
    args: argparse.Namespace,
    config: Config,
    rate: float,
    num_ranks: int,
    data: Text,
    num_steps: int,
    dtype: Any = None,
) -> tuple[list[np.ndarray], list[float]]:
    """Returns the weights after training on the mean of all ranks' losses, in this process, without hpfunc."""
    framework.seed(args.seed)
    leaves, treedef = optree.tree_flatten(cast(Any, model.init(config)))
    leaves = [leaf if dtype is None else leaf.astype(dtype) for leaf in leaves]
    losses = []
    for number in range(num_steps):
        batches = [batch(args, data, framework, number, rank) for rank in range(num_ranks)]

        def mean(*leaves: Any) -> Any:
            params = cast(Any, optree.tree_unflatten(treedef, leaves))
            return sum(model.loss(model.PLAIN, params, *batch) for batch in batches) / num_ranks  # noqa: B023

        loss, gradients = mindspore.value_and_grad(mean, tuple(range(len(leaves))))(*leaves)
        leaves = [leaf - rate * gradient for leaf, gradient in zip(leaves, gradients, strict=True)]
        losses.append(float(loss))
    return [leaf.asnumpy() for leaf in leaves], losses


def judge(
    framework: Framework, args: argparse.Namespace, config: Config, num_ranks: int, data: Text, num_steps: int
) -> tuple[list[np.ndarray], list[float]]:
    """Returns weights and losses of a training with SGD in this process, without hpfunc, in float64."""
    return _alone(framework, args, config, args.rate, num_ranks, data, num_steps, mindspore.float64)
