"""Context parallelism (ring attention), beside FSDP and replication: a mesh of three axes.

    torchrun --standalone --nproc-per-node 8 examples/torch/context_parallel.py

Ranks along "cp" hold parts of the same sequences. All but attention works on single positions. In attention the keys
and values of each rank travel around the ring of ranks (`ppermute`), and each rank puts together what its queries see
of them by an online softmax; backward is that of the loop, and sends gradients around the ring the other way.

"cp" is a data axis: its ranks have different positions, so gradients are to be summed over it. All have equally many,
so the mean over ranks of each one's mean loss is the mean over all positions. "shard" and "cp" cut the weights alike.
``--check`` compares some steps with one process, which sees whole sequences, in float64.
"""

from __future__ import annotations

import math
import sys
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

SIZES, AXES = (2, 2, 2), ("replicate", "shard", "cp")
NUM_PLACES = 4  # along "replicate" and "shard"
DIM, HEAD_DIM, LAYERS, CONTEXT, BATCH = 64, 16, 2, 64, 2
LAYER = {"inputs": (3 * DIM, DIM), "output": (DIM, DIM), "up": (4 * DIM, DIM), "down": (DIM, 4 * DIM)}
SPECS = hp.P(("shard", "cp"))


def init(dtype: torch.dtype) -> Any:
    """Returns whole weights; `hp.init` keeps this rank's part of each."""

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, dtype=dtype) / columns**0.5

    embed = {"byte": matrix(256, DIM), "place": matrix(CONTEXT, DIM)}
    layers = [{name: matrix(*shape) for name, shape in LAYER.items()} for _ in range(LAYERS)]
    return {"embed": embed, "layers": layers, "head": matrix(256, DIM)}


def ring_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention over the sequences that all ranks along "cp" hold. (batch, heads, part of length, head_dim)."""
    mine, num_parts, length = hp.axis_index("cp"), hp.axis_size("cp"), query.shape[2]
    ring = [(rank, (rank + 1) % num_parts) for rank in range(num_parts)]
    top = torch.full_like(query[..., :1], -math.inf)  # the highest score so far
    weight, total = torch.zeros_like(top), torch.zeros_like(query)  # sums of exp(score - top), and of it times values
    for turn in range(num_parts):
        part = (mine - turn) % num_parts  # whose keys and values are here; in the first turn its own
        hidden = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1 + (mine - part) * length)
        # A part that lies wholly ahead is hidden, but computed: backward must be the same `ppermute`s on all ranks.
        scores = (query @ key.mT / HEAD_DIM**0.5).masked_fill(hidden, -math.inf)
        new_top = torch.maximum(top, scores.detach().amax(-1, keepdim=True))
        shrink, grown = (top - new_top).exp(), (scores - new_top).exp()
        weight, total = weight * shrink + grown.sum(-1, keepdim=True), total * shrink + grown @ value
        top = new_top
        if turn + 1 < num_parts:
            key, value = hp.ppermute((key, value), "cp", ring)
    return total / weight


def embed(weights: Any, inputs: Tensor, positions: Tensor) -> Tensor:
    return F.embedding(inputs, weights["byte"]) + F.embedding(positions, weights["place"])


def block(weights: Any, x: Tensor, attention: Any) -> Tensor:
    h = F.rms_norm(x, (DIM,))
    heads = F.linear(h, weights["inputs"]).unflatten(-1, (3, -1, HEAD_DIM)).permute(2, 0, 3, 1, 4)
    x = x + F.linear(attention(*heads).transpose(1, 2).flatten(2), weights["output"])
    h = F.rms_norm(x, (DIM,))
    return x + F.linear(F.gelu(F.linear(h, weights["up"])), weights["down"])


def head(weights: Tensor, x: Tensor) -> Tensor:
    return F.linear(F.rms_norm(x, (DIM,)), weights)


def loss_of(functions: Any, params: Any, inputs: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
    """Returns the loss of the model that is made of these three functions."""
    embed, block, head = functions
    x = embed(params["embed"], inputs, positions)
    for weights in params["layers"]:
        x = block(weights, x)
    return F.cross_entropy(head(params["head"], x).flatten(0, 1), labels.flatten())


def batch(data: text.Text, step: int, place: int) -> list[Tensor]:
    """Returns whole sequences for a place along "replicate" and "shard": inputs, labels and positions, along dim 1."""
    return [*map(torch.from_numpy, data.batch(0, step, place, BATCH, CONTEXT)), torch.arange(CONTEXT)[None]]


def train(mesh: hp.Mesh, data: text.Text, optimizer: Any, steps: int, dtype: torch.dtype, run: Any = hp.sharded) -> Any:
    """Returns the whole weights after some steps, and the losses."""
    torch.manual_seed(0)
    params = hp.init(partial(init, dtype), mesh, SPECS)
    ring_block = partial(block, attention=ring_attention)
    loss_fn = partial(loss_of, (hp.unit(embed), hp.unit(ring_block, name="block"), hp.unit(head)))

    def step_fn(params: Any, state: Any, *batch: Tensor) -> Any:
        mine = [x.chunk(mesh.axis_size("cp"), 1)[mesh.axis_index("cp")] for x in batch]
        loss, grads = hp.value_and_grad(loss_fn)(params, *mine)
        updates, state = optimizer.update(grads, state, params)
        return hp.apply_updates(params, updates), state, hp.pmean(loss, AXES, mesh=mesh)

    step, state, losses, place = run(step_fn, mesh), optimizer.init(params), [], mesh.axis_index(("replicate", "shard"))
    for number in range(steps):
        params, state, loss = step(params, state, *(x.to(mesh.device) for x in batch(data, number, place)))
        losses.append(float(loss))
    return hp.unshard(params), losses


def alone(data: text.Text, rate: float, steps: int) -> Any:
    """The same with SGD in this process, without hpfunc, and with torch's own attention over whole sequences."""
    torch.manual_seed(0)
    params = init(torch.float64)
    optimizer = torch.optim.SGD([leaf.requires_grad_() for leaf in optree.tree_leaves(cast(Any, params))], rate)
    whole_attention = partial(F.scaled_dot_product_attention, is_causal=True)
    loss_fn = partial(loss_of, (embed, partial(block, attention=whole_attention), head))
    for number in range(steps):
        optimizer.zero_grad()
        torch.stack([loss_fn(params, *batch(data, number, place)) for place in range(NUM_PLACES)]).mean().backward()
        optimizer.step()
    return optree.tree_map(torch.detach, params)


def main() -> int:
    mesh, data = hp.make_mesh(SIZES, AXES, AXES), text.standard_library()
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
