"""What works, but hardly as its author intends, is said once."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import hpfunc as hp
from tests.helpers import frameworks as ops
from tests.helpers.ranks import mesh_of
from tests.helpers.refusals import check_texts

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
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(steps):
            step(params, ops.zeros())
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
    assert [len(found) for found in texts] == [1, 1]
    check_texts([found[0] for found in texts], name)


def test_a_plan_that_hides_nothing_is_warned_of(pool: Any) -> None:
    texts = pool(2).run(nothing_ahead)
    check_texts(texts, "nothing_can_be_hidden")


def nothing_ahead(rank: int) -> str:
    mesh = mesh_of((2,), ("shard",))
    params = hp.shard([ops.ones(4), ops.ones(4)], mesh, hp.P("shard"))
    unit = hp.unit(lambda w: w.sum(), name="layer")
    policy = hp.Policy(prefetch=0, pack_below_bytes=65536)
    step = hp.sharded(lambda params: sum(unit(w) for w in params), mesh, policy=policy)
    with pytest.warns(hp.HpfuncWarning) as found:
        step(params)
    return f"{found[0].category.__name__}: {found[0].message}"


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
