"""Optimizers where weights, gradients and updates differ in dtype: float32 arithmetic, and one rounding."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hpfunc as hp
from hpfunc import optim
from tests.helpers.zoo import assert_same, bits

HALVES = [torch.bfloat16, torch.float16]
STEPS = 4
OPTIMIZERS = {
    "sgd": lambda: optim.sgd(0.1),
    "decay": lambda: optim.sgd(0.1, weight_decay=0.1),
    "momentum": lambda: optim.sgd(0.1, 0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda: optim.adamw(0.01, weight_decay=0.1),
    "no decay": lambda: optim.adamw(0.01, weight_decay=0.0),
    "clipped": lambda: optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(0.01)),
    "parts": lambda: optim.chain(
        optim.scale_by_adam(), optim.add_decayed_weights(0.1), optim.scale_by_learning_rate(0.01)
    ),
}


def tree(seed: int, dtype: torch.dtype) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return {k: torch.randn(n, generator=generator).to(dtype) for k, n in (("a", 5), ("b", 3))}


def to(values: Any, dtype: torch.dtype) -> Any:
    return optree.tree_map(lambda x: x.to(dtype), values)


def train(optimizer: Any, params: Any, gradients: list[Any]) -> tuple[Any, Any]:
    state = optimizer.init(params)
    for grads in gradients:
        updates, state = optimizer.update(grads, state, params)
        params = optim.apply_updates(params, updates)
    return params, state


def rounded_each_step(optimizer: Any, params: Any, gradients: list[Any], dtype: torch.dtype) -> tuple[Any, Any]:
    """As `train`, on float32 weights that are rounded to `dtype` after each step."""
    state = optimizer.init(to(params, torch.float32))
    for grads in gradients:
        wide = to(params, torch.float32)
        updates, state = optimizer.update(to(grads, torch.float32), state, wide)
        params = to(optim.apply_updates(wide, updates), dtype)
    return params, state


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_arithmetic_is_that_of_float32_rounded_once(name: str, dtype: torch.dtype) -> None:
    gradients = [tree(seed, torch.float32) for seed in range(1, STEPS + 1)]
    got = train(OPTIMIZERS[name](), tree(0, dtype), gradients)
    assert_same_trees(got, rounded_each_step(OPTIMIZERS[name](), tree(0, dtype), gradients, dtype))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - {"clipped"}))  # a clipped gradient keeps its 16 bits
def test_gradients_of_16_bits_are_widened_first(name: str, dtype: torch.dtype) -> None:
    gradients = [tree(seed, dtype) for seed in range(1, STEPS + 1)]
    got = train(OPTIMIZERS[name](), tree(0, dtype), gradients)
    assert_same_trees(got, rounded_each_step(OPTIMIZERS[name](), tree(0, dtype), gradients, dtype))


def assert_same_trees(got: Any, want: Any) -> None:
    """Steps are compared as tensors too."""
    assert_same(*[optree.tree_map(torch.as_tensor, x) for x in (got, want)])


@pytest.mark.parametrize(("weight", "gradient"), [(torch.float32, torch.float64), (torch.float64, torch.float32)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_wider_and_narrower_gradients(name: str, weight: torch.dtype, gradient: torch.dtype) -> None:
    gradients = [tree(seed, gradient) for seed in range(1, STEPS + 1)]
    params, state = train(OPTIMIZERS[name](), tree(0, weight), gradients)
    wide, _ = train(OPTIMIZERS[name](), tree(0, torch.float64), [to(g, torch.float64) for g in gradients])
    assert all(x.dtype == weight for x in optree.tree_leaves(params))
    assert all(x.dtype == weight for x in optree.tree_leaves(state) if isinstance(x, torch.Tensor))
    for a, b in zip(optree.tree_leaves(params), optree.tree_leaves(wide), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", HALVES)
def test_moments_are_float32_and_can_decay(dtype: torch.dtype) -> None:
    """In bfloat16 0.999 * nu rounds back to nu: a second moment of 16 bits would never fall."""
    params = torch.ones(3, dtype=dtype)
    for optimizer in (optim.adamw(0.1, weight_decay=0.0), optim.scale_by_adam()):
        _, state = optimizer.update(torch.ones(3, dtype=dtype), optimizer.init(params))
        before = state.nu.clone()
        updates, state = optimizer.update(torch.zeros(3, dtype=dtype), state)
        assert {x.dtype for x in (state.mu, state.nu, updates)} == {torch.float32}
        assert torch.equal(state.nu, 0.999 * before)
    assert torch.equal(before.to(torch.bfloat16) * 0.999, before.to(torch.bfloat16))
    assert optim.sgd(0.1, 0.9).init(params).momentum.dtype == torch.float32


@given(st.integers(0, 1000), st.sampled_from(HALVES))
def test_updates_are_added_before_the_rounding(seed: int, dtype: torch.dtype) -> None:
    weights, updates = tree(seed, dtype)["a"], tree(seed + 1, torch.float32)["a"] * 0.01
    got = optim.apply_updates(weights, updates)
    assert torch.equal(bits(got), bits((weights.float() + updates).to(dtype)))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_donated_weights_are_updated_in_place_with_the_same_bits(name: str, dtype: torch.dtype) -> None:
    mesh, optimizer = hp.make_mesh((1,), ("shard",)), OPTIMIZERS[name]()

    def step_fn(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    results = []
    for donate in ((), (0, 1)):
        params, grads = (hp.shard(tree(i, d), mesh, hp.P("shard")) for i, d in ((0, dtype), (1, torch.float32)))
        state = optimizer.init(params)
        step = hp.sharded(step_fn, mesh, donate_argnums=donate)
        step.lower(params, state, grads)
        places = [x.data_ptr() for x in optree.tree_leaves((params, state)) if isinstance(x, torch.Tensor)]
        for _ in range(2):
            params, state = step(params, state, grads)
        after = [x for x in optree.tree_leaves((params, state)) if isinstance(x, torch.Tensor)]
        assert (places == [x.data_ptr() for x in after]) == bool(donate)
        assert all(x.dtype == dtype for x in optree.tree_leaves(params))
        results.append(after)
    for a, b in zip(*results, strict=True):
        assert torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("dtype", HALVES)
def test_norm_and_clipping_of_16_bits(dtype: torch.dtype) -> None:
    large = torch.full((4096,), 2.0**15, dtype=dtype)  # the sum of squares is beyond float16, and the factor below it
    norm = optim.global_norm(large)
    assert norm.dtype == torch.float32
    assert norm.item() == 2.0**21
    clipped, _ = optim.clip_by_global_norm(2.0**-4).update(large, ())
    assert torch.equal(clipped, torch.full((4096,), 2.0**-10, dtype=dtype))
    mixed = {"a": large, "b": torch.ones(1, dtype=torch.float64)}
    assert optim.global_norm(mixed).dtype == torch.float64
    halved, _ = optim.clip_by_global_norm(2.0**20).update({"a": large, "b": torch.ones(1)}, ())
    assert [x.dtype for x in optree.tree_leaves(halved)] == [dtype, torch.float32]
    assert halved["a"][0] == 2.0**14
