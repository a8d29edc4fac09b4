"""Expert parallelism (a mixture of experts), beside FSDP and replication: a mesh of three axes.

    torchrun --standalone --nproc-per-node 8 examples/torch/expert_parallel.py

Ranks along "ep" have data of their own and experts of their own. A router sends each token to two experts, by
`all_to_all` there and back. An expert has a number of places for each rank; tokens beyond skip it.

"ep" is a data axis: the weights that all tokens use are gathered and reduced over it as over "shard". Experts are not:
``hp.unit(..., axes=("replicate", "shard"))`` leaves them cut, and does not reduce their gradients over "ep", as
`all_to_all` has brought the tokens of all ranks to them, and in backward the gradients of these. One unit holds both
kinds. ``--check`` compares some steps with one process, which has all experts, in float64.
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

SIZES, AXES = (2, 2, 2), ("replicate", "shard", "ep")
DIM, HEAD_DIM, LAYERS, CONTEXT, BATCH = 64, 16, 2, 32, 4
EXPERTS, CHOICES, SPARE = 4, 2, 1.25  # an expert takes 1.25 times its fair share of a rank's tokens
ATTENTION = {"inputs": (3 * DIM, DIM), "output": (DIM, DIM)}
MIXTURE = {"router": (EXPERTS, DIM), "up": (EXPERTS, DIM, 2 * DIM), "down": (EXPERTS, 2 * DIM, DIM)}
DENSE, EXPERT = hp.P(("shard", "ep")), hp.P("ep", "shard")
LAYER = {"attention": DENSE, "mixture": {"router": hp.P("shard"), "up": EXPERT, "down": EXPERT}}
SPECS = {"embed": DENSE, "layers": [LAYER] * LAYERS, "head": DENSE}


def init(dtype: torch.dtype) -> Any:
    """Returns whole weights; `hp.init` keeps this rank's part of each."""

    def draw(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
        return {name: torch.randn(shape, dtype=dtype) / DIM**0.5 for name, shape in shapes.items()}

    embed = draw({"byte": (256, DIM), "place": (CONTEXT, DIM)})
    layers = [{"attention": draw(ATTENTION), "mixture": draw(MIXTURE)} for _ in range(LAYERS)]
    return {"embed": embed, "layers": layers, "head": draw({"output": (256, DIM)})}


def embed(weights: Any, inputs: Tensor) -> Tensor:
    return F.embedding(inputs, weights["byte"]) + weights["place"]


def attention(weights: Any, x: Tensor) -> Tensor:
    wide = F.linear(F.rms_norm(x, (DIM,)), weights["inputs"])
    query, key, value = wide.unflatten(-1, (3, -1, HEAD_DIM)).permute(2, 0, 3, 1, 4)
    seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return x + F.linear(seen.transpose(1, 2).flatten(2), weights["output"])


def route(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Returns which token has which place at which expert (0 or 1), and its weight, as (tokens, experts, places)."""
    num_places = math.ceil(SPARE * CHOICES * len(scores) / EXPERTS)
    best, experts = scores.softmax(-1).topk(CHOICES, -1)
    chosen = F.one_hot(experts, EXPERTS).transpose(0, 1).flatten(0, 1)  # all first choices come before all second ones
    place = (chosen.cumsum(0) - 1).masked_fill(chosen == 0, num_places).clamp(max=num_places)  # the last one: none
    taken = F.one_hot(place, num_places + 1)[..., :-1].to(scores).unflatten(0, (CHOICES, -1))
    return taken.sum(0), torch.einsum("tc,ctep->tep", best / best.sum(-1, keepdim=True), taken)


def mixture(weights: Any, x: Tensor, to_experts: Any, back: Any) -> Tensor:
    tokens = F.rms_norm(x, (DIM,)).flatten(0, 1)
    taken, share = route(F.linear(tokens, weights["router"]))
    held = to_experts(torch.einsum("tep,td->epd", taken, tokens))  # (experts that are here, places on all ranks, DIM)
    made = back(F.gelu(held @ weights["up"]) @ weights["down"])
    return x + torch.einsum("tep,epd->td", share, made).view_as(x)


def head(weights: Any, x: Tensor) -> Tensor:
    return F.linear(F.rms_norm(x, (DIM,)), weights["output"])


def loss_of(functions: Any, params: Any, inputs: Tensor, labels: Tensor) -> Tensor:
    """Returns the loss of the model that is made of these four functions."""
    embed, attention, mixture, head = functions
    x = embed(params["embed"], inputs)
    for layer in params["layers"]:
        x = mixture(layer["mixture"], attention(layer["attention"], x))
    return F.cross_entropy(head(params["head"], x).flatten(0, 1), labels.flatten())


def batch(data: text.Text, step: int, place: int) -> list[Tensor]:
    """Returns the inputs and labels of a place along all axes."""
    return [torch.from_numpy(x) for x in data.batch(0, step, place, BATCH, CONTEXT)]


def train(mesh: hp.Mesh, data: text.Text, optimizer: Any, steps: int, dtype: torch.dtype, run: Any = hp.sharded) -> Any:
    """Returns the whole weights after some steps, and the losses."""
    torch.manual_seed(0)
    params = hp.init(partial(init, dtype), mesh, SPECS)
    to_experts = partial(hp.all_to_all, axis_name="ep", split_dim=0, concat_dim=1, tiled=True)
    back = partial(hp.all_to_all, axis_name="ep", split_dim=1, concat_dim=0, tiled=True)
    sent = hp.unit(partial(mixture, to_experts=to_experts, back=back), name="mixture", axes=("replicate", "shard"))
    loss_fn = partial(loss_of, (hp.unit(embed), hp.unit(attention), sent, hp.unit(head)))

    def step_fn(params: Any, state: Any, inputs: Tensor, labels: Tensor) -> Any:
        loss, grads = hp.value_and_grad(loss_fn)(params, inputs, labels)
        updates, state = optimizer.update(grads, state, params)
        return hp.apply_updates(params, updates), state, hp.pmean(loss, AXES, mesh=mesh)

    step, state, losses = run(step_fn, mesh), optimizer.init(params), []
    for number in range(steps):
        params, state, loss = step(params, state, *(x.to(mesh.device) for x in batch(data, number, mesh.rank)))
        losses.append(float(loss))
    return hp.unshard(params), losses


def alone(data: text.Text, rate: float, steps: int) -> Any:
    """The same with SGD in this process, without hpfunc: all experts are here."""
    torch.manual_seed(0)
    params = init(torch.float64)
    optimizer = torch.optim.SGD([leaf.requires_grad_() for leaf in optree.tree_leaves(cast(Any, params))], rate)
    loss_fn = partial(loss_of, (embed, attention, partial(mixture, to_experts=lambda x: x, back=lambda x: x), head))
    for number in range(steps):
        optimizer.zero_grad()
        torch.stack([loss_fn(params, *batch(data, number, place)) for place in range(8)]).mean().backward()
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
