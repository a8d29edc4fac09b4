"""Several micro-batches make the gradient of one big batch: in numbers, in messages and in memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

import hpfunc as hp
from tests.helpers import frameworks as ops
from tests.helpers.accumulation import NUMERICS, Run, one_big_batch, train
from tests.helpers.chain import layers
from tests.helpers.frameworks import to_framework
from tests.helpers.leaves import assert_close, assert_same_bits, local_leaves
from tests.helpers.models import Layout, Model, P, layouts, models, policies
from tests.helpers.ranks import Pool, mesh_of

pytestmark = pytest.mark.processes
EXAMPLES = settings(max_examples=10, phases=[Phase.explicit, Phase.generate], deadline=None)
REPLICATED = Layout((2, 2), ("replicate", "shard"), P("shard"), P("shard"))  # each draw may do without


@EXAMPLES
@given(
    model=models(),
    layout=layouts([(2,), (3,), (2, 2), (3, 1), (4,)]),
    policy=st.none() | policies,
    count=st.integers(1, 4),
    mode=st.sampled_from(["scatter", "local"]),
)
@example(Model(), REPLICATED, hp.Policy(), 3, "scatter")
@example(Model(), REPLICATED, hp.Policy(), 2, "local")
def test_micro_batches_equal_one_big_batch(
    pool: Callable[[int], Pool], model: Model, layout: Layout, policy: hp.Policy | None, count: int, mode: str
) -> None:
    results = pool(layout.num_ranks).run(train, model, layout, Run(count, mode, policy))
    want = one_big_batch(model, layout.num_ranks, count)
    for _, weights, followed in results:
        assert_close(weights, want, 1e-12)
        assert followed == (policy is not None)


@EXAMPLES
@given(
    model=models(),
    layout=layouts([(2,), (3,), (2, 2), (3, 2), (2, 1)]),
    policy=policies,
    count=st.integers(2, 3),
    mode=st.sampled_from(["scatter", "local"]),
    numerics=st.sampled_from(NUMERICS),
)
def test_every_schedule_gives_the_bits_of_the_eager_reference(
    pool: Callable[[int], Pool],
    model: Model,
    layout: Layout,
    policy: hp.Policy,
    count: int,
    mode: str,
    numerics: hp.Numerics,
) -> None:
    ranks = pool(layout.num_ranks)
    eager = ranks.run(train, model, layout, Run(count, mode, None, numerics, torch.float32))
    planned = ranks.run(train, model, layout, Run(count, mode, policy, numerics, torch.float32))
    for (grads, weights, followed), (eager_grads, eager_weights, _) in zip(planned, eager, strict=True):
        assert followed
        assert_same_bits(grads, eager_grads)
        assert_same_bits(weights, eager_weights)


# --- messages -------------------------------------------------------------------------------------------------------
def counted(rank: int, mode: str, policy: hp.Policy, count: int) -> dict[str, int]:
    """Returns the collectives of a planned step over four layers."""
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    params = hp.shard(layers(4), mesh, P("shard"))
    unit = hp.unit(_layer)
    step = hp.sharded(
        hp.accumulate(hp.value_and_grad(lambda p, x: _chain(unit, p, x)), count, mode=mode), mesh, policy=policy
    )
    for _ in range(2):
        step(params, ops.ones(count, 32))
    assert step.followed_plan
    assert step.last_counters is not None
    return step.last_counters.collectives


def _layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    return ops.tanh(ops.linear(x, p["w"], p["b"]))


def _chain(unit: Callable[..., Any], params: Any, x: torch.Tensor) -> torch.Tensor:
    for p in params:
        x = unit(p, x)
    return x.square().mean()


@pytest.mark.parametrize(
    ("mode", "policy", "gathers", "scatters", "all_reduces"),
    [
        # ZeRO-3, everything packed, prefetch 1: four gathers forward; of the last two units none backward. The first
        # two of a micro-batch are whole when the next one begins.
        ("scatter", hp.Policy(pack_below_bytes=math.inf), 3 * (4 + 2) - 2 * 2, 12, 4),
        ("local", hp.Policy(pack_below_bytes=math.inf), 3 * (4 + 2) - 2 * 2, 4, 4),
        ("scatter", hp.Policy.zero1(pack_below_bytes=math.inf), 4, 12, 4),
        ("local", hp.Policy.zero1(pack_below_bytes=math.inf, reduce_bucket_bytes=math.inf), 4, 4, 1),
        ("scatter", hp.Policy.zero2(pack_below_bytes=math.inf, reduce_bucket_bytes=6000), 3 * 4 - 2 * 2, 12, 2),
    ],
)
def test_collectives_of_three_micro_batches(
    pool: Callable[[int], Pool], mode: str, policy: hp.Policy, gathers: int, scatters: int, all_reduces: int
) -> None:
    """One all-reduce for each reduce buffer, whatever the number of micro-batches."""
    for counts in pool(4).run(counted, mode, policy, 3):
        assert counts == {"all_gather": gathers, "all_to_all": scatters, "all_reduce": all_reduces}


# --- numbers --------------------------------------------------------------------------------------------------------
def gradient_error(rank: int, count: int, mode: str, accum_dtype: str | None) -> float:
    """Returns the relative error of a gradient of bfloat16 weights over `count` micro-batches of the same examples.

    Every micro-batch has its own data; one of float64 judges.
    """
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(16, 16, generator=generator) / 4).bfloat16()
    data = torch.randn(4, 64, 8, 16, generator=generator)[:, :count].bfloat16()
    numerics = hp.Numerics(reduce_dtype="float32" if accum_dtype else None, accum_dtype=accum_dtype)
    unit = hp.unit(lambda w, x: (x @ w).float().square().mean(), name="square")
    grad_fn = hp.accumulate(hp.value_and_grad(unit, numerics=numerics), count, mode=mode)
    w = hp.shard(weight, mesh, P("shard"))
    _, grad = grad_fn(w, data[rank].reshape(-1, 16))
    exact = weight.double().requires_grad_()
    (data.reshape(-1, 16).double() @ exact).square().mean().backward()
    assert exact.grad is not None
    return float((hp.unshard(grad).double() - exact.grad).norm() / exact.grad.norm())


@pytest.mark.parametrize("mode", ["scatter", "local"])
def test_the_error_of_float32_sums_does_not_grow_with_their_number(pool: Callable[[int], Pool], mode: str) -> None:
    few, many = (max(pool(4).run(gradient_error, count, mode, "float32")) for count in (4, 64))
    assert many <= 1.5 * few


def test_the_error_of_bfloat16_sums_does(pool: Callable[[int], Pool]) -> None:
    """So the test above can fail."""
    few, many = (max(pool(4).run(gradient_error, count, "scatter", None)) for count in (4, 64))
    assert many > 1.5 * few


# --- leaving a plan -------------------------------------------------------------------------------------------------
def leaving(rank: int, mode: str, policy: hp.Policy, numerics: hp.Numerics) -> list[tuple[bool, Any, Any]]:
    """In each step another micro-batch calls the layers in another order; returns (planned, gradients, eager ones)."""
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    params = hp.shard(layers(4), mesh, P("shard"))
    unit, order = hp.unit(_layer), [0, 1, 2, 3]
    place = [0]

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        place[0] += 1
        chosen = order[::-1] if place[0] % 3 == turn[0] else order[: 2 + place[0] % 3]
        return _chain(unit, [p[i] for i in chosen], x)

    turn = [0]
    grad_fn = hp.accumulate(hp.value_and_grad(loss, numerics=numerics), 3, mode=mode)
    step = hp.sharded(grad_fn, mesh, policy=policy, debug=True)
    x = to_framework(torch.randn(3, 32, generator=torch.Generator().manual_seed(rank)))
    found = []
    wanted = {}
    for turn[0] in (5, 5, 0, 5, 1, 1, 2):
        if turn[0] not in wanted:
            wanted[turn[0]] = grad_fn(params, x)
        _, want = wanted[turn[0]]
        _, got = step(params, x)
        found.append((step.followed_plan, local_leaves(got), local_leaves(want)))
    return found


@pytest.mark.parametrize(
    ("mode", "policy", "numerics"),
    [
        ("scatter", hp.Policy(), hp.Numerics()),
        (
            "local",
            hp.Policy(prefetch=2, pack_below_bytes=math.inf, reduce_bucket_bytes=math.inf),
            hp.Numerics(reduce_dtype="bfloat16", accum_dtype="float32"),
        ),
    ],
)
def test_a_plan_may_be_left_in_any_micro_batch(
    pool: Callable[[int], Pool], mode: str, policy: hp.Policy, numerics: hp.Numerics
) -> None:
    for results in pool(4).run(leaving, mode, policy, numerics):
        assert not results[2][0]
        assert results[1][0]
        for _, got, want in results:
            assert_same_bits(got, want)
