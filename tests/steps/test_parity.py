"""Training gives the numbers of one process in float64, and every schedule the bits of the eager reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import hpfunc as hp
from tests.helpers import frameworks as ops
from tests.helpers.frameworks import to_framework, to_torch
from tests.helpers.leaves import assert_close, assert_same_bits
from tests.helpers.models import Layout, Model, P, layouts, models, policies, reference
from tests.helpers.ranks import Pool, mesh_of
from tests.helpers.training import NUMERICS, STEPS, train

pytestmark = pytest.mark.processes
HSDP = ("replicate", "shard")
# Models are small as they are drawn, and an example that fails costs a new pool: no shrinking.
EXAMPLES = settings(max_examples=20, phases=[Phase.explicit, Phase.generate])


ONE_TO_FOUR = [(1,), (2,), (3,), (2, 1), (1, 2), (2, 2), (3, 1), (4,)]


@EXAMPLES
@given(model=models(), layout=layouts(ONE_TO_FOUR), policy=st.none() | policies)
def test_training_matches_one_process(
    pool: Callable[[int], Pool], model: Model, layout: Layout, policy: hp.Policy | None
) -> None:
    results = pool(layout.num_ranks).run(train, model, layout, policy, torch.float64, hp.Numerics())
    want = reference(model, layout.num_ranks, STEPS)
    for _, weights, followed in results:
        assert_close(weights, want, 1e-12)
        assert followed == (policy is not None)


@EXAMPLES
@given(
    model=models(),
    layout=layouts([*ONE_TO_FOUR, (3, 2)]),
    policy=policies,
    numerics=st.sampled_from(NUMERICS),
)
def test_every_schedule_gives_the_bits_of_the_eager_reference(
    pool: Callable[[int], Pool], model: Model, layout: Layout, policy: hp.Policy, numerics: hp.Numerics
) -> None:
    ranks = pool(layout.num_ranks)
    eager = ranks.run(train, model, layout, None, torch.float32, numerics)
    planned = ranks.run(train, model, layout, policy, torch.float32, numerics)
    for (grads, weights, followed), (eager_grads, eager_weights, _) in zip(planned, eager, strict=True):
        assert followed
        assert_same_bits(grads, eager_grads)
        assert_same_bits(weights, eager_weights)


def test_a_sum_is_the_mean_times_the_number_of_ranks(pool: Callable[[int], Pool]) -> None:
    model, layout = Model(), Layout((2, 2), ("replicate", "shard"), P("shard"), P("shard"))
    common = model, layout, hp.Policy(), torch.float64
    means = pool(4).run(train, *common, hp.Numerics(), 1)
    sums = pool(4).run(train, *common, hp.Numerics(reduce_op="sum"), 1)
    for (mean, _, _), (total, _, _) in zip(means, sums, strict=True):
        assert any(bool(leaf.any()) for leaf in mean)
        assert_close(total, [4 * leaf for leaf in mean], 1e-15)


def test_low_precision_reduction_shows(pool: Callable[[int], Pool]) -> None:
    """bfloat16 has other bits than float32: that they agree above is not because `numerics` is ignored."""
    model, layout = Model(), Layout((2,), ("shard",), P("shard"), P("shard"))
    runs = [pool(2).run(train, model, layout, hp.Policy(), torch.float32, n) for n in NUMERICS[:3]]
    grads = [result[0][0][0] for result in runs]
    assert not torch.equal(grads[0], grads[1])
    assert not torch.equal(grads[1], grads[2])
    assert torch.allclose(grads[0], grads[2], rtol=0.1, atol=0.02)


def tensor_parallel(rank: int, policy: hp.Policy | None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A two-layer block cut over "tp" as well: the first matrix by rows, the second by columns, summed in the unit."""
    mesh = mesh_of((2, 2), ("shard", "tp"), ("shard",))
    generator = torch.Generator().manual_seed(3)
    weights = [
        {name: torch.randn(8, 8, generator=generator, dtype=torch.float64) / 3 for name in ("up", "down")}
        for _ in range(3)
    ]
    specs = {"up": hp.P(("tp", "shard")), "down": hp.P("shard", "tp")}
    params = hp.shard(to_framework(weights), mesh, [specs] * 3)

    def block(p: Any, x: torch.Tensor) -> torch.Tensor:
        return x + hp.psum(ops.linear(ops.tanh(ops.linear(hp.pvary(x, "tp"), p["up"])), p["down"]), "tp")

    unit = hp.unit(block)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for p in params:
            x = unit(p, x)
        return x.square().mean()

    def dense(params: Any, x: torch.Tensor) -> torch.Tensor:
        for p in params:
            x = x + torch.tanh(x @ p["up"].T) @ p["down"].T
        return x.square().mean()

    batches = torch.randn(2, 4, 8, generator=generator, dtype=torch.float64)
    run = hp.value_and_grad(loss) if policy is None else hp.sharded(hp.value_and_grad(loss), mesh, policy=policy)
    for _ in range(2):
        with hp.use_mesh(mesh):
            _, grads = run(params, to_framework(batches[mesh.axis_index("shard")]))
    leaves, treedef = optree.tree_flatten(weights)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    tree = optree.tree_unflatten(treedef, leaves)
    total = torch.stack([dense(tree, batch) for batch in batches]).mean()
    return optree.tree_leaves(to_torch(hp.unshard(grads, mesh.axis_names))), list(torch.autograd.grad(total, leaves))


@pytest.mark.parametrize("policy", [None, hp.Policy(), hp.Policy(prefetch=2, pack_below_bytes=float("inf"))])
def test_an_axis_that_holds_no_data_stays_cut(pool: Callable[[int], Pool], policy: hp.Policy | None) -> None:
    for got, want in pool(4).run(tensor_parallel, policy):
        assert_close(got, want, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("matrix", "packs"), [(P("shard"), (0, math.inf)), (P(("replicate", "shard")), (None,))])
def test_two_replicas_of_four_shards(pool: Callable[[int], Pool], matrix: hp.P, packs: Any) -> None:
    """Eight ranks. Nothing divides: 7 columns over 4 or 8 ranks, 5 inputs, so that some ranks hold nothing."""
    model, layout = Model(width=7, calls=(0, 1, 2, 1), dropped=(2,)), Layout((2, 4), HSDP, matrix, P("shard"))
    policies = [hp.Policy(prefetch=2, pack_below_bytes=number) for number in packs]
    double = pool(8).run(train, model, layout, policies[-1], torch.float64, hp.Numerics())
    want = reference(model, 8, STEPS)
    for _, weights, followed in double:
        assert followed
        assert_close(weights, want, 1e-12)
    eager, *planned = [
        pool(8).run(train, model, layout, policy, torch.float32, hp.Numerics()) for policy in (None, *policies)
    ]
    for results in planned:
        for (grads, weights, followed), (eager_grads, eager_weights, _) in zip(results, eager, strict=True):
            assert followed
            assert_same_bits(grads, eager_grads)
            assert_same_bits(weights, eager_weights)
