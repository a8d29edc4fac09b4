"""Small random models, as values that travel to ranks, and what training them should give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import optree
import torch

import hpfunc as hp
from tests.helpers import frameworks as ops

Tree = Any


@dataclass(frozen=True)
class Model:
    """An embedding, some square layers called in any order and number, and a head.

    Attributes:
        width: of the hidden state.
        num_inputs: of the embedding.
        biases: for each layer, whether it has one.
        calls: the layers in the order of their calls; one may be called twice, or never.
        dropped: calls whose result does not reach the loss.
        is_tied: the head is the embedding's weight again.
    """

    width: int = 6
    num_inputs: int = 5
    biases: tuple[bool, ...] = (True, False, True)
    calls: tuple[int, ...] = (0, 1, 2)
    dropped: tuple[int, ...] = ()
    is_tied: bool = False

    def weights(self, dtype: torch.dtype = torch.float32) -> Tree:
        generator = torch.Generator().manual_seed(self.width + 10 * len(self.biases))

        def draw(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=generator, dtype=torch.float64) / 3).to(dtype)

        layers = []
        for has_bias in self.biases:
            layer = {"w": draw(self.width, self.width)}
            if has_bias:
                layer |= {"b": draw(self.width), "gain": draw()}
            layers.append(layer)
        tree = {"embed": {"w": draw(self.num_inputs, self.width)}, "layers": layers}
        return tree if self.is_tied else tree | {"head": {"w": draw(self.num_inputs, self.width)}}

    def batch(self, rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Every rank and step has its own data."""
        generator = torch.Generator().manual_seed(1000 * rank + step)
        return torch.randn(3, self.num_inputs, generator=generator, dtype=torch.float64).to(dtype)

    def loss(self, params: Tree, batch: torch.Tensor, unit: Callable[..., Any] = lambda fn: fn) -> torch.Tensor:
        embed, layer, head = unit(_embed), unit(_layer), unit(_head)
        x = embed(params["embed"], batch)
        for place, index in enumerate(self.calls):
            y = layer(params["layers"][index], x)
            x = x if place in self.dropped else y
        return head(params["embed" if self.is_tied else "head"], x).square().mean()


def _embed(p: Tree, batch: torch.Tensor) -> torch.Tensor:
    return ops.matmul(batch.to(p["w"].dtype), p["w"])


def _layer(p: Tree, x: torch.Tensor) -> torch.Tensor:
    y = ops.tanh(ops.linear(x, p["w"], p.get("b")))
    return x + (y * p["gain"] if "gain" in p else y)


def _head(p: Tree, x: torch.Tensor) -> torch.Tensor:
    return ops.linear(x, p["w"])


def sgd(params: Tree, grads: Tree, rate: float = 0.1) -> Tree:
    return optree.tree_map(
        lambda p, g: p.with_local(p.local - ops.scaled(g.local, rate)),
        params,
        grads,
        is_leaf=lambda x: isinstance(x, hp.ShardedArray),
    )


def reference(model: Model, num_ranks: int, num_steps: int, rate: float = 0.1) -> list[torch.Tensor]:
    """The weights after some steps of SGD on the mean of all ranks' losses, in one process, in float64."""
    params = model.weights(torch.float64)
    for step in range(num_steps):
        leaves, treedef = optree.tree_flatten(params)
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        tree = optree.tree_unflatten(treedef, leaves)
        losses = [model.loss(tree, model.batch(rank, step, torch.float64)) for rank in range(num_ranks)]
        grads = torch.autograd.grad(torch.stack(losses).mean(), leaves, allow_unused=True)
        new = [p if g is None else p - rate * g for p, g in zip(leaves, grads, strict=True)]
        params = optree.tree_unflatten(treedef, [leaf.detach() for leaf in new])
    return optree.tree_leaves(params)


@dataclass(frozen=True)
class Layout:
    """A mesh, and the specs of matrices, vectors and scalars on it."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    matrix: hp.P
    vector: hp.P

    @property
    def num_ranks(self) -> int:
        return int(torch.Size(self.shape).numel())

    def specs(self, tree: Tree) -> Tree:
        return optree.tree_map(lambda x: {2: self.matrix, 1: self.vector, 0: hp.P()}[x.dim()], tree)


P = hp.P
FSDP = (P("shard"), P(None, "shard"), P())
HSDP = (*FSDP, P(("replicate", "shard")), P("replicate", "shard"), P("shard", "replicate"))


@st.composite
def layouts(draw: Any, shapes: Sequence[tuple[int, ...]]) -> Layout:
    shape = draw(st.sampled_from(list(shapes)))
    names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
    matrix = draw(st.sampled_from(FSDP if len(shape) == 1 else HSDP))
    return Layout(shape, names, matrix, draw(st.sampled_from([P("shard"), P()])))


@st.composite
def models(draw: Any) -> Model:
    biases = tuple(draw(st.lists(st.booleans(), min_size=1, max_size=3)))
    calls = tuple(draw(st.lists(st.integers(0, len(biases) - 1), min_size=1, max_size=5)))
    dropped = tuple(place for place in range(len(calls)) if draw(st.integers(0, 4)) == 0)
    return Model(
        draw(st.sampled_from([4, 6, 7])), draw(st.sampled_from([4, 5])), biases, calls, dropped, draw(st.booleans())
    )


policies = st.builds(
    hp.Policy,
    prefetch=st.integers(0, 3),
    release=st.sampled_from(["forward", "backward", "never"]),
    pack_below_bytes=st.sampled_from([None, 0, 100, 200, float("inf")]),
    prefetch_backward=st.sampled_from([None, None, 0, 2]),
    gather_budget_bytes=st.sampled_from([float("inf"), 3000]),  # more than the largest unit of these models needs
    release_overrides=st.sampled_from([(), {"_embed.*": "never"}, {"_layer.0": "backward", "_layer.*": "forward"}]),
    reduce_bucket_bytes=st.sampled_from([0, 0, 700, float("inf")]),
)

MESHES_OF_FOUR = [(4,), (2, 2), (1, 4), (4, 1)]
