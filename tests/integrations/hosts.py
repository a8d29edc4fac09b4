"""How a host is run on the ranks of a pool, and the model and data of its tests."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

NUM_EXAMPLES, WIDTH = 16, 8


@contextmanager
def launched(rank: int, num_ranks: int) -> Iterator[None]:
    """Sets the variables that torchrun sets. What hosts warn of, such as a machine without a GPU, is not judged."""
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "NODE_RANK": 0}
    values |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
    before = dict(os.environ)
    os.environ.update({key: str(value) for key, value in values.items()} | {"ACCELERATE_USE_CPU": "true"})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", "hpfunc")
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class Block(nn.Module):
    """A layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    """A few blocks, a head and a number, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)
        self.scale = nn.Parameter(torch.ones(()))
        self.double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Returns outputs, and the mean loss of labels."""
        for layer in self.layers:
            x = layer(x)
        outputs = self.head(x) * self.scale
        if labels is None:
            return {"logits": outputs}
        return {"loss": (outputs - labels).square().mean(), "logits": outputs}


class Examples(torch.utils.data.Dataset):
    """Examples of a regression, the same each time; those of one rank of several."""

    def __init__(self, rank: int = 0, num_ranks: int = 1) -> None:
        generator = torch.Generator().manual_seed(5)
        xs = torch.randn(NUM_EXAMPLES, WIDTH, generator=generator, dtype=torch.float64)
        self.rows = [{"x": x, "labels": x.sum(0, keepdim=True).sin()} for x in xs[rank::num_ranks]]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]
