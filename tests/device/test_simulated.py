"""The simulated device itself: it runs late, and it reports what it is made to do wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import record_function

from tests.device import simulated
from tests.device.harness import Conditions, Observed, assert_clean, assert_same_bits, device, observe
from tests.helpers.ranks import outcome

pytestmark = pytest.mark.processes
SIZE = 1000
LATE_US = 20000


def sim() -> Any:
    return getattr(torch, simulated.NAME)


def side_stream() -> Any:
    stream = sim().Stream()
    device().name_stream(stream.stream_id, "side")
    return stream


def group_of_both() -> Any:
    return dist.new_group([0, 1], timeout=timedelta(seconds=10), group_desc="test")


# --- streams ---------------------------------------------------------------------------------------------------------
def reads_elsewhere(rank: int, waits: bool) -> list[torch.Tensor]:
    side = side_stream()
    x = torch.zeros(SIZE, device=simulated.NAME)
    sim().synchronize()
    device().set_delay("compute", LATE_US)
    x.add_(1.0)
    if waits:
        side.wait_stream(sim().current_stream())
    with sim().stream(side):
        y = x * 2
    side.synchronize()
    device().set_delay("compute", 0)
    return [y.cpu()]


def assert_wrong(program: Callable[..., Any], report: str) -> None:
    """The race is reported each time. How late a stream is is drawn: the number is wrong once at least."""
    seen = []
    for _ in range(5):
        observed = observe(program, False)
        assert all(any(text.startswith(report) for text in each.races) for each in observed), observed[0].races
        seen += [bool((each.result[0] == 2).all()) for each in observed]
        if not all(seen):
            return
    pytest.fail("the number was right each time")


def test_a_missing_wait_gives_a_wrong_number_and_is_reported() -> None:
    for each in observe(reads_elsewhere, True):
        assert each.races == []
        assert bool((each.result[0] == 2).all())
    assert_wrong(reads_elsewhere, "RAW: mul on side is not ordered after add on compute")


def frees_early(rank: int, records: bool) -> list[torch.Tensor]:
    """A tensor is dropped while another stream reads it, and its memory is used again."""
    side = side_stream()
    x = torch.ones(SIZE, device=simulated.NAME)
    side.wait_stream(sim().current_stream())
    device().set_delay("side", LATE_US)
    with sim().stream(side):
        y = x + 1
    if records:
        x.record_stream(side)
    del x
    z = torch.full((SIZE,), 7.0, device=simulated.NAME)
    side.synchronize()
    device().set_delay("side", 0)
    return [y.cpu(), z.cpu()]


def test_memory_that_is_freed_early_is_overwritten_and_reported() -> None:
    for each in observe(frees_early, True):
        assert each.races == []
        assert bool((each.result[0] == 2).all())
    assert_wrong(frees_early, "WAR: free on compute")


def reuses(rank: int) -> list[torch.Tensor]:
    """Memory of one stream is freed, and another stream allocates."""
    with sim().stream(side_stream()):
        x = torch.ones(77 * SIZE, device=simulated.NAME)  # no other test leaves a block of this size
    del x
    return [torch.ones(77 * SIZE, device=simulated.NAME).cpu()]


def writes_twice(rank: int, waits: bool) -> list[torch.Tensor]:
    side, x = side_stream(), torch.zeros(SIZE, device=simulated.NAME)
    side.wait_stream(sim().current_stream())
    with sim().stream(side):
        x.add_(1)
    if waits:
        sim().current_stream().wait_stream(side)
    x.fill_(3)
    sim().synchronize()
    return [x.cpu()]


def test_two_writes_without_order_are_reported() -> None:
    assert_clean(observe(writes_twice, True))
    for each in observe(writes_twice, False):
        assert any(text.startswith("WA") and "on compute is not ordered after" in text for text in each.races)


def labels(rank: int) -> list[torch.Tensor]:
    side, x = side_stream(), torch.ones(SIZE, device=simulated.NAME)
    with sim().stream(side), record_function("library::first step"):
        y = x + 1
    side.synchronize()
    return [y.cpu()]


def test_a_race_has_the_names_of_ranges_operators_and_streams() -> None:
    for each in observe(labels):
        assert each.races[0] == "RAW: first step/add on side is not ordered after fill_ on compute", each.races


# --- collectives -----------------------------------------------------------------------------------------------------
def gathers(rank: int) -> list[torch.Tensor]:
    """A collective whose input has just been enqueued, and whose output is used at once."""
    x = torch.zeros(SIZE, device=simulated.NAME)
    whole = torch.empty(2 * SIZE, device=simulated.NAME)
    x.add_(rank + 1)
    work: Any = dist.all_gather_single(whole, x, group=group_of_both(), async_op=True)
    work.wait()
    return [(whole * 2).cpu()]


def test_collectives_wait_and_are_waited_for() -> None:
    want = torch.cat([torch.full((SIZE,), 2.0), torch.full((SIZE,), 4.0)])
    for late in ("compute", "communicator"):
        observed = observe(gathers, conditions=Conditions(delays={late: LATE_US}))
        assert_clean(observed)
        assert_same_bits([each.result for each in observed], [[want]] * 2)


def waits_for_an_event(rank: int) -> list[torch.Tensor]:
    return reads_elsewhere(rank, True)


def records_a_stream(rank: int) -> list[torch.Tensor]:
    return frees_early(rank, True)


def reads_on_host(rank: int) -> list[torch.Tensor]:
    x = torch.ones((), device=simulated.NAME) + 1
    return [torch.tensor(x.item()), x.cpu()]


@pytest.mark.parametrize(
    ("fault", "program", "report"),
    [
        ("forgotten_event_wait", waits_for_an_event, "RAW: mul on side"),
        ("forgotten_work_wait", gathers, "is not ordered after all_gather on communicator test"),
        ("ignored_record_stream", records_a_stream, "WAR: free on compute"),
        ("early_reuse", reuses, "WAW: free on compute is not ordered after fill_ on side"),
        ("early_collective", gathers, "RAW: all_gather on communicator test is not ordered after add on compute"),
        ("unsynchronized_read", reads_on_host, "RAW: item on host is not ordered after"),
    ],
)
def test_a_fault_is_reported(fault: str, program: Callable[..., Any], report: str) -> None:
    assert_clean(observe(program))
    for each in observe(program, conditions=Conditions(faults={fault: 1})):
        assert any(report in text for text in each.races), each.races


def test_every_fault_is_documented_and_exists() -> None:
    observe(sets_all_faults, list(simulated.FAULTS))


def sets_all_faults(rank: int, names: list[str]) -> None:
    for name in names:
        device().set_fault(name, 0)
    assert "no fault named typo" in outcome(device().set_fault, "typo", 1)


# --- failures --------------------------------------------------------------------------------------------------------
def usable_again(rank: int) -> str:
    return outcome(lambda: assert_same_bits([[gathers(rank)[0][:1]]], [[torch.tensor([2.0])]]))


def test_a_communicator_that_failed_says_so() -> None:
    """Its work has an error, and the device goes on: a new group works."""
    observed = observe(fails_once)
    for each in observed:
        failed, again = each.result
        assert failed
        assert again == "returned"
        assert any(text.startswith("all_gather: ") for text in each.errors), each.errors


def fails_once(rank: int) -> tuple[bool, str]:
    device().set_fault("failed_communicator", 1)
    group, x = group_of_both(), torch.ones(SIZE, device=simulated.NAME)
    work = dist.all_gather_single(torch.empty(2 * SIZE, device=simulated.NAME), x, group=group, async_op=True)
    device().clear_faults()
    failed = outcome(work.wait, timedelta(seconds=5)) != "returned"  # type: ignore[union-attr]
    return failed, usable_again(rank)


def given_up(rank: int) -> tuple[str, float, str]:
    """Rank 0 waits for a collective that rank 1 never calls, and gives its group up; both go on with another one."""
    group, x = group_of_both(), torch.ones(SIZE, device=simulated.NAME)
    dist.all_reduce(x.clone(), group=group)  # the first call meets the others
    sim().synchronize()
    text, begin = "returned", time.monotonic()
    if rank == 0:
        work = dist.all_reduce(x, group=group, async_op=True)
        threading.Timer(0.3, group.abort).start()
        text = outcome(work.wait, timedelta(seconds=9))  # type: ignore[union-attr]
    return text, time.monotonic() - begin, usable_again(rank)


def test_abort_ends_what_is_pending() -> None:
    first, second = observe(given_up)
    text, elapsed_s, again = first.result
    assert text != "returned"
    assert 0.2 < elapsed_s < 8
    assert again == second.result[2] == "returned"
    assert any(error.startswith("all_reduce: ") for error in first.errors), first.errors


def peer_gives_up(rank: int) -> str:
    group, x = group_of_both(), torch.ones(SIZE, device=simulated.NAME)
    dist.all_reduce(x.clone(), group=group)
    sim().synchronize()
    if rank == 1:
        group.abort()
        return "gave up"
    work: Any = dist.all_reduce(x, group=group, async_op=True)
    text = outcome(work.wait, timedelta(seconds=9))
    error: Any = group._get_backend(torch.device(simulated.NAME)).get_error()
    stays = not work.is_completed()
    group.abort()
    return f"{text.partition(':')[0]}, {error.name}, stays: {stays}"


def test_a_peer_that_gives_up_is_an_error_of_the_work_which_stays_until_abort() -> None:
    first, second = observe(peer_gives_up)
    assert second.result == "gave up"
    assert first.result == "RuntimeError, REMOTE_ERROR, stays: True"
    assert first.errors


def crossed(rank: int) -> str:
    """Two ranks launch two collectives in different orders."""
    groups = [group_of_both(), group_of_both()]
    x = torch.ones(SIZE, device=simulated.NAME)
    for group in groups:
        dist.all_reduce(x.clone(), group=group)
    sim().synchronize()
    works = []
    for group in groups if rank == 0 else groups[::-1]:
        works.append(dist.all_reduce(x.clone(), group=group, async_op=True))
        time.sleep(0.2)
    return outcome(lambda: [work.wait(timedelta(seconds=5)) for work in works])


def test_a_device_with_too_few_places_stands_still_and_says_where() -> None:
    assert [each.result for each in observe(crossed)] == ["returned"] * 2
    for each in observe(crossed, conditions=Conditions(max_in_flight=1, hang_s=1.0)):
        assert "the host waits for communicator test since 1 s" in each.result
        assert each.result.count("communicator test stands in 'all_reduce'") >= 2
        assert "compute is idle" in each.result or "compute stands in 'wait for communicator test'" in each.result


# --- the host --------------------------------------------------------------------------------------------------------
def waits_in_all_ways(rank: int) -> list[torch.Tensor]:
    x = torch.ones(3, device=simulated.NAME)
    with record_function("library::reading"):
        x.sum().item()
    values = x.cpu()
    x.nonzero()
    event = sim().Event()
    event.record()
    event.synchronize()
    sim().current_stream().synchronize()
    return [values]


def test_waits_of_the_host_are_counted_with_their_reason() -> None:
    for each in observe(waits_in_all_ways):
        expected = ("reading/item", "copy to host", "nonzero", "event.synchronize", "stream.synchronize")
        assert {name: each.syncs[name] for name in expected} == dict.fromkeys(expected, 1)
        assert each.events == {"recorded": 1}


def computes(rank: int, reads: bool) -> str:
    x = torch.ones(3, device=simulated.NAME) * 2
    return outcome(lambda: x.sum().item() if reads else x.sum())


def test_a_wait_of_the_host_can_be_an_error() -> None:
    conditions = Conditions(raises_on_sync=True)
    assert [each.result for each in observe(computes, False, conditions=conditions)] == ["returned"] * 2
    for each in observe(computes, True, conditions=conditions):
        assert "the host waits for the device: item" in each.result


def allocates(rank: int) -> dict[str, int]:
    before = device().memory()["in use"]
    x = torch.empty(1024, device=simulated.NAME)
    during = device().memory()["in use"]
    del x
    reuses_before = device().memory()["reuses"]
    y = torch.empty(1000, device=simulated.NAME)
    after = device().memory()
    return {"grew": during - before, "reused": after["reuses"] - reuses_before, "of": y.numel()}


def test_memory_is_counted() -> None:
    assert [each.result for each in observe(allocates)] == [{"grew": 4096, "reused": 1, "of": 1000}] * 2


# --- the harness -----------------------------------------------------------------------------------------------------
def test_the_assert_helpers_fail_on_wrong_input() -> None:
    one = torch.ones(2)
    assert_same_bits([[one]], [[one.clone()]])
    for wrong in ([[one + 1e-6]], [[one.double()]], [[one, one]], [[]], [[one * float("nan")]]):
        with pytest.raises(AssertionError):
            assert_same_bits(wrong, [[one]])
    with pytest.raises(AssertionError, match="nothing to compare"):
        assert_same_bits([[]], [[]])
    clean = Observed([], [], [], {}, {}, {}, {})
    assert_clean([clean])
    for found in (Observed([], ["RAW"], [], {}, {}, {}, {}), Observed([], [], ["failed"], {}, {}, {}, {})):
        with pytest.raises(AssertionError, match="rank 1: "):
            assert_clean([clean, found])
