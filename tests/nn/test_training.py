"""Modules train like the plain module on one process, and go on so from a checkpoint on other ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.nn.training import FEWER, FSDP, HSDP, Layout, Pools, assert_close, assert_trained, resume, same_bits, train
from tests.nn.zoo import CASES, Found

pytestmark = pytest.mark.processes


def second(rank: int, name: str, layout: Layout, path: str) -> Found:
    return resume(rank, CASES[name], layout, path)


def first_and_second(rank: int, name: str, layout: Layout, other: Layout, path: str) -> tuple[Found, Found]:
    return train(rank, CASES[name], layout, path), second(rank, name, other, path)


WITH_FEWER = ("tied", "batch norm")  # from here on 3 ranks go on, too
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
    before, after = zip(*pool(4).run(first_and_second, name, layout, other, str(tmp_path)), strict=True)
    assert_trained(CASES[name], before, after)
    if layout == HSDP and name in WITH_FEWER:
        assert_trained(CASES[name], before, pool(3).run(second, name, FEWER, str(tmp_path)))


def test_the_assert_helper_fails_on_wrong_input() -> None:
    right = {"w": torch.ones(3, dtype=torch.float64)}
    assert_close(right, right)
    for wrong in ({"w": right["w"] * (1 + 1e-9)}, {"v": right["w"]}, {}):
        with pytest.raises(AssertionError):
            assert_close(wrong, right)


def test_one_bit_is_a_difference() -> None:
    w = torch.ones(3, dtype=torch.float64)
    found = Found({"w": w}, {})
    assert same_bits(found, Found({"w": w.clone()}, {}))
    for wrong in (Found({"w": w * (1 + 2**-52)}, {}), Found({}, {}), Found({"w": w}, {"w": w})):
        assert not same_bits(found, wrong)
