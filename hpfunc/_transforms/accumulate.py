"""`accumulate`: one gradient from several micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, get_args

from .. import backends
from .._errors import LeafError, PolicyError, UsageError, message
from .._running.context import stepping
from .._running.eager import session_on
from .._running.use import Backwards
from .._values.array import describe, is_sharded
from .._values.mesh import Mesh
from .._values.tree import flatten, paths, unflatten
from ..backends import uncompiled
from ..planning.program import Carry
from .grad import GradFunction

Params = ParamSpec("Params")
Result = TypeVar("Result")

Mode = Literal["scatter", "local"]
_NAME = "hpfunc.accumulate"
_CARRY: dict[str, Carry] = {"scatter": "shards", "local": "wholes"}


def accumulate(
    grad_fn: Callable[Params, Result],
    num_microbatches: int,
    *,
    mode: Mode = "scatter",
    batch_argnums: int | Sequence[int] | None = None,
    dim: int = 0,
) -> Callable[Params, Result]:
    """Returns a function like `grad_fn` that cuts its batch into micro-batches and adds up their gradients.

    For a loss that is a mean over examples (a sum, with ``reduce_op="sum"``), the result equals that of one large
    batch, and the memory is that of a micro-batch. Gradients are added up in `Numerics.accum_dtype`.

    Args:
        grad_fn: a function that `value_and_grad` or `grad` returned.
        num_microbatches: number of micro-batches, at least 1.
        mode: what happens to the gradients of all but the last micro-batch. ``"scatter"`` reduce-scatters them and
            carries shards: one reduce-scatter for each micro-batch. ``"local"`` sends nothing and carries whole
            gradients, which take the memory of the whole model. Both all-reduce once.
        batch_argnums: the positional arguments that are cut; default: all that are not differentiated. Every tensor of
            one dim or more in them, and in keyword arguments, is cut; each micro-batch gets all else uncut.
        dim: the dim along which those tensors are cut into equal parts.

    Returns:
        A function with the arguments and results of `grad_fn`. The loss is the mean of the losses of the micro-batches
        (their sum with ``reduce_op="sum"``), and aux is a list with one entry for each micro-batch.

    Raises:
        PolicyError: `num_microbatches` or `mode` has a value outside of its range.
        UsageError: `grad_fn` was not made by `value_and_grad` or `grad`.
        LeafError: a tensor cannot be cut into equal parts.

    Communication: the gathers of `grad_fn`, for each micro-batch; for each weight one all-reduce in total, and one
        reduce-scatter for each micro-batch (``"scatter"``) or in total (``"local"``).

    >>> import torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> w = hpfunc.shard(torch.ones(2), mesh, hpfunc.P("shard"))
    >>> unit = hpfunc.unit(lambda w, x: (x @ w).mean())
    >>> loss, grads = accumulate(hpfunc.value_and_grad(unit), 2)(w, torch.arange(8.0).reshape(4, 2))
    >>> loss, grads.local
    (tensor(7.), tensor([3., 4.]))
    """
    if isinstance(num_microbatches, bool) or not isinstance(num_microbatches, int) or num_microbatches < 1:
        raise PolicyError(message(_NAME, f"num_microbatches must be an integer >= 1, got {num_microbatches!r}"))
    if mode not in get_args(Mode):
        raise PolicyError(message(_NAME, f"mode must be 'scatter' or 'local', got {mode!r}"))
    if not isinstance(grad_fn, GradFunction):
        rule = f"{getattr(grad_fn, '__name__', type(grad_fn).__name__)!r} was not made by value_and_grad or grad"
        hint = "hpfunc.accumulate(hpfunc.value_and_grad(loss_fn), ...); what else is done to gradients comes after it"
        raise UsageError(message(_NAME, rule, hint=hint))
    numbers = (batch_argnums,) if isinstance(batch_argnums, int) else batch_argnums

    @functools.wraps(grad_fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        chosen = [n for n in range(len(args)) if n not in grad_fn.argnums] if numbers is None else list(numbers)
        return _accumulate(grad_fn, num_microbatches, mode, chosen, dim, args, kwargs)

    return call


@uncompiled
def _accumulate(
    grad_fn: GradFunction, num_microbatches: int, mode: Mode, chosen: list[int], dim: int, args: Any, kwargs: Any
) -> Any:
    mesh = grad_fn.mesh_of(args)
    with session_on(mesh) as session, stepping(session):  # one for all micro-batches
        batch = {n: args[n] for n in chosen} | kwargs
        batches = list(_cut(batch, num_microbatches, dim, mesh))
        backwards = Backwards(num_microbatches, _CARRY[mode])
        losses, auxs, gradients = [], [], None
        for backwards.left, batch in zip(range(num_microbatches, 0, -1), batches, strict=True):
            filled = [batch.get(n, arg) for n, arg in enumerate(args)]
            loss, aux, gradients = grad_fn.run(filled, {key: batch[key] for key in kwargs}, backwards)
            losses.append(loss)
            auxs.append(aux)
        loss = sum(losses[1:], start=losses[0])
        if grad_fn.numerics.reduce_op == "mean":
            loss = loss / num_microbatches
        return grad_fn.result(loss, auxs, gradients)


def _cut(batch: dict[Any, Any], count: int, dim: int, mesh: Mesh) -> Iterator[dict[Any, Any]]:
    """Yields the micro-batches of the arguments. Keys are argument numbers and keywords."""
    backend = backends.get(mesh.framework)
    leaves, treedef = flatten(list(batch.values()), is_sharded)
    labels = [f"args[{key}]" if isinstance(key, int) else key for key in batch]
    names = [path for label, arg in zip(labels, batch.values(), strict=True) for path in paths(arg, label, is_sharded)]
    cuts = [backend.is_tensor(leaf) and len(leaf.shape) > 0 for leaf in leaves]
    bad = [
        f"{name}: {describe(leaf)}"
        for name, leaf, is_cut in zip(names, leaves, cuts, strict=True)
        if is_cut and (not -len(leaf.shape) <= dim < len(leaf.shape) or leaf.shape[dim] % count)
    ]
    if bad:
        hint = "choose another number, drop the last examples, or name the arguments to cut with batch_argnums"
        raise LeafError(message(_NAME, f"dim {dim} cannot be cut into {count} equal parts", bad, hint=hint))
    for k in range(count):
        parts = [_part(leaf, dim, k, count) if is_cut else leaf for leaf, is_cut in zip(leaves, cuts, strict=True)]
        yield dict(zip(batch, unflatten(treedef, parts), strict=True))


def _part(tensor: Any, dim: int, k: int, count: int) -> Any:
    place = dim % len(tensor.shape)
    size = tensor.shape[place] // count
    return tensor[(*[slice(None)] * place, slice(k * size, (k + 1) * size))]
