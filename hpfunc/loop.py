"""What a training loop needs around its step: as many batches on all ranks, numbers of all ranks, a meeting point.

All ranks call these functions together, between steps. They speak to the other hosts, and not to devices.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeVar

import optree

from ._errors import LeafError, PolicyError, UsageError, message
from ._running.agreement import agreeing, control
from ._running.context import current_session
from ._values.mesh import Mesh
from ._values.tree import paths

__all__ = ["barrier", "even_batches", "flops_per_token", "reduce_metrics"]
T = TypeVar("T")
_EVEN, _METRICS, _BARRIER = (f"hpfunc.loop.{name}" for name in ("even_batches", "reduce_metrics", "barrier"))
_UNKNOWN = -1
_OPS = ("mean", "sum", "max", "min")


def even_batches(batches: Iterable[T], mesh: Mesh, fill: T) -> Iterator[T]:
    """Yields this rank's batches, and then `fill` until no rank has any left: all ranks get the same number.

    A step is one program on all ranks, so a rank without data takes part in it as well: `fill` is a batch that does not
    count, such as one whose tokens are all masked. If reading a batch raises on one rank, the others raise PeerError.

    Args:
        batches: of this rank, a data loader or any iterable.
        mesh: its ranks go through their batches together.
        fill: a batch of the usual shapes.

    Raises:
        UsageError: it is called inside of a step, or `batches` has more items than its length says.
        AgreementError: a rank does something else meanwhile.
        PeerError: reading a batch failed on another rank.

    Communication: if all ranks know the length of their batches, 24 bytes from each once, else before each batch.

    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> list(hpfunc.loop.even_batches(range(3), mesh, fill=-1))
    [0, 1, 2]
    """
    _check_outside(_EVEN, "go through batches between steps")
    length = _length(batches)
    lengths = _of_all_ranks(mesh, "the number of batches", length)
    iterator, number = iter(batches), 0
    while True:
        batch = _next(iterator, mesh)
        if _UNKNOWN in lengths:
            goes_on = any(_of_all_ranks(mesh, f"batch {number}", int(batch is not _END)))
        else:
            goes_on = number < max(lengths)
            if batch is not _END and number >= length:
                rule = f"the batches of this rank go on after {length}, which is their length"
                hint = "give it iter(batches), whose length is not known; then ranks compare before each batch"
                raise UsageError(message(_EVEN, rule, mesh=mesh, hint=hint))
        if not goes_on:
            return
        yield fill if batch is _END else batch
        number += 1


_END: Any = object()


def _length(batches: Any) -> int:
    try:
        return len(batches)
    except TypeError:  # it has none, or is a loader over a stream, which has none either
        return _UNKNOWN


def _of_all_ranks(mesh: Mesh, what: str, number: int) -> list[int]:
    control(mesh).agree(_EVEN, lambda: what)
    if mesh.size == 1:
        return [number]
    return [row[0] for row in control(mesh).exchange(f"{_EVEN}: {what}", [number])]


def _next(iterator: Iterator[T], mesh: Mesh) -> T:
    try:
        return next(iterator, _END)
    except Exception as error:
        control(mesh).fail(error)  # else the others wait for this rank until their timeout
        raise


def reduce_metrics(metrics: Any, mesh: Mesh, op: Literal["mean", "sum", "max", "min"] = "mean") -> Any:
    """Returns numbers reduced over the ranks that hold different data, as floats, the same on all of these.

    For losses and counts between steps; inside of a step use `pmean` and `psum`. A mean over tokens is the quotient of
    two sums.

    Args:
        metrics: pytree of numbers or of tensors with one element; the same tree on all ranks.
        mesh: reduced over its data axes.
        op: ``"mean"``, ``"sum"``, ``"max"`` or ``"min"``. Numbers are added in rank order, in float64.

    Raises:
        LeafError: a leaf is not a number.
        PolicyError: there is no such `op`.
        MeshError: the mesh has more than one rank, and its data axes are not known.
        AgreementError: ranks pass different trees.
        UsageError: it is called inside of a step.

    Communication: a digest, and 8 bytes from each rank for each number, whatever their devices.

    >>> import torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> hpfunc.loop.reduce_metrics({"loss": torch.tensor(2.5), "tokens": 512}, mesh, "sum")
    {'loss': 2.5, 'tokens': 512.0}
    """
    _check_outside(_METRICS, "return it from the step, or reduce it there by hpfunc.pmean")
    names = [name.removeprefix("metrics") for name in paths(metrics, "metrics")]
    with agreeing(mesh, _METRICS, lambda: "\n".join([f"{op} of", *names])):
        if op not in _OPS:
            raise PolicyError(message(_METRICS, f"op must be one of {', '.join(map(repr, _OPS))}, got {op!r}"))
        mesh.check_data_axes(_METRICS)
        leaves, treedef = optree.tree_flatten(metrics)
        mine = [_number(leaf) for leaf in leaves]
        if bad := [f"metrics{n}: {leaf!r}" for n, leaf, x in zip(names, leaves, mine, strict=True) if x is None]:
            hint = "give numbers or tensors with one element, such as loss.mean()"
            raise LeafError(message(_METRICS, "a leaf is not a number", bad, hint=hint))
    if mesh.size == 1 or not mine:
        return optree.tree_unflatten(treedef, mine)
    bits = struct.unpack(f"{len(mine)}q", struct.pack(f"{len(mine)}d", *mine))
    rows = dict(zip(mesh.ranks, control(mesh).exchange(_METRICS, bits), strict=True))
    of_ranks = [struct.unpack(f"{len(mine)}d", struct.pack(f"{len(mine)}q", *rows[r])) for r in _data_ranks(mesh)]
    return optree.tree_unflatten(treedef, [_reduced(op, column) for column in zip(*of_ranks, strict=True)])


def _number(leaf: Any) -> float | None:
    try:
        return None if isinstance(leaf, str) else float(leaf)
    except (TypeError, ValueError, RuntimeError):  # torch and MindSpore: more than one element; HpfuncError: an array
        return None


def _data_ranks(mesh: Mesh) -> tuple[int, ...]:
    return mesh.group(mesh.data_axes)


def _reduced(op: str, numbers: tuple[float, ...]) -> float:
    if op in ("mean", "sum"):
        return sum(numbers) / (len(numbers) if op == "mean" else 1)
    if any(map(math.isnan, numbers)):
        return math.nan
    return max(numbers) if op == "max" else min(numbers)


def barrier(mesh: Mesh, name: str = "barrier") -> None:
    """Waits until all ranks of the mesh have called it: what one rank has written, the others may read then.

    Work that a device has been given may still run.

    Args:
        mesh: whose ranks meet.
        name: ranks at barriers of different names raise.

    Raises:
        AgreementError: a rank is at another barrier, or does something else.
        PeerError: a rank failed, or did not come within the timeout of the mesh.
        UsageError: it is called inside of a step.

    Communication: 16 bytes from each rank.

    >>> hpfunc.loop.barrier(hpfunc.make_mesh((1,), ("shard",)))
    """
    _check_outside(_BARRIER, "ranks meet between steps; a step is one program on all ranks anyway")
    control(mesh).agree(_BARRIER, lambda: f"name {name!r}")


def flops_per_token(
    num_parameters: int, *, num_frozen: int = 0, num_layers: int = 0, dim: int = 0, context: int = 0
) -> float:
    """Returns the floating-point operations that training a transformer takes for one token, for its utilization (MFU).

    Two for each weight in forward, and four in backward; only two there for a frozen weight, which has no gradient.
    Attention adds ``12 * num_layers * dim * context``. What is recomputed does not count, nor does a causal mask.

    Args:
        num_parameters: weights that are multiplied by, as `num_parameters` counts them; without tables of embeddings
            that are only looked up.
        num_frozen: those of them that do not train.
        num_layers: blocks with attention; 0 leaves attention out.
        dim: their width: number of heads times their size.
        context: tokens that each token looks at.

    Source: Chowdhery et al., PaLM (2022), appendix B.

    >>> tokens_per_s, peak_flops = 4500.0, 312e12  # an A100
    >>> flops = hpfunc.loop.flops_per_token(6_700_000_000, num_layers=32, dim=4096, context=2048)
    >>> print(f"{tokens_per_s * flops / peak_flops:.0%}")
    63%
    """
    return 6.0 * num_parameters - 2.0 * num_frozen + 12.0 * num_layers * dim * context


def _check_outside(function: str, hint: str) -> None:
    if current_session() is not None:
        raise UsageError(message(function, "it is called inside of a step", hint=hint))
