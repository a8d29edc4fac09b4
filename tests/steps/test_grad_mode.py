"""Gradients do not depend on the grad mode of the caller, and nothing made in inference mode spoils later steps.

As in ``torch.func.grad``: what is on outside of the differentiated function does not count, what is put on inside does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import hpfunc as hp
from hpfunc import optim
from tests.helpers.models import Model, reference, sgd
from tests.helpers.ranks import Pool, mesh_of, outcome
from tests.helpers.ranks import pool as get_pool

pytestmark = pytest.mark.processes
P = hp.P
MODEL = Model(width=6, num_inputs=5, biases=(True, False), calls=(0, 1, 0))
MODES: dict[str, Callable[[], Any]] = {
    "": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "off": partial(torch.set_grad_enabled, False),
}


# --- training and evaluating in any mode ----------------------------------------------------------------------------
def checkpointed(fn: Callable[..., Any]) -> Callable[..., Any]:
    unit = hp.unit(fn)
    return lambda p, *args: checkpoint(unit, p, *args, use_reentrant=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "eager": hp.value_and_grad,
    "planned": hp.value_and_grad,
    "scatter": lambda loss: hp.accumulate(hp.value_and_grad(loss), 3),
    "local": lambda loss: hp.accumulate(hp.value_and_grad(loss), 3, mode="local"),
    "remat": hp.value_and_grad,
    "checkpoint": hp.value_and_grad,
}
UNITS: dict[str, Any] = {"remat": partial(hp.unit, remat=True), "checkpoint": checkpointed}


def whole(params: Any) -> list[torch.Tensor]:
    return [x.clone() for x in optree.tree_leaves(hp.unshard(params))]


def trained(rank: int, way: str, modes: list[tuple[str, str]]) -> tuple[list[torch.Tensor], list[float]]:
    """Trains and evaluates once for each pair of modes. Returns weights and losses."""
    mesh = mesh_of((2, 1), ("shard", "replicate"))
    tree = MODEL.weights(torch.float64)
    with MODES[modes[0][0]]():
        params = hp.shard(tree, mesh, optree.tree_map(lambda x: P("shard") if x.dim() else P(), tree))
    differentiate = WAYS[way](lambda p, x: MODEL.loss(p, x, UNITS.get(way, hp.unit)))

    def update(params: Any, batch: torch.Tensor) -> tuple[Any, torch.Tensor]:
        loss, grads = differentiate(params, batch)
        return sgd(params, grads), loss

    def evaluate(params: Any, batch: torch.Tensor) -> torch.Tensor:
        return MODEL.loss(params, batch, hp.unit)

    step, losses = update if way == "eager" else hp.sharded(update, mesh), []
    score = evaluate if way == "eager" else hp.sharded(evaluate, mesh)
    for number, (train, test) in enumerate(modes):
        with MODES[train]():  # the data too
            params, loss = step(params, MODEL.batch(rank, number, torch.float64))
        with MODES[test]():
            losses += [float(loss), float(score(params, MODEL.batch(rank, 100 + number, torch.float64)))]
    return whole(params), losses


def check(way: str, modes: list[tuple[str, str]]) -> None:
    want = reference(MODEL, 2, len(modes))
    found = get_pool(2).run(trained, way, modes)
    same = get_pool(2).run(trained, way, [("", "")] * len(modes))
    for (weights, losses), (weights_without, losses_without) in zip(found, same, strict=True):
        for got, without, expected in zip(weights, weights_without, want, strict=True):
            assert torch.equal(got, without)
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        assert losses == losses_without


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode])
@pytest.mark.parametrize("way", WAYS)
def test_the_mode_outside_does_not_count(way: str, mode: str) -> None:
    check(way, [(mode, mode)] * 3)


@pytest.mark.parametrize("way", ["eager", "planned"])
@settings(max_examples=8, deadline=None)
@given(modes=st.lists(st.tuples(st.sampled_from(list(MODES)), st.sampled_from(list(MODES))), min_size=2, max_size=4))
def test_modes_may_change_between_calls(way: str, modes: list[tuple[str, str]]) -> None:
    check(way, modes)


# --- what is made in inference mode ---------------------------------------------------------------------------------
def by_shard(mesh: hp.Mesh, tree: Any) -> Any:
    return hp.shard(tree, mesh, P("shard"))


def by_init(mesh: hp.Mesh, tree: Any) -> Any:
    return hp.init(
        lambda: optree.tree_map(lambda x: x.clone() if x.is_inference() else x * 1.0, tree), mesh, P("shard")
    )


def by_broadcast(mesh: hp.Mesh, tree: Any) -> Any:
    return hp.shard(tree, mesh, P("shard"), broadcast_from=0)


def by_loading(mesh: hp.Mesh, tree: Any) -> Any:
    path = hp.all_gather(
        torch.frombuffer(bytearray(tempfile.mkdtemp().encode()), dtype=torch.uint8), "shard", mesh=mesh
    )
    place = bytes(path[0].tolist()).decode()
    like = hp.shard(tree, mesh, P("shard"))
    hp.checkpoint.save(place, like).wait()
    return hp.checkpoint.load(place, like=optree.tree_map(lambda x: x * 0.0, like))


def by_arithmetic(mesh: hp.Mesh, tree: Any) -> Any:
    return optree.tree_map(lambda x: x * 1.0, hp.shard(tree, mesh, P("shard")))


def by_transposing(mesh: hp.Mesh, tree: Any) -> Any:
    return optree.tree_map(lambda x: (x * 1.0).t().contiguous().t(), hp.shard(tree, mesh, P("shard")))


def whole_ones(mesh: hp.Mesh, tree: Any) -> Any:
    return optree.tree_map(
        lambda x: x * 1.0, hp.shard(tree, mesh, P())
    )  # gathered by nobody: the memory itself is used


MAKERS = [by_shard, by_init, by_broadcast, by_loading, by_arithmetic, by_transposing, whole_ones]
UPDATES: dict[str, Callable[[], hp.optim.Optimizer]] = {
    "sgd": lambda: optim.sgd(0.1, momentum=0.9),
    "adamw": lambda: optim.adamw(0.01),
    "torch": lambda: optim.from_torch(torch.optim.AdamW, lr=0.01),
}


def square(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(x @ p["w"]) @ p["v"]).square().mean()


def made(rank: int, maker: Callable[..., Any], update: str, mode: str, planned: bool) -> list[torch.Tensor]:
    """Makes arrays and the optimizer's state in a mode, and trains outside of it, in place."""
    mesh = mesh_of((2,), ("shard",))
    generator = torch.Generator().manual_seed(3)
    optimizer = UPDATES[update]()
    with MODES[mode]():
        tree = {name: torch.randn(4, 4, generator=generator, dtype=torch.float64) for name in "wv"}
        params = maker(mesh, tree)
        state = optimizer.init(params)
    unit = hp.unit(square)

    def step(params: Any, state: Any, x: torch.Tensor) -> Any:
        loss, grads = hp.value_and_grad(lambda p, x: unit(p, x) + 0.1 * p["w"].local.square().sum())(params, x)
        updates, state = optimizer.update(grads, state, params)
        return hp.apply_updates(params, updates), state, loss

    run = hp.sharded(step, mesh, donate_argnums=(0, 1)) if planned else step
    for number in range(3):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * number + rank), dtype=torch.float64)
        params, state, _ = run(params, state, x)
        with MODES[mode]():
            unit(params, x)
    return whole(params)


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("maker", MAKERS)
def test_what_is_made_in_inference_mode_trains(maker: Callable[..., Any], update: str, planned: bool) -> None:
    found = get_pool(2).run(quietly, made, maker, update, "inference", planned)
    want = get_pool(2).run(quietly, made, maker, update, "", planned)
    for got, expected in zip(found, want, strict=True):
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)


