"""Tensor, context and expert parallelism: each example against one process, and its plan against program order."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import optree
import pytest
import torch

import hpfunc as hp
from tests.helpers.examples import FOLDER, bytes_to_learn, example
from tests.helpers.leaves import assert_close, assert_same_bits
from tests.helpers.ranks import Pool, mesh_of, outcome
from tests.helpers.ranks import pool as pool_of

NAMES = ("tensor_parallel", "context_parallel", "expert_parallel")
DATA_AXES = {"tensor_parallel": 2, "context_parallel": 3, "expert_parallel": 3}
STEPS, RATE = 3, 0.5


Result = tuple[list[torch.Tensor], list[float]]


def train(rank: int, name: str, planned: bool) -> Result:
    """Returns whole weights and losses; a planned run has `debug=True`."""
    module = example(name)
    mesh = mesh_of(module.SIZES, module.AXES, module.AXES[: DATA_AXES[name]])
    steps: list[hp.ShardedStep] = []

    def run(step_fn: Any, mesh: hp.Mesh) -> Any:
        if not planned:
            return step_fn
        steps.append(hp.sharded(step_fn, mesh, debug=True))
        return steps[0]

    weights, losses = module.train(mesh, bytes_to_learn(module), hp.optim.sgd(RATE), STEPS, torch.float64, run)
    assert [step.followed_plan for step in steps] == [True] * planned
    return optree.tree_leaves(weights), losses


@cache
def planned_results(name: str) -> list[Result]:
    return pool_of(8).run(train, name, True)


@pytest.mark.processes
@pytest.mark.parametrize("name", NAMES)
def test_an_example_gives_the_weights_of_one_process(name: str) -> None:
    module = example(name)
    want = optree.tree_leaves(module.alone(bytes_to_learn(module), RATE, STEPS))
    torch.manual_seed(0)
    start = optree.tree_leaves(module.init(torch.float64))
    assert all((a - b).norm() > 1e-4 * b.norm() for a, b in zip(want, start, strict=True)), "nothing was learnt"
    for got, losses in planned_results(name):
        assert_close(got, want, 1e-13)
        assert losses[-1] < losses[0]


@pytest.mark.processes
@pytest.mark.parametrize("name", NAMES)
def test_its_plan_has_the_bits_of_program_order(pool: Callable[[int], Pool], name: str) -> None:
    eager = pool(8).run(train, name, False)
    for (got, got_losses), (want, want_losses) in zip(planned_results(name), eager, strict=True):
        assert_same_bits(got, want)
        assert got_losses == want_losses


def without_pvary(rank: int) -> str:
    module = example("tensor_parallel")
    vars(module)["hp"] = SimpleNamespace(**{**vars(hp), "pvary": lambda x, axis: x})
    mesh = mesh_of(module.SIZES, module.AXES, module.AXES[:2])

    def run(step_fn: Any, mesh: hp.Mesh) -> Any:
        return hp.sharded(step_fn, mesh, debug=True)

    return outcome(module.train, mesh, bytes_to_learn(module), hp.optim.sgd(RATE), 1, torch.float32, run)


@pytest.mark.processes
def test_debug_finds_a_missing_pvary(pool: Callable[[int], Pool]) -> None:
    for text in pool(8).run(without_pvary):
        assert text.startswith(
            "UsageError: hpfunc.psum: the cotangent of its result differs between ranks along ('tp',)"
        )


def test_an_expert_takes_as_many_tokens_as_it_has_places() -> None:
    module = example("expert_parallel")
    scores = torch.tensor([[3.0, 2.0, 1.0, 0.0]]).expand(8, 4)
    taken, share = module.route(scores)
    assert taken.sum((0, 2)).tolist() == [5, 5, 0, 0]  # 1.25 * (8 tokens * 2 choices / 4 experts)
    assert taken.sum((1, 2)).tolist() == [2] * 5 + [0] * 3
    assert taken[:, :2].sum(0).max() == 1  # a place has one token
    assert torch.allclose(share.sum((1, 2)), torch.tensor([1.0] * 5 + [0.0] * 3))


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short(name: str) -> None:
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) < 150
