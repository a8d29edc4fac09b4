"""The checker against schedules with one mistake: it may let hardly any pass that computes something wrong."""

from __future__ import annotations

import os
from random import Random

import pytest

from hpfunc.planning.checking.checker import find_violations
from hpfunc.planning.planner import plan
from tests.planning.mutants import MUTATIONS, Mutant, is_wrong, mutants, random_mutant, tally
from tests.planning.programs import random_case

SCALE = int(os.environ.get("HPFUNC_PLANNING_SCALE", "1"))
"""25 checks 10,000 planned schedules and 5,000 mutants."""


@pytest.mark.slow
def test_no_planned_schedule_is_rejected() -> None:
    for seed in range(400 * SCALE):
        case = random_case(Random(seed))
        assert not find_violations(plan(case.program, case.policy, case.traits)), f"seed {seed}"


@pytest.mark.slow
def test_accepted_mutants_are_right_under_every_timing() -> None:
    """What the checker accepts is run; what it rejects need not be, so there are many more of these."""
    accepted = [mutant for mutant in mutants(range(100 * SCALE)) if not find_violations(mutant.schedule)]
    assert accepted
    missed = [mutant for mutant in accepted if is_wrong(mutant.schedule, mutant.case)]
    assert not missed, [mutant.mutation for mutant in missed]


@pytest.mark.slow
def test_ninety_nine_of_a_hundred_harmful_mutants_are_rejected() -> None:
    """With the count of harmful ones, so that the test cannot pass because there are none."""
    found = tally(range(10_000, 10_000 + 100 * SCALE), num_timings=20)
    assert found.harmful.total() >= 30 * SCALE
    assert found.missed.total() <= found.harmful.total() // 100


def test_every_mutation_makes_mutants() -> None:
    made = {mutant.mutation for mutant in mutants(range(400))}
    assert made == {mutation.__name__ for mutation in MUTATIONS}


def loses_order(mutant: Mutant) -> bool:
    """Returns whether two uses of a buffer lose their order; not if only the caller's own memory is begun early.

    That is harmful where the caller happens to work with that memory: see `tests.planning.test_interpret`.
    """
    return any("what the caller has done" not in str(found) for found in find_violations(mutant.schedule))


def test_an_unmutated_schedule_is_not_wrong_and_a_harmful_one_is() -> None:
    case = random_case(Random(7))
    assert not is_wrong(plan(case.program, case.policy, case.traits), case, 5)
    harmful = [mutant for mutant in mutants(range(60)) if mutant.mutation == "drop_wait" and loses_order(mutant)]
    assert len(harmful) > 4
    assert all(is_wrong(mutant.schedule, mutant.case) for mutant in harmful)


def test_a_seed_is_always_the_same_mutant() -> None:
    assert random_mutant(Random(3)) == random_mutant(Random(3))
