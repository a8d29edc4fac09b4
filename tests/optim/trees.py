"""Random trees of weights and gradients, and the bits of trees."""

from __future__ import annotations

from typing import Any

import optree
import torch

from hpfunc._values.array import is_sharded
from tests.helpers.zoo import bits

SHAPES = {"a": (5, 3), "layers": [{"w": (4, 4), "b": (4,)}, {"w": (2, 4), "b": ()}]}


def is_shape(x):
    return isinstance(x, tuple)


def random_tree(seed, dtype=torch.float64, shapes: Any = SHAPES) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return optree.tree_map(lambda shape: torch.randn(shape, generator=generator, dtype=dtype), shapes, is_leaf=is_shape)


def local(tree):
    return optree.tree_map(lambda x: x.local if is_sharded(x) else x, tree, is_leaf=is_sharded)


def leaves(tree):
    return [x for x in optree.tree_leaves(local(tree)) if isinstance(x, torch.Tensor)]


def same_bits(left, right):
    return all(
        a.dtype == b.dtype and torch.equal(bits(a), bits(b)) for a, b in zip(leaves(left), leaves(right), strict=True)
    )
