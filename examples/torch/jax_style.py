"""Pure functions over a tree of weights, as in JAX: an initialisation, a loss, an update. There is no module.

    torchrun --nproc-per-node 2 examples/torch/jax_style.py

Weights of all blocks are stacked in one array for each kind, and a step takes the whole state and returns the next.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import hpfunc as hp

sys.path.insert(0, str(Path(__file__).parents[1]))
import text

BATCH, CONTEXT, DIM, LAYERS, STEPS = 8, 32, 64, 3, 60
OPTIMIZER = hp.optim.chain(
    hp.clip_by_global_norm(1.0, error_if_nonfinite=True),
    hp.optim.adamw(hp.optim.warmup_cosine(1e-2, 5, STEPS), weight_decay=0.01),
)


class State(NamedTuple):
    """All that a step depends on but its batch."""

    params: Any
    opt_state: Any


def init_params() -> Any:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    blocks = {"mix": normal(LAYERS, CONTEXT, CONTEXT), "up": normal(LAYERS, 4 * DIM, DIM)}
    blocks |= {"down": normal(LAYERS, DIM, 4 * DIM), "scale": torch.ones(LAYERS, DIM)}
    return {"embed": normal(text.NUM_BYTES, DIM), "blocks": blocks}


SPECS = {"embed": hp.P("shard"), "blocks": hp.P(None, "shard")}  # the first dim of stacked weights stays whole


def embed(table: Tensor, tokens: Tensor) -> Tensor:
    return F.embedding(tokens, table)


def block(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """(batch, CONTEXT, DIM) to the same shape: mixes each position with those before it, then an MLP."""
    norm = F.rms_norm(x, (DIM,)) * p["scale"]
    x = x + p["mix"].tril() @ norm
    return x + F.linear(F.gelu(F.linear(F.rms_norm(x, (DIM,)), p["up"])), p["down"])


def head(table: Tensor, x: Tensor) -> Tensor:
    return F.linear(F.rms_norm(x, (DIM,)), table)


def loss_fn(params: Any, inputs: Tensor, labels: Tensor, unit: Callable[..., Any] = hp.unit) -> Tensor:
    """Returns the mean cross-entropy. With ``unit=lambda fn: fn`` the weights are plain tensors: no hpfunc is left."""
    x = unit(embed)(params["embed"], inputs)
    for weights in hp.unstack(params["blocks"]):
        x = unit(block)(weights, x)
    return F.cross_entropy(unit(head)(params["embed"], x).flatten(0, 1), labels.flatten())


def update(state: State, inputs: Tensor, labels: Tensor) -> tuple[State, dict[str, Any]]:
    loss, grads = hp.value_and_grad(loss_fn)(state.params, inputs, labels)
    largest, by_group = hp.global_norm(grads, torch.inf, groups=lambda path, leaf: path)
    updates, opt_state = OPTIMIZER.update(grads, state.opt_state, state.params)
    return State(hp.apply_updates(state.params, updates), opt_state), {"loss": loss, "largest": largest, **by_group}


def batch(data: text.Text, step: int, part: int) -> list[Tensor]:
    return [torch.from_numpy(x) for x in data.batch(0, step, part, BATCH, CONTEXT)]


def train(mesh: hp.Mesh, steps: int) -> tuple[State, list[dict[str, float]]]:
    """Returns the last state, and what each step says: means over all ranks of what each of them says."""
    data = text.standard_library()
    params = hp.init(init_params, mesh, SPECS)
    state, log = State(params, OPTIMIZER.init(params)), []
    step = hp.sharded(update, mesh, donate_argnums=0)
    for number in range(steps):
        state, said = step(state, *batch(data, number, mesh.data_rank))
        log.append(hp.loop.reduce_metrics(said, mesh))
    return state, log


def main() -> None:
    mesh = hp.make_mesh((-1,), ("shard",))
    _, log = train(mesh, STEPS)
    if mesh.is_main:
        for number in range(0, STEPS, 10):
            print(number, *(f"{name} {x:.3f}" for name, x in log[number].items()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
