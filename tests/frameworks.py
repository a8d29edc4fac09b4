"""The few operations of the tests' models in each framework, so that one model, and one test, serves them all.

What a rank computes with is told by ``HPFUNC_BACKEND``; tests themselves hold torch tensors.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import optree
import pytest
import torch

Tensor = Any

needs_mindspore = pytest.mark.skipif(
    importlib.util.find_spec("mindspore") is None, reason="MindSpore is not installed (pip install 'hpfunc[mindspore]')"
)


def is_mindspore() -> bool:
    """Returns whether this process computes with MindSpore."""
    return os.environ.get("HPFUNC_BACKEND") == "mindspore"


def to_framework(tree: Any) -> Any:
    """Returns a tree of torch tensors as tensors of this process's framework, in memory of their own."""
    if not is_mindspore():
        return tree
    from hpfunc.backends._mindspore_host import give

    return optree.tree_map(lambda x: give(x.clone()), tree)


def to_torch(tree: Any) -> Any:
    """Returns a tree of tensors as torch tensors, with the local parts of sharded arrays."""
    if not is_mindspore():
        return tree
    from hpfunc.backends._mindspore_host import hold

    return optree.tree_map(hold, tree)


def matmul(x: Tensor, w: Tensor) -> Tensor:
    """Returns ``x @ w``."""
    return x @ w


def linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """Returns ``x @ w.T + b``, without a saved copy of `w`."""
    if isinstance(x, torch.Tensor):
        return torch.nn.functional.linear(x, w, b)
    return importlib.import_module("mindspore.mint.nn.functional").linear(x, w, b)


def tanh(x: Tensor) -> Tensor:
    """Returns the hyperbolic tangent."""
    if isinstance(x, torch.Tensor):
        return torch.tanh(x)
    return importlib.import_module("mindspore.mint").tanh(x)


def scaled(x: Tensor, factor: float) -> Tensor:
    """Returns ``factor * x``. MindSpore rounds a number to float32 first, also for a float64 tensor."""
    if isinstance(x, torch.Tensor):
        return factor * x
    return x * importlib.import_module("mindspore").Tensor(factor, x.dtype)
