"""What hpfunc promises everywhere, and a device makes hard: contexts in threads, failures, waits, copies."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import hpfunc as hp
from tests.device.cases import WIDTH, P, batch, block, chain, layer, layers, local, plain_mesh, sharded_layers, train
from tests.device.check import failures
from tests.device.check.found import Task
from tests.device.harness import Conditions, assert_same_bits, device, observe, on_device, on_host
from tests.helpers.ranks import mesh_of, outcome

pytestmark = pytest.mark.processes


# --- context variables in autograd's own threads ---------------------------------------------------------------------
def checkpointed_psum(rank: int) -> list[torch.Tensor]:
    """A unit with a collective of the caller, run again in backward."""
    mesh = mesh_of((1, 2), ("shard", "tp"), ("shard",))

    def parallel(p: Any, x: torch.Tensor) -> torch.Tensor:
        return x + hp.psum(torch.tanh(F.linear(hp.pvary(x, "tp"), p["w"])) @ p["w"], "tp")

    unit = hp.unit(parallel, name="parallel")
    params = hp.shard([{"w": p["w"]} for p in layers()], mesh, P("tp"))

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return chain(params, x, lambda p, x: checkpoint(unit, p, x, use_reentrant=False))

    return train(mesh, params, loss)


def checkpointed_frozen(rank: int) -> list[torch.Tensor]:
    """A frozen unit and one that trains, under one checkpoint."""
    mesh = plain_mesh()
    frozen = sharded_layers(mesh)
    scales = hp.shard([{"s": torch.ones(WIDTH)} for _ in range(3)], mesh, P("shard"))
    base, scale = hp.unit(block, name="base"), hp.unit(lambda p, x: x * p["s"], name="scale")

    def loss(scales: Any, x: torch.Tensor, frozen: Any) -> torch.Tensor:
        for p, q in zip(scales, frozen, strict=True):
            x = checkpoint(lambda p, q, x: scale(p, base(q, x)), p, q, x, use_reentrant=False)
        return x.square().mean()

    return train(mesh, scales, loss, frozen, donates=False)


@pytest.mark.parametrize("room", [0, 1])
@pytest.mark.parametrize("fn", [checkpointed_psum, checkpointed_frozen])
def test_a_unit_that_runs_again_in_backward_knows_its_step(fn: Callable[..., Any], room: int) -> None:
    on_device(fn, Conditions(max_in_flight=room))  # with room for one, the caller's collectives wait for the plan's


# --- failures --------------------------------------------------------------------------------------------------------
def a_peer_fails(rank: int) -> tuple[str, float, list[torch.Tensor]]:
    """Rank 1 raises in a step that rank 0 has enqueued. Returns what each raised, when, and what it computes then."""
    mesh = mesh_of((2,), ("shard",), None, 15.0)
    params, count = sharded_layers(mesh), [0]

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        if count[0] == 4 and mesh.rank == 1:
            raise ValueError("a bad batch")
        return chain(params, x)

    step = hp.sharded(hp.value_and_grad(loss), mesh, policy=hp.Policy(pack_below_bytes=0))

    def steps() -> None:
        for number in range(6):
            value, _ = step(params, batch(mesh, number))
            value.item()  # the host looks at its losses

    told, when = outcome(steps), time.time()
    return told, when, [step(params, batch(mesh, number))[0].cpu() for number in range(3)]


def no_peer_fails(rank: int) -> list[torch.Tensor]:
    mesh = plain_mesh()
    step = hp.sharded(hp.value_and_grad(chain), mesh, policy=hp.Policy(pack_below_bytes=0))
    return [step(sharded_layers(mesh), batch(mesh, number))[0].cpu() for number in range(3)]


def test_a_failure_of_a_peer_is_noticed() -> None:
    """The host never waits within a step, so it must look for failures elsewhere; and the ranks can go on."""
    first, second = (each.result for each in observe(a_peer_fails))
    (told, told_at, after), (raised, raised_at, _) = first, second
    assert "a bad batch" in raised
    assert told.startswith("PeerError")
    assert "a bad batch" in told
    assert "rank 1 failed while rank 0 waited for 'gather layer.0'" in told
    assert told_at - raised_at < 4, "the promise is two seconds, on a machine that has time for it"
    assert_same_bits([after, second[2]], on_host(no_peer_fails))


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise ValueError("a bad gradient")


def recovers(rank: int, where: str) -> list[torch.Tensor]:
    """The fourth step, which follows a plan, fails on all ranks. Returns what the others give.

    The host reads the result of each step: what is still in flight of an earlier one would be given up as well.
    """
    mesh = mesh_of((2,), ("shard",), None, 15.0)
    params, count = sharded_layers(mesh), [0]

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        x = chain_of(params[:1], x)
        if count[0] == 4 and where == "forward":
            raise ValueError("a bad batch")
        return chain(params[1:], FailsInBackward.apply(x) if count[0] == 4 else x)

    step, results = hp.sharded(hp.value_and_grad(loss), mesh, policy=hp.Policy(pack_below_bytes=0)), []
    for number in range(8):
        x = batch(mesh, number)
        told = outcome(lambda x=x: results.extend(local(step(params, x))))
        assert (told == "returned") == (number != 3), told
    assert step.followed_plan
    return results


def chain_of(params: Any, x: torch.Tensor) -> torch.Tensor:
    for p in params:
        x = layer(p, x)
    return x


@pytest.mark.parametrize("slow", ["compute", "gather", "reduce_scatter"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_steps_after_one_that_failed_are_right(where: str, slow: str) -> None:
    """What the failed step had in flight is given up, which the device reports; no memory of it is used too early."""
    observed = observe(recovers, where, conditions=Conditions(delays={slow: 1000}))
    assert [each.races for each in observed] == [[], []]
    assert_same_bits([each.result for each in observed], on_host(recovers, where))


def permutes_beside_a_silent_rank(rank: int) -> str:
    """Rank 1 neither sends nor receives, in the first call of a group."""
    mesh = mesh_of((2,), ("shard",), None, 5.0)
    x = batch(mesh, 0)
    return outcome(lambda: hp.ppermute(x, "shard", [(0, 0)], mesh=mesh).cpu())


def test_a_permutation_in_which_a_rank_takes_no_part() -> None:
    """The first call of a communicator meets all of its ranks, those that have nothing to send, too."""
    assert [each.result for each in observe(permutes_beside_a_silent_rank)] == ["returned"] * 2


def test_a_peer_that_is_killed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes nothing on the board: the library of the device tells."""
    monkeypatch.setattr(failures, "PROMISE_S", 20.0)  # on a busy machine; `make device-check` holds it to 2 s
    answer = failures.rank_is_killed(Task("sim", is_planted=False))
    assert answer.state == "done", answer


