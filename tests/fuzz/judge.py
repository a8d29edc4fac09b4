"""The judge of numbers: plain torch on one process, on the data of all ranks. It knows nothing of hpfunc."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from tests.fuzz.build import batch_of, forward, num_microbatches, random_seed, slices, unit_function, whole
from tests.fuzz.cases import Case, Ref, Unit

Tensor = torch.Tensor
LEARNING_RATE, MOMENTUM = 0.05, 0.9


@dataclass
class Judged:
    """One call of the step, as it should be.

    Attributes:
        losses: by data index; one for each differentiation.
        gradients: by name, of whole arrays; those of plain tensors by (name, data index).
        scales: what the gradients are sums of, in size.
        updated: arrays after the update.
    """

    losses: dict[int, list[Tensor]] = field(default_factory=dict)
    gradients: list[dict[Any, Tensor]] = field(default_factory=list)
    scales: list[dict[Any, float]] = field(default_factory=list)
    updated: dict[str, Tensor] = field(default_factory=dict)
    activations: dict[int, list[Tensor]] = field(default_factory=dict)


class PlainWorld:
    """One rank's view of the whole arrays."""

    def __init__(
        self, case: Case, wholes: dict[str, Tensor], rank: int, *, casts: bool = True, checkpoints: bool = False
    ) -> None:
        self.case, self.wholes, self.rank = case, wholes, rank
        self.casts, self.checkpoints = casts, checkpoints

    def psum(self, x: Tensor) -> Tensor:
        return x  # arrays are whole over tp

    pvary = psum

    def weight(self, ref: Ref, unit: Unit) -> Tensor:
        array, value = self.case.array(ref.array), self.wholes[ref.array]
        if array.kind == "ep":
            value = value[slices(self.case, array, self.rank, ["ep"])]
        for row in ref.rows:
            value = value[row]
        return 2 * value if ref.is_made else value

    def call(self, unit: int, weights: Any, x: Tensor) -> Any:
        fn, name = unit_function(self.case, self.case.units[unit], self), self.case.around.param_dtype
        if name:
            fn = functools.partial(_casting, fn, getattr(torch, name) if self.casts else torch.float64)
        if self.checkpoints and self.case.units[unit].remat:
            return checkpoint(fn, weights, x, use_reentrant=False)  # with its casts: it keeps what it is given
        return fn(weights, x)

    def checkpoint(self, fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return checkpoint(fn, x, use_reentrant=False) if self.checkpoints else fn(x)

    def inner_checkpoint(self, fn: Callable[..., Any], weights: Any, x: Tensor) -> Any:
        return checkpoint(fn, weights, x, use_reentrant=False) if self.checkpoints else fn(weights, x)

    def whole(self, name: str) -> Tensor:
        return self.wholes[name]

    def own(self, name: str) -> Tensor:
        array = self.case.array(name)
        return self.wholes[name] if array.kind == "plain" else self.wholes[name][slices(self.case, array, self.rank)]


def _casting(fn: Callable[..., Any], dtype: torch.dtype, weights: Any, x: Tensor) -> Any:
    return _cast(fn(_cast(weights, dtype), _cast(x, dtype)), torch.float64)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    if isinstance(tree, dict):
        return {key: _cast(value, dtype) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree)(_cast(value, dtype) for value in tree)
    return tree


def _ranks_of_data(case: Case) -> dict[int, int]:
    """Returns the first rank that has each part of the data."""
    found: dict[int, int] = {}
    for rank in range(case.num_ranks):
        found.setdefault(case.grid.data_index(rank), rank)
    return found


def judge(case: Case, num_calls: int, *, casts: bool = True, checkpoints: bool = False) -> list[Judged]:
    """Returns what each call gives; a step with an update goes on from what the last one gave.

    Args:
        casts: compute units in `param_dtype`, if there is one, with arrays in their own dtypes; else all in float64.
        checkpoints: checkpoint where the step does. That changes no number, but what torch finds of writes in place.

    Raises:
        Exception: whatever plain torch raises.
    """
    wholes = {array.name: whole(case, array) for array in case.arrays}
    if not casts:
        wholes = _cast(wholes, torch.float64)
    if case.around.is_remade:
        wholes |= {array.name: 2 * wholes[array.name] for array in case.arrays if array.group == "a"}
    sums: dict[str, Tensor] = {}
    found = []
    for _ in range(num_calls):
        found.append(_call(case, wholes, casts, checkpoints))
        if not case.around.update:
            return found * num_calls
        wholes = wholes | _updated(case, wholes, found[-1], sums)
        found[-1].updated = wholes
    return found


def _call(case: Case, wholes: dict[str, Tensor], casts: bool, checkpoints: bool) -> Judged:
    out = Judged()
    passes = [1.0, 0.5] if case.around.twice else [1.0]
    out.gradients, out.scales = [{} for _ in passes], [{} for _ in passes]
    ranks = _ranks_of_data(case)
    for index, rank in ranks.items():
        torch.manual_seed(random_seed(case, index))
        out.losses[index] = []
        for n, factor in enumerate(passes):
            world = functools.partial(PlainWorld, case, rank=rank, casts=casts, checkpoints=checkpoints)
            loss, gradients, activations = _differentiate(case, wholes, world, index, factor)
            out.losses[index].append(loss)
            out.activations.setdefault(index, activations)
            share = 1 / len(ranks) if case.around.reduce_op == "mean" else 1.0
            for name, gradient in gradients.items():
                if case.array(name).kind == "plain":
                    _add(out.gradients[n], out.scales[n], (name, index), gradient)
                else:
                    _add(out.gradients[n], out.scales[n], name, share * gradient)
        if case.around.evaluates:
            with torch.no_grad():
                loss = forward(PlainWorld(case, dict(wholes), rank, casts=False), batch_of(case, index))[0]
            out.losses[index].append(loss)
    return out


def _add(sums: dict[Any, Tensor], scales: dict[Any, float], key: Any, value: Tensor) -> None:
    sums[key] = sums[key] + value if key in sums else value
    scales[key] = scales.get(key, 0.0) + float(value.detach().abs().double().sum())


def trained(case: Case) -> Iterable[str]:
    """Returns the names of what is differentiated."""
    return [array.name for array in case.arrays if array.group in case.trained_groups]


def _differentiate(
    case: Case, wholes: dict[str, Tensor], world_of: Callable[..., PlainWorld], index: int, factor: float
) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
    names = list(trained(case))
    leaves = {name: wholes[name].clone().requires_grad_() for name in names}
    values = {name: value.clone() for name, value in wholes.items()} | leaves
    world = world_of(values)
    count = num_microbatches(case)
    share = 1 / count if case.around.reduce_op == "mean" else 1.0
    total, sums, activations = torch.zeros((), dtype=torch.float64), {}, []
    for x in batch_of(case, index).chunk(count):
        loss, aux = forward(world, x)
        found = torch.autograd.grad(factor * loss, list(leaves.values()), allow_unused=True)
        for name, gradient in zip(names, found, strict=True):
            if gradient is not None:
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                sums[name] = sums.get(name, 0) + share * dense
        total = total + share * factor * loss.detach()
        activations += [h.detach() for h in aux]
    return total, {name: sums.get(name, torch.zeros_like(wholes[name])) for name in names}, activations


def _updated(case: Case, wholes: dict[str, Tensor], call: Judged, sums: dict[str, Tensor]) -> dict[str, Tensor]:
    after = {}
    for array in case.arrays:
        if array.group == "a":
            step = call.gradients[0][array.name]
            if case.around.update == "momentum":
                step = sums[array.name] = MOMENTUM * sums[array.name] + step if array.name in sums else step
            after[array.name] = wholes[array.name] - LEARNING_RATE * step
    return after
