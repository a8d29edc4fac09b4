"""The few operations of the tests' models in each framework, so that one model, and one test, serves them all.

What a rank computes with is told by ``HPFUNC_BACKEND``; tests themselves hold torch tensors.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import optree
import pytest
import torch
import torch.utils.checkpoint

Tensor = Any

needs_mindspore = pytest.mark.skipif(
    importlib.util.find_spec("mindspore") is None, reason="MindSpore is not installed (pip install 'hpfunc[mindspore]')"
)


def framework() -> str:
    """Returns what this process computes with."""
    return os.environ.get("HPFUNC_BACKEND", "torch")


def is_mindspore() -> bool:
    """Returns whether this process computes with MindSpore."""
    return framework() == "mindspore"


def to_framework(tree: Any) -> Any:
    """Returns a tree of torch tensors as tensors of this process's framework, in memory of their own."""
    if not is_mindspore():
        return tree
    from hpfunc.backends.mindspore.cpu import give

    return optree.tree_map(lambda x: give(x.clone()) if isinstance(x, torch.Tensor) else x, tree)


def to_torch(tree: Any) -> Any:
    """Returns a tree of tensors as torch tensors, with the local parts of sharded arrays."""
    if not is_mindspore():
        return tree
    from hpfunc.backends.mindspore.cpu import hold

    return optree.tree_map(lambda x: hold(x) if is_tensor(x) else x, tree)


def is_tensor(x: Any) -> bool:
    """Returns whether this is a tensor of this process's framework."""
    return isinstance(x, tensor_type())


def tensor_type() -> type:
    """Returns the class of this process's tensors."""
    return importlib.import_module("mindspore").Tensor if is_mindspore() else torch.Tensor


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns ones, in this process's framework."""
    return to_framework(torch.ones(shape, dtype=dtype))


def zeros(*shape: int) -> Tensor:
    """Returns zeros of float32."""
    return to_framework(torch.zeros(shape))


def arange(end: float) -> Tensor:
    """Returns 0, 1, ... of the dtype that torch chooses."""
    return to_framework(torch.arange(end))


def checkpoint(fn: Callable[..., Any], *args: Any, reentrant: bool = False) -> Any:
    """Calls `fn`, whose inside is computed again in backward."""
    if is_mindspore():
        mindspore = importlib.import_module("mindspore")
        block = type("Block", (mindspore.nn.Cell,), {"construct": lambda self, *args: fn(*args)})() if reentrant else fn
        return mindspore.recompute(block, *args, use_reentrant=reentrant)
    return torch.utils.checkpoint.checkpoint(fn, *args, use_reentrant=reentrant)


def no_early_stop() -> AbstractContextManager[Any]:
    """In it what is called is computed again to its end, not only until all that was saved is there."""
    if is_mindspore():
        return importlib.import_module("mindspore.common.recompute")._set_recompute_early_stop(False)
    return torch.utils.checkpoint.set_checkpoint_early_stop(False)


def gradient(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Returns the gradient of `fn` by the framework's own functional transform."""
    return importlib.import_module("mindspore").grad(fn) if is_mindspore() else torch.func.grad(fn)


def detached(x: Tensor) -> Tensor:
    """Returns `x` without its history."""
    return importlib.import_module("mindspore").ops.stop_gradient(x) if is_mindspore() else x.detach()


def with_backward(x: Tensor, backward: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns `x` as a new tensor, whose gradient goes through `backward`."""
    return _identity().apply(backward, x)


@cache
def _identity() -> Any:
    base: Any = torch.autograd.Function
    if is_mindspore():
        base = importlib.import_module("mindspore.common._grad_function")._Function

    class Identity(base):
        """The identity, with a backward by hand."""

        @staticmethod
        def forward(ctx: Any, backward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
            ctx.by_hand = backward
            return x[...]

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
            return None, ctx.by_hand(gradients[0])

    return Identity


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


def repeat(x: Tensor, number: int) -> Tensor:
    """Returns the rows of a matrix, all of them this many times."""
    return x.repeat(number, 1) if isinstance(x, torch.Tensor) else x.tile((number, 1))


def dropout(x: Tensor, probability: float) -> Tensor:
    """Returns `x` with some elements zero, the others larger."""
    if isinstance(x, torch.Tensor):
        return torch.nn.functional.dropout(x, probability)
    return importlib.import_module("mindspore").ops.dropout(x, probability)


def seed(number: int) -> None:
    """Seeds the random numbers of this process's framework."""
    importlib.import_module("mindspore").manual_seed(number) if is_mindspore() else torch.manual_seed(number)


def random_state() -> torch.Tensor:
    """Returns the state of the generator of this process's framework."""
    return to_torch(importlib.import_module("mindspore").get_rng_state()) if is_mindspore() else torch.get_rng_state()


def stopped(x: Tensor) -> Tensor:
    """Returns `x` without a derivative."""
    return x.detach() if isinstance(x, torch.Tensor) else importlib.import_module("mindspore").ops.stop_gradient(x)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `x` in the dtype that torch calls so."""
    if isinstance(x, torch.Tensor):
        return x.to(dtype)
    return x.astype(getattr(importlib.import_module("mindspore"), str(dtype).removeprefix("torch.")))


def scaled(x: Tensor, factor: float) -> Tensor:
    """Returns ``factor * x``. MindSpore rounds a number to float32 first, also for a float64 tensor."""
    if isinstance(x, torch.Tensor):
        return factor * x
    return x * importlib.import_module("mindspore").Tensor(factor, x.dtype)
