"""`Found`: what the zoo says of one architecture, and which numbers are wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isnan
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]

# A planned step adds up what the ranks have in another order than one process: some last bits of float64.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Trained:
    """What some steps give: the loss of each, and weights and a rank's buffers at the end."""

    losses: tuple[float, ...]
    weights: Tensors
    buffers: Tensors


def difference(got: Trained, want: Trained, start: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    """Returns the largest difference between losses, weights and buffers, and where it is.

    That of a weight is relative to how far the steps moved it, because an update that is wrong may be small beside the
    weight; or to a thousandth of the mean of all, for those that stayed where they were.
    """
    found = [(abs(a - b) / max(abs(b), 1e-9), "the loss") for a, b in zip(got.losses, want.losses, strict=True)]
    moved = {path: _norm(x, start[path]) for path, x in want.weights.items()}
    least = max(1e-3 * (sum(x**2 for x in moved.values()) / max(len(moved), 1)) ** 0.5, 1e-12)
    found += [(_norm(got.weights[path], x) / max(moved[path], least), path) for path, x in want.weights.items()]
    found += [
        (_norm(got.buffers[path], x) / max(_norm(x, torch.zeros_like(x)), 1e-9), path)
        for path, x in want.buffers.items()
    ]
    # NaN compares as smaller than everything: it is the largest here.
    return max(((float("inf") if isnan(x) else x, where) for x, where in found), default=(0.0, ""))


def _norm(a: torch.Tensor, b: torch.Tensor) -> float:
    differs = a != b  # infinities may be equal
    return float((a[differs].double() - b[differs].double()).norm()) if a.is_floating_point() else float(differs.sum())


# From good to bad. ``not built``: it does not train without hpfunc either, so nothing is known. ``refused``: by an
# error of hpfunc. ``wrong``: numbers or bits. ``error``: not an error of hpfunc. ``hangs``: or a rank died.
VERDICTS = ("works", "not built", "refused", "wrong", "error", "hangs")


@dataclass(frozen=True, slots=True)
class Units:
    """Which units were chosen, for the table.

    Attributes:
        num: how many there are.
        blocks: the class that most of them have, and how many have it.
        share: of the bytes, in the largest one.
        largest: its path and class.
        is_of_words: whether that one has a row for each word: an embedding, or a head.
    """

    num: int
    blocks: str
    share: float
    largest: str
    is_of_words: bool


@dataclass(frozen=True, slots=True)
class Found:
    """What a sweep found out about one architecture: one of `VERDICTS`, why, and facts for the table."""

    name: str
    kind: str
    verdict: str
    why: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def judged(got: Trained, want: Trained, start: Tensors, rounding: float) -> tuple[str, str]:
    """Returns ``works`` or ``wrong``, and why.

    Args:
        got: of the planned steps.
        want: of the same steps in one process.
        start: the weights before.
        rounding: what torch's own rounding explains; see `plain.rounding`.
    """
    found, where = difference(got, want, start)
    if found <= max(ROUNDING, rounding):
        return "works", ""
    return "wrong", f"{where} differs by {found:.1e}, and torch's own rounding explains {rounding:.1e}"
