"""Kills processes in the middle of saves, and looks whether a checkpoint that was complete is lost.

    python -m tests.checkpoint.kills --kills 100

Two processes save one step after another, and get SIGKILL at a random time, one a little later than the other or not.
Each tells a file of every step that `save` has returned; none of these may be missing or damaged, except those that
`keep` removed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import hpfunc as hp
from tests.helpers import ranks

NUM_RANKS = 2
KEEP = 2
SIZE = 200_000
ACTIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def save_for_ever(rank: int, folder: str, path: str, first: int, asynchronous: bool) -> None:
    """Saves steps until it is killed."""
    torch.set_num_threads(1)
    ranks._join(rank, NUM_RANKS, folder)
    mesh = hp.make_mesh((NUM_RANKS,), ("shard",))
    with (Path(folder) / f"told-{rank}").open("a", buffering=1) as told:
        for step in range(first, first + 100_000):
            tree = {"w": hp.shard(torch.full((SIZE,), float(step)), mesh, hp.P("shard")), "step": step}
            hp.checkpoint.save(path, tree, step=step, keep=KEEP, asynchronous=asynchronous).wait()
            told.write(f"{step}\n")


def kill_once(path: Path, first: int, draw: random.Random) -> int:
    """Starts processes that save, kills them, and returns the last step that they had told of.

    Raises:
        AssertionError: a complete checkpoint is lost.
    """
    context: Any = ranks._context()
    asynchronous = draw.random() < 0.5
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, str(path), first, asynchronous)
        processes = [context.Process(target=save_for_ever, args=(r, *arguments), daemon=True) for r in range(NUM_RANKS)]
        for process in processes:
            process.start()
        deadline = time.monotonic() + 60
        files = [Path(folder) / f"told-{rank}" for rank in range(NUM_RANKS)]
        while not all(file.exists() and file.stat().st_size for file in files):  # each has saved once
            assert time.monotonic() < deadline, "the processes do not save"
            assert all(process.is_alive() for process in processes)
            time.sleep(0.005)
        time.sleep(draw.uniform(0.0, 0.25))
        draw.shuffle(processes)
        for process in processes:
            process.kill()
            time.sleep(draw.choice([0.0, 0.02]))
        for process in processes:
            process.join()
        told = [file.read_text().split() for file in files]
    last = max((int(step) for steps in told for step in steps), default=first - 1)
    check(path, last)
    return last


def save_until(path: str, step: int, action: int) -> None:
    """Saves a step, and is killed before it opens, makes, renames or removes something for the `action`-th time."""
    mesh = hp.make_mesh((1,), ("shard",))
    tree = {"w": hp.shard(torch.full((SIZE,), float(step)), mesh, hp.P("shard")), "step": step}
    left = action

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in ACTIONS and (event != "open" or str(arguments[0]).startswith(path)):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    hp.checkpoint.save(path, tree, step=step, keep=KEEP)
    os._exit(0)


def kill_before(path: Path, step: int, action: int) -> bool:
    """Saves a step in a process that is killed before its n-th action on the disk. Returns whether it came so far.

    Raises:
        AssertionError: a complete checkpoint is lost.
    """
    before = newest(path)
    process: Any = ranks._context().Process(target=save_until, args=(str(path), step, action), daemon=True)
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
    check(path, step if process.exitcode == 0 else before)
    return process.exitcode != 0


def newest(path: Path) -> int:
    """Returns the latest step, -1 if there is none."""
    latest = hp.checkpoint.latest(path)
    return -1 if latest is None else latest


def check(path: Path, last: int) -> None:
    """Looks at every checkpoint of a folder.

    Raises:
        AssertionError: step `last` or a later one is not the latest, or one is not what was saved.
    """
    mesh = hp.make_mesh((1,), ("shard",))
    assert newest(path) >= last, f"step {last} was complete, the latest is {newest(path)}"
    steps = sorted(int(entry.name[5:]) for entry in path.glob("step-*") if entry.name[5:].isdigit())
    assert len(steps) >= min(KEEP, last + 1), steps
    like = {"w": hp.shard(torch.zeros(SIZE), mesh, hp.P("shard")), "step": 0}
    for step in steps:
        loaded = hp.checkpoint.load(path, like, step=step)
        assert loaded["step"] == step
        assert torch.equal(loaded["w"].local, torch.full((SIZE,), float(step)))


def main() -> None:
    """Kills as often as the command line says, and prints what was left."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    draw, last, unfinished = random.Random(arguments.seed), -1, 0
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        for _ in range(arguments.kills):
            last = max(kill_once(path, last + 1, draw), newest(path))
            unfinished += any("." in entry.name for entry in path.iterdir())
    print(f"{arguments.kills} kills, {last + 1} checkpoints, none lost; {unfinished} saves were cut in the middle")


if __name__ == "__main__":
    main()
