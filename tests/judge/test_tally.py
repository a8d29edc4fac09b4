"""`check` against the judge: every verdict on a mutant is the same, or the difference is explained."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import count

import pytest

from hpfunc.planning.checking.checker import find_violations
from hpfunc.planning.planner import Traits, plan
from hpfunc.planning.policy import Policy
from tests.judge.differences import KINDS, Difference, explain
from tests.judge.tally import compare
from tests.judge.works import Rules
from tests.judge.world import World
from tests.planning.edits import changed
from tests.planning.programs import layers

HSDP = {"replicate": 2, "shard": 2}
RULES = Rules()
SCALE = int(os.environ.get("HPFUNC_PLANNING_SCALE", "1"))

VALID = plan(layers(2, HSDP, 8), Policy(), Traits(ordered_sums=True))
WORLD = World(VALID.program, HSDP)


@pytest.mark.slow
def test_every_verdict_on_mutants_agrees_or_is_explained() -> None:
    """``python -m tests.judge --count 100000`` does more of them."""
    tally = compare(count(10_000), 400 * SCALE, RULES, seconds=40 * SCALE)
    assert not tally.missed, str(tally)
    assert not tally.unexplained, str(tally)
    assert tally.agreed.total() > 10 * tally.unknown.total(), str(tally)
    assert sum(number for (_, right), number in tally.agreed.items() if right) > 0, str(tally)


def test_a_difference_without_a_reason_is_not_explained() -> None:
    assert explain(Difference(VALID, VALID, WORLD, RULES)) is None
    twins = replace(VALID, buffers=(*VALID.buffers[:-1], replace(VALID.buffers[-1], name=VALID.buffers[-2].name)))
    assert find_violations(twins)
    assert explain(Difference(twins, VALID, WORLD, RULES)) is None


def test_a_free_that_waits_for_nothing_is_explained_by_idle_memory() -> None:
    name = next(op.name for op in VALID.ops if op.name.startswith("free staging"))
    assert explain(Difference(changed(VALID, name, waits=()), VALID, WORLD, RULES)) == "idle memory"


def test_every_kind_of_difference_has_a_reason_and_one_way_to_tell_it() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    assert all(kind.reason and (kind.shows is None) != (kind.mended is None) for kind in KINDS)
