"""The text of schedules, word for word.

When a change of the planner is meant, write the files anew and read their diff: ``HPFUNC_UPDATE_GOLDEN=1 make test``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpfunc.planning.checking.checker import check
from hpfunc.planning.policy import Policy
from hpfunc.planning.schedule import Schedule
from tests.helpers.golden import assert_golden
from tests.planning.schedules import SCHEDULES

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", SCHEDULES)
def test_text_of_three_units(name: str) -> None:
    check(SCHEDULES[name])
    assert_golden(str(SCHEDULES[name]), GOLDEN / f"{name}.txt")


def test_another_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPFUNC_UPDATE_GOLDEN", raising=False)
    with pytest.raises(AssertionError, match="differs"):
        assert_golden(str(SCHEDULES["fsdp_native"]), GOLDEN / "hsdp_native.txt")


def differing(schedule: Schedule) -> list[Schedule]:
    """Returns schedules that differ from one in a single field of an op or a buffer."""
    slots = schedule.slots
    ops = slots[0].ops
    op = ops[-1]
    buffers = schedule.buffers
    other = replace(buffers[0], stream="all_reduce")
    return [
        replace(schedule, policy=Policy(prefetch=7)),
        replace(schedule, buffers=(other, *buffers[1:])),
        replace(schedule, buffers=(replace(buffers[0], weight=None), *buffers[1:])),
        replace(schedule, slots=(replace(slots[0], ops=(*ops[:-1], replace(op, waits=()))), *slots[1:])),
        replace(schedule, slots=(replace(slots[0], ops=(*ops[:-1], replace(op, stream="gather"))), *slots[1:])),
        replace(schedule, slots=(replace(slots[0], when="after"), *slots[1:])),
    ]


def test_schedules_that_differ_have_other_texts_and_fingerprints() -> None:
    schedule = SCHEDULES["hsdp_native"]
    variants = [schedule, *SCHEDULES.values(), *differing(schedule)]
    assert len({str(variant) for variant in variants}) == len(set(variants))
    assert len({variant.fingerprint for variant in variants}) == len(set(variants))


def test_the_four_steps_are_marked_in_order() -> None:
    text = str(SCHEDULES["hsdp_ordered"])
    after = text.split("after backward block")[1].split("before backward", maxsplit=1)[0]
    assert [line[-1] for line in after.splitlines() if "# step" in line] == ["1", "2", "4"]
    after = str(SCHEDULES["fsdp_ordered"]).split("after backward block")[1].split("before backward")[0]
    assert [line[-1] for line in after.splitlines() if "# step" in line] == ["1", "2", "3"]
