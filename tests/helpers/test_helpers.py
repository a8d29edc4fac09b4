"""The helpers of tests fail where they should."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers import leaves, reference, refusals, waiting
from tests.helpers.reference import Grid
from tests.helpers.waiting import settled
from tests.helpers.zoo import Box, Linear, assert_close, assert_same, bits, tensor, trees


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (torch.ones(3), torch.ones(4)),
        (torch.ones(3), torch.ones(3, 1)),
        (torch.ones(3), torch.ones(3, dtype=torch.float64)),
        (torch.ones(3), torch.ones(3) + 1e-6),
        (torch.zeros(1), -torch.zeros(1)),
        ([torch.ones(1)], (torch.ones(1),)),
        ({"a": torch.ones(1)}, {"b": torch.ones(1)}),
        (Linear(torch.ones(1), None), Linear(torch.ones(1), torch.ones(1))),
        (Box(torch.ones(2)), Box(torch.zeros(2))),
        ([torch.ones(1)], []),
        ([1.0], [torch.ones(())]),
    ],
)
def test_other_trees_are_not_the_same(got: Any, want: Any) -> None:
    with pytest.raises(AssertionError):
        assert_same(got, want)


@pytest.mark.parametrize("name", trees())
def test_trees_are_the_same_as_themselves(name: str) -> None:
    assert_same(trees()[name], trees()[name])


def test_bits_are_compared_not_values() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert_same(nan, nan.clone())
    assert bits(torch.ones(2, 3, dtype=torch.bfloat16).t()).numel() == 12
    assert bits(torch.empty(0, 3)).numel() == 0


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (torch.ones(3), torch.ones(3) + 1e-5),
        (torch.ones(3), torch.ones(4)),
        (torch.ones(3), torch.ones(3).double()),
        ([torch.ones(3)], torch.ones(3)),
        (torch.full((2,), float("nan")), torch.ones(2)),
        (torch.full((2,), 1e12).double(), torch.full((2,), 1e12).double() + 10),
    ],
)
def test_other_numbers_are_not_close(got: Any, want: Any) -> None:
    with pytest.raises(AssertionError):
        assert_close(got, want, tolerance=1e-12)


def test_other_leaves_are_neither_close_nor_of_the_same_bits() -> None:
    right = [torch.ones(3, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)]
    leaves.assert_close(right, right, 0.0)
    leaves.assert_same_bits(right, right)
    for wrong in ([right[0] * (1 + 1e-9), right[1]], [right[0], right[1] + 1e-15]):
        with pytest.raises(AssertionError):
            leaves.assert_same_bits(wrong, right)
        with pytest.raises(AssertionError):
            leaves.assert_close(wrong, right, 1e-10)
    with pytest.raises(AssertionError):
        leaves.assert_same_bits([x.float() for x in right], right)
    with pytest.raises(AssertionError):
        leaves.assert_same_bits([-x for x in right[1:]], right[1:])  # minus zero


def test_close_numbers_are_close() -> None:
    assert_close({"a": torch.ones(3) * (1 + 1e-6)}, {"a": torch.ones(3)}, tolerance=1e-5)
    assert_close(torch.empty(0), torch.empty(0))


def test_tensors_of_the_zoo_are_small_integers() -> None:
    x = tensor((1000,), torch.bfloat16)
    assert x.dtype == torch.bfloat16
    assert (x == x.round()).all()
    assert x.abs().max() <= 8
    assert not torch.equal(x, tensor((1000,), torch.bfloat16, seed=1))


# --- waiting --------------------------------------------------------------------------------------------------------
def test_what_settles_is_waited_for_and_the_rest_is_returned_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    falling = iter([3, 2, 1, 0])
    assert settled(lambda: next(falling), lambda number: number <= 1) == 1
    monkeypatch.setattr(waiting, "DEADLINE_S", 0.0)
    assert settled(lambda: 2, lambda number: number <= 1) == 2


# --- the reference --------------------------------------------------------------------------------------------------
GRID = Grid((2, 3), ("a", "b"), ("a", "b"))


def test_grids_count_row_by_row() -> None:
    assert GRID.place(4) == {"a": 1, "b": 1}
    assert GRID.peers(4, ("b",)) == [3, 4, 5]
    assert GRID.peers(4, ("a",)) == [1, 4]
    assert GRID.peers(0, ("b", "a")) == [0, 3, 1, 4, 2, 5]
    assert (GRID.index(4, ("b", "a")), GRID.index(4, ())) == (3, 0)


def test_blocks_are_of_one_size_but_the_last() -> None:
    assert [reference.bounds(7, 3, part) for part in range(3)] == [slice(0, 3), slice(3, 6), slice(6, 7)]
    assert [reference.bounds(2, 3, part) for part in range(3)] == [slice(0, 1), slice(1, 2), slice(2, 2)]
    assert reference.part((7, 2), (("b",), ("a",)), GRID, 5) == (slice(6, 7), slice(1, 2))
    assert reference.whole((7, 2), (("b",), ("a",)), GRID, 5, ("b",)) == (slice(0, 7), slice(1, 2))


def test_collectives_of_the_reference() -> None:
    parts = [np.array([rank, rank + 0.5]) for rank in range(6)]
    assert reference.psum(parts, GRID, 1, ("a",)).tolist() == [5.0, 6.0]
    assert reference.pmax(parts, GRID, 1, ("b",)).tolist() == [2.0, 2.5]
    assert reference.pmin(parts, GRID, 1, ("b",)).tolist() == [0.0, 0.5]
    assert reference.all_gather(parts, GRID, 4, ("a",), 0, tiled=True).tolist() == [1.0, 1.5, 4.0, 4.5]
    assert reference.psum_scatter(parts, GRID, 4, ("a",), 0, tiled=True).tolist() == [6.0]
    assert reference.all_to_all(parts, GRID, 4, ("a",), 0, 0, tiled=False).tolist() == [1.5, 4.5]
    assert reference.ppermute(parts, GRID, 4, ("b",), [(0, 1)]).tolist() == [3.0, 3.5]
    assert reference.ppermute(parts, GRID, 3, ("b",), [(0, 1)]).tolist() == [0.0, 0.0]


# --- the judge of refusals ------------------------------------------------------------------------------------------
def accepted(rank: int) -> Any:
    return lambda: None, None


def changes_what_it_gets(rank: int) -> Any:
    kept = torch.zeros(3)

    def call() -> None:
        kept.add_(1)
        raise ValueError("refused")

    return call, {"w": kept}


def test_the_judge_sees_what_is_accepted_changed_or_worded_otherwise(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.delenv("HPFUNC_UPDATE_GOLDEN", raising=False)
    monkeypatch.setattr(refusals, "GOLDEN", tmp_path)
    with pytest.raises(AssertionError, match="returned"):
        refusals.check_texts(refusals.texts_of(accepted), "any")
    with pytest.raises(AssertionError, match="changed"):
        refusals.texts_of(changes_what_it_gets)
    (tmp_path / "any.txt").write_text("ValueError: refused\n")
    refusals.check_texts(["ValueError: refused"] * 2, "any")
    for texts in (["ValueError: refused", "ValueError: denied"], ["ValueError: denied"] * 2):
        with pytest.raises(AssertionError, match="differs"):
            refusals.check_texts(texts, "any")
