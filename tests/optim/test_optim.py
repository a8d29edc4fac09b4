"""Optimizers: the numbers of torch.optim, the purity of arguments, and the norm that counts each element once."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any, cast

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hpfunc as hp
from hpfunc import optim
from tests.helpers.ranks import mesh_of_one, outcome
from tests.optim.trees import SHAPES, leaves, random_tree, same_bits

DTYPES = [torch.float32, torch.float64]


def train(optimizer, params, dtype, num_steps=12):
    state = optimizer.init(params)
    for step in range(num_steps):
        updates, state = optimizer.update(random_tree(100 + step, dtype), state, params)
        params = optim.apply_updates(params, updates)
    return params


def train_torch(make, params, dtype, num_steps=12):
    weights = [x.clone().requires_grad_() for x in leaves(params)]
    optimizer = make(weights)
    for step in range(num_steps):
        for weight, gradient in zip(weights, leaves(random_tree(100 + step, dtype)), strict=True):
            weight.grad = gradient
        optimizer.step()
    return [weight.detach() for weight in weights]


def largest_error(got, expected):
    """In units of the last place of the largest element."""
    eps = torch.finfo(expected[0].dtype).eps
    return max(
        ((a - b).abs().max() / (eps * b.abs().max().clamp(min=1.0))).item()
        for a, b in zip(leaves(got), expected, strict=True)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.5, "weight_decay": 0.1}],
    ids=str,
)
def test_sgd_has_the_numbers_of_torch(options, dtype):
    params = random_tree(0, dtype)
    expected = train_torch(lambda w: torch.optim.SGD(w, lr=0.05, **options), params, dtype)
    assert largest_error(train(optim.sgd(0.05, **options), params, dtype), expected) <= 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.0}, {"weight_decay": 0.3, "eps": 1e-3}], ids=str)
def test_adamw_has_the_numbers_of_torch(options, dtype):
    params = random_tree(0, dtype)
    expected = train_torch(lambda w: torch.optim.AdamW(w, lr=0.01, foreach=True, **options), params, dtype)
    assert largest_error(train(optim.adamw(0.01, **options), params, dtype), expected) <= 4


def test_moments_have_the_bits_of_torch():
    params, gradients = random_tree(0), [random_tree(1), random_tree(2)]
    optimizer, state = optim.scale_by_adam(), optim.scale_by_adam().init(params)
    weights = [x.clone().requires_grad_() for x in leaves(params)]
    reference = torch.optim.AdamW(weights, foreach=True)
    for gradient in gradients:
        _, state = optimizer.update(gradient, state)
        for weight, g in zip(weights, leaves(gradient), strict=True):
            weight.grad = g
        reference.step()
    assert state.step == 2
    for weight, mu, nu in zip(weights, leaves(state.mu), leaves(state.nu), strict=True):
        assert torch.equal(mu, reference.state[weight]["exp_avg"])
        assert torch.equal(nu, reference.state[weight]["exp_avg_sq"])


def test_adamw_without_its_decay_fails_the_comparison():
    params = random_tree(0)
    expected = train_torch(lambda w: torch.optim.AdamW(w, lr=0.01, weight_decay=0.1), params, torch.float64)
    assert largest_error(train(optim.adamw(0.01, weight_decay=0.0), params, torch.float64), expected) > 1e6


def test_adamw_is_the_chain_of_its_parts():
    parts = optim.chain(
        optim.scale_by_adam(eps=1e-4), optim.add_decayed_weights(0.2), optim.scale_by_learning_rate(0.01)
    )
    whole = optim.adamw(0.01, eps=1e-4, weight_decay=0.2)
    params = random_tree(0)
    assert largest_error(train(whole, params, torch.float64), leaves(train(parts, params, torch.float64))) <= 4


def test_a_mask_chooses_what_decays():
    params = random_tree(0)
    no_gradient = optree.tree_map(torch.zeros_like, params)

    def mask(tree: Any) -> Any:
        return optree.tree_map(lambda x: x.ndim > 1, tree)

    for chosen in (mask, mask(params)):
        for optimizer in (optim.adamw(0.5, weight_decay=0.5, mask=chosen), optim.add_decayed_weights(-0.0, chosen)):
            updates, _ = optimizer.update(no_gradient, optimizer.init(params), params)
            assert all((u == 0).all() for u in leaves(updates) if u.ndim < 2)
    updates, _ = optim.add_decayed_weights(0.5, {"a": True, "layers": False}).update(no_gradient, (), params)
    assert torch.equal(updates["a"], 0.5 * params["a"])
    assert not updates["layers"][0]["w"].any()


def test_the_learning_rate_may_be_a_function_of_the_step():
    seen = []

    def schedule(step):
        seen.append(step)
        return 0.1 * (step + 1)

    one = torch.ones(1)
    for optimizer in (optim.sgd(schedule), optim.chain(optim.scale_by_learning_rate(schedule))):
        state = optimizer.init(one)
        for step in range(3):
            updates, state = optimizer.update(one, state, one)
            assert math.isclose(updates.item(), -0.1 * (step + 1), rel_tol=1e-6)
    assert seen == [0, 1, 2] * 2


@given(st.floats(0, 1), st.floats(0, 1), st.integers(0, 20), st.integers(1, 20))
def test_schedules_stay_between_their_ends(low, high, warmup, rest):
    low, high = sorted((low, high))
    schedule = optim.warmup_cosine(high, warmup, warmup + rest, start=low, end=low)
    values = [schedule(step) for step in range(warmup + rest + 3)]
    assert all(low - 1e-12 <= value <= high + 1e-12 for value in values)
    assert values[warmup] == pytest.approx(high)
    assert values[-1] == pytest.approx(low)
    assert [optim.linear(low, high, rest)(step) for step in (0, rest, rest + 5)] == pytest.approx([low, high, high])


# --- what is written to -----------------------------------------------------------------------------------------------
OPTIMIZERS = {
    "sgd": lambda: optim.sgd(0.1),
    "momentum": lambda: optim.sgd(0.1, 0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda: optim.adamw(0.1),
    "chain": lambda: optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.1)),
    "parts": lambda: optim.chain(
        optim.scale_by_adam(), optim.add_decayed_weights(0.1), optim.scale(2.0), optim.scale_by_learning_rate(0.1)
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_arguments_that_are_not_donated_keep_their_bits(name):
    optimizer, mesh = OPTIMIZERS[name](), mesh_of_one()
    params, grads = (hp.shard(random_tree(seed), mesh, hp.P("shard")) for seed in (0, 1))
    _, state = optimizer.update(grads, optimizer.init(params), params)
    before = [x.clone() for x in leaves((params, grads, state))]
    versions = [x._version for x in leaves((params, grads, state))]
    updates, _ = optimizer.update(grads, state, params)
    new = optim.apply_updates(params, updates)
    assert same_bits((params, grads, state), before)
    assert versions == [x._version for x in leaves((params, grads, state))]
    assert not same_bits(new, params)


def make_step(optimizer, **options):
    def step_fn(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    return hp.sharded(step_fn, mesh_of_one(), **options)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_donated_arrays_are_updated_in_place_with_the_same_bits(name):
    optimizer, mesh = OPTIMIZERS[name](), mesh_of_one()
    grads = hp.shard(random_tree(1), mesh, hp.P("shard"))
    results = []
    for donate in ((), (0, 1)):
        params = hp.shard(random_tree(0), mesh, hp.P("shard"))
        state = optimizer.init(params)
        step = make_step(optimizer, donate_argnums=donate)
        places = [x.data_ptr() for x in leaves((params, state))]
        old = params
        for _ in range(3):
            old, (params, state) = params, step(params, state, grads)
        now = [x.data_ptr() for x in leaves((params, state))]
        results.append(leaves((params, state)))
        assert (places == now) == bool(donate)
        if donate:
            with pytest.raises(hp.DonatedError, match=r"hpfunc\.apply_updates"):
                _ = old["a"].local
    assert same_bits(*results)


def test_donated_gradients_are_not_written_to():
    optimizer, mesh = OPTIMIZERS["momentum"](), mesh_of_one()
    params, grads = (hp.shard(random_tree(seed), mesh, hp.P("shard")) for seed in (0, 1))
    kept = leaves(grads)
    make_step(optimizer, donate_argnums=(0, 1, 2))(params, optimizer.init(params), grads)
    assert same_bits(kept, random_tree(1))


def test_an_array_at_two_places_is_updated_at_both():
    mesh, optimizer = mesh_of_one(), optim.sgd(1.0)
    w, g = (hp.shard(torch.full((2,), x), mesh, hp.P("shard")) for x in (5.0, 1.0))
    params, _ = make_step(optimizer, donate_argnums=(0, 1))([w, w], optimizer.init([w, w]), [g, g])
    assert [x.tolist() for x in leaves(params)] == [[4.0, 4.0], [4.0, 4.0]]


def test_an_error_leaves_donated_arrays_and_the_rest_alone():
    optimizer, mesh = optim.adamw(0.1), mesh_of_one()
    params, grads = (hp.shard(random_tree(seed), mesh, hp.P("shard")) for seed in (0, 1))
    state = optimizer.init(params)
    with pytest.raises(hp.SpecError):
        make_step(optimizer, donate_argnums=(0, 1))(params, state, {"a": grads["a"]})
    assert same_bits(params, random_tree(0))
    assert not any(x.any() for x in leaves((state.mu, state.nu)))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_lowers_without_values(name):
    optimizer, mesh = OPTIMIZERS[name](), mesh_of_one()
    params, grads = (hp.shard(random_tree(seed), mesh, hp.P("shard")) for seed in (0, 1))
    state = optimizer.init(params)
    step = make_step(optimizer, donate_argnums=(0, 1))
    lowered = step.lower(params, state, grads)
    assert same_bits(params, random_tree(0))
    step(params, state, grads)
    assert step.last_schedule is not None
    assert lowered.program.fingerprint == step.last_schedule.program.fingerprint


# --- errors -----------------------------------------------------------------------------------------------------------
def arrays(tree=SHAPES):
    return hp.shard(random_tree(0, shapes=tree), mesh_of_one(), hp.P("shard"))


ERRORS = {
    "negative rate": (
        lambda: optim.sgd(-1),
        "PolicyError: hpfunc.optim.sgd: learning_rate must be a number >= 0, got -1",
    ),
    "b1": (
        lambda: optim.adamw(0.1, b1=1.0),
        "PolicyError: hpfunc.optim.adamw: b1 must be a number >= 0 and < 1, got 1.0",
    ),
    "nesterov": (
        lambda: optim.sgd(0.1, nesterov=True),
        "PolicyError: hpfunc.optim.sgd: nesterov needs a momentum above 0\n\nHint: sgd(0.1, momentum=0.9)",
    ),
    "warmup": (
        lambda: optim.warmup_cosine(1.0, 5, 5),
        "PolicyError: hpfunc.optim.warmup_cosine: warmup_steps must be a number >= 0 and < 5, got 5",
    ),
    "no params": (
        lambda: optim.adamw(0.1).update(arrays(), optim.adamw(0.1).init(arrays())),
        "UsageError: hpfunc.optim.adamw: update needs params, because weight_decay is not 0\n\n"
        "Hint: optimizer.update(grads, state, params)",
    ),
    "another tree": (
        lambda: optim.apply_updates(arrays({"a": (2,), "b": (2,)}), arrays({"a": (2,), "c": (2,)})),
        "SpecError: hpfunc.apply_updates: updates and params are different trees\n"
        "  only in updates: ['c']\n  only in params: ['b']\n\n"
        "Hint: updates and params come from the same weights; call init again after these have changed",
    ),
    "another shape": (
        lambda: optim.sgd(0.1, 0.9).update(arrays({"a": (2,)}), optim.sgd(0.1, 0.9).init(arrays({"a": (3,)}))),
        "SpecError: hpfunc.optim.sgd: state.momentum and grads lie differently\n"
        "  state.momentum['a']: shape (3,), spec P('shard'), but in grads shape (2,), spec P('shard')\n\n"
        "Hint: state.momentum and grads come from the same weights; call init again after these have changed",
    ),
    "another state": (
        lambda: optim.adamw(0.1).update(arrays(), optim.sgd(0.1).init(arrays()), arrays()),
        "LeafError: hpfunc.optim.adamw: the state is not an instance of AdamState, but of SgdState\n\n"
        "Hint: take it from init, or from the last update",
    ),
    "integers": (
        lambda: optim.adamw(0.1).init({"a": torch.arange(2), "b": torch.ones(2)}),
        "LeafError: hpfunc.optim.adamw: params has leaves that are not floating arrays\n"
        "  params['a']: shape (2,), int64\n\n"
        "Hint: keep other leaves out of the tree that is optimized: hpfunc.partition(tree, hpfunc.is_floating)",
    ),
    "no optimizer": (
        lambda: optim.chain(optim.sgd(0.1), cast(Any, 3)),
        "LeafError: hpfunc.optim.chain: an argument is not an Optimizer\n  argument 1: int",
    ),
    "partial sums": (
        lambda: optim.global_norm(hp.ShardedArray(torch.ones(2), (2,), hp.P(unreduced={"shard"}), mesh_of_one())),
        "SpecError: hpfunc.optim.global_norm: arrays still are partial sums, which have no norm\n"
        "  tree: shape (2,), spec P(unreduced={'shard'})\n\nHint: finish them with hpfunc.reduce first",
    ),
    "mask": (
        lambda: optim.adamw(0.1, mask={"b": True}).update(arrays(), optim.adamw(0.1).init(arrays()), arrays()),
        "SpecError: hpfunc.optim.adamw: mask is not a tree prefix of params",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_is_refused_is_said(name):
    call, expected = ERRORS[name]
    got = outcome(call)
    assert got == expected if name != "mask" else got.startswith(expected)


def test_a_framework_is_imported_only_where_its_tensors_are():
    code = "import sys; sys.modules['torch'] = None; import hpfunc.optim as o; o.adamw(0.1); o.chain(o.sgd(0.1))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
