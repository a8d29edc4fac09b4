"""Ranks with different numbers of micro-batches, batches or tokens: the hang of the year."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hpfunc as hp
from tests.helpers.ranks import Pool, mesh_of, outcome
from tests.museum.steps import assert_all_close, draw, gradient, grid, in_all_ways, plain, whole

pytestmark = pytest.mark.processes
TIMEOUT_S = 3.0


def weights() -> Any:
    return [draw(3, 3, seed=1), draw(3, 3, seed=2)]


def rows_of(rank: int, count: int) -> torch.Tensor:
    return draw(count, 3, seed=30 + rank)


def squares(params: Any, x: torch.Tensor, mask: torch.Tensor, unit: Callable[..., Any] = hp.unit) -> torch.Tensor:
    """Returns the sum over the rows that count."""
    layer = unit(lambda w, x: torch.tanh(x @ w))
    for w in params:
        x = layer(w, x)
    return (x.square().sum(dim=1) * mask).sum()


SUM = hp.Numerics(reduce_op="sum")


def impatient() -> hp.Mesh:
    return mesh_of((2,), ("shard",), None, TIMEOUT_S)


# --- the hang, as a refusal -----------------------------------------------------------------------------------------
def cut_by_tokens(rank: int, way: str) -> str:
    """Rank 0 has four rows, rank 1 two; each makes micro-batches of two rows."""
    mesh = impatient()
    params = hp.shard(weights(), mesh, hp.P("shard"))

    def step(params: Any, x: torch.Tensor, count: int) -> Any:
        grad_fn = hp.value_and_grad(lambda p, x: squares(p, x, torch.ones(len(x), dtype=x.dtype)), numerics=SUM)
        return hp.accumulate(grad_fn, count, mode="scatter")(params, x)

    sharded = hp.sharded(step, mesh)
    if way == "planned":
        for _ in range(3):
            sharded(params, rows_of(rank, 4), 2)
        assert sharded.followed_plan
    count = 2 - rank
    if way == "eager":
        with hp.use_mesh(mesh):
            return outcome(step, params, rows_of(rank, 2 * count), count)
    return outcome(sharded, params, rows_of(rank, 2 * count), count)


@pytest.mark.parametrize("way", ["eager", "recorded", "planned"])
def test_ranks_cut_their_batches_into_different_numbers(pool: Callable[[int], Pool], way: str) -> None:
    """verl 5591, 6176, 6178; bergson 227; tinker-cloud 30: each rank makes as many micro-batches as its tokens need.

    One rank ends its loop, the others wait in a gather until the network's timeout ends the job, half an hour later
    and without a reason. Here the number is a plain argument of a step, which ranks compare; and where nobody does,
    the one that waits is told whom it waits for.
    """
    texts = pool(2).run(cut_by_tokens, way)
    pool(2).stop()
    for text in texts:
        assert text.startswith(("AgreementError", "PeerError")), texts


# --- the remedies ---------------------------------------------------------------------------------------------------
def padded(rank: int, mode: str) -> Any:
    """Rank 1 has two rows where rank 0 has four: it adds rows that count nothing."""
    mesh = grid("two shards")
    params = hp.shard(weights(), mesh, hp.P("shard"))
    count = 4 - 2 * rank
    x = torch.cat([rows_of(rank, count), torch.zeros(4 - count, 3, dtype=torch.float64)])
    mask = (torch.arange(4) < count).double()
    step = hp.accumulate(hp.grad(squares, numerics=SUM), 2, mode=mode)
    return in_all_ways(step, mesh, params, x, mask)


@pytest.mark.parametrize("mode", ["scatter", "local"])
def test_a_rank_without_rows_passes_rows_that_count_nothing(pool: Callable[[int], Pool], mode: str) -> None:
    """EasyR1 11012: ranks agreed on the largest number, and a rank with fewer samples could not fill as many.

    It crashed in its own loop, and the others hung. Here the rank's second micro-batch has rows of weight zero: its
    gradients are zeros, which must be summed like others.
    """
    want = gradient(
        lambda p: sum(squares(p, rows_of(r, 4 - 2 * r), torch.ones(4 - 2 * r).double(), plain) for r in range(2)),
        weights(),
    )
    assert_all_close(pool(2).run(padded, mode), want[1:])


def evaluated(rank: int, agreed: bool) -> Any:
    """An evaluation in which rank 0 has three batches and rank 1 two."""
    mesh = impatient()
    params = hp.shard(weights(), mesh, hp.P("shard"))
    evaluate = hp.sharded(lambda p, x: hp.psum(squares(p, x, torch.ones(2).double()), "shard"), mesh)
    more = hp.sharded(lambda flag: hp.psum(flag, "shard"), mesh)
    batches = rows_of(rank, 6 - 2 * rank).split(2)

    def run() -> list[torch.Tensor]:
        found = []
        for batch in [*batches, None] if agreed else batches:
            if agreed and more(torch.tensor(float(batch is not None))) < 2:
                break
            found.append(evaluate(params, batch))
        return found

    return whole(run(), mesh) if agreed else outcome(run)


def test_an_evaluation_ends_on_all_ranks_together(pool: Callable[[int], Pool]) -> None:
    """prime-rl 2515: ranks had different numbers of batches to validate on; the first one out left the others hanging.

    Two batches of rank 0 meet those of rank 1, and the third one has no partner. Asking before each batch whether all
    have one ends the loop together. Without it, the rank that goes on is told that the other one does not come.
    """
    want = [
        sum(squares(weights(), rows_of(r, 6 - 2 * r).split(2)[k], torch.ones(2).double(), plain) for r in range(2))
        for k in range(2)
    ]
    for found in pool(2).run(evaluated, True):
        torch.testing.assert_close(found, want, rtol=1e-12, atol=0)
    first, second = pool(2).run(evaluated, False)
    pool(2).stop()  # one rank has given up, the other one does not know it
    assert first.startswith("PeerError"), first
    assert second == "returned"


# --- units that only one rank uses ----------------------------------------------------------------------------------
def two_kinds(params: Any, text: torch.Tensor, image: torch.Tensor | None) -> torch.Tensor:
    encode = hp.unit(lambda w, x: torch.tanh(x @ w))
    decode = hp.unit(lambda w, x: (x @ w).square().mean())
    hidden = text if image is None else text + encode(params[0], image)
    return decode(params[1], hidden)


def one_has_an_image(rank: int, way: str) -> str:
    mesh = impatient()
    params = hp.shard(weights(), mesh, hp.P("shard"))
    image = rows_of(rank, 4)
    step = hp.sharded(hp.value_and_grad(two_kinds), mesh)
    if way == "planned":
        for _ in range(2):
            step(params, rows_of(rank, 4), image)
    return outcome(step, params, rows_of(rank, 4), image if rank == 0 else None)


@pytest.mark.parametrize("way", ["recorded", "planned"])
def test_only_one_rank_has_an_image(pool: Callable[[int], Pool], way: str) -> None:
    """prime-rl 1918, 1959; pytorch 170667: only the ranks that had an image called the encoder, which gathers.

    The gathers of some ranks met other gathers of the others. Here ranks differ in what they pass, which a step
    compares when it sees it first; a rank that goes on with its plan reads on the board that the other one cannot.
    """
    texts = pool(2).run(one_has_an_image, way)
    for text in texts:
        assert "AgreementError" in text, texts


def no_image_but_zeros(rank: int) -> Any:
    mesh = grid("two shards")
    params = hp.shard(weights(), mesh, hp.P("shard"))
    image = rows_of(rank, 4) if rank == 0 else torch.zeros(4, 3, dtype=torch.float64)
    return in_all_ways(hp.grad(two_kinds), mesh, params, rows_of(rank, 4), image)


def test_the_rank_without_an_image_encodes_zeros(pool: Callable[[int], Pool]) -> None:
    """The remedy: all call the encoder, and what it does to zeros reaches nothing."""

    def total(p: Any) -> torch.Tensor:
        seen = rows_of(0, 4) + torch.tanh(rows_of(0, 4) @ p[0])
        return ((seen @ p[1]).square().mean() + (rows_of(1, 4) @ p[1]).square().mean()) / 2

    assert_all_close(pool(2).run(no_image_but_zeros), gradient(total, weights())[1:])
