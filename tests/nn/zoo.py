"""Small modules, each with one habit of real ones, and what training them on one process gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

Tensor = torch.Tensor
Tensors = dict[str, Tensor]
WIDTH, NUM_STEPS = 6, 10
# Adam divides by the root of squares: gradients that are zero but for their rounding, such as those of the biases of
# keys in an attention, would become steps of any size. EPS is far above that.
EPS, DECAY = 1e-3, 0.1


def rate(step: int) -> float:
    """Returns the learning rate of a step: each has its own."""
    return 0.02 / (1 + 0.1 * step)


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Stack(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Reordered(Stack):
    """Blocks in another order, one of them twice and one never."""

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](self.blocks[2](self.blocks[0](x)))


class Tied(nn.Module):
    """The head is the embedding's weight; the module itself has a parameter beside its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.stack = nn.Linear(WIDTH, WIDTH, bias=False), Stack()
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.full((WIDTH,), 0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stack(self.embed(x)) * self.gain)


class Outside(Tied):
    """The embedding's weight is used outside of its module, and its dtype asked for."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.to(self.head.weight.dtype))
        assert self.embed.weight.shape == (WIDTH, WIDTH)
        return F.linear(self.stack(x), self.embed.weight.t() * self.gain, self.head.bias) + self.embed.weight.sum()


class Positions(nn.Module):
    """Returns its parameter, or a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(2.0 * WIDTH).reshape(2, WIDTH) / 10)

    def forward(self, row: int | None = None) -> Tensor:
        return self.table if row is None else self.table[row]


class Placed(Stack):
    """What a module gives to its blocks is a parameter of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.positions(1)) * self.positions().sum(0)


class Pair(NamedTuple):
    first: Tensor
    second: dict[str, Any]


class ManyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor, *, scale: float, mask: Tensor | None = None) -> Pair:
        y = self.inner(x) * scale
        return Pair(y if mask is None else y * mask, {"norm": y.square().sum(), "text": "kept"})


class Many(nn.Module):
    """Several inputs and outputs, keyword arguments, tensors inside of containers and beside other values."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ManyBlock() for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        first, info = self.blocks[0](x, scale=scale)
        pair = self.blocks[1](first, scale=scale, mask=mask)
        assert (info["text"], type(pair)) == ("kept", Pair)
        return {"out": pair.first, "extra": [info["norm"], pair.second["norm"]]}


class Checkpointed(Stack):
    """Activation checkpointing that the module does by itself, around its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))


class Convolutional(nn.Module):
    """A residual network as torchvision writes it: stem, layers of blocks, pooling, classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU())
        self.layer1 = nn.Sequential(Residual(5), Residual(5))
        self.layer2 = nn.Sequential(nn.Conv2d(5, 4, 1), Residual(4))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(self.layer2(self.layer1(self.stem(x)))).flatten(1))


@dataclass(frozen=True)
class Case:
    """A module and how it is called; `shape` is that of one rank's batch."""

    build: Callable[[], nn.Module]
    units: Any = None
    remat: bool = False
    shape: tuple[int, ...] = (4, WIDTH)
    with_mask: bool = False

    def module(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().double()

    def call(self, rank: int, step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of a rank's own step, and sets the random numbers that it draws."""
        torch.manual_seed(1000 * rank + step)
        x = torch.randn(self.shape, dtype=torch.float64)
        if not self.with_mask:
            return (x,), {}
        return (x,), {"mask": (torch.rand(self.shape) < 0.7).double(), "scale": 0.8}

    def loss(self, outputs: Any) -> Tensor:
        if isinstance(outputs, dict):
            return outputs["out"].square().mean() + outputs["extra"][0] * 0.01 + outputs["extra"][1] * 0.02
        return (outputs - 1).square().mean()


CASES: dict[str, Case] = {
    "stack": Case(Stack),
    "dropout": Case(lambda: Stack(0.3)),
    "dropout computed again": Case(lambda: Stack(0.3), remat=True),
    "reordered": Case(Reordered),
    "tied": Case(Tied),
    "outside": Case(Outside),
    "many": Case(Many, with_mask=True),
    "a parameter that its module returns": Case(Placed),
    "a parameter that its module returns, computed again": Case(Placed, remat=True),
    "checkpointed": Case(Checkpointed),
    "batch norm": Case(Convolutional, shape=(4, 3, 6, 6)),
    "batch norm computed again": Case(Convolutional, shape=(4, 3, 6, 6), remat=True),
    "batch norm, small units": Case(Convolutional, units=(nn.Conv2d, nn.BatchNorm2d), shape=(4, 3, 6, 6)),
}


class Found(NamedTuple):
    """What training gives: whole weights, and buffers."""

    weights: Tensors
    buffers: Tensors


@cache
def reference(case: Any, nums_ranks: tuple[int, ...]) -> list[tuple[Tensors, list[Tensors]]]:
    """Returns what training the plain module in one process gives, in legs of `NUM_STEPS` with so many ranks' data.

    After each leg: the weights, and the buffers that each rank has then. The next one begins with their means.
    """
    module = case.module()
    own, weights = dict(module.named_buffers()), dict(module.named_parameters())
    trained = [w for w in weights.values() if w.requires_grad]
    groups = [{"params": [w for w in weights.values() if (w.dim() > 1) == is_matrix]} for is_matrix in (True, False)]
    groups = [group | {"weight_decay": decay} for group, decay in zip(groups, (DECAY, 0.0), strict=True)]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], eps=EPS)
    start, legs = _copied(own), []
    for leg, num_ranks in enumerate(nums_ranks):
        buffers = [start] * num_ranks
        for step in range(leg * NUM_STEPS, (leg + 1) * NUM_STEPS):
            for w in trained:  # those that no call reaches have zeros, not None, which AdamW would skip
                w.grad = torch.zeros_like(w)
            for rank in range(num_ranks):
                for path, x in own.items():
                    x.copy_(buffers[rank][path])
                args, kwargs = case.call(rank, step)
                case.loss(module(*args, **kwargs)).backward()
                buffers[rank] = _copied(own)
            for w in trained:  # not the losses: some models have theirs in float32, and a third of it is none
                assert w.grad is not None
                w.grad /= num_ranks
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
            optimizer.step()
        legs.append((_copied(weights), buffers))
        start = {
            path: torch.stack([x[path] for x in buffers]).mean(0) if x.is_floating_point() else buffers[0][path]
            for path, x in own.items()
        }
    return legs


def _copied(tensors: Tensors) -> Tensors:
    return {path: x.detach().clone() for path, x in tensors.items()}
