"""Weights that several places use, and what is done to the outputs of a unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hpfunc as hp
from tests.helpers.ranks import Pool
from tests.museum.steps import MESHES, assert_all_close, draw, gradient, grid, in_all_ways, plain, refusals, size_of

pytestmark = pytest.mark.processes
Unit = Callable[..., Any]


# --- tied weights whose size does not divide ------------------------------------------------------------------------
def tied_loss(params: Any, ids: torch.Tensor, unit: Unit = hp.unit) -> torch.Tensor:
    """An embedding, a layer, and the embedding again as the head."""
    embed = unit(lambda w, ids: F.embedding(ids, w))
    layer = unit(lambda w, x: x + torch.tanh(x @ w))
    head = unit(lambda w, x: x @ w.t())
    logits = head(params["table"], layer(params["layer"], embed(params["table"], ids)))
    return F.cross_entropy(logits, ids.roll(1))


def tied_weights(num_words: int) -> Any:
    return {"layer": draw(3, 3, seed=1), "table": draw(num_words, 3, seed=2)}


def ids_of(rank: int, num_words: int) -> torch.Tensor:
    return torch.randint(num_words, (6,), generator=torch.Generator().manual_seed(rank))


def tied(rank: int, mesh_name: str, num_words: int) -> Any:
    mesh = grid(mesh_name)
    params = hp.shard(tied_weights(num_words), mesh, hp.P("shard"))
    return in_all_ways(hp.grad(tied_loss), mesh, params, ids_of(rank, num_words))


@pytest.mark.parametrize("num_words", [4, 5, 7])
@pytest.mark.parametrize("mesh_name", MESHES)
def test_tied_weights_that_do_not_divide(pool: Callable[[int], Pool], mesh_name: str, num_words: int) -> None:
    """pytorch 176076: a table that is embedding and head at once, whose rows the ranks do not divide.

    The head had been sharded as a weight of its own; the last rank, whose block was padded, wrote its updates into a
    padded copy, and its rows never moved. Here two units are given one array. A weight is named by its place among
    the arguments, so both uses have one gradient, and padding is in messages only.
    """
    num_ranks = size_of(mesh_name)
    rows = [ids_of(rank, num_words) for rank in range(num_ranks)]
    want = gradient(lambda p: torch.stack([tied_loss(p, ids, plain) for ids in rows]).mean(), tied_weights(num_words))
    assert_all_close(pool(num_ranks).run(tied, mesh_name, num_words), want[1:])
    assert all(row.abs().sum() > 0 for row in want[2])  # so each row has to move


# --- blocks that are called several times ---------------------------------------------------------------------------
def looped_loss(params: Any, x: torch.Tensor, unit: Unit = hp.unit) -> torch.Tensor:
    """A head that is used within a block and once more behind it, and a layer in a loop."""
    layer = unit(lambda w, x: x + torch.tanh(x @ w))
    head = unit(lambda w, x: torch.sin(x @ w))
    extra = unit(lambda w, x: x * w)
    for _ in range(3):
        x = layer(params["layer"], x)
    ahead = head(params["head"], extra(params["extra"], x))
    return (head(params["head"], x) + ahead.flip(0)).square().mean()


def looped_weights() -> Any:
    return {"extra": draw(3, seed=3), "head": draw(3, 4, seed=4), "layer": draw(3, 3, seed=5)}


def looped(rank: int, mesh_name: str, policy: hp.Policy) -> Any:
    mesh = grid(mesh_name)
    params = hp.shard(looped_weights(), mesh, {"extra": hp.P(), "head": hp.P("shard"), "layer": hp.P(None, "shard")})
    return in_all_ways(hp.grad(looped_loss), mesh, params, draw(5, 3, seed=70 + rank), policy=policy)


@pytest.mark.parametrize("policy", [hp.Policy(), hp.Policy(pack_below_bytes=0), hp.Policy.zero2(prefetch=2)], ids=repr)
@pytest.mark.parametrize("mesh_name", MESHES)
def test_a_block_that_is_called_several_times(pool: Callable[[int], Pool], mesh_name: str, policy: hp.Policy) -> None:
    """pytorch 153354, 183702; fairscale 617, 918: a module is called twice before its backward runs.

    Its state said "released" after the first backward, while the second one still needed the weights; or the hook of
    the second call never ran. Here uses are events of a program, each with a number, and a plan is over all of them.
    """
    num_ranks = size_of(mesh_name)
    batches = [draw(5, 3, seed=70 + rank) for rank in range(num_ranks)]
    want = gradient(lambda p: torch.stack([looped_loss(p, x, plain) for x in batches]).mean(), looped_weights())
    assert_all_close(pool(num_ranks).run(looped, mesh_name, policy), want[1:])


# --- writes into outputs --------------------------------------------------------------------------------------------
WRITES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view then add": lambda y: y.view(-1).add_(1.0).view(y.shape),
    "slice": lambda y: (y[:, 1:].mul_(2.0), y)[1],
    "transposed": lambda y: (y.t().mul_(3.0), y)[1],
    "itself": lambda y: y.mul_(2.0),
    "row": lambda y: (y[0].add_(1.0), y)[1],
}


def written_loss(params: Any, x: torch.Tensor, name: str, returns: str, unit: Unit = hp.unit) -> torch.Tensor:
    """The output of the first unit is written in place before the second one gets it."""

    def first(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = torch.addmm(torch.ones(3, dtype=x.dtype), x, w)
        return y if returns == "tensor" else y.reshape(2, 2, 3).view(4, 3)

    second = unit(lambda w, x: torch.tanh(x @ w))
    return second(params["b"], WRITES[name](unit(first)(params["a"], x))).square().mean()


def written_weights() -> Any:
    return {"a": draw(3, 3, seed=8), "b": draw(3, 3, seed=9)}


def written(rank: int, name: str, returns: str) -> Any:
    mesh = grid("two shards")
    params = hp.shard(written_weights(), mesh, hp.P("shard"))
    loss = hp.grad(lambda p, x: written_loss(p, x, name, returns))
    return in_all_ways(loss, mesh, params, draw(4, 3, seed=80 + rank))


@pytest.mark.parametrize("returns", ["tensor", "view"])
@pytest.mark.parametrize("name", WRITES)
def test_an_output_is_written_in_place(pool: Callable[[int], Pool], name: str, returns: str) -> None:
    """pytorch 181832: a write into a view of a block's output took the hook off that gathers for its backward.

    Autograd rewrites the history of the base, and the node that carried the hook is an orphan. Here the way into the
    backward of a unit is a node of its own, with outputs that are not views of what the unit has made.
    """
    batches = [draw(4, 3, seed=80 + rank) for rank in range(2)]
    want = gradient(
        lambda p: torch.stack([written_loss(p, x, name, returns, plain) for x in batches]).mean(), written_weights()
    )
    assert_all_close(pool(2).run(written, name, returns), want[1:])


def saved_and_written(params: Any, x: torch.Tensor, unit: Unit = hp.unit) -> torch.Tensor:
    """What autograd has saved of the unit, its output, is written before its backward."""
    y = unit(lambda w, x: torch.exp(x @ w))(params["a"], x)
    y.mul_(2.0)
    return y.square().mean()


def saving(rank: int) -> list[str]:
    mesh = grid("two shards")
    params = hp.shard(written_weights(), mesh, hp.P("shard"))
    return refusals(hp.grad(saved_and_written), mesh, params, draw(4, 3, seed=80 + rank))


def test_what_is_needed_for_backward_is_written_in_place(pool: Callable[[int], Pool]) -> None:
    """pytorch 181832's other half: here torch by itself refuses, since it has saved what was written.

    A system that hands out other tensors than those which autograd has saved takes that check away.
    """
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient(lambda p: saved_and_written(p, draw(4, 3), plain), written_weights())
    for eager, recorded in pool(2).run(saving):
        assert "returned" not in (eager, recorded)
