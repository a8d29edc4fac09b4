"""A rank that fails or dies in the middle of a step: the others end in time and say why, and all can go on then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hpfunc as hp
from tests.ranks import mesh_of, outcome
from tests.zoo import assert_same

ROOT = Path(__file__).parents[2]
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

    step: Callable[..., Any] = eagerly if kind == "eager" else hp.sharded(step_fn, mesh())
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
    assert kind == "eager" or step.followed_plan  # type: ignore[attr-defined]
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
        assert elapsed_s < PROMPT_S
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


# --- a rank that dies -----------------------------------------------------------------------------------------------
SCRIPT = """
import os, signal, sys, time, warnings
from datetime import timedelta
import torch
import torch.distributed as dist
import hpfunc as hp

rank, kind, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
store = dist.FileStore(f"{directory}/store", 3)
dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=60))
mesh = hp.make_mesh((3,), ("shard",), timeout_s=4.0)
params = hp.shard([torch.eye(4) for _ in range(3)], mesh, hp.P("shard"))
layer = hp.unit(lambda w, x: x @ w)
calls = [0]

def loss_fn(params, x):
    for i, w in enumerate(params):
        x = layer(w, x)
        if rank == 1 and i == 1 and calls[0] == (3 if kind == "planned" else 1):
            os.kill(os.getpid(), signal.SIGKILL if kind != "silent" else signal.SIGSTOP)
    return x.sum()

def step_fn(params, x):
    calls[0] += 1
    return hp.value_and_grad(loss_fn)(params, x)

step = hp.sharded(step_fn, mesh)
start = time.monotonic()
try:
    for _ in range(4):
        start = time.monotonic()
        step(params, torch.ones(2, 4))
except hp.PeerError as error:
    elapsed_s = time.monotonic() - start
    assert torch.equal(torch.cat([w.local for w in params[:1]]), torch.eye(4)[2 * rank : 2 * rank + 2])
    with open(f"{directory}/said-{rank}", "w") as file:
        file.write(f"{elapsed_s}\\n{error}")
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("kind", ["recording", "planned", "silent"])
def test_a_rank_that_dies_is_named_by_its_peers(tmp_path: Path, kind: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen([sys.executable, str(script), str(rank), kind, str(tmp_path)], env=environment)
        for rank in range(3)
    ]
    try:
        for rank in (0, 2):
            assert started[rank].wait(120) == 0
    finally:
        for process in started:
            process.kill()
        codes = [process.wait() for process in started]
    assert codes[1] == -signal.SIGKILL
    for rank in (0, 2):
        elapsed_s, text = (tmp_path / f"said-{rank}").read_text().split("\n", 1)
        assert float(elapsed_s) < 30.0
        assert "rank 1: no answer" in text, text
        assert "hpfunc: " in text
        assert "waits for" in text, text
