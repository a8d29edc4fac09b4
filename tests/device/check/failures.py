"""Rows vi and vi.2: a rank raises, and a rank is killed."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import hpfunc as hp
from hpfunc import backends
from tests.device.cases import batch, chain, sharded_layers
from tests.device.harness import observe, on_host
from tests.helpers.ranks import RankError, mesh_of, outcome

from .found import Answer, Task, Wrong
from .programs import farthest_rank, group_of

PROMISE_S = 2.0
NEAR = 1e-5  # float32 of two kinds of kernels
TIMEOUT_S = 12.0  # of the groups: what is only noticed by it is noticed far too late
FAILS_AT = 4


def rank_raises(task: Task) -> Answer:
    """Rank 0 must raise, too, within the time that is promised; the steps after that must be right on both ranks."""
    group = group_of(task, 2)
    task.note("rank 1 raises")
    try:
        first, second = (each.result for each in observe(fails, task.is_planted, world=2, framework=task.framework))
    except RankError as error:
        raise Wrong(f"rank 1 raises, and then: {str(error).splitlines()[-1]}") from None
    (told, told_at, after), (raised, raised_at, its_after) = first, second
    if "a bad batch" not in raised or "a bad batch" not in told:
        raise Wrong(f"rank 1 raised {raised.splitlines()[0]!r}, and rank 0 says {told.splitlines()[0]!r}")
    far = farthest_rank([after, its_after], on_host(steps_that_work, world=2))
    if far > (0 if task.device == "sim" else NEAR):
        raise Wrong(f"the steps after the failure are {far:.1e} off")
    text = f"{group}: rank 0 raised {told_at - raised_at:.1f} s after rank 1"
    if told_at - raised_at > PROMISE_S:
        raise Wrong(f"{text}, and not within {PROMISE_S:g} s")
    return Answer("done", f"{text}; the next steps are right", {"after_s": told_at - raised_at})


def rank_is_killed(task: Task) -> Answer:
    """Rank 0 must raise, within the time that is promised for other failures."""
    group = group_of(task, 2)
    task.note("rank 1 is killed")
    with tempfile.TemporaryDirectory(prefix="hpfunc-killed-") as folder:
        died = ""
        try:
            observe(is_killed, folder, task.is_planted, world=2, framework=task.framework)
        except RankError as error:  # of rank 1, and of rank 0 if torch has ended it
            died = " and ".join(line for line in str(error).splitlines() if line.startswith(("--- ", "exit code")))
        killed, told = (Path(folder, name) for name in ("killed", "told"))
        if not killed.exists():
            raise Wrong(f"{group}: rank 1 came to no fourth step")
        if not told.exists():
            raise Wrong(f"{group}: rank 0 raised nothing in Python: {died}")
        when, _, what = told.read_text().partition(" ")
        after_s = float(when) - float(killed.read_text())
    if what.startswith("returned"):
        losses = what.removeprefix("returned, ")
        raise Wrong(f"{group}: rank 0 went on and raised nothing; its losses from then on are {losses}")
    if after_s > PROMISE_S:
        raise Wrong(f"{group}: rank 0 raised {after_s:.1f} s after rank 1 ended, and not within {PROMISE_S:g} s")
    return Answer("done", f"{group}: rank 0 raised {after_s:.1f} s after rank 1 ended", {"after_s": after_s})


# --- in the ranks ----------------------------------------------------------------------------------------------------
def fails(rank: int, is_deaf: bool) -> tuple[str, float, list[torch.Tensor]]:
    """Rank 1 raises in a step that rank 0 has enqueued. Returns what each raised, when, and what it computes then."""
    step, params, mesh = _step(1)
    told = outcome(_train, step, params, mesh, is_deaf, [])
    when = time.time()
    return told, when, [step(params, batch(mesh, number))[0].cpu() for number in range(3)]


def is_killed(rank: int, folder: str, is_deaf: bool) -> None:
    """Rank 1 ends without a word. Rank 0 writes when it raised, and what."""
    step, params, mesh = _step(None if rank == 0 else folder)
    losses: list[float] = []
    told = outcome(_train, step, params, mesh, is_deaf, losses)
    Path(folder, "told").write_text(f"{time.time()} {told}, {losses[FAILS_AT - 1 :]}")


def steps_that_work(rank: int) -> list[torch.Tensor]:
    """Returns losses of steps in which nothing fails."""
    step, params, mesh = _step(None)
    return [step(params, batch(mesh, number))[0].cpu() for number in range(3)]


def _step(fails: int | str | None) -> tuple[Any, Any, hp.Mesh]:
    """Returns a step in which a rank of this number raises, or, if a folder is given, this process is killed."""
    mesh, count = mesh_of((2,), ("shard",), None, TIMEOUT_S), [0]

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        if count[0] == FAILS_AT and fails == mesh.rank:
            raise ValueError("a bad batch")
        if count[0] == FAILS_AT and isinstance(fails, str):
            Path(fails, "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        return chain(params, x)

    step = hp.sharded(hp.value_and_grad(loss), mesh, policy=hp.Policy(pack_below_bytes=0))
    return step, sharded_layers(mesh), mesh


def _train(step: Any, params: Any, mesh: hp.Mesh, is_deaf: bool, losses: list[float]) -> None:
    if is_deaf:  # nobody looks at the board while the device waits
        backends.get("torch").streams(mesh.device).watch.add = lambda *_: None  # type: ignore[union-attr, method-assign]
    for number in range(FAILS_AT + 2):
        losses.append(step(params, batch(mesh, number))[0].item())  # the host looks at its losses
