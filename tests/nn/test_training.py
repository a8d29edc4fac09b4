"""Modules train like the plain module on one process; planned steps have the bits of eager ones."""

from __future__ import annotations

import math

import pytest
import torch

from tests.nn.training import LAYOUTS, Layout, Pools, assert_close, assert_trained, train
from tests.nn.zoo import CASES

pytestmark = pytest.mark.processes


def run(rank: int, name: str, layout: Layout) -> object:
    return train(rank, CASES[name], layout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["fsdp", "hsdp"])
@pytest.mark.parametrize("name", CASES)
def test_training_matches_the_plain_module(pool: Pools, name: str, layout: Layout) -> None:
    results = pool(math.prod(layout[0])).run(run, name, layout)
    assert_trained(CASES[name], results)


def test_the_assert_helper_fails_on_wrong_input() -> None:
    right = {"w": torch.ones(3, dtype=torch.float64)}
    assert_close(right, right)
    for wrong in ({"w": right["w"] * (1 + 1e-9)}, {"v": right["w"]}, {}):
        with pytest.raises(AssertionError):
            assert_close(wrong, right)
