"""Tensor parallelism in the manner of Megatron-LM, beside FSDP and replication: a mesh of three axes.

    torchrun --standalone --nproc-per-node 8 examples/torch/tensor_parallel.py

Ranks along "tp" see the same data and hold a part of each matrix: of the first matrix of a pair some outputs (of
attention: some heads), of the second the inputs that belong to them. What the second gives is a partial sum, so
`psum` ends the pair. `pvary` begins it: from there ranks compute different things, so in backward their gradients are
summed. "tp" is not a data axis: hpfunc itself neither gathers nor reduces anything over it. The others work as ever,
on the parts. ``--check`` compares some steps with one process in float64.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

import hpfunc as hp

sys.path.insert(0, str(Path(__file__).parents[1]))
import text

SIZES, AXES, DATA_AXES = (2, 2, 2), ("replicate", "shard", "tp"), ("replicate", "shard")
NUM_PLACES = 4  # along the data axes
DIM, HEAD_DIM, LAYERS, CONTEXT, BATCH = 64, 16, 2, 32, 4
Map = Callable[[Tensor], Tensor]

OUTPUTS = hp.P(("tp", "shard"))  # rows are cut twice: inside of a unit, a rank has the rows of its place along "tp"
INPUTS = hp.P("shard", "tp")  # inside of a unit: all rows, and the columns of its place along "tp"
UNCUT = hp.P("shard")  # inside of a unit: all of it, the same along "tp"
LAYER = dict.fromkeys(("query", "key", "value", "up"), OUTPUTS) | {"output": INPUTS, "down": INPUTS, "norms": UNCUT}
SPECS = {"embed": UNCUT, "layers": [LAYER] * LAYERS, "head": UNCUT}


def init(dtype: torch.dtype) -> Any:
    """Returns whole weights; `hp.init` keeps this rank's part of each."""

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, dtype=dtype) / columns**0.5

    def layer() -> Any:
        square = {name: matrix(DIM, DIM) for name in ("query", "key", "value", "output")}
        mlp = {"up": matrix(4 * DIM, DIM), "down": matrix(DIM, 4 * DIM)}
        return square | mlp | {"norms": torch.ones(2, DIM, dtype=dtype)}

    embed = {"byte": matrix(256, DIM), "place": matrix(CONTEXT, DIM)}
    return {"embed": embed, "layers": [layer() for _ in range(LAYERS)], "head": matrix(256, DIM)}


def embed(weights: Any, inputs: Tensor) -> Tensor:
    return F.embedding(inputs, weights["byte"]) + weights["place"]


def block(weights: Any, x: Tensor, enter: Map, leave: Map) -> Tensor:
    """Attention and MLP, of as many heads and as wide as the weights that are here."""
    h = enter(F.rms_norm(x, (DIM,), weights["norms"][0]))
    wide = (F.linear(h, weights[name]).unflatten(-1, (-1, HEAD_DIM)) for name in ("query", "key", "value"))
    query, key, value = (each.transpose(1, 2) for each in wide)
    seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    x = x + leave(F.linear(seen.transpose(1, 2).flatten(2), weights["output"]))
    h = enter(F.rms_norm(x, (DIM,), weights["norms"][1]))
    return x + leave(F.linear(F.gelu(F.linear(h, weights["up"])), weights["down"]))


def head(weights: Tensor, x: Tensor) -> Tensor:
    return F.linear(F.rms_norm(x, (DIM,)), weights)


def loss_of(functions: Any, params: Any, inputs: Tensor, labels: Tensor) -> Tensor:
    """Returns the loss of the model that is made of these three functions."""
    embed, block, head = functions
    x = embed(params["embed"], inputs)
    for weights in params["layers"]:
        x = block(weights, x)
    return F.cross_entropy(head(params["head"], x).flatten(0, 1), labels.flatten())


def batch(data: text.Text, step: int, place: int) -> list[Tensor]:
    """Returns the inputs and labels of a place along the data axes."""
    return [torch.from_numpy(x) for x in data.batch(0, step, place, BATCH, CONTEXT)]


def train(mesh: hp.Mesh, data: text.Text, optimizer: Any, steps: int, dtype: torch.dtype, run: Any = hp.sharded) -> Any:
    """Returns the whole weights after some steps, and the losses."""
    torch.manual_seed(0)
    params = hp.init(partial(init, dtype), mesh, SPECS)
    parallel = partial(block, enter=lambda x: hp.pvary(x, "tp"), leave=lambda x: hp.psum(x, "tp"))
    loss_fn = partial(loss_of, (hp.unit(embed), hp.unit(parallel, name="block"), hp.unit(head)))

    def step_fn(params: Any, state: Any, inputs: Tensor, labels: Tensor) -> Any:
        loss, grads = hp.value_and_grad(loss_fn)(params, inputs, labels)
        updates, state = optimizer.update(grads, state, params)
        return hp.apply_updates(params, updates), state, hp.pmean(loss, DATA_AXES, mesh=mesh)

    step, state, losses = run(step_fn, mesh), optimizer.init(params), []
    for number in range(steps):
        here = [x.to(mesh.device) for x in batch(data, number, mesh.axis_index(DATA_AXES))]
        params, state, loss = step(params, state, *here)
        losses.append(float(loss))
    return hp.unshard(params, AXES), losses


def alone(data: text.Text, rate: float, steps: int) -> Any:
    """The same with SGD in this process, without hpfunc: there is nothing to enter or to leave."""
    torch.manual_seed(0)
    params = init(torch.float64)
    optimizer = torch.optim.SGD([leaf.requires_grad_() for leaf in optree.tree_leaves(cast(Any, params))], rate)
    loss_fn = partial(loss_of, (embed, partial(block, enter=lambda x: x, leave=lambda x: x), head))
    for number in range(steps):
        optimizer.zero_grad()
        torch.stack([loss_fn(params, *batch(data, number, place)) for place in range(NUM_PLACES)]).mean().backward()
        optimizer.step()
    return optree.tree_map(torch.detach, params)


def main() -> int:
    mesh, data = hp.make_mesh(SIZES, AXES, DATA_AXES), text.standard_library()
    if "--check" in sys.argv:
        got, _ = train(mesh, data, hp.optim.sgd(0.5), 5, torch.float64, partial(hp.sharded, debug=True))
        pairs = zip(optree.tree_leaves(got), optree.tree_leaves(alone(data, 0.5, 5)), strict=True)
        worst = max(float((a - b).norm() / b.norm()) for a, b in pairs)
        print(f"rank {mesh.rank}: weights differ by {worst:.1e} of their norm or less")
        return int(worst > 1e-12)
    _, losses = train(mesh, data, hp.optim.adamw(3e-3), 100, torch.float32)
    if mesh.rank == 0:
        print("bits per byte:", *(f"{loss / math.log(2):.2f}" for loss in losses[::10]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
