"""What works, but hardly as its author intends, is said once, by the first rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hpfunc as hp
from tests.helpers import frameworks as ops
from tests.helpers.ranks import mesh_of
from tests.helpers.refusals import check_texts, linear, mesh, params, total_loss, x

MIB = 1 << 18  # float32 elements


def caught(rank: int, n: int, sizes: list[int], units: list[list[int]], steps: int) -> list[str]:
    """The warnings of some steps over weights of these sizes, grouped into units."""
    mesh = mesh_of((n,), ("shard",))
    params = hp.shard([ops.ones(size) for size in sizes], mesh, hp.P("shard"))
    total = hp.unit(lambda weights, x: x + sum(w.sum() for w in weights), name="layer")

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for places in units:
            x = total([params[i] for i in places], x)
        return x

    step = hp.sharded(hp.value_and_grad(loss), mesh)
    return warnings_of(lambda: [step(params, ops.zeros()) for _ in range(steps)])


def warnings_of(call: Callable[[], Any], action: Any = "always") -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter(action)
        call()
    return [f"{warning.category.__name__}: {warning.message}" for warning in found]


@pytest.mark.parametrize(
    ("name", "sizes", "units"),
    [
        ("one_unit_holds_most_of_the_weights", [MIB + 1, MIB // 16, MIB // 16], [[0], [1], [2]]),
        ("the_whole_model_is_one_unit", [64, 64], [[0, 1]]),
    ],
)
def test_bad_units_are_warned_of_once(pool: Any, name: str, sizes: list[int], units: list[list[int]]) -> None:
    texts = pool(2).run(caught, 2, sizes, units, 3)
    assert [len(found) for found in texts] == [1, 0]
    check_texts(texts[0], name)


def test_a_plan_that_hides_nothing_is_warned_of(pool: Any) -> None:
    first, second = pool(2).run(nothing_ahead)
    assert (len(first), second) == (1, [])
    check_texts(first, "nothing_can_be_hidden")


def nothing_ahead(rank: int) -> list[str]:
    mesh = mesh_of((2,), ("shard",))
    params = hp.shard([ops.ones(4), ops.ones(4)], mesh, hp.P("shard"))
    unit = hp.unit(lambda w: w.sum(), name="layer")
    policy = hp.Policy(prefetch=0, pack_below_bytes=65536)
    step = hp.sharded(lambda params: sum(unit(w) for w in params), mesh, policy=policy)
    return warnings_of(lambda: step(params))


@pytest.mark.parametrize(
    ("n", "sizes", "units"),
    [
        (2, [MIB, MIB, MIB], [[0], [1], [2]]),
        (2, [64, 1, 1], [[0], [1], [2]]),  # too small to matter
        (1, [MIB, 1], [[0, 1]]),  # nothing is cut
    ],
)
def test_good_units_are_not_warned_of(pool: Any, n: int, sizes: list[int], units: list[list[int]]) -> None:
    assert pool(n).run(caught, n, sizes, units, 2) == [[]] * n


def two_steps(rank: int) -> list[str]:
    """Two steps with the same fault, made at different lines, as a program with Python's own filter sees them."""
    mesh = mesh_of((2,), ("shard",))
    params = hp.shard([ops.ones(64)], mesh, hp.P("shard"))
    unit = hp.unit(lambda w: w[0].sum())

    def call() -> None:
        hp.sharded(unit, mesh)(params)
        hp.sharded(hp.unit(lambda w: 2 * w[0].sum()), mesh)(params)

    return warnings_of(call, "default")


def test_the_same_text_is_said_once_whatever_line_calls(pool: Any) -> None:
    first, second = pool(2).run(two_steps)
    assert (len(first), second) == (1, [])


# --- a step that is made in the loop ----------------------------------------------------------------------------------
def making(rank: int, steps: int, calls: int) -> list[str]:
    kept = params()

    def train_step(p: Any) -> Any:
        return hp.value_and_grad(total_loss(linear))(p, x())

    def loop() -> None:
        for _ in range(steps):
            step = hp.sharded(train_step, mesh())
            for _ in range(calls):
                step(kept)

    return [text for text in warnings_of(loop) if "anew" in text]


def test_a_step_that_is_made_in_the_loop_is_warned_of(pool: Any) -> None:
    first, second = pool(2).run(making, 12, 1)
    assert (len(first), second) == (1, [])
    check_texts(first, "a_step_that_is_made_anew")


