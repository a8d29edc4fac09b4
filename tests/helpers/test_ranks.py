"""The pool of ranks itself: that what it reports is what happened."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

import hpfunc as hp
from tests.helpers.ranks import Pool, RankError, mesh_of, outcome


def summed(rank, values):
    total = torch.tensor(values[rank])
    dist.all_reduce(total)
    return rank, total.item()


def fails_on_one(rank):
    if rank == 1:
        raise KeyError("broken here")
    return rank


def hangs_on_one(rank):
    if rank == 1:
        time.sleep(100)
    return rank


def dies_on_one(rank):
    if rank == 1:
        os._exit(7)
    return rank


def unpicklable(rank):
    return lambda: rank


def warns(rank):
    import warnings

    warnings.warn("something is deprecated", FutureWarning, stacklevel=1)


def cut(rank, x):
    mesh = mesh_of((2,), ("shard",))
    assert mesh is mesh_of((2,), ("shard",))
    return hp.shard(x, mesh, hp.P("shard")).local


@pytest.fixture(scope="module")
def pair():
    pair = Pool(2)
    yield pair
    pair.stop()


def test_results_come_in_rank_order(pair):
    assert pair.run(summed, [1.5, 2.0]) == [(0, 3.5), (1, 3.5)]


def test_tensors_travel_by_value(pair):
    x = torch.arange(4, dtype=torch.bfloat16)
    parts = pair.run(cut, x)
    assert [part.dtype for part in parts] == [torch.bfloat16] * 2
    assert torch.equal(torch.cat(parts), x)


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (fails_on_one, "rank 1 raised.*KeyError: 'broken here'"),
        (dies_on_one, "rank 1 died.*exit code 7"),
        (unpicklable, "rank 0 raised.*cannot be pickled"),
        (warns, "rank 0 raised.*FutureWarning: something is deprecated"),
    ],
)
def test_what_goes_wrong_is_told_and_the_pool_goes_on(pair, fn, said):
    with pytest.raises(RankError, match=f"(?s){said}"):
        pair.run(fn)
    assert pair.run(summed, [1.0, 1.0]) == [(0, 2.0), (1, 2.0)]


def test_a_hanging_rank_is_told_with_its_stack(pair):
    with pytest.raises(RankError, match=r"(?s)rank 1 hung.*hangs_on_one"):
        pair.run(hangs_on_one, deadline_s=1.0)
    assert pair.run(summed, [1.0, 1.0]) == [(0, 2.0), (1, 2.0)]


def test_outcome_tells_errors_from_results():
    assert outcome(int, "3") == "returned"
    assert outcome(int, "x").startswith("ValueError: invalid literal")