def quietly(rank: int, fn: Callable[..., Any], *args: Any) -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hp.HpfuncWarning)  # the whole model is one unit
        return fn(rank, *args)


def bound(rank: int, mode: str) -> list[torch.Tensor]:
    mesh = mesh_of((2,), ("shard",))
    with MODES[mode]():
        weights = optim.bind(by_arithmetic(mesh, {"w": torch.eye(4).double(), "v": torch.eye(4).double()}))
    optimizer = torch.optim.AdamW(weights.parameters, lr=0.1)
    for number in range(3):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * number + rank), dtype=torch.float64)
        with MODES[mode]():
            _, grads = hp.value_and_grad(hp.unit(square))(weights.params, x)
        weights.set_grads(grads)
        optimizer.step()
    return whole(weights.params)


def test_parameters_that_are_bound_in_inference_mode_train(pool: Callable[[int], Pool]) -> None:
    for got, want in zip(pool(2).run(bound, "inference"), pool(2).run(bound, ""), strict=True):
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)


def delivered(rank: int, planned: bool) -> list[bool]:
    mesh = mesh_of((2,), ("shard",))
    params = hp.shard({"w": torch.eye(4), "v": torch.eye(4)}, mesh, {"w": P("shard"), "v": P()})
    run: Any = hp.value_and_grad(hp.unit(square))
    run = hp.sharded(run, mesh) if planned else run
    found = []
    with torch.inference_mode():
        for _ in range(3):
            loss, grads = run(params, torch.ones(2, 4))
            found += [x.is_inference() for x in [loss, *optree.tree_leaves(grads)]]
    return found