@pytest.mark.parametrize(("steps", "calls"), [(4, 1), (12, 2)])
def test_steps_that_are_compared_or_called_again_are_not(pool: Any, steps: int, calls: int) -> None:
    pool(2).run(making, 1, 2)  # what other tests have made does not count
    assert pool(2).run(making, steps, calls) == [[], []]


# --- rows that do not divide ------------------------------------------------------------------------------------------
def batches(rank: int, rows: list[int], reduce_op: Any, differentiates: bool) -> list[str]:
    kept, loss = params(), total_loss(linear)
    fn = hp.value_and_grad(loss, numerics=hp.Numerics(reduce_op=reduce_op)) if differentiates else loss
    step = hp.sharded(fn, mesh(), in_specs=(None, hp.P("shard")))
    found = warnings_of(lambda: [step(kept, ops.ones(count, 4)) for count in rows], "default")
    return [text for text in found if "in_specs" in text]


def test_a_last_batch_of_another_size_is_warned_of(pool: Any) -> None:
    first, second = pool(2).run(batches, [4, 4, 3, 3], "mean", True)
    assert (len(first), second) == (1, [])
    check_texts(first, "parts_of_different_sizes")


@pytest.mark.parametrize(
    ("rows", "reduce_op", "differentiates"),
    [([4, 4, 2], "mean", True), ([4, 3], "sum", True), ([4, 3], "mean", False)],
)
def test_sums_evaluations_and_even_batches_are_not(pool: Any, rows: Any, reduce_op: str, differentiates: bool) -> None:
    assert pool(2).run(batches, rows, reduce_op, differentiates) == [[], []]


# --- parts of weights -------------------------------------------------------------------------------------------------
def penalties(rank: int, spec: Any, reduce_op: Any) -> list[str]:
    kept = {"w": hp.shard(ops.ones(4), mesh(), spec)}
    unit = hp.unit(lambda p: p["w"].sum())
    grad = hp.grad(lambda p: unit(p) + (p["w"].local ** 2).sum(), numerics=hp.Numerics(reduce_op=reduce_op))
    step = hp.sharded(grad, mesh())
    return [text for text in warnings_of(lambda: [step(kept) for _ in range(3)], "default") if "local" in text]


def test_the_part_of_a_weight_in_the_loss_is_warned_of(pool: Any) -> None:
    first, second = pool(2).run(penalties, hp.P("shard"), "mean")
    assert (len(first), second) == (1, [])
    check_texts(first, "parts_of_weights_in_the_loss")


@pytest.mark.parametrize(("spec", "reduce_op"), [(hp.P(), "mean"), (hp.P("shard"), "sum")])
def test_whole_weights_and_sums_are_not(pool: Any, spec: Any, reduce_op: str) -> None:
    assert pool(2).run(penalties, spec, reduce_op) == [[], []]


def updates(rank: int, kept: str, calls: int) -> list[str]:
    """The warnings of a training whose loop keeps its results, or not."""
    mesh = mesh_of((2,), ("shard",))
    optimizer = hp.optim.adamw(0.1)
    square = hp.unit(lambda w: w.square().sum())

    def train(params: Any, state: Any) -> Any:
        loss, grads = hp.value_and_grad(lambda params: square(params[0]))(params)
        changes, state = optimizer.update(grads, state, params)
        return hp.apply_updates(params, changes), state, loss

    def evaluate(params: Any, state: Any) -> Any:
        return hp.value_and_grad(lambda params: square(params[0]))(params)

    def loop() -> None:
        params = hp.shard([ops.ones(4)], mesh, hp.P("shard"))
        state, others = optimizer.init(params), []
        step = hp.sharded(evaluate if kept == "gradients" else train, mesh)
        for _ in range(calls):
            result = step(params, state)
            if kept == "everything":
                params, state, _ = result
            elif kept == "in a list":
                others.append(result)

    return [text for text in warnings_of(loop) if "one unit" not in text]


def test_updated_weights_that_nobody_keeps_are_warned_of(pool: Any) -> None:
    first, second = pool(2).run(updates, "nothing", 6)
    assert (len(first), second) == (1, [])
    check_texts(first, "updated_weights_that_nobody_keeps")


@pytest.mark.parametrize(("kept", "calls"), [("everything", 6), ("in a list", 6), ("gradients", 6), ("nothing", 4)])
def test_results_that_are_used_are_not_warned_of(pool: Any, kept: str, calls: int) -> None:
    assert pool(2).run(updates, kept, calls) == [[], []]
