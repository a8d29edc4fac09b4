"""hpfunc on an accelerator: no race, no wait that is missing, and the bits of the CPU, however slow a stream is."""

from __future__ import annotations

import pytest

from tests.device.all_cases import CASES, DELAYS, SLOW
from tests.device.harness import Conditions, observe, on_device

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(("name", "slow"), [(name, slow) for name in CASES for slow in SLOW[name]])
def test_no_race_and_the_bits_of_a_cpu(name: str, slow: str | None) -> None:
    fn, world = CASES[name]
    on_device(fn, Conditions(delays={} if slow is None else {slow: DELAYS[slow]}), world=world)


@pytest.mark.parametrize("slow", sorted(DELAYS))
@pytest.mark.parametrize(("name", "room"), [("hybrid", 1), ("accumulate_hybrid", 1), ("hybrid_in_two_queues", 2)])
def test_steps_go_on_where_few_collectives_have_room(name: str, room: int, slow: str) -> None:
    """With three at a time, which a device without room for them would not survive, a CPU computes the same."""
    fn, world = CASES[name]
    on_device(fn, Conditions(delays={slow: DELAYS[slow]}, max_in_flight=room), world=world)


@pytest.mark.parametrize(
    ("fault", "every"),
    [
        ("forgotten_event_wait", 3),
        ("early_reuse", 1),
        ("unsynchronized_read", 1),
    ],
)
def test_a_fault_of_the_device_would_be_found(fault: str, every: int) -> None:
    """That no race is found above is not because nobody looks."""
    fn, world = CASES["plain"]
    for each in observe(fn, conditions=Conditions(faults={fault: every}), world=world):
        assert each.races