@pytest.mark.parametrize("planned", [False, True])
def test_what_is_delivered_in_inference_mode_is_ordinary(pool: Callable[[int], Pool], planned: bool) -> None:
    for found in pool(2).run(quietly, delivered, planned):
        assert not any(found)


# --- modes inside of the differentiated function --------------------------------------------------------------------
def stopped(rank: int, inside: str, outside: str, planned: bool) -> Any:
    mesh = mesh_of((2,), ("shard",))
    params = hp.shard({"w": torch.arange(4.0)}, mesh, P("shard"))
    square = hp.unit(lambda p: (p["w"] ** 2).sum())

    def loss(p: Any) -> torch.Tensor:
        with MODES[inside]():
            factor = square(p)
        return factor.clone() * square(p)

    run: Any = hp.value_and_grad(loss)
    run = hp.sharded(run, mesh) if planned else run
    with MODES[outside]():
        return [hp.unshard(run(params)[1]["w"]) for _ in range(3)]


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("outside", MODES)
@pytest.mark.parametrize("inside", MODES)
def test_no_grad_inside_stops_gradients(pool: Callable[[int], Pool], inside: str, outside: str, planned: bool) -> None:
    w = torch.arange(4.0)
    want = 2 * w * 14.0 if inside else 2 * 2 * w * 14.0
    for found in pool(2).run(quietly, stopped, inside, outside, planned):
        for got in found:
            assert torch.equal(got, want)


def of_a_module(rank: int, planned: bool) -> list[str]:
    """The module's own parameters are used, not those that are differentiated."""
    mesh = mesh_of((2,), ("shard",))
    module = torch.nn.Linear(4, 1)
    params = hp.shard({"weight": torch.ones(4, 4)}, mesh, P("shard"))
    run: Any = hp.value_and_grad(lambda p, x: module(x).sum())
    run = hp.sharded(run, mesh) if planned else run
    return [outcome(run, params, torch.ones(1, 4)) for _ in range(2)]


@pytest.mark.parametrize("planned", [False, True])
def test_a_loss_of_other_weights_is_refused(pool: Callable[[int], Pool], planned: bool) -> None:
    for found in pool(2).run(quietly, of_a_module, planned):
        for text in found:
            assert text.startswith("UsageError: hpfunc.value_and_grad: the loss does not depend on what is diff")


def captured(rank: int, planned: bool) -> list[str]:
    mesh = mesh_of((2,), ("shard",))
    params = hp.shard({"w": torch.arange(4.0)}, mesh, P("shard"))
    with torch.inference_mode():
        x = torch.ones(4)
    run: Any = hp.value_and_grad(hp.unit(lambda p: (x * p["w"]).sum()))
    run = hp.sharded(run, mesh) if planned else run
    found = [outcome(run, params)]
    with torch.no_grad():
        x = x.clone()
    return [*found, outcome(run, params)]


@pytest.mark.parametrize("planned", [False, True])
def test_a_captured_tensor_of_inference_mode_is_refused(pool: Callable[[int], Pool], planned: bool) -> None:
    for refused, mended in pool(2).run(quietly, captured, planned):
        assert refused.startswith(
            "UsageError: hpfunc.value_and_grad: a tensor that was made under torch.inference_mode"
        )
        assert "clone it outside of inference_mode" in refused
        assert mended == "returned"
