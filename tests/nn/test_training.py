"""Modules train like the plain module on one process, and go on so from a checkpoint on other ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.nn.training import FEWER, FSDP, HSDP, Layout, Pools, assert_close, assert_trained, resume, train
from tests.nn.zoo import CASES, Found

pytestmark = pytest.mark.processes


def first(rank: int, name: str, layout: Layout, path: str) -> Found:
    return train(rank, CASES[name], layout, path)


def second(rank: int, name: str, layout: Layout, path: str) -> Found:
    return resume(rank, CASES[name], layout, path)


def first_and_second(rank: int, name: str, layout: Layout, other: Layout, path: str) -> tuple[Found, Found]:
    return first(rank, name, layout, path), second(rank, name, other, path)


# A model that stands here twice, with other options, goes one way only.
BACK = [name for name in CASES if "again" not in name and "units" not in name]


@pytest.mark.parametrize(
    ("name", "layout", "other"),
    [*((name, FSDP, HSDP) for name in CASES), *((name, HSDP, FSDP) for name in BACK)],
    ids=[*(f"{name}-fsdp" for name in CASES), *(f"{name}-hsdp" for name in BACK)],
)
def test_training_matches_the_plain_module_also_after_a_checkpoint(
    pool: Pools, tmp_path: Path, name: str, layout: Layout, other: Layout
) -> None:
    results = pool(4).run(first_and_second, name, layout, other, str(tmp_path))
    assert_trained(CASES[name], *map(list, zip(*results, strict=True)))


@pytest.mark.parametrize("name", ["tied", "batch norm"])
def test_training_goes_on_with_another_number_of_ranks(pool: Pools, tmp_path: Path, name: str) -> None:
    before = pool(4).run(first, name, HSDP, str(tmp_path))
    after = pool(3).run(second, name, FEWER, str(tmp_path))
    assert_trained(CASES[name], before, after)


def test_the_assert_helper_fails_on_wrong_input() -> None:
    right = {"w": torch.ones(3, dtype=torch.float64)}
    assert_close(right, right)
    for wrong in ({"w": right["w"] * (1 + 1e-9)}, {"v": right["w"]}, {}):
        with pytest.raises(AssertionError):
            assert_close(wrong, right)
