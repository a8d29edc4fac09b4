"""The text of a schedule is the schedule: what is written is read back, whatever it is."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpfunc._errors import ScheduleError
from hpfunc.planning.checking.checker import check, find_violations
from hpfunc.planning.ops import Buffer, Collective, Launch, Local, LocalKind, Op, Region, Slot
from hpfunc.planning.planner import Traits, plan
from hpfunc.planning.policy import Policy
from hpfunc.planning.program import Event, Program, Unit
from hpfunc.planning.schedule import Schedule
from tests.planning.mutants import mutants
from tests.planning.programs import Case, cases, edge_cases, layers, weight
from tests.planning.schedules import SCHEDULES

HSDP = {"replicate": 2, "shard": 2}
THREE = SCHEDULES["hsdp_native"]


def assert_is_read_back(schedule: Schedule) -> None:
    """Asserts that the text of a schedule is read as an equal one."""
    text = str(schedule)
    found = Schedule.parse(text)
    assert found == schedule, text
    assert str(found) == text
    assert found.fingerprint == schedule.fingerprint


@pytest.mark.parametrize("name", SCHEDULES)
def test_golden_texts_are_read_back(name: str) -> None:
    assert_is_read_back(SCHEDULES[name])


@settings(max_examples=100, deadline=None)
@given(cases() | edge_cases())
def test_every_plan_is_read_back(case: Case) -> None:
    assert_is_read_back(plan(case.program, case.policy, case.traits))


def test_schedules_that_are_not_safe_are_read_back() -> None:
    for mutant in mutants(range(150)):
        assert_is_read_back(mutant.schedule)


def test_every_kind_of_op_is_read_back() -> None:
    """By the tests above, of which this one counts the ops."""
    ops = [op for mutant in mutants(range(150)) for op in mutant.schedule.ops]
    assert {type(op) for op in ops} == set(get_args(Op))
    assert {op.kind for op in ops if isinstance(op, Local)} >= set(get_args(LocalKind)) - {"zero"}
    assert {op.collective for op in ops if isinstance(op, Launch)} == set(get_args(Collective))


ODD = ["", " ", "a, b", "a,", ",", "a:", "a -> b", "->", "- ->", "()", "w[0:4]", "buffer 3", "64 bytes", "a  b", "a*b"]
WORSE = ["'", '"a"', "a\nb", "\ud800", "\u2028", "\xa0", "é", "a\\", "a as weight 3", "a as weight", "a, 8 bytes"]
NAMES = st.text(max_size=12) | st.sampled_from([*ODD, *WORSE, "x, waits for y", "a  # step 1", "block (event 3)"])


@settings(max_examples=150, deadline=None)
@given(st.lists(NAMES, min_size=7, max_size=7), st.booleans())
def test_any_names_are_read_back(names: list[str], ordered: bool) -> None:
    """Of weights, units, dtypes, axes, ops and buffers, and in a policy."""
    one, two, dtype, first, second, collective, renamed = names
    sizes = {f"0{first}": 2, f"1{second}": 3}
    cut = (f"1{second}",)
    weights = (weight(one, 64, sizes, cut, dtype=dtype), weight(two, 64, sizes, cut))
    events = (Event("forward", 0), Event("collective", name=collective), Event("backward", 0))
    program = Program(weights, (Unit(two, (0, 1)),), (*events, Event("end_backward"), Event("end_step")))
    schedule = plan(program, Policy(release_overrides={one: "never"}), Traits(ordered_sums=ordered))
    assert_is_read_back(schedule)
    buffers = (*schedule.buffers[:-1], replace(schedule.buffers[-1], name=renamed))
    slot = schedule.slots[0]
    ops = (replace(slot.ops[0], name=renamed, waits=(one, renamed)), *slot.ops[1:])
    assert_is_read_back(replace(schedule, buffers=buffers, slots=(replace(slot, ops=ops), *schedule.slots[1:])))


def test_a_policy_with_numbers_of_numpy_is_read_back() -> None:
    """numpy 2 writes them as ``np.float64(1e6)``: the policy holds plain ones."""
    policy = Policy(pack_below_bytes=np.float64(1e3), gather_budget_bytes=np.float64(1e6))
    assert {type(policy.pack_below_bytes), type(policy.gather_budget_bytes)} == {float}
    assert_is_read_back(plan(layers(1, HSDP), policy))


def test_zeros_and_odd_schedules_are_read_back() -> None:
    program = Program((), (), (Event("end_step"),))
    assert_is_read_back(Schedule(program, Policy(), (), ()))
    buffers = (Buffer("twice", "reduce", 4, "float32", "compute"), Buffer("twice", "send", 4, "float32", "gather"))
    regions = (Region(0, 0, 4), Region(1, 1, 3), Region(7, 0, 1), Region(-1, -2, 5))
    ops = (Local("zero", "zero", "all_reduce", (), regions), Local("zero", "zero", "gather", (), ()))
    assert_is_read_back(Schedule(program, Policy(), buffers, (Slot(5, "after", ops), Slot(0, "before", ()))))


def test_what_follows_from_the_rest_is_not_read() -> None:
    text = re.sub(r"\d+ bytes", "1 bytes", str(THREE)).replace("# step 1", "# mine").replace("23 buffers", "many")
    text = text.replace("before forward embed", "before the first").replace(THREE.program.fingerprint, "")
    assert Schedule.parse(text.replace("\n", "\r\n")) == THREE


def test_a_schedule_is_edited_by_hand() -> None:
    gather, block = "gather embed", ", waits for gather embed"
    assert gather in str(THREE)
    hasty = Schedule.parse(str(THREE).replace(block, "", 1))
    assert [str(found) for found in find_violations(hasty)] == [
        "forward embed: uses whole embed.w, but is not ordered after gather embed",
        "forward embed: uses whole embed.b, but is not ordered after gather embed",
    ]
    lines = str(THREE).splitlines()
    place = next(i for i, line in enumerate(lines) if "  gather block  " in line)
    late = lines.index("before forward block (event 1)")
    lines.insert(late, lines.pop(place))  # after embed: a prefetch less
    assert check(Schedule.parse("\n".join(lines))).hidden_launches == 4 < check(THREE).hidden_launches


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("schedule of", "plan of", "'schedule of'"),
        ("prefetch=1", "prefetch=-1", "Policy(...) as Python writes it"),
        ("prefetch=1", "prefetch=f()", "Policy(...) as Python writes it"),
        ("Policy(", "Weight(", "Policy(...) as Python writes it"),
        ("shard embed.w     shard", "shard embed.w     sharp", "a kind of buffer: shard, send,"),
        ("  1   shard embed.b", "  2   shard embed.b", "the number 1"),
        ("32768 float32", "many float32", "its number of elements"),
        ("before forward embed", "during forward embed", "'before' or 'after' and an event, or 'weights'"),
        ("  compute         begin", "  computer        begin", "a stream: compute, gather,"),
        ("begin    ", "begin, x ", "two spaces, and what the op does"),
        ("caller: ->", "called: ->", "what the op does: free, deliver, caller, event, all_gather,"),
        ("over gather@shard:", "over get@shard:", "a purpose: gather, reduce_scatter, all_reduce"),
        ("@shard: shard embed.w", "@shard: shard embed.x", "the name of a buffer that is listed above, once, found"),
        ("whole embed.b, 263168 bytes", "whole embed.b", "the name of a buffer that is listed above"),
        ("free 6, 262144 bytes", "free 6", "', ' and a size in bytes"),
        ("waits for begin", "awaits begin", "the end of the line"),
        (" -> (), 263168", ", 263168", "', ' and another place that is read, or ' -> '"),
        ("scale (divisor 4)", "scale (divisor four)", "the fields of the op"),
        ("as weight 0", "as weight zero", "' as weight ' and a number"),
        ("num_shards=2", "num_shards='2'", "Weight(...) as Python writes it, with another num_shards"),
        ("num_shards=2", "shards=2", "Weight(...) as Python writes it"),
        ("weights=(0, 1)", "weights=(0, 6)", "a unit of some of the 6 weights above"),
        (
            "Event(kind='forward', unit=0)",
            "Event(kind='forward', unit=3)",
            "an event, which has one of the 3 units above",
        ),
        ("kind='end_step'", "kind='end_steps'", "Event(...) as Python writes it, with another kind"),
        ("\nunits", "", "the number 6"),
    ],
)
def test_errors_name_the_line_and_what_was_expected(old: str, new: str, expected: str) -> None:
    before = str(THREE)
    assert old in before
    after = before.replace(old, new, 1)
    differ = zip(before.splitlines(), after.splitlines(), strict=False)
    number, line = next((i, b) for i, (a, b) in enumerate(differ, 1) if a != b)
    with pytest.raises(ScheduleError) as caught:
        Schedule.parse(after)
    first, shown, why, *_ = str(caught.value).splitlines()
    assert first == f"hpfunc.Schedule.parse: line {number} is not that of a schedule"
    assert shown == f"  line {number}: {line}"
    assert f"expected {expected}" in why
    assert ", found " in why


def test_a_text_that_ends_early_is_refused() -> None:
    lines = str(THREE).splitlines()
    for stop in (1, 2, 3, 40, 90, lines.index("units"), lines.index("events")):
        with pytest.raises(ScheduleError, match=f"line {stop + 1} is not that of a schedule"):
            Schedule.parse("\n".join(lines[:stop]))
    with pytest.raises(ScheduleError, match="expected the end of the text"):
        Schedule.parse(f"{THREE}\nevents")


def test_the_assertion_refuses_another_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    other = plan(layers(1, HSDP), Policy())
    monkeypatch.setattr(Schedule, "parse", lambda text: other)
    with pytest.raises(AssertionError):
        assert_is_read_back(THREE)
