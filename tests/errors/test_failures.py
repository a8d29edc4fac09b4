"""A rank that fails or dies in the middle of a step: the others end in time and say why, and all can go on then."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hpfunc as hp
from tests.helpers import ranks
from tests.helpers.ranks import mesh_of, outcome
from tests.helpers.zoo import assert_same

NUM_RANKS = 3
TIMEOUT_S = 30.0
PROMPT_S = 10.0  # a failure is noticed at once, on a loaded machine within seconds; the timeout is far longer
FAULTY = 1
PLACES = ("start", "forward", "backward", "end")


class Step:
    """A step of three layers, which fails on one rank at a place when it is told to."""

    def __init__(self, rank: int, place: str) -> None:
        self.rank, self.place, self.is_armed = rank, place, False
        self.layer = hp.unit(lambda p, x: torch.tanh(x @ p["w"] + p["b"]))

    def fail(self, place: str) -> None:
        if self.is_armed and self.rank == FAULTY and self.place == place:
            raise KeyError(f"no such token, at {place}")

    def loss(self, params: Any, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(params):
            x = self.layer(layer, x)
            if i == 1:
                self.fail("forward")
                x.register_hook(lambda _: self.fail("backward"))
        return x.square().mean()

    def __call__(self, params: Any, x: torch.Tensor) -> Any:
        self.fail("start")
        loss, grads = hp.value_and_grad(self.loss)(params, x)
        self.fail("end")
        mean = hp.pmean(loss, "shard")
        self.fail("last")
        return mean, grads


def mesh() -> hp.Mesh:
    return mesh_of((NUM_RANKS,), ("shard",), None, TIMEOUT_S)


def weights() -> Any:
    random = torch.Generator().manual_seed(0)
    return [{"w": torch.randn(4, 4, generator=random), "b": torch.randn(4, generator=random)} for _ in range(3)]


def arrays_of(tree: Any) -> list[hp.ShardedArray]:
    return [layer[name] for layer in tree for name in sorted(layer)]


def failing(rank: int, kind: str, place: str) -> Any:
    whole = weights()
    params, x = hp.shard(whole, mesh(), hp.P("shard")), torch.full((2, 4), float(rank))
    step_fn = Step(rank, place)

    def eagerly(*args: Any) -> Any:
        with hp.use_mesh(mesh()):
            return step_fn(*args)

    step: Any = eagerly if kind == "eager" else hp.sharded(step_fn, mesh())
    reference = hp.unshard(eagerly(params, x)[1])
    for _ in range(2 if kind == "planned" else 0):
        step(params, x)
    before = [a.local.clone() for a in arrays_of(params)]
    step_fn.is_armed = True
    start = time.monotonic()
    text = outcome(step, params, x)
    elapsed_s = time.monotonic() - start
    step_fn.is_armed = False
    assert_same([a.local for a in arrays_of(params)], before)  # nothing was donated, nothing is changed
    steps = [step(params, x) for _ in range(3)]  # at once
    after = [float(loss) for loss, _ in steps]
    for _, grads in steps:
        assert_same(hp.unshard(grads), reference)
    assert kind == "eager" or step.followed_plan
    return text, elapsed_s, after


# What is raised between two calls of hpfunc outside of a `sharded` step is no business of hpfunc.
@pytest.mark.parametrize(
    ("kind", "place"),
    [(kind, place) for kind in ("recording", "planned") for place in PLACES]
    + [("eager", "forward"), ("eager", "backward"), ("recording", "last")],
)
def test_an_exception_on_one_rank_ends_the_step_on_all(pool: Any, kind: str, place: str) -> None:
    results = pool(NUM_RANKS).run(failing, kind, place)
    assert results[FAULTY][0] == f"KeyError: 'no such token, at {place}'"
    for rank, (text, elapsed_s, after) in enumerate(results):
        assert elapsed_s < PROMPT_S  # a promise: nobody waits for the timeout
        assert after == results[0][2]
        if rank != FAULTY:
            assert text.startswith(("PeerError", "AgreementError")), text
            assert f"rank {FAULTY}: KeyError: 'no such token, at {place}'" in text, text
            assert "waited for" in text or "refuses to go on" in text, text


def failing_after_all_communication(rank: int) -> Any:
    """On one rank the planned step fails at its very end, when the others need nothing of it any more."""
    params, x = hp.shard(weights(), mesh(), hp.P("shard")), torch.full((2, 4), float(rank))
    step_fn = Step(rank, "last")
    step = hp.sharded(step_fn, mesh())
    step(params, x)
    want, _ = step(params, x)
    step_fn.is_armed = True
    text = outcome(step, params, x)
    step_fn.is_armed = False
    time.sleep(1.0 if rank == FAULTY else 0.0)  # so that the others look what keeps it
    errors, after = [], 0
    while after < 3 and len(errors) < 3:
        try:
            assert torch.equal(step(params, x)[0], want)
            after += 1
        except hp.PeerError as error:
            errors.append(str(error))
    return text, errors, after


def test_a_failure_that_nobody_waits_for_is_told_in_the_next_step(pool: Any) -> None:
    for rank, (text, errors, after) in enumerate(pool(NUM_RANKS).run(failing_after_all_communication)):
        assert text == ("KeyError: 'no such token, at last'" if rank == FAULTY else "returned")
        assert after == 3, errors
        if rank != FAULTY:
            assert f"rank {FAULTY}: KeyError: 'no such token, at last'" in errors[0]


def failing_many_times(rank: int) -> list[int]:
    """Returns how many threads the process has after each failure and the step that comes after it."""
    params, x = hp.shard(weights(), mesh(), hp.P("shard")), torch.full((2, 4), float(rank))
    step_fn = Step(rank, "forward")
    step, counts = hp.sharded(step_fn, mesh()), []
    for _ in range(6):
        step_fn.is_armed = True
        outcome(step, params, x)
        step_fn.is_armed = False
        step(params, x)
        counts.append(len(os.listdir("/proc/self/task")))
    return counts


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the threads of a process are counted in /proc")
def test_groups_that_were_given_up_leave_no_threads(pool: Any) -> None:
    for counts in pool(NUM_RANKS).run(failing_many_times):
        assert counts[-1] <= counts[1], counts  # of the first two, autograd's and torch's own may still begin


def failing_beside_a_group_of_the_caller(rank: int) -> list[str]:
    params, x = hp.shard(weights(), mesh(), hp.P("shard")), torch.full((2, 4), float(rank))
    step_fn = Step(rank, "forward")
    step = hp.sharded(step_fn, mesh())
    texts = [outcome(step, params, x)]
    mine = dist.new_group(list(range(NUM_RANKS)), use_local_synchronization=True)
    for _ in range(3):
        step_fn.is_armed = True
        outcome(step, params, x)
        step_fn.is_armed = False
        texts.append(outcome(step, params, x))
    dist.all_reduce(x, group=mine)  # it is not destroyed: torch would give the name of another one to the next group
    return [*texts, f"{float(x[0, 0]):g}"]


def test_new_groups_take_no_name_of_another_one(pool: Any) -> None:
    """torch makes names of ranks and of how many groups there are, so that none may be forgotten."""
    total = f"{sum(range(NUM_RANKS)):g}"
    assert pool(NUM_RANKS).run(failing_beside_a_group_of_the_caller) == [["returned"] * 4 + [total]] * NUM_RANKS


# --- a rank that dies -----------------------------------------------------------------------------------------------
KINDS = ("recording", "planned", "silent")


def dying(rank: int, kind: str, directory: str) -> None:
    """Rank 1 dies, or stops, in the middle of a step. The others write down for how long, and what they heard."""
    store = dist.FileStore(f"{directory}/store", NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=60))
    mesh = hp.make_mesh((NUM_RANKS,), ("shard",), timeout_s=4.0)
    params = hp.shard([torch.eye(4) for _ in range(3)], mesh, hp.P("shard"))
    layer = hp.unit(lambda w, x: x @ w)
    calls = [0]

    def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        for i, w in enumerate(params):
            x = layer(w, x)
            if rank == FAULTY and i == 1 and calls[0] == (3 if kind == "planned" else 1):
                os.kill(os.getpid(), signal.SIGKILL if kind != "silent" else signal.SIGSTOP)
        return x.sum()

    step = hp.sharded(hp.value_and_grad(loss_fn), mesh)
    start = 0.0
    try:
        for calls[0] in range(1, 5):
            start = time.monotonic()
            step(params, torch.ones(2, 4))
    except hp.PeerError as error:
        elapsed_s = time.monotonic() - start
        assert torch.equal(params[0].local, torch.eye(4)[2 * rank : 2 * rank + 2])
        (Path(directory) / f"said-{rank}").write_text(f"{elapsed_s}\n{error}")
    os._exit(0)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[int]]]:
    """Lets a rank die in each way, at the same time: all others but wait. Returns what they left, and exit codes."""
    started: dict[str, tuple[Path, list[Any]]] = {}
    for kind in KINDS:
        directory = tmp_path_factory.mktemp(kind)
        arguments = [(rank, kind, str(directory)) for rank in range(NUM_RANKS)]
        processes = [ranks._context().Process(target=dying, args=each, daemon=True) for each in arguments]
        started[kind] = directory, processes
        for process in processes:
            process.start()
    for _, processes in started.values():
        for process in (processes[0], processes[2], processes[1]):
            if process is processes[FAULTY]:
                process.kill()  # if it has but stopped
            process.join(120)
    return {kind: (directory, [process.exitcode for process in each]) for kind, (directory, each) in started.items()}


@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_dies_is_named_by_its_peers(ended: dict[str, tuple[Path, list[int]]], kind: str) -> None:
    directory, codes = ended[kind]
    assert codes == [0, -signal.SIGKILL, 0]
    for rank in (0, 2):
        elapsed_s, text = (directory / f"said-{rank}").read_text().split("\n", 1)
        assert (
            float(elapsed_s) < 30.0
        )  # a promise: the timeout of the mesh, 4 s, ends the wait, also on a loaded machine
        assert "rank 1: no answer" in text, text
        assert "hpfunc: " in text
        assert "waits for" in text, text
