"""What holds for every program, policy and backend."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hpfunc.planning.checking.checker import check
from hpfunc.planning.checking.interpreter import interpret
from hpfunc.planning.checking.reference import World, reference
from hpfunc.planning.planner import plan
from tests.planning.programs import Case, cases, edge_cases


@settings(max_examples=150, deadline=None)
@given(cases() | edge_cases(), st.integers(0, 1000))
def test_every_plan_is_safe_and_right_whatever_the_timing(case: Case, timing: int) -> None:
    schedule = plan(case.program, case.policy, case.traits)
    report = check(schedule)
    if case.policy.release == "forward" and not case.policy.release_overrides:
        assert report.max_whole_units <= max(map(case.policy.depth, ("forward", "backward"))) + 1
    assert report.max_whole_bytes <= case.policy.gather_budget_bytes
    world = World(case.program, case.mesh_sizes, seed=timing)
    for found, wanted in zip(interpret(schedule, world, timing), reference(world), strict=True):
        assert found.agrees(wanted), str(schedule)
