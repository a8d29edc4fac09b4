"""From a case to its loss: written once, over a `World`, which is hpfunc's or plain torch's."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from tests.fuzz.cases import BATCH, WIDTH, Array, Call, Case, Join, Ref, Term, Unit
from tests.fuzz.functions import hooked
from tests.fuzz.ops import KINDS

Tensor = torch.Tensor


class LossWorld(Protocol):
    """What differs between hpfunc and plain torch in a loss."""

    case: Case

    def psum(self, x: Tensor) -> Tensor: ...

    def pvary(self, x: Tensor) -> Tensor: ...

    def weight(self, ref: Ref, unit: Unit) -> Any:
        """Returns what stands in the place of a weight in a unit's first argument."""
        ...

    def call(self, unit: int, weights: Any, x: Tensor) -> Any:
        """Calls a unit."""
        ...

    def checkpoint(self, fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Calls ``fn(x)`` under activation checkpointing."""
        ...

    def own(self, name: str) -> Tensor:
        """Returns this rank's part of an array, or a plain tensor."""
        ...

    def whole(self, name: str) -> Tensor:
        """Returns a whole array outside of units."""
        ...


# --- values ---------------------------------------------------------------------------------------------------------
def whole(case: Case, array: Array) -> Tensor:
    """Returns the value of an array before the first step, the same on all ranks."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{case.seed} {array.name}".encode()))
    if array.dtype == "int64":
        return torch.randperm(max(array.shape[0], 1), generator=generator)[: array.shape[0]]
    if array.dtype == "bool":
        return torch.rand(array.shape, generator=generator) > 0.5
    dtype = getattr(torch, array.dtype)
    return 0.5 * torch.randn(array.shape, generator=generator, dtype=torch.complex128 if dtype.is_complex else
                             torch.float64).to(dtype)  # fmt: skip


def batch_of(case: Case, index: int) -> Tensor:
    """Returns the examples of the ranks at one place along the data axes."""
    generator = torch.Generator().manual_seed(7919 * case.seed + index)
    x = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)
    if case.around.batch == "transposed":
        return x.t().contiguous().t()
    if case.around.batch == "expanded":
        return x[:1].expand(BATCH, WIDTH)
    return x


def random_seed(case: Case, index: int) -> int:
    """Returns the state of the random generator from which the step of a rank draws."""
    return 31 * case.seed + index


def num_microbatches(case: Case) -> int:
    """Returns how many backwards make one gradient."""
    return 2 if case.around.accumulate else 1


def slices(case: Case, array: Array, rank: int, only: Sequence[str] = ()) -> tuple[slice, ...]:
    """Returns where the part of a rank lies: blocks of equal size, the last ones short or empty.

    Args:
        only: count these axes alone; none for all.
    """
    place, found = case.grid.coordinate(rank), []
    for dim, n in enumerate(array.shape):
        entry = array.spec[dim] if dim < len(array.spec) else None
        axes = [entry] if isinstance(entry, str) else list(entry or ())
        count, index = 1, 0
        for axis in axes:
            if not only or axis in only:
                count, index = count * case.grid.size(axis), index * case.grid.size(axis) + place[axis]
        block = -(-n // count)
        found.append(slice(min(n, index * block), min(n, (index + 1) * block)))
    return tuple(found)


# --- units ----------------------------------------------------------------------------------------------------------
def unit_function(case: Case, unit: Unit, world: Any) -> Callable[..., Any]:
    """Returns ``fn(weights, x)`` of a unit."""

    def fn(weights: Any, x: Tensor) -> Any:
        values = list(weights.values()) if isinstance(weights, dict) else list(weights)
        given, place = x, 0
        for op in unit.ops:
            count = len(op.weights)
            x = KINDS[op.kind].apply(x, *values[place : place + count], world, **dict(op.options))
            place += count
        return OUTPUTS[unit.output](x, given)

    def checkpointing(weights: Any, x: Tensor) -> Any:
        return world.inner_checkpoint(fn, weights, x)

    return checkpointing if unit.checkpoints else fn


OUTPUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tensor": lambda y, x: y,
    "view": lambda y, x: y.unsqueeze(0)[0],
    "tuple": lambda y, x: (y, None, 3, y.detach().sum()),
    "dict": lambda y, x: {"y": y, "none": None, "text": "t", "more": 2 * y},
    "twice": lambda y, x: [y, y],
    "with its input": lambda y, x: (y, x),
    "with integers": lambda y, x: (y, y.detach().argmax(1)),
    "transposed": lambda y, x: y.t(),
    "lost": lambda y, x: {"y": x * 1.0, "lost": y},
}


def _taken(kind: str, out: Any) -> Tensor:
    match kind:
        case "tuple" | "with its input" | "with integers":
            return out[0]
        case "dict":
            return out["y"] + 0.5 * out["more"]
        case "lost":
            return out["y"]
        case "twice":
            return out[0] + out[1]
        case "transposed":
            return out.t()
        case _:
            return out


# --- the loss -------------------------------------------------------------------------------------------------------
def _added_in_place(a: Tensor, b: Tensor) -> Tensor:
    fresh = 1.0 * a
    fresh += b
    return fresh


def _residual(a: Tensor, b: Tensor) -> Tensor:
    a += b
    return a


def _kept(a: Tensor, b: Tensor) -> Tensor:
    return hooked(a) + 0.5 * b


def _without_grad(a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(a)
    return b * gate


JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * torch.tanh(b),
    "sub": lambda a, b: a - 0.5 * b,
    "cat": lambda a, b: torch.cat([a[:, :3], b[:, 3:]], 1),
    "added_in_place": _added_in_place,
    "residual_in_place": _residual,
    "relu_in_place": lambda a, b: a.relu_(),
    "detached": lambda a, b: a.detach() + b,
    "kept_gradient": _kept,
    "without_grad": _without_grad,
    "flipped": lambda a, b: a.flip(0) + b.mT.mT,
}


def forward(world: LossWorld, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Returns the loss of one batch, and the last activations."""
    case = world.case
    h = [1.0 * x]
    for statement in case.body:
        h.append(_statement(world, statement, h))
    loss = torch.zeros((), dtype=torch.float64)
    for term in case.loss:
        loss = loss + term.factor * _term(world, term, h)
    return loss.detach() if case.has_detached_loss else loss, [h[-1]]


def _statement(world: LossWorld, statement: Call | Join, h: list[Tensor]) -> Tensor:
    if isinstance(statement, Join):
        return JOINS[statement.kind](h[statement.first], h[statement.second])

    def calls(x: Tensor) -> Tensor:
        for index in statement.units:
            unit = world.case.units[index]
            weights: Any = [world.weight(ref, unit) for ref in unit.refs]
            if unit.tree == "dict":
                weights = {f"w{i:02}": weight for i, weight in enumerate(weights)}
            x = _taken(unit.output, world.call(index, weights, x))
        return x

    source = h[statement.source]
    if statement.is_without_grad:
        with torch.no_grad():
            extra = calls(source)
        return source + extra
    return world.checkpoint(calls, source) if statement.is_checkpointed else calls(source)


def _term(world: LossWorld, term: Term, h: list[Tensor]) -> Tensor:
    match term.kind:
        case "square":
            return h[int(term.of)].square().mean()
        case "mean":
            return h[int(term.of)].mean()
        case "local":
            return world.own(str(term.of)).square().sum()
        case "whole":
            return world.whole(str(term.of)).square().mean()
        case "penalty":
            x = h[0].detach().requires_grad_()
            call = next(s for s in world.case.body if isinstance(s, Call))
            out = _statement(world, replace(call, source=0, is_without_grad=False), [x])
            (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
            return gradient.square().mean()
        case "plain":
            return (world.own(str(term.of)) * h[-1].mean()).sum()
    raise AssertionError(term)
