"""The loop of ``plain_loop.py`` over several processes, which share weights, gradients and optimizer state.

    torchrun --nproc-per-node 4 examples/torch/sharded_loop.py

Module, optimizer and scheduler are those of PyTorch, and the losses are the same but for the order of sums.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hpfunc as hp

sys.path.insert(0, str(Path(__file__).parents[1]))
import text

STEPS, BATCH, CONTEXT, DIM = 200, 48, 8, 64


class Block(nn.Module):
    """A normalisation and an MLP on a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 64) to the same shape."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


def build() -> nn.Module:
    """Returns a model that guesses a byte from the eight before it."""
    torch.manual_seed(0)
    start = nn.Embedding(text.NUM_BYTES, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, DIM)
    return nn.Sequential(*start, *(Block() for _ in range(3)), nn.Linear(DIM, text.NUM_BYTES))


def batch(data: text.Text, step: int) -> tuple[Tensor, Tensor]:
    """Returns the inputs of a step, (48, 8), and the byte that follows each, (48)."""
    inputs, labels = data.batch(0, step, 0, BATCH, CONTEXT)
    return torch.from_numpy(inputs), torch.from_numpy(labels[:, -1])


def train(steps: int) -> list[float]:
    data = text.standard_library()
    mesh = hp.make_mesh((-1,), ("shard",))
    apply, params = hp.from_module(build())
    bound = hp.optim.bind(hp.shard(params, mesh, hp.P("shard")))
    grad_fn = hp.value_and_grad(lambda params, inputs, labels: F.cross_entropy(apply(params, inputs), labels))
    grad_fn = hp.sharded(grad_fn, mesh, in_specs=(None, hp.P("shard"), hp.P("shard")))
    optimizer = torch.optim.AdamW(bound.parameters, lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for number in range(steps):
        inputs, labels = batch(data, number)
        loss, grads = grad_fn(bound.params, inputs, labels)
        bound.set_grads(grads)
        optimizer.step()
        scheduler.step()
        losses.append(hp.pmean(loss, "shard", mesh=mesh).item())
    return losses


if __name__ == "__main__":
    print(*(f"{loss:.2f}" for loss in train(STEPS)[::20]))
