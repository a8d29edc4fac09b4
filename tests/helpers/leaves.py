"""The leaves of trees as lists of tensors: taken out, and compared."""

from __future__ import annotations

from typing import Any

import optree
import torch

from hpfunc._values.array import is_sharded
from tests.helpers.frameworks import to_torch
from tests.helpers.zoo import bits


def local_leaves(tree: Any) -> list[torch.Tensor]:
    return to_torch([leaf.local for leaf in optree.tree_leaves(tree, is_leaf=is_sharded)])


def assert_close(got: list[torch.Tensor], want: list[torch.Tensor], tolerance: float) -> None:
    """Every leaf differs from the wanted one by at most `tolerance` of its norm."""
    assert len(got) == len(want)
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        error = (a.double() - b).norm() / b.norm().clamp_min(1e-12)
        assert error <= tolerance, f"leaf {index} differs by {error:.1e}"


def assert_same_bits(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    """Every leaf has the dtype, the shape and the bits of the wanted one."""
    assert [(x.dtype, x.shape) for x in got] == [(x.dtype, x.shape) for x in want]
    unequal = [i for i, (a, b) in enumerate(zip(got, want, strict=True)) if not torch.equal(bits(a), bits(b))]
    assert not unequal, f"leaves {unequal} differ"
