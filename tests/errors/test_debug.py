"""Planted mistakes that `debug=True` finds, in a recorded step and in a planned one, and what it lets pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch

import hpfunc as hp
from tests.helpers import frameworks as ops
from tests.helpers.frameworks import to_framework, to_torch
from tests.helpers.leaves import assert_same_bits
from tests.helpers.ranks import Pool, mesh_of
from tests.helpers.refusals import check_texts, texts_of

Tensor = torch.Tensor
WIDTH, LAYERS = 8, 3
SPECS = {"up": hp.P(("tp", "shard")), "down": hp.P("shard", "tp"), "gain": hp.P("shard"), "shift": hp.P()}


def weights(mesh: hp.Mesh) -> Any:
    generator = torch.Generator().manual_seed(1)
    hidden = WIDTH // mesh.axis_size("tp")
    shapes = {"up": (WIDTH, WIDTH), "down": (WIDTH, WIDTH), "gain": (hidden,), "shift": (hidden,)}
    tree = [{k: torch.randn(s, generator=generator) / 3 for k, s in shapes.items()} for _ in range(LAYERS)]
    return hp.shard(to_framework(tree), mesh, [SPECS] * LAYERS)


def batch(mesh: hp.Mesh) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return to_framework(torch.randn(2, 3, WIDTH, generator=generator)[mesh.axis_index("shard")])


def enter_by_hand(x: Tensor, factors: list[float]) -> Tensor:
    """A `pvary` by hand. Where `factors` differ along "tp", its backward is wrong."""
    return ops.with_backward(x, lambda g: hp.psum(g, "tp") * factors[hp.axis_index("tp")])


def vary(x: Tensor) -> Tensor:
    return hp.pvary(x, "tp")


def keep(x: Tensor) -> Tensor:
    return x


def step_of(
    mesh: hp.Mesh,
    *,
    enter: Callable[[Tensor], Tensor] = vary,
    small: Callable[[Tensor], Tensor] = vary,
    leave: Callable[[Tensor], Tensor] = lambda x: hp.psum(x, "tp"),
    debug: bool = True,
    remat: bool = False,
) -> hp.ShardedStep:
    """A step of layers cut over "tp", each of which enters, uses small weights that are not cut, and leaves."""

    def block(p: Any, x: Tensor) -> Tensor:
        hidden = ops.tanh(ops.linear(enter(x), p["up"]) * small(p["gain"]) + small(p["shift"]))
        return x + leave(ops.linear(hidden, p["down"]))

    unit = hp.unit(block, remat=remat)

    def loss(params: Any, x: Tensor) -> Tensor:
        for p in params:
            x = unit(p, x)
        return x.square().mean()

    return hp.sharded(hp.value_and_grad(loss), mesh, debug=debug)


def planted(**functions: Any) -> Any:
    mesh = mesh_of((1, 2), ("shard", "tp"), ("shard",))
    kept, step = weights(mesh), step_of(mesh, **functions)
    return lambda: step(kept, batch(mesh)), kept


def a_missing_pvary(rank: int) -> Any:
    return planted(enter=keep)


def weights_that_are_not_cut_beside_those_that_are(rank: int) -> Any:
    return planted(small=keep)


def a_pvary_of_what_differs(rank: int) -> Any:
    return planted(enter=lambda x: hp.pvary(hp.pvary(x, "tp") + hp.axis_index("tp"), "tp"))


def a_missing_psum(rank: int) -> Any:
    return planted(leave=keep)


def a_wrong_backward_by_hand(rank: int) -> Any:
    return planted(enter=lambda x: enter_by_hand(x, [1.0, 0.5]))


def a_wrong_backward_in_a_planned_step(rank: int) -> Any:
    """The backward turns wrong on the third call, which follows the plan: the events are the same."""
    mesh, factors = mesh_of((1, 2), ("shard", "tp"), ("shard",)), [1.0, 1.0]
    kept, step = weights(mesh), step_of(mesh, enter=lambda x: enter_by_hand(x, factors))
    for _ in range(2):
        step(kept, batch(mesh))
    assert step.followed_plan
    factors[1] = 0.5
    return lambda: step(kept, batch(mesh)), kept


CASES = {
    case.__name__: case
    for case in (
        a_missing_pvary,
        weights_that_are_not_cut_beside_those_that_are,
        a_pvary_of_what_differs,
        a_missing_psum,
        a_wrong_backward_by_hand,
        a_wrong_backward_in_a_planned_step,
    )
}


@pytest.mark.parametrize("name", list(CASES))
def test_a_mistake_is_found(name: str) -> None:
    check_texts(texts_of(CASES[name]), name)


# --- what is right --------------------------------------------------------------------------------------------------
def right(rank: int, by_hand: bool, fill: float, remat: bool = False) -> list[list[Tensor]]:
    """The gradients with and without debug, where the plan was followed, and `lower` gives the same program."""
    mesh, found = mesh_of((2, 2), ("shard", "tp"), ("shard",)), []
    params, x = weights(mesh), batch(mesh) * fill
    for debug in (False, True):
        enter = (lambda x: enter_by_hand(x, [1.0, 1.0])) if by_hand else vary
        step = step_of(mesh, enter=enter, debug=debug, remat=debug and remat)
        for _ in range(2):
            _, grads = step(params, x)
        assert step.followed_plan
        assert step.last_schedule is not None
        compares = [event for event in step.last_schedule.program.events if event.name.startswith("compare ")]
        assert bool(compares) == debug
        if not by_hand and not ops.is_mindspore():
            assert step.lower(params, x).program == step.last_schedule.program
        found.append(optree.tree_leaves(to_torch(hp.unshard(grads, mesh.axis_names))))
    return found


@pytest.mark.parametrize("by_hand", [False, True])
def test_what_is_right_passes_with_the_same_bits(pool: Callable[[int], Pool], by_hand: bool) -> None:
    for plain, compared in pool(4).run(right, by_hand, 1.0):
        assert_same_bits(compared, plain)


def test_what_is_right_passes_when_it_is_recomputed(pool: Callable[[int], Pool]) -> None:
    for plain, compared in pool(4).run(right, False, 1.0, True):
        assert_same_bits(compared, plain)


def test_nan_is_the_same_as_nan(pool: Callable[[int], Pool]) -> None:
    for _, compared in pool(4).run(right, False, math.nan):
        assert all(bool(gradient.isnan().any()) for gradient in compared)