# --- what a step costs -----------------------------------------------------------------------------------------------
def followed_step(rank: int, records: bool) -> dict[str, dict[str, int]]:
    """Returns what the device and the host did in one call that followed its plan."""
    mesh = plain_mesh()
    params, step = (
        sharded_layers(mesh),
        hp.sharded(hp.value_and_grad(chain), mesh, policy=hp.Policy(pack_below_bytes=0)),
    )
    for number in range(3):
        step(params, batch(mesh, number))
    return counted(lambda: step(params, batch(mesh, 3)) if not records else recorded(step, params, batch(mesh, 3)))


def recorded(step: Any, params: Any, x: torch.Tensor) -> None:
    with hp.record_timeline():
        step(params, x)


def counted(fn: Callable[[], Any]) -> dict[str, dict[str, int]]:
    """Returns what was counted during a call."""
    sim = device()
    kinds = {"launches": sim.launches, "syncs": sim.syncs, "events": sim.events}
    before = {kind: get() for kind, get in kinds.items()}
    fn()
    after = {kind: get() for kind, get in kinds.items()}
    return {k: {n: c - before[k].get(n, 0) for n, c in after[k].items() if c != before[k].get(n, 0)} for k in kinds}


def test_a_step_that_follows_its_plan_never_waits_on_the_host() -> None:
    for each in observe(followed_step, False):
        assert each.result["syncs"] == {}


def test_a_timeline_does_not_wait_at_every_launch() -> None:
    for each in observe(followed_step, True):
        num_launches = sum(each.result["launches"].get(name, 0) for name in ("all_gather", "reduce_scatter"))
        assert sum(each.result["syncs"].values()) < num_launches, each.result["syncs"]


def test_events_are_recorded_where_somebody_waits_for_them() -> None:
    for each in observe(followed_step, False):
        events = each.result["events"]
        assert events["recorded"] <= events["waited for"], events


def buffers(rank: int) -> dict[str, dict[str, int]]:
    mesh = plain_mesh()
    torch.manual_seed(0)
    apply, params = hp.from_module(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH)))
    params, evaluated = hp.shard(params, mesh, P("shard")), apply.eval()
    step = hp.sharded(hp.value_and_grad(lambda p, x: evaluated(p, x).square().mean()), mesh)
    for number in range(3):
        step(params, batch(mesh, number))
    x = batch(mesh, 3)
    return counted(lambda: step(params, x))


def test_buffers_of_a_module_are_copied_to_the_device_once() -> None:
    for each in observe(buffers):
        assert "copy to device" not in each.result["launches"], each.result["launches"]
