"""Losses without a gradient: exact texts, on all ranks, before anything is reduced, and nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import hpfunc as hp
from tests.helpers import frameworks as ops
from tests.helpers.frameworks import to_torch
from tests.helpers.ranks import outcome
from tests.helpers.refusals import cases_among, check_texts, mesh, params, texts_of


def square(p: Any) -> Any:
    return (p["w"] ** 2).sum()


def differentiating(loss: Callable[[Any], Any], planned: bool = False) -> Any:
    kept = params()
    run: Any = hp.value_and_grad(loss)
    if not planned:
        return lambda: run(kept), kept

    def alternating(p: Any, differentiable: bool) -> Any:
        return hp.value_and_grad(lambda p: total(p) if differentiable else loss(p))(p)

    step = hp.sharded(alternating, mesh())
    for _ in range(2):
        step(kept, True)
    return lambda: step(kept, False), kept


def total(p: Any) -> Any:
    unit = hp.unit(square)
    return sum(unit(layer) for layer in p["layers"])


def constant(p: Any) -> Any:
    return ops.ones(1).sum()


def a_detached_loss(rank: int) -> Any:
    return differentiating(lambda p: ops.detached(total(p)))


def a_detached_loss_in_a_planned_step(rank: int) -> Any:
    return differentiating(lambda p: ops.detached(total(p)), planned=True)


def a_loss_of_a_number(rank: int) -> Any:
    return differentiating(lambda p: constant(p) * float(ops.detached(total(p))))


def a_constant_loss(rank: int) -> Any:
    return differentiating(constant)


def a_constant_micro_batch(rank: int) -> Any:
    kept = params()
    grad_fn = hp.value_and_grad(lambda p, x: total(p) if float(x.sum()) > 0 else constant(p))
    return lambda: hp.accumulate(grad_fn, 2)(kept, ops.arange(2.0)), kept


def a_loss_of_what_is_not_differentiated(rank: int) -> Any:
    kept, other = params(), params()
    return lambda: hp.value_and_grad(lambda p, q: total(q))(kept, other), (kept, other)


CASES = cases_among(globals())


@pytest.mark.parametrize("name", CASES)
def test_refusals(name: str) -> None:
    check_texts(texts_of(CASES[name]), name)


# --- on one rank only -----------------------------------------------------------------------------------------------
def one_constant(rank: int, planned: bool) -> list[str]:
    kept = params()
    step: Any = hp.value_and_grad(lambda p, is_constant: constant(p) if is_constant else total(p))
    step = hp.sharded(step, mesh()) if planned else step
    return [outcome(step, kept, is_constant) for is_constant in (False, False, rank == 1, False)]


@pytest.mark.parametrize("planned", [False, True])
def test_a_loss_without_gradient_on_one_rank_ends_all(pool: Callable[..., Any], planned: bool) -> None:
    first, second = pool(2).run(one_constant, planned)
    assert [found == "returned" for found in first] == [True, True, False, True]
    assert [found == "returned" for found in second] == [True, True, False, True]
    assert second[2].startswith("UsageError: hpfunc.value_and_grad: the loss does not depend on what is differentiated")
    assert first[2].startswith(("PeerError", "AgreementError"))


# --- what is no mistake ---------------------------------------------------------------------------------------------
def empty_batch(rank: int, planned: bool) -> list[Any]:
    """One rank has no examples, and makes its loss of the weights nevertheless; some weights are not used at all."""
    kept = params()
    unit = hp.unit(lambda p, x: (x @ p["w"]).sum())

    def loss(p: Any, x: Any) -> Any:
        found = unit(p["layers"][0], x)
        return 0 * found if rank == 1 else found

    step: Any = hp.value_and_grad(loss)
    step = hp.sharded(step, mesh()) if planned else step
    for _ in range(3):
        _, grads = step(kept, ops.ones(3, 4))
    return [to_torch(hp.unshard(grads["layers"][k]["w"])).tolist() for k in range(2)]


@pytest.mark.parametrize("planned", [False, True])
def test_a_loss_of_zero_times_the_weights_is_one(pool: Callable[..., Any], planned: bool) -> None:
    for used, unused in pool(2).run(empty_batch, planned):
        assert used == [[1.5] * 4] * 4
        assert unused == [[0.0] * 4] * 4


def nothing_to_differentiate(rank: int) -> Any:
    with hp.use_mesh(mesh()):
        _, grads = hp.value_and_grad(lambda p, q: total(q))({}, params())
        _, scale = hp.value_and_grad(lambda scale, q: scale * hp.unit(square)(q["layers"][1]))(
            ops.ones(1).sum(), params()
        )
    return grads, float(scale)


def test_nothing_to_differentiate_and_plain_tensors_are_no_mistake(pool: Callable[..., Any]) -> None:
    assert pool(2).run(nothing_to_differentiate) == [({}, 16.0)] * 2
