"""What a probe finds is equal on all ranks and found once, and packing follows from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import hpfunc as hp
from hpfunc._running import link_probe as _probe
from hpfunc._running.agreement import control
from hpfunc.backends import get
from hpfunc.planning.ops import Launch
from hpfunc.planning.planner import plan
from tests.helpers.leaves import assert_same_bits, local_leaves
from tests.helpers.models import P
from tests.helpers.ranks import Pool, mesh_of, outcome
from tests.planning.programs import layers as planned_layers

HSDP = ("replicate", "shard")


# --- links ----------------------------------------------------------------------------------------------------------
@given(st.floats(1e-9, 10), st.floats(1, 1e13))
def test_packing_pays_below_latency_times_bandwidth(latency_s: float, bytes_per_s: float) -> None:
    product, chosen = latency_s * bytes_per_s, hp.Link(latency_s, bytes_per_s).pack_below_bytes
    assert 4096 <= chosen <= 1 << 20
    assert chosen.bit_count() == 1
    if 4096 < product < 1 << 20:
        assert 0.7 < chosen / product < 1.42  # the nearest power of two
    else:
        assert chosen == (4096 if product <= 4096 else 1 << 20)


@given(st.floats(1e-9, 1), st.floats(1, 1e12), st.floats(1, 100))
def test_a_longer_latency_never_packs_less(latency_s: float, bytes_per_s: float, factor: float) -> None:
    link, other = hp.Link(latency_s, bytes_per_s), hp.Link(latency_s * factor, bytes_per_s)
    assert link.pack_below_bytes <= other.pack_below_bytes


@pytest.mark.parametrize(
    ("field", "value"), [("latency_s", 0), ("latency_s", math.inf), ("latency_s", "1"), ("bytes_per_s", math.nan)]
)
def test_a_link_refuses_what_is_no_positive_number(field: str, value: Any) -> None:
    fields: dict[str, Any] = {"latency_s": 1e-5, "bytes_per_s": 1e9, field: value}
    with pytest.raises(hp.PolicyError, match=f"^hpfunc.Link: {field} must be a positive number, got"):
        hp.Link(**fields)


def test_a_plan_measures_nothing() -> None:
    schedule = plan(planned_layers(3, {"shard": 4}), hp.Policy())
    assert schedule == plan(planned_layers(3, {"shard": 4}), hp.Policy(pack_below_bytes=65536))
    assert schedule.policy.pack_below_bytes == 65536


# --- the probe ------------------------------------------------------------------------------------------------------
def fresh(shape: tuple[int, ...]) -> hp.Mesh:
    """Returns a mesh of which nothing has been measured: another timeout makes it another one."""
    mesh = mesh_of(shape, ("shard",) if len(shape) == 1 else HSDP, None, 19.0)
    for key in [key for key in _probe._links if key[0] == mesh]:
        del _probe._links[key]
    return mesh


def gathers(fn: Callable[[], Any]) -> tuple[Any, int, int]:
    """Returns what `fn` returns, how many all-gathers were launched, and how many exchanges of the control group."""
    backend, exchanges = cast(Any, get("torch")), [0]
    before, exchange = backend.counters.copy(), backend.exchange

    def watch(*args: Any) -> Any:
        exchanges[0] += 1
        return exchange(*args)

    backend.exchange = watch
    try:
        result = fn()
    finally:
        del backend.exchange
    return result, backend.counters.since(before).collectives.get("all_gather", 0), exchanges[0]


def probed(rank: int, shape: tuple[int, ...], axes: tuple[str, ...]) -> list[tuple[hp.Link, int, int]]:
    mesh = fresh(shape)
    return [gathers(lambda: hp.probe(mesh, axes)) for _ in range(2)]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("shape", "axes"), [((2,), ("shard",)), ((4,), ("shard",)), ((2, 2), ("shard",)), ((2, 2), HSDP)]
)
def test_all_ranks_find_the_same_link_once(
    pool: Callable[[int], Pool], shape: tuple[int, ...], axes: tuple[str, ...]
) -> None:
    results = pool(math.prod(shape)).run(probed, shape, axes)
    (link, num_gathers, exchanges), again = results[0]
    assert all(result == results[0] for result in results)
    assert (num_gathers, exchanges) == (16, 2)
    assert again == (link, 0, 0)
    assert 1e-6 < link.latency_s < 1
    assert 1e5 < link.bytes_per_s < 1e12


def probe_alone(rank: int) -> Any:
    mesh = fresh((2, 1))
    return gathers(lambda: hp.probe(mesh, "shard"))


@pytest.mark.processes
def test_one_rank_sends_nothing(pool: Callable[[int], Pool]) -> None:
    for link, num_gathers, exchanges in pool(2).run(probe_alone):
        assert (link.pack_below_bytes, num_gathers, exchanges) == (65536, 0, 0)


def probe_of_others(rank: int) -> str:
    return outcome(hp.probe, fresh((2, 2)), "shard" if rank else "replicate")


@pytest.mark.processes
def test_ranks_that_measure_different_axes_are_told(pool: Callable[[int], Pool]) -> None:
    for text in pool(4).run(probe_of_others):
        assert text.startswith("AgreementError: hpfunc.probe: ranks disagree"), text
        assert "axes replicate" in text


def probe_after_failure(rank: int) -> Any:
    mesh = fresh((2,))
    (params,) = weights(mesh, 1, "shard")
    hp.probe(mesh, "shard")

    def fails(p: Any) -> Any:
        loss = matrices(p, data(rank)).sum()
        if rank == 1:
            raise KeyError("no such token")
        return loss + hp.pmean(loss, "shard")

    text = outcome(hp.sharded(fails, mesh), params)
    return text, gathers(lambda: hp.probe(mesh, "shard"))


@pytest.mark.processes
def test_after_a_failed_step_all_measure_again(pool: Callable[[int], Pool]) -> None:
    """The rank that failed may have done so before it got what the others had measured."""
    (first, measured), (second, others) = pool(2).run(probe_after_failure)
    assert "no such token" in first
    assert "no such token" in second
    assert measured == others
    assert measured[1:] == (16, 2)


# --- steps ----------------------------------------------------------------------------------------------------------
matrices = hp.unit(lambda p, x: torch.tanh(F.linear(F.linear(x, p["w"]), p["v"])), name="matrices")


def weights(mesh: hp.Mesh, count: int, *axes: str) -> Any:
    """Returns layers of two weights of 16 KiB, cut over some axes."""
    generator = torch.Generator().manual_seed(0)
    tree = [{name: torch.randn(64, 64, generator=generator) / 8 for name in ("w", "v")} for _ in range(count)]
    return hp.shard(tree, mesh, P(axes))


def data(rank: int) -> torch.Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(7 + rank))


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    for p in params:
        x = matrices(p, x)
    return x.square().mean()


@contextmanager
def links(mesh: hp.Mesh, **known: hp.Link) -> Iterator[None]:
    """Lets the mesh know the link of some axes; ``__`` stands between their names."""
    keys = {(mesh, tuple(name.split("__"))): (control(mesh).standing.generation, link) for name, link in known.items()}
    _probe._links.update(keys)
    yield
    for key in keys:
        del _probe._links[key]


SLOW, MIDDLE, FAST = hp.Link(1.0, 1e9), hp.Link(1e-4, 1e9), hp.Link(1e-9, 1e9)  # by their latency


def choosing(rank: int, shape: tuple[int, ...]) -> Any:
    """Returns whether the second call was planned, the number of the schedule, that of the probe, and gradients."""
    mesh = fresh(shape)
    params = weights(mesh, 3, "shard")
    found = []
    for pack_below_bytes in (None, 0, math.inf):
        run = hp.sharded(hp.value_and_grad(loss), mesh, policy=hp.Policy(pack_below_bytes=pack_below_bytes), debug=True)
        run(params, data(rank))
        _, grads = run(params, data(rank))
        assert run.last_schedule is not None
        found.append((run.followed_plan, run.last_schedule.policy.pack_below_bytes, local_leaves(grads)))
    _, want = hp.value_and_grad(loss)(params, data(rank))
    return found, hp.probe(mesh, "shard").pack_below_bytes, local_leaves(want)


@pytest.mark.processes
@pytest.mark.parametrize("shape", [(2,), (3, 1), (2, 2)])
def test_a_step_chooses_by_its_link_and_changes_no_bit(pool: Callable[[int], Pool], shape: tuple[int, ...]) -> None:
    results = pool(math.prod(shape)).run(choosing, shape)
    for found, link, want in results:
        assert [number for _, number, _ in found] == [link, 0, math.inf]
        for followed, _, grads in found:
            assert followed
            assert_same_bits(grads, want)
    assert len({link for _, link, _ in results}) == 1


def num_messages(schedule: hp.Schedule, collective: str) -> int:
    return sum(len(op.writes) for op in schedule.ops if isinstance(op, Launch) and op.collective == collective)


def packed(rank: int, link: hp.Link) -> Any:
    mesh = fresh((2,))
    params = weights(mesh, 3, "shard")
    run = hp.sharded(hp.value_and_grad(loss), mesh)
    with links(mesh, shard=link):
        lowered, num_gathers, exchanges = gathers(lambda: run.lower(params, data(rank)))
        run(params, data(rank))
        _, in_step, _ = gathers(lambda: run(params, data(rank)))
    assert run.last_schedule is not None
    assert lowered.schedule == run.last_schedule
    assert (num_gathers, exchanges) == (0, 0)
    assert in_step == num_messages(run.last_schedule, "all_gather")
    return num_messages(run.last_schedule, "all_gather"), num_messages(run.last_schedule, "all_to_all")


@pytest.mark.processes
def test_a_slow_link_packs_and_a_fast_one_does_not(pool: Callable[[int], Pool]) -> None:
    # Three units forward, the first of them again backward; two weights each.
    assert pool(2).run(packed, SLOW) == [(4, 3)] * 2
    assert pool(2).run(packed, MIDDLE) == [(4, 3)] * 2  # 128 KiB
    assert pool(2).run(packed, FAST) == [(8, 6)] * 2


def of_two_links(rank: int) -> Any:
    mesh = fresh((2, 2))
    params = weights(mesh, 1, "shard") + weights(mesh, 1, *HSDP)
    run = hp.sharded(hp.value_and_grad(loss), mesh)
    with links(mesh, shard=FAST, replicate__shard=MIDDLE):
        run(params, data(rank))
    assert run.last_schedule is not None
    return run.last_schedule.policy.pack_below_bytes


@pytest.mark.processes
def test_of_several_links_the_largest_number_counts(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(of_two_links) == [MIDDLE.pack_below_bytes] * 4


def unmeasured(rank: int) -> Any:
    """Lowering before anything was measured, and a step without a cut weight."""
    mesh = fresh((2,))
    params, run = weights(mesh, 2, "shard"), hp.sharded(hp.value_and_grad(loss), mesh)
    lowered, num_gathers, exchanges = gathers(lambda: run.lower(params, data(rank)))
    whole = hp.sharded(hp.value_and_grad(loss), mesh)
    whole(weights(mesh, 4), data(rank))
    assert whole.last_schedule is not None
    numbers = [schedule.policy.pack_below_bytes for schedule in (lowered.schedule, whole.last_schedule)]
    return numbers, num_gathers, exchanges, [key for key in _probe._links if key[0] == mesh]


@pytest.mark.processes
def test_nothing_is_measured_where_it_would_not_serve(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(unmeasured) == [([65536, 65536], 0, 0, [])] * 2
