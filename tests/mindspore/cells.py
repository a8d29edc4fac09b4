"""Small cells, as people write them, for the ranks of the tests; and what training them on one process gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

WIDTH, HEADS, TOKENS, RATE = 8, 2, 7, 0.05


class Attention(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Dense(WIDTH, WIDTH) for _ in range(4))

    def construct(self, x: Any, mask: Any) -> Any:
        batch, length, _ = x.shape
        q, k, v = (part(x).reshape(batch, length, HEADS, -1).swapaxes(1, 2) for part in (self.q, self.k, self.v))
        weights = ops.softmax(ops.matmul(q, k.swapaxes(2, 3)) * 0.5 + mask, -1)
        return self.out(ops.matmul(weights, v).swapaxes(1, 2).reshape(batch, length, WIDTH))


class Block(nn.Cell):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm((WIDTH,)), nn.LayerNorm((WIDTH,))
        self.attention, self.up, self.down = Attention(), nn.Dense(WIDTH, 12), nn.Dense(12, WIDTH, has_bias=False)
        self.dropout = nn.Dropout(p=dropout)

    def construct(self, x: Any, *, mask: Any) -> dict[str, Any]:
        x = x + self.attention(self.norm1(x), mask)
        return {"x": x + self.dropout(self.down(ops.tanh(self.up(self.norm2(x))))), "rest": (None, "unused")}


class Transformer(nn.Cell):
    """The head is the embedding's table; the cell has a parameter beside its blocks."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.CellList([Block(dropout) for _ in range(2)])
        self.gain = Parameter(Tensor(np.ones(WIDTH, np.float32)), name="gain")

    def construct(self, tokens: Any, scale: float = 1.0) -> tuple[Any, Any]:
        x = self.embed(tokens) * self.gain
        length = tokens.shape[1]
        mask = Tensor(np.triu(np.full((length, length), -30.0), 1)).astype(x.dtype)
        for block in self.blocks:
            x = block(x, mask=mask)["x"]
        return mint.nn.functional.linear(x, self.embed.embedding_table), x * scale

    def twice(self, tokens: Any) -> Any:
        return self(tokens)[0] + self(tokens)[0]


class Residual(nn.Cell):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3), nn.BatchNorm2d(channels)

    def construct(self, x: Any) -> Any:
        return ops.relu(x + self.bn2(self.conv2(ops.relu(self.bn1(self.conv1(x))))))


class Convolutional(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.SequentialCell(nn.Conv2d(3, 4, 3, has_bias=True), nn.BatchNorm2d(4), nn.ReLU())
        self.layer = nn.SequentialCell(Residual(4), Residual(4))
        self.head = nn.Dense(4, 5)

    def construct(self, images: Any) -> Any:
        return self.head(self.layer(self.stem(images)).mean((2, 3)))


@dataclass(frozen=True)
class Case:
    """A cell to train.

    Attributes:
        make: builds it.
        dtype: in which it computes; MindSpore has no convolution in float64 on a CPU.
    """

    make: Callable[[], Any]
    dtype: str
    remat: bool = False

    def cell(self) -> Any:
        """Returns the cell, in training mode; its weights do not depend on random numbers of MindSpore."""
        cell, draw = self.make().set_train(True), np.random.default_rng(0)
        for x in cell.get_parameters():
            if x.requires_grad:
                x.set_dtype(getattr(mindspore, self.dtype))
                mean = 1.0 if x.name.endswith(("gamma", "gain")) else 0.0
                x.set_data(Tensor(draw.normal(mean, 0.3, x.shape).astype(self.dtype)))
        return cell

    def call(self, rank: int, number: int) -> Any:
        """Every rank and step has its own data."""
        draw = np.random.default_rng(100 * rank + number)
        if self.make is Convolutional:
            return Tensor(draw.normal(size=(6, 3, 5, 5)).astype(np.float32))
        return Tensor(draw.integers(0, TOKENS, (3, 5)).astype(np.int32))

    def loss(self, outputs: Any) -> Any:
        """Returns a loss that every output reaches."""
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return sum((x.square().mean() for x in outputs[1:]), start=ops.logsumexp(outputs[0], -1).mean())


CASES = {
    "transformer": Case(Transformer, "float64"),
    "transformer, remat": Case(Transformer, "float64", remat=True),
    "convolutional": Case(Convolutional, "float32"),
}


@cache
def reference(case: Case, num_ranks: int, steps: tuple[int, ...]) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Returns the weights and each rank's state after so many steps of SGD with the plain cell, by MindSpore alone."""
    cell, found = case.cell(), []
    weights = cell.trainable_params()
    state = dict((path, x) for path, x in cell.parameters_and_names() if not x.requires_grad)
    kept = [{path: x.asnumpy().copy() for path, x in state.items()} for _ in range(num_ranks)]
    grad = mindspore.value_and_grad(lambda x: case.loss(cell(x)), None, weights)
    for number in range(max(steps)):
        total = [np.zeros(w.shape, case.dtype) for w in weights]
        for rank in range(num_ranks):
            for path, x in state.items():
                x.set_data(Tensor(kept[rank][path]))
            for place, g in enumerate(grad(case.call(rank, number))[1]):
                total[place] += g.asnumpy() / num_ranks
            kept[rank] = {path: x.asnumpy().copy() for path, x in state.items()}
        for w, g in zip(weights, total, strict=True):
            w.set_data(Tensor((w.asnumpy() - RATE * g).astype(case.dtype)))
        if number + 1 in steps:
            named = {path: w.asnumpy().copy() for path, w in cell.parameters_and_names() if w.requires_grad}
            found.append((named, list(kept)))
    return found
