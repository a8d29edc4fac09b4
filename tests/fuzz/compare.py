"""What one call of a step delivered, against the judge, against the eager step, and as memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tests.fuzz.build import slices
from tests.fuzz.cases import Case
from tests.fuzz.functions import KEPT
from tests.fuzz.judge import Judged
from tests.fuzz.memory import copies, overlap, overlaps_itself, same_values
from tests.fuzz.step import own_part

Tensor = torch.Tensor
ROUNDINGS = 10
"""By how many times the rounding of plain torch in the same dtypes a number may differ."""
TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 3e-2}


@dataclass(frozen=True, slots=True)
class Find:
    """Something that should not be.

    Attributes:
        kind: what, in few words; finds of one kind probably have one cause.
        stage: ``"eager"``, ``"recorded"`` or ``"planned"``.
        text: the details.
    """

    kind: str
    stage: str
    text: str

    @property
    def key(self) -> str:
        """What stays the same while a case is made smaller."""
        return f"{self.kind} ({self.stage})"


class Delivered:
    """The tensors of one result, with names."""

    def __init__(self, result: Any) -> None:
        passes, updated, state = result
        self.losses = [each["loss"] for each in passes]
        self.gradients = [{n: own_part(g) for n, g in each["gradients"].items()} for each in passes]
        self.activations = list(_tensors(passes[0]["aux"]))
        self.updated = {n: own_part(p) for n, p in (updated or {}).items()}
        self.state = list(_tensors(state))

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yields what the caller may write into: gradients, new weights, losses."""
        for n, each in enumerate(self.gradients):
            for name, tensor in each.items():
                yield f"gradient {name}{f' of pass {n}' if n else ''}", tensor
        for name, tensor in self.updated.items():
            yield f"new {name}", tensor
        for n, tensor in enumerate(self.losses):
            if tensor is not None:
                yield f"loss {n}", tensor

    def bits(self) -> list[Tensor]:
        """Returns copies of all that was delivered."""
        return copies([tensor for _, tensor in self.named()] + self.activations)


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for each in tree:
            yield from _tensors(each)


# --- numbers --------------------------------------------------------------------------------------------------------
def tolerance(case: Case) -> float:
    """Returns the relative difference that the dtypes of a case explain."""
    return max(TOLERANCE[name] for name in _dtypes(case))


def _dtypes(case: Case) -> list[str]:
    around = case.around
    found = [around.reduce_dtype or around.param_dtype, around.accum_dtype, *(array.dtype for array in case.arrays)]
    return [name for name in ["float64", *found] if name in TOLERANCE]


def numbers(
    case: Case, rank: int, got: Delivered, want: Judged, exact: Callable[[], Judged]
) -> Iterator[tuple[str, str]]:
    """Yields what differs from the judge: kind and text.

    Args:
        exact: returns the judge of the same step in float64: where gradients cancel, nothing is left but rounding.
    """
    index, limit = case.grid.data_index(rank), tolerance(case)
    for n, loss in enumerate(got.losses):
        if loss is not None:
            right = want.losses[index][n]
            near = _close(loss, right, limit, 1 + abs(float(right)))
            if not near and not _is_rounded(case, loss, right, right, exact().losses[index][n]):
                yield "wrong loss", f"{float(loss)!r}, judge {float(right)!r}"
    expected = want.activations[index] if case.around.has_aux else []
    for a, b in zip(got.activations, expected, strict=True):
        if not _close(a, b, limit, float(b.abs().max())):
            yield "wrong aux", f"{a.flatten()[:3].tolist()}, judge {b.flatten()[:3].tolist()}"
    for n, each in enumerate(got.gradients[: len(want.gradients)]):
        floor = 1e-4 * max(want.scales[n].values(), default=1.0)
        for name, tensor in each.items():
            yield from _gradient(case, rank, name, tensor, want, n, floor, exact)
    for name, tensor in got.updated.items():
        whole = want.updated[name][slices(case, case.array(name), rank)]
        scale = float(want.updated[name].abs().sum()) + 1e-3
        terms = max(_terms(case, want, n) for n in range(len(want.scales)))
        near = _close(tensor, whole, limit, scale) or _close(tensor, whole, terms, 1.0)
        if not near and not _is_rounded(case, tensor, whole, want.updated[name], exact().updated[name]):
            yield "wrong update", f"{name}: {_first(tensor)}, judge {_first(whole)}"


