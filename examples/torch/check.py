"""``train_text.py --check``: 20 steps over all ranks against 20 of plain torch in one process, on the same data."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import model
import numpy as np
import optree
import torch
from text import Text
from training import Framework, batch, make_step
from transformer import Config

import hpfunc as hp

NUM_STEPS = 20
RATE = 0.1
LEAF_TOLERANCE = 1e-10
LOSS_TOLERANCE = 1e-5


def run(framework: Framework, args: argparse.Namespace, mesh: hp.Mesh, data: Text, say: Callable[[str], None]) -> int:
    """Compares, prints what it found, and returns 0 if all is well, on every rank alike."""
    policy = hp.Policy(args.prefetch, args.release, args.pack_below_bytes)
    double = Config(args.dim, args.layers, args.context, "float64")
    single = Config(args.dim, args.layers, args.context, "float32")

    weights, _ = _sharded(framework, args, double, hp.optim.sgd(RATE), mesh, policy, data)
    say("float64 with SGD: relative difference of each leaf after 20 steps")
    worst = 0.0
    if mesh.rank == 0:
        sgd = partial(torch.optim.SGD, lr=RATE)
        wanted, _ = _alone(framework, args, double, sgd, mesh.size, data, NUM_STEPS)
        for path, got, want in zip(optree.tree_paths(weights), optree.tree_leaves(weights), wanted, strict=True):
            difference = float((got - want).norm() / want.norm())
            say(f"  {difference:.1e}  {'.'.join(map(str, path))}")
            worst = max(worst, difference)

    _, losses = _sharded(framework, args, single, hp.optim.adamw(1e-3, weight_decay=0.01), mesh, policy, data)
    say("float32 with AdamW: loss of each step, and its difference")
    apart = 0.0
    if mesh.rank == 0:
        adamw = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.01)
        _, wanted = _alone(framework, args, single, adamw, mesh.size, data, NUM_STEPS)
        for number, (got, want) in enumerate(zip(losses, wanted, strict=True)):
            say(f"  {number:2d}  {want:.6f}  {abs(got - want):.1e}")
            apart = max(apart, abs(got - want))

    found = torch.tensor([worst, apart], dtype=torch.float64)
    worst, apart = hp.pmax(found, mesh.axis_names, mesh=mesh).tolist()
    good = worst <= LEAF_TOLERANCE and apart <= LOSS_TOLERANCE
    say(f"worst leaf {worst:.1e} (at most {LEAF_TOLERANCE:g}), worst loss {apart:.1e} (at most {LOSS_TOLERANCE:g})")
    say("check passed" if good else "check FAILED")
    return 0 if good else 1


def _sharded(
    framework: Framework,
    args: argparse.Namespace,
    config: Config,
    optimizer: hp.optim.Optimizer,
    mesh: hp.Mesh,
    policy: hp.Policy,
    data: Text,
) -> tuple[Any, list[float]]:
    """Returns the whole weights after training with hpfunc, and the loss of each step."""
    torch.manual_seed(args.seed)
    params = hp.init(lambda: model.init(config), mesh, hp.P("shard"))
    step, state, losses = make_step(framework, optimizer, mesh, policy), optimizer.init(params), []
    for number in range(NUM_STEPS):
        params, state, loss = step(params, state, *batch(args, data, framework, number, mesh.rank))
        losses.append(float(loss))
    return hp.unshard(params), losses


def _alone(
    framework: Framework,
    args: argparse.Namespace,
    config: Config,
    make_optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    num_ranks: int,
    data: Text,
    num_steps: int,
    dtype: torch.dtype | None = None,
) -> tuple[list[torch.Tensor], list[float]]:
    """Returns the weights after training on the mean of all ranks' losses, in this process, without hpfunc."""
    torch.manual_seed(args.seed)
    params = cast(Any, optree.tree_map(lambda leaf: leaf.to(dtype), cast(Any, model.init(config))))
    leaves, losses = [leaf.requires_grad_() for leaf in optree.tree_leaves(params)], []
    optimizer = make_optimizer(leaves)
    for number in range(num_steps):
        each = [
            model.loss(model.PLAIN, params, *batch(args, data, framework, number, rank)) for rank in range(num_ranks)
        ]
        loss = torch.stack(each).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return [leaf.detach() for leaf in leaves], losses


def judge(
    framework: Framework, args: argparse.Namespace, config: Config, num_ranks: int, data: Text, num_steps: int
) -> tuple[list[np.ndarray], list[float]]:
    """Returns weights and losses of a training with SGD in this process, without hpfunc, in float64."""
    sgd = partial(torch.optim.SGD, lr=args.rate)
    leaves, losses = _alone(framework, args, config, sgd, num_ranks, data, num_steps, torch.float64)
    return [leaf.numpy() for leaf in leaves], losses
