"""An ordinary training loop of PyTorch: a module, an optimizer, a scheduler. It knows nothing of hpfunc.

    python examples/torch/plain_loop.py

``sharded_loop.py`` is the same over several processes, with about ten other lines.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for number in range(steps):
        inputs, labels = batch(data, number)
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(*(f"{loss:.2f}" for loss in train(STEPS)[::20]))
