"""Chains of views of one weight, and what is computed from them. A chain is drawn by trying it on an empty tensor."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import torch

Tensor = torch.Tensor
Step = tuple[Any, ...]

SHAPES = [(6,), (4, 6), (6, 4), (2, 3, 2), (3, 2), (1,), (), (5, 2), (2, 2, 3, 2), (7, 1), (1, 6), (3, 4), (8,)]

STEPS: dict[str, Callable[..., Tensor]] = {
    "t": lambda v: v.t(),
    "mT": lambda v: v.mT,
    "transpose": lambda v, i, j: v.transpose(i, j),
    "permute": lambda v, *order: v.permute(order),
    "flatten": lambda v: v.reshape(-1),
    "view": lambda v, *shape: v.view(shape),
    "unsqueeze": lambda v, i: v.unsqueeze(i),
    "squeeze": lambda v: v.squeeze(),
    "select": lambda v, i, k: v.select(i, k),
    "narrow": lambda v, i, k, n: v.narrow(i, k, n),
    "every_second": lambda v: v[::2],
    "last": lambda v: v[..., -1],
    "index": lambda v, *rows: v[list(rows)],
    "mask": lambda v: v[torch.arange(v.shape[0]) % 2 == 0],
    "chunk": lambda v, i, k: v.chunk(2, i)[k],
    "unbind": lambda v, k: v.unbind(0)[k],
    "expand": lambda v, n: v.expand(n, *v.shape),
    "unfold": lambda v, i, n, step: v.unfold(i, n, step),
    "diagonal": lambda v: v.diagonal(),
    "as_strided": lambda v, size, stride: v.as_strided(size, stride, v.storage_offset()),
    "flip": lambda v, i: v.flip(i),
    "roll": lambda v, n: v.roll(n),
    "view_as_complex": torch.view_as_complex,
    "view_as_real": torch.view_as_real,
    "complex_dtype": lambda v: v.view(torch.complex128),
    "conj": lambda v: v.conj(),
    "real": lambda v: v.real,
    "imag": lambda v: v.imag,
    "neg_view": torch._neg_view,
    "neg": lambda v: -v,
    "resolve": lambda v: v.resolve_conj().resolve_neg(),
    "detach": lambda v: v.detach(),
    "contiguous": lambda v: v.contiguous(),
    "clone": lambda v: v.clone(),
    "T_contiguous": lambda v: v.t().contiguous().t(),
}

CONSUMERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "square": lambda v, s: v * v,
    "times": lambda v, s: v * s,
    "tanh": lambda v, s: torch.tanh(_real(v) * s),
    "sin_times": lambda v, s: torch.sin(_real(v)) * s,
    "conj_times": lambda v, s: v.conj() * (v * s),
    "matmul": lambda v, s: _real(v).reshape(-1, 1) @ (s * torch.ones(1, 2, dtype=s.dtype)),
    "only_sum": lambda v, s: v,
    "clone_inplace": lambda v, s: (v.clone().mul_(2) * s).add_(1),
}


def _real(v: Tensor) -> Tensor:
    return torch.view_as_real(v) if v.is_complex() else v


def draw_steps(rng: Random, shape: tuple[int, ...], count: int, dtype: torch.dtype = torch.float64) -> tuple[Step, ...]:
    """Returns a chain that works on a contiguous tensor of this shape."""
    tried = torch.ones(shape, dtype=dtype)
    steps: list[Step] = []
    for _ in range(6 * count):
        if len(steps) == count:
            break
        step = _draw(rng, tried)
        with suppress(Exception):
            after = STEPS[step[0]](tried, *step[1:])
            if 0 < after.numel() <= 64:
                tried = after
                steps.append(step)
    return tuple(steps)


def _draw(rng: Random, v: Tensor) -> Step:
    complex_only = ("conj", "real", "imag", "view_as_real", "resolve")
    kinds = [kind for kind in STEPS if v.is_complex() or kind not in complex_only]
    if v.is_complex():
        kinds += complex_only * 4
    elif v.dim() and v.shape[-1] == 2:
        kinds += ["view_as_complex"] * 12
    kind = rng.choice(kinds)
    arguments = _ARGUMENTS.get(kind)
    return (kind, *arguments(rng, v)) if arguments else (kind,)


def _dim(rng: Random, v: Tensor) -> int:
    return rng.randrange(max(v.dim(), 1))


def _place(rng: Random, v: Tensor) -> tuple[int, int, int]:
    """Returns a dim, an index in it, and how many elements come from there on."""
    dim = _dim(rng, v)
    n = v.shape[dim] if v.dim() else 1
    index = rng.randrange(max(n, 1))
    return dim, index, n - index


def _narrow(rng: Random, v: Tensor) -> Step:
    dim, index, rest = _place(rng, v)
    return dim, index, rng.randint(1, max(rest, 1))


def _rows(rng: Random, v: Tensor) -> Step:
    return tuple(rng.randrange(v.shape[0] if v.dim() else 1) for _ in range(rng.randint(1, 4)))


def _strided(rng: Random, _: Tensor) -> Step:
    size = rng.choice([(2,), (2, 2), (3, 2), (1, 3)])
    return size, tuple(rng.randint(0, 2) for _ in size)


_ARGUMENTS: dict[str, Callable[[Random, Tensor], Step]] = {
    "transpose": lambda rng, v: (_dim(rng, v), _dim(rng, v)),
    "permute": lambda rng, v: tuple(rng.sample(range(v.dim()), v.dim())),
    "view": lambda rng, v: rng.choice([(-1,), (2, -1), (-1, 2), (3, -1), (-1, 1)]),
    "unsqueeze": lambda rng, v: (_dim(rng, v),),
    "flip": lambda rng, v: (_dim(rng, v),),
    "select": lambda rng, v: _place(rng, v)[:2],
    "chunk": lambda rng, v: (_dim(rng, v), rng.randrange(2)),
    "narrow": _narrow,
    "index": _rows,
    "unbind": lambda rng, v: _rows(rng, v)[:1],
    "expand": lambda rng, v: (rng.randint(1, 3),),
    "roll": lambda rng, v: (rng.randint(1, 3),),
    "unfold": lambda rng, v: (_dim(rng, v), rng.randint(1, 3), rng.randint(1, 2)),
    "as_strided": _strided,
}


def follow(weight: Tensor, steps: tuple[Step, ...]) -> Tensor:
    """Returns the view at the end of a chain."""
    for name, *rest in steps:
        weight = STEPS[name](weight, *rest)
    return weight


def consume(kind: str, view: Tensor, x: Tensor) -> Tensor:
    """Returns a real number made of the view and of the activations."""
    out = CONSUMERS[kind](view, x.mean())
    if out.is_complex():
        out = torch.view_as_real(out * torch.tensor(1 + 0.5j, dtype=out.dtype))
    return out.mean()
