"""`Numerics`, each field alone and all together: bit for bit what one process computes with the same casts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import hpfunc as hp
from tests.helpers.frameworks import to_framework, to_torch
from tests.helpers.leaves import assert_same_bits
from tests.helpers.models import Layout, Model, P, layouts, models, policies
from tests.helpers.ranks import Pool, mesh_of

DTYPES = [None, "bfloat16", "float32", "float64"]
numerics_of_any_kind = st.builds(
    lambda param, reduce, accum, output, cast, op: hp.Numerics(
        param, reduce, accum, output, cast and param is not None, op
    ),
    st.sampled_from(DTYPES),
    st.sampled_from([*DTYPES, "float16"]),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.sampled_from(["mean", "sum"]),
)


def cast(tree: Any, dtype: str | None) -> Any:
    return tree if dtype is None else optree.tree_map(lambda x: x.to(getattr(torch, dtype)), tree)


def toward_weights(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a layer that takes inputs of any dtype, whoever casts what before."""
    return lambda p, x: fn(p, x.to(next(iter(p.values())).dtype))


def unit_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    return hp.unit(toward_weights(fn), name=fn.__name__)


def uses_of(model: Model, weights: list[torch.Tensor], batch: torch.Tensor, n: hp.Numerics) -> list[torch.Tensor]:
    """Returns the gradient of each weight, those of its uses added up in the order of the backward."""
    tree = optree.tree_unflatten(optree.tree_structure(model.weights()), weights)
    places = {id(w): i for i, w in enumerate(weights)}
    uses: list[tuple[int, torch.Tensor]] = []

    def unit(fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(p: Any, x: torch.Tensor) -> torch.Tensor:
            leaves, treedef = optree.tree_flatten(p)
            wholes = [cast(leaf, n.param_dtype).detach().clone().requires_grad_() for leaf in leaves]
            uses[:0] = [(places[id(leaf)], whole) for leaf, whole in zip(leaves, wholes, strict=True)]
            x = cast(x, n.param_dtype) if n.cast_inputs else x
            return cast(toward_weights(fn)(optree.tree_unflatten(treedef, wholes), x), n.output_dtype)

        return call

    loss = model.loss(tree, batch, unit)
    found = torch.autograd.grad(loss, [whole for _, whole in uses], allow_unused=True)
    totals: dict[int, torch.Tensor] = {}
    for (place, whole), gradient in zip(uses, found, strict=True):
        term = torch.zeros_like(whole) if gradient is None else gradient
        if place in totals:
            accum = n.accum_dtype or str(weights[place].dtype).removeprefix("torch.")
            term = cast(totals[place], accum) + cast(term, accum)
        totals[place] = term
    return [totals.get(i, torch.zeros_like(cast(w, n.param_dtype))) for i, w in enumerate(weights)]


def reduced(summands: list[torch.Tensor], mesh: hp.Mesh, spec: hp.P, n: hp.Numerics, dtype: torch.dtype) -> Any:
    """Returns the gradient of a whole weight from those of all ranks: scattered, all-reduced, scaled."""
    size = mesh.size if n.reduce_op == "mean" else 1
    reduce_dtype = n.reduce_dtype or n.param_dtype or str(dtype).removeprefix("torch.")
    early = reduce_dtype == "float16" and size > 1
    parts = [cast(s / size if early else s, reduce_dtype) for s in summands]
    grid: Any = torch.arange(mesh.size).reshape(mesh.sizes)
    inner = [i for i, axis in enumerate(mesh.axis_names) if axis in spec.axes]
    outer = [i for i in range(len(mesh.sizes)) if i not in inner]
    rows = grid.permute(*outer, *inner).reshape(-1, int(torch.tensor([mesh.sizes[i] for i in inner]).prod()))
    total = in_order([in_order([parts[int(rank)] for rank in row]) for row in rows])
    if size > 1 and not early:
        total = total / size
    return total.to(getattr(torch, n.accum_dtype) if n.accum_dtype else dtype)


def in_order(terms: list[torch.Tensor]) -> torch.Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def compare(
    rank: int,
    model: Model,
    layout: Layout,
    n: hp.Numerics,
    policy: hp.Policy | None,
    dtype: str,
    judge: Callable[..., None] = assert_same_bits,
) -> None:
    """Fails unless `judge` finds the gradients to be those of one process, which computes with torch."""
    mesh = mesh_of(layout.shape, layout.names)
    weights = cast(model.weights(), dtype)
    params = hp.shard(to_framework(weights), mesh, layout.specs(weights))
    grad_fn = hp.grad(lambda p, b: model.loss(p, b, unit_of), numerics=n)
    step = grad_fn if policy is None else hp.sharded(grad_fn, mesh, policy=policy, debug=True)
    batches = [model.batch(r, 0) for r in range(mesh.size)]
    for _ in range(1 if policy is None else 2):
        grads = step(params, to_framework(batches[rank]))
    leaves = optree.tree_leaves(weights)
    by_rank = [uses_of(model, leaves, batch, n) for batch in batches]
    specs = optree.tree_leaves(layout.specs(weights), is_leaf=lambda x: isinstance(x, hp.P))
    want = [
        reduced(list(summands), mesh, spec, n, leaf.dtype)
        for leaf, spec, *summands in zip(leaves, specs, *by_rank, strict=True)
    ]
    judge(optree.tree_leaves(to_torch(hp.unshard(grads, mesh.axis_names))), want)


@pytest.mark.processes
@settings(max_examples=40, phases=[Phase.explicit, Phase.generate], deadline=None)
@given(
    model=models(),
    layout=layouts([(2,), (3,), (2, 2), (3, 1), (1, 3)]),
    numerics=numerics_of_any_kind,
    policy=st.none() | policies,
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_every_kind_of_numerics(
    pool: Callable[[int], Pool],
    model: Model,
    layout: Layout,
    numerics: hp.Numerics,
    policy: hp.Policy | None,
    dtype: str,
) -> None:
    pool(layout.num_ranks).run(compare, model, layout, numerics, policy, dtype)


FIELDS = [
    hp.Numerics(param_dtype="bfloat16"),
    hp.Numerics(output_dtype="float64"),
    hp.Numerics(reduce_dtype="bfloat16"),
    hp.Numerics(accum_dtype="bfloat16"),
    hp.Numerics(reduce_op="sum"),
]


def gradients(rank: int, numerics: hp.Numerics) -> list[torch.Tensor]:
    model, layout = Model(calls=(0, 1, 1)), Layout((2,), ("shard",), P("shard"), P("shard"))
    mesh = mesh_of(layout.shape, layout.names)
    params = hp.shard(to_framework(model.weights()), mesh, layout.specs(model.weights()))
    grad_fn = hp.grad(lambda p, b: model.loss(p, b, unit_of), numerics=numerics)
    return optree.tree_leaves(to_torch(grad_fn(params, to_framework(model.batch(rank, 0)))))


@pytest.mark.processes
@pytest.mark.parametrize("fields", [FIELDS])
def test_each_field_shows(pool: Callable[[int], Pool], fields: list[hp.Numerics]) -> None:
    """That bits agree above is not because a field is ignored."""
    plain = pool(2).run(gradients, hp.Numerics())[0]
    for numerics in fields:
        found = pool(2).run(gradients, numerics)[0]
        wanted = torch.bfloat16 if numerics.accum_dtype else torch.float32
        assert {x.dtype for x in found} == {wanted}
        assert any(not torch.equal(a, b) for a, b in zip(found, plain, strict=True)), numerics