def _gradient(
    case: Case, rank: int, name: str, tensor: Tensor, want: Judged, n: int, floor: float, exact: Callable[[], Judged]
) -> Iterator[tuple[str, str]]:
    array = case.array(name)
    if array.kind == "plain":
        key: Any = name, case.grid.data_index(rank)
        expected = want.gradients[n][key]
    else:
        key = name
        expected = want.gradients[n][key][slices(case, array, rank)]
    if tensor.shape != expected.shape:
        yield "wrong shape", f"gradient of {name}: {tuple(tensor.shape)}, judge {tuple(expected.shape)}"
    elif not _close(tensor, expected, tolerance(case), max(want.scales[n][key], floor)):
        right = exact().gradients[n][key]
        if _is_rounded(case, tensor, expected, want.gradients[n][key], right):
            return
        if _cancels(case, right, want, n, tensor, expected):
            return
        ratio = float((tensor * expected).sum() / expected.square().sum().clamp_min(1e-300)) if tensor.numel() else 1.0
        which = f"of {name}{f' of pass {n}' if n else ''}"
        yield "wrong gradient", f"{which}: {_first(tensor)}, judge {_first(expected)}; about {ratio:.4g} times that"


def _is_rounded(case: Case, got: Tensor, part: Tensor, want: Tensor, exact: Tensor) -> bool:
    """Returns whether `got` differs from its part of `want` by what plain torch rounds there, against float64."""
    rounding = float((want - exact).abs().max()) if len(set(_dtypes(case))) > 1 else 0.0
    return rounding > 0 and _close(got, part, ROUNDINGS * rounding, 1.0)


def _terms(case: Case, want: Judged, n: int) -> float:
    """Returns what is rounded away of the largest terms of a pass: what is left where terms cancel."""
    eps = max(torch.finfo(getattr(torch, name)).eps for name in _dtypes(case))
    return ROUNDINGS * eps * max(want.scales[n].values(), default=0.0)


def _cancels(case: Case, exact: Tensor, want: Judged, n: int, got: Tensor, expected: Tensor) -> bool:
    """Returns whether a gradient is nothing but rounding of larger terms, and so are the differences."""
    terms = _terms(case, want, n)
    return float(exact.abs().max()) <= terms and _close(got, expected, terms, 1.0)


def _close(got: Tensor, want: Tensor, limit: float, scale: float) -> bool:
    if got.shape != want.shape:
        return False
    difference = (got.detach() - want).abs()
    return bool((difference <= limit * scale + 1e-14).all())


def _first(tensor: Tensor) -> str:
    return str([float(f"{x:.5g}") if not isinstance(x, complex) else x for x in tensor.flatten()[:3].tolist()])


# --- memory ---------------------------------------------------------------------------------------------------------
def memory(case: Case, got: Delivered, arguments: list[Tensor]) -> Iterator[tuple[str, str]]:
    """Yields what shares memory, or was written into."""
    named = list(got.named())
    for i, (name, tensor) in enumerate(named):
        if overlaps_itself(tensor):
            yield "shared memory: within one tensor", f"{name} has strides {tensor.stride()}"
        for other, another in named[:i]:
            if overlap(tensor, another):
                yield "shared memory: two delivered tensors", f"{other} and {name}"
        if any(overlap(tensor, argument) for argument in arguments):
            yield "shared memory: with an argument", name
        if any(overlap(tensor, activation) for activation in got.activations):
            yield "shared memory: with aux", name
        if any(overlap(tensor, kept) for kept, _ in KEPT):
            yield "shared memory: with what a function keeps", name
    for tensor, before in KEPT:
        if not same_values(tensor, before):
            yield "written: what a function keeps", f"{_first(tensor)}, before {_first(before)}"


def poison(got: Delivered, turn: int) -> Iterator[tuple[str, str]]:
    """Writes NaN into one gradient, then into all; yields what that changed elsewhere."""
    every = [tensor for each in got.gradients for tensor in each.values()]
    rest = [(name, tensor) for name, tensor in got.named() if not name.startswith("gradient")]
    rest += [("aux", tensor) for tensor in got.activations] + [("state", tensor) for tensor in got.state]
    rest += [("what a function keeps", tensor) for tensor, _ in KEPT]
    if not every:
        return
    chosen, before, held = turn % len(every), copies(every), copies([tensor for _, tensor in rest])
    for i in [chosen, *(i for i in range(len(every)) if i != chosen)]:
        _fill(every[i])
        if i == chosen:
            for j, (tensor, bits) in enumerate(zip(every, before, strict=True)):
                if j != i and not same_values(tensor, bits):
                    yield "written: another gradient", f"by writing NaN into gradient {i}, gradient {j} changed"
    for (name, tensor), bits in zip(rest, held, strict=True):
        if not same_values(tensor, bits):
            yield f"written: {name.split()[0]}", f"by writing NaN into the gradients, {name} changed"


def _fill(tensor: Tensor) -> None:
    if not overlaps_itself(tensor):
        with torch.inference_mode():  # a step that runs under it gives tensors that can be written to in it only
            tensor.fill_(float("nan"))
