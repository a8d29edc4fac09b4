"""Trees and tensors that tests share, and the one comparison that counts: structure, dtypes, shapes, bits."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any, NamedTuple

import optree
import torch
from optree.registry import __GLOBAL_NAMESPACE as GLOBAL_NAMESPACE

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)


class Linear(NamedTuple):
    weight: Any
    bias: Any


@optree.register_pytree_node_class(namespace=GLOBAL_NAMESPACE)
class Box:
    """A node that a user registered."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def tree_flatten(self) -> tuple[Any, None, tuple[str]]:
        return (self.content,), None, ("content",)

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> Box:
        return cls(*children)


def tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    """Returns small integers in any dtype: sums of up to 16 of them are exact, in every order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 8, shape, generator=generator).to(dtype)


def trees(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Returns trees of every kind of node, by name."""
    count = iter(range(100))

    def leaf(*shape: int) -> torch.Tensor:
        return tensor(shape, dtype, next(count))

    tied = leaf(4, 3)
    return {
        "leaf": leaf(5, 2),
        "nothing": {},
        "none": {"w": None, "b": leaf(3)},
        "dict": {"w": leaf(6, 4), "b": leaf(4)},
        "nested": {"embed": {"w": leaf(7, 2)}, "layers": [{"w": leaf(4, 4), "b": leaf(4)} for _ in range(2)]},
        "tuples": (leaf(2, 3, 4), (leaf(1), [leaf(0, 3)])),
        "named": Linear(leaf(4, 4), Linear(leaf(3), None)),
        "ordered": OrderedDict(z=leaf(2, 2), a=leaf(9)),
        "deque": deque([leaf(4), leaf(8)]),
        "registered": {"box": Box(Box(leaf(4, 2)))},
        "scalars": [leaf(), leaf(4), leaf()],
        "tied": {"embed": tied, "head": tied},
    }


def bits(x: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor: NaN equals itself, and zero is not minus zero."""
    flat = x.detach().resolve_conj().reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8) if flat.numel() else flat.to(torch.uint8)


def assert_same(got: Any, want: Any) -> None:
    """Fails unless both trees have the same nodes, and tensors of the same dtype, shape and bits."""
    paths, found, got_def = optree.tree_flatten_with_path(got)
    _, wanted, want_def = optree.tree_flatten_with_path(want)
    assert got_def == want_def, f"{got_def} is not {want_def}"
    for path, a, b in zip(paths, found, wanted, strict=True):
        assert isinstance(a, torch.Tensor), (path, type(a))
        assert (a.dtype, tuple(a.shape)) == (b.dtype, tuple(b.shape)), (path, a.dtype, a.shape, b.dtype, b.shape)
        assert torch.equal(bits(a), bits(b)), (path, a, b)


def assert_close(got: Any, want: Any, tolerance: float = 1e-12) -> None:
    """Fails unless both trees have the same nodes, and float64 tensors that differ by at most `tolerance`, relative."""
    found, got_def = optree.tree_flatten(got)
    wanted, want_def = optree.tree_flatten(want)
    assert got_def == want_def, f"{got_def} is not {want_def}"
    for a, b in zip(found, wanted, strict=True):
        assert (a.dtype, tuple(a.shape)) == (b.dtype, tuple(b.shape)), (a.dtype, a.shape, b.dtype, b.shape)
        error = float((a - b).abs().max()) if a.numel() else 0.0
        scale = max(1.0, float(b.abs().max())) if b.numel() else 1.0
        assert error <= tolerance * scale, f"differs by {error:g} of {scale:g}\n{a}\n{b}"
