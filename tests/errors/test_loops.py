"""Bad use of `hpfunc.loop`, of norms and of data ranks: exact texts, on all ranks, and nothing changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

import hpfunc as hp
from tests.helpers import frameworks as ops
from tests.helpers.ranks import mesh_of
from tests.helpers.refusals import cases_among, check_texts, linear, mesh, params, texts_of, x


def in_a_step(call: Callable[[], Any]) -> Any:
    kept = params()

    def step(p: Any) -> Any:
        call()
        return p

    return lambda: hp.sharded(step, mesh())(kept), kept


# --- norms ----------------------------------------------------------------------------------------------------------
def an_order_that_is_no_number(rank: int) -> Any:
    return lambda: hp.global_norm(params(), "fro"), None


def a_norm_that_is_not_finite(rank: int) -> Any:
    kept = params()
    bad = kept["layers"][1]["w"]
    kept["layers"][1]["w"] = bad.with_local(bad.local * (math.nan if rank else 1.0))
    return lambda: hp.global_norm(kept, error_if_nonfinite=True), kept


def a_norm_that_overflows(rank: int) -> Any:
    kept = hp.shard({"w": ops.ones(4, 4) * 1e30}, mesh(), hp.P("shard"))
    return lambda: hp.global_norm(kept, error_if_nonfinite=True), kept


def gradients_to_clip_that_are_not_finite(rank: int) -> Any:
    kept = params()
    clip = hp.clip_by_global_norm(1.0, error_if_nonfinite=True)

    def step(p: Any, x: Any) -> Any:
        _, grads = hp.value_and_grad(lambda p, x: hp.unit(linear)(p["layers"][0], x).sum())(p, x)
        return hp.apply_updates(p, clip.update(grads, ())[0])

    return lambda: hp.sharded(step, mesh(), donate_argnums=0)(kept, x() * (math.inf if rank else 1.0)), kept


# --- batches, metrics, barriers -------------------------------------------------------------------------------------
def a_part_of_the_data_without_data_axes(rank: int) -> Any:
    return lambda: mesh_of((2,), ("tp",)).data_rank, None


class Longer(list[int]):
    """A loader that says that it is shorter than it is."""

    def __len__(self) -> int:
        return 1


def batches_beyond_their_length(rank: int) -> Any:
    return lambda: list(hp.loop.even_batches(Longer([1, 2]), mesh(), 0)), None


def batches_in_a_step(rank: int) -> Any:
    return in_a_step(lambda: list(hp.loop.even_batches([1], mesh(), 0)))


def different_metrics(rank: int) -> Any:
    metrics = {"loss": 1.0, "accuracy": 0.5} if rank else {"loss": 1.0}
    return lambda: hp.loop.reduce_metrics(metrics, mesh()), None


def metrics_that_are_no_numbers(rank: int) -> Any:
    return lambda: hp.loop.reduce_metrics({"loss": 1.0, "name": "a", "logits": ops.ones(2)}, mesh()), None


def metrics_by_an_unknown_op(rank: int) -> Any:
    return lambda: hp.loop.reduce_metrics({"loss": 1.0}, mesh(), "median"), None


def metrics_in_a_step(rank: int) -> Any:
    return in_a_step(lambda: hp.loop.reduce_metrics({"loss": 1.0}, mesh()))


def different_barriers(rank: int) -> Any:
    return lambda: hp.loop.barrier(mesh(), "saved" if rank else "loaded"), None


def a_barrier_in_a_step(rank: int) -> Any:
    return in_a_step(lambda: hp.loop.barrier(mesh()))


CASES = cases_among(globals())


@pytest.mark.parametrize("name", CASES)
def test_refusals(name: str) -> None:
    check_texts(texts_of(CASES[name]), name)
