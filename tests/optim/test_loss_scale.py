"""Dynamic loss scaling: its laws, steps that all ranks skip alike, and float16 training."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hpfunc as hp
from hpfunc import optim
from tests.helpers import frameworks as ops
from tests.helpers.frameworks import to_framework, to_torch
from tests.helpers.leaves import assert_close
from tests.helpers.models import Layout, Model
from tests.helpers.ranks import Pool, mesh_of, outcome
from tests.helpers.zoo import bits

P = hp.P


# --- laws -------------------------------------------------------------------------------------------------------------
@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5), st.sampled_from([2.0, 3.0, 4.0]))
def test_the_scale_falls_at_once_and_grows_after_a_period(finite: list[bool], period: int, factor: float) -> None:
    scaling = optim.DynamicLossScale(period, factor, min_loss_scale=0.5, max_loss_scale=64.0)
    state, scale, good = scaling.init(8.0), 8.0, 0
    for ok in finite:
        given_as = ok if good % 2 else torch.tensor(ok)
        state = scaling.adjust(state, given_as)
        good = good + 1 if ok else 0
        if not ok:
            scale = max(scale / factor, 0.5)
        elif good % period == 0:
            scale = min(scale * factor, 64.0)
        assert state.loss_scale == scale
        assert state.counter == good % period


@given(st.integers(-10, 20), st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
def test_unscale_undoes_scale(exponent: int, dtype: torch.dtype) -> None:
    scaling = optim.DynamicLossScale(min_loss_scale=2.0**-10)
    state = scaling.init(2.0**exponent)
    values = {"a": torch.tensor([1.0, -0.375, 0.0], dtype=dtype), "b": [torch.tensor(2.0**-12, dtype=dtype)]}
    scaled = scaling.scale(values, state)
    wide = torch.promote_types(dtype, torch.float32)
    for x, y, z in zip(*map(optree.tree_leaves, (values, scaled, scaling.unscale(scaled, state))), strict=True):
        assert y.dtype == dtype
        assert z.dtype == wide
        if y.isfinite().all() and not (y.abs() < torch.finfo(dtype).tiny).logical_and(x != 0).any():
            assert torch.equal(z, x.to(wide))
        assert z.isfinite().all() == y.isfinite().all()


def test_unscale_keeps_arrays_and_what_float16_would_lose() -> None:
    mesh, scaling = hp.make_mesh((1,), ("shard",)), optim.DynamicLossScale()
    smallest = torch.tensor([2.0**-24, math.inf], dtype=torch.float16)
    got = scaling.unscale(hp.shard({"w": smallest}, mesh, P("shard")), scaling.init(2.0**10))["w"]
    assert got.spec == P("shard")
    assert got.local.tolist() == [2.0**-34, math.inf]


ERRORS = {
    "period": (lambda: optim.DynamicLossScale(0), "period must be an integer >= 1, got 0"),
    "factor": (lambda: optim.DynamicLossScale(factor=1.0), "factor must be a number > 1, got 1"),
    "min": (lambda: optim.DynamicLossScale(min_loss_scale=0.0), "min_loss_scale must be a number > 0, got 0"),
    "max": (
        lambda: optim.DynamicLossScale(min_loss_scale=2.0, max_loss_scale=1.0),
        "max_loss_scale must be a number >= 2, got 1.0",
    ),
    "init": (lambda: optim.DynamicLossScale().init(2.0**30), "loss_scale must be a number <= 1.67772e+07"),
    "finite": (
        lambda: optim.DynamicLossScale().adjust(optim.LossScaleState(1.0, 0), "yes"),
        "finite must be a bool or a 0-d tensor, got str",
    ),
    "no optimizer": (lambda: optim.apply_if_finite(3), "the argument is not an Optimizer but int"),
    "state": (
        lambda: optim.apply_if_finite(optim.sgd(0.1)).update(torch.ones(2), optim.SgdState(0, None)),
        "the state is not an instance of ApplyIfFiniteState, but of SgdState",
    ),
    "partial sums": (
        lambda: optim.all_finite(
            hp.ShardedArray(torch.ones(2), (2,), P(unreduced={"shard"}), hp.make_mesh((1,), ("shard",)))
        ),
        "arrays still are partial sums, which may still overflow",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_is_refused_is_said(name: str) -> None:
    call, expected = ERRORS[name]
    kind, function, rule = outcome(call).split(": ", 2)
    assert issubclass(getattr(hp, kind), hp.HpfuncError)
    assert function.startswith("hpfunc.optim.")
    assert rule.startswith(expected)


# --- a skipped step ---------------------------------------------------------------------------------------------------
INNER = {
    "sgd": lambda: optim.sgd(0.1),
    "momentum": lambda: optim.sgd(0.1, 0.9, weight_decay=0.1),
    "adamw": lambda: optim.adamw(0.1),
    "parts": lambda: optim.chain(optim.scale_by_adam(), optim.add_decayed_weights(0.1), optim.scale(-0.1)),
}


def tensors(tree: Any) -> list[torch.Tensor]:
    return to_torch([x for x in optree.tree_leaves(tree) if ops.is_tensor(x)])


@pytest.mark.parametrize("donate", [(), (0, 1)])
@pytest.mark.parametrize("name", INNER)
def test_a_skipped_step_changes_no_bit(name: str, donate: tuple[int, ...]) -> None:
    mesh, optimizer = hp.make_mesh((1,), ("shard",)), optim.apply_if_finite(INNER[name]())

    def step_fn(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return hp.apply_updates(params, updates), state

    step = hp.sharded(step_fn, mesh, donate_argnums=donate)
    weights = torch.tensor([0.0, -0.0, 1.0, -1e-40, 1e38])  # both zeros and a denormal number
    params = hp.shard({"a": weights, "b": weights.bfloat16()}, mesh, P("shard"))
    grads = [hp.shard({"a": torch.full((5,), x), "b": torch.ones(5)}, mesh, P("shard")) for x in (0.5, math.inf)]
    state = optimizer.init(params)
    step.lower(params, state, grads[0])
    for good in (True, False, False, True, False):
        before = [bits(x).clone() for x in tensors((params, state.inner))]
        steps, skipped, old = optree.tree_leaves(state.inner), state.num_skipped, params
        params, state = step(params, state, grads[not good])
        after = [bits(x) for x in tensors((params, state.inner))]
        assert state.is_finite is good
        assert state.num_skipped == skipped + (not good)
        if good:
            assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        else:
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            numbers = [[x for x in xs if isinstance(x, int)] for xs in (steps, optree.tree_leaves(state.inner))]
            assert numbers[0] == numbers[1]
        if donate:
            with pytest.raises(hp.DonatedError):
                _ = old["a"].local
    assert step.followed_plan


# --- training ---------------------------------------------------------------------------------------------------------
MODEL = Model(width=6, biases=(True, False), calls=(0, 1))
NUM_RANKS = 4


def run(
    rank: int, layout: Layout, policy: hp.Policy | None, donate: bool, numerics: hp.Numerics, scale: float, bad: Any
) -> dict[str, Any]:
    """Trains; at the steps in `bad` the loss of one rank alone overflows. Returns what happened at each step."""
    mesh, dtype = mesh_of(layout.shape, layout.names), torch.float64 if numerics.param_dtype is None else torch.float32
    weights = MODEL.weights(dtype)
    params = hp.shard(to_framework(weights), mesh, layout.specs(weights))
    scaling = optim.DynamicLossScale(period=3)
    optimizer = optim.chain(hp.clip_by_global_norm(1.0), optim.apply_if_finite(optim.sgd(0.1, 0.9)))

    def step_fn(params: Any, state: Any, scale_state: Any, batch: Any, factor: float) -> Any:
        def loss_fn(params: Any, batch: torch.Tensor) -> torch.Tensor:
            return scaling.scale(ops.cast(MODEL.loss(params, batch, hp.unit), dtype) * factor, scale_state)

        loss, grads = hp.value_and_grad(loss_fn, numerics=numerics)(params, batch)
        updates, state = optimizer.update(scaling.unscale(grads, scale_state), state, params)
        new_scale = scaling.adjust(scale_state, state[1].is_finite)
        return hp.apply_updates(params, updates), state, new_scale, scaling.unscale(loss, scale_state)

    donated = (0, 1) if donate else ()
    step: Any = (
        step_fn if policy is None else hp.sharded(step_fn, mesh, policy=policy, donate_argnums=donated, debug=True)
    )
    state, scale_state = optimizer.init(params), scaling.init(scale)
    if policy is not None and not ops.is_mindspore():
        step.lower(params, state, scale_state, MODEL.batch(rank, 0, dtype), 1.0)
    scales, finite, planned, same = [], [], [], []
    for number in range(NUM_STEPS):
        scales.append(scale_state.loss_scale)
        factor = math.inf if number in bad and rank == 1 else 1.0
        before = [x.clone() for x in tensors((params, state[1].inner))]
        batch = to_framework(MODEL.batch(rank, number, dtype))
        params, state, scale_state, _ = step(params, state, scale_state, batch, factor)
        finite.append(state[1].is_finite)
        same.append(all(map(torch.equal, before, tensors((params, state[1].inner)))))
        planned.append(policy is None or step.followed_plan)
    whole = optree.tree_leaves(to_torch(hp.unshard(params, mesh.axis_names)))
    return {"scales": scales, "finite": finite, "same": same, "planned": planned, "weights": whole}


NUM_STEPS = 10


def reference(good: list[bool]) -> list[torch.Tensor]:
    """One process, float64: clipped SGD with momentum on the mean loss of all ranks, at the good steps only."""
    leaves, treedef = optree.tree_flatten(MODEL.weights(torch.float64))
    momentum = [torch.zeros_like(x) for x in leaves]
    for step in (number for number, ok in enumerate(good) if ok):
        leaves = [x.detach().requires_grad_() for x in leaves]
        tree = optree.tree_unflatten(treedef, leaves)
        losses = [MODEL.loss(tree, MODEL.batch(rank, step, torch.float64)) for rank in range(NUM_RANKS)]
        grads = torch.autograd.grad(torch.stack(losses).mean(), leaves)
        factor = min(1.0, 1.0 / math.sqrt(sum(float(g.square().sum()) for g in grads)))
        momentum = [0.9 * m + factor * g for m, g in zip(momentum, grads, strict=True)]
        leaves = [x - 0.1 * m for x, m in zip(leaves, momentum, strict=True)]
    return [x.detach() for x in leaves]


def follow(finite: list[bool], scale: float) -> list[float]:
    """The scales that follow from which steps were finite."""
    scaling = optim.DynamicLossScale(period=3)
    state, scales = scaling.init(scale), []
    for ok in finite:
        scales.append(state.loss_scale)
        state = scaling.adjust(state, ok)
    return scales


LAYOUTS = [
    Layout((4,), ("shard",), P("shard"), P("shard")),
    Layout((2, 2), ("replicate", "shard"), P(None, "shard"), P()),
]
RUNS = [(None, False), (hp.Policy(), True), (hp.Policy(prefetch=2, release="backward"), False)]


@pytest.mark.processes
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_overflow_on_one_rank_is_skipped_by_all(pool: Callable[[int], Pool], layout: Layout) -> None:
    bad = (0, 4, 5)
    good = [number not in bad for number in range(NUM_STEPS)]
    want = reference(good)
    for policy, donate in RUNS if layout is LAYOUTS[1] else RUNS[1:2]:
        for found in pool(4).run(run, layout, policy, donate, hp.Numerics(), 2.0**10, bad):
            assert found["finite"] == good
            assert found["same"] == [not ok for ok in good]
            assert found["scales"] == follow(good, 2.0**10)
            assert found["planned"][1:] == [True] * (NUM_STEPS - 1)
            assert_close(found["weights"], want, 1e-12)


@pytest.mark.processes
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_float16_training(pool: Callable[[int], Pool], layout: Layout) -> None:
    """The first scale is far too large: steps are skipped until it fits; then it grows, and is too large again."""
    numerics = hp.Numerics(param_dtype="float16")
    results = pool(4).run(run, layout, hp.Policy(), True, numerics, 2.0**16, ())
    finite = results[0]["finite"]
    assert not finite[0]
    assert False in finite[finite.index(True) :]
    want = reference(finite)
    for found in results:
        assert found["finite"] == finite
        assert found["scales"] == follow(finite, 2.0**16)
        assert found["same"] == [not ok for ok in finite]
        assert_close(found["weights"], want, 2e-3)
    with pytest.raises(AssertionError):
        assert_close(results[0]["weights"], reference([True] * NUM_STEPS), 2e-3)
