"""Pools of real processes that talk through gloo, for tests.

A pool of n ranks is started once per test session, on its first use, and kept; a call costs a few milliseconds.
How to use it:

    from tests.helpers.ranks import mesh_of

    def local_part(rank, x):                        # at module level; runs on every rank
        mesh = mesh_of((2, 2), ("replicate", "shard"))
        return hp.shard(x, mesh, hp.P("shard")).local

    def test_part(pool):                            # the session fixture of conftest.py, or `tests.helpers.ranks.pool`
        parts = pool(4).run(local_part, torch.arange(4.0))
        assert torch.equal(torch.cat(parts[:2]), torch.arange(4.0))

`run(fn, *args)` calls ``fn(rank, *args)`` on all ranks and returns their results in rank order. Functions travel by
name, arguments and results by value (pickle). What a rank raises comes out as `RankError` with the tracebacks of
all ranks; a test of errors catches them in the rank (`outcome`). After an error, or when the deadline has passed,
the pool is started anew on its next use, so that no state of a failed test reaches another one. Warnings are errors
in the ranks too. `mesh_of` keeps its meshes, and hpfunc the process groups, for as long as the pool lives: making
groups for each example is slow, and races.

Ranks are forked from a server process that has imported torch and computed nothing: no thread of the test process
can be inherited half. Ranks of ``pool(4, "mindspore")`` import MindSpore themselves: torch's must not have it. Ranks of
``pool(4, "simulated")`` and of ``pool(4, "cuda")`` have an accelerator, see `tests.device`. The latter are not forked,
but started anew: whoever imported torch may have asked its driver for devices, and a fork cannot use this driver.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

DEADLINE_S = 60.0
START_S = 300.0  # to import MindSpore takes 5 s on an idle machine, and beside other work far longer
GROUP_TIMEOUT_S = 20.0


class RankError(AssertionError):
    """Ranks of a pool failed, hung or died. The text has what each of them said last."""


# Ranks inherit these modules. torch would import the last two on the first use of torch.func, in seconds.
PRELOAD = [
    "hypothesis",
    "hpfunc",
    "hpfunc.backends.torch.backend",
    "torch._dynamo",
    "torch._decomp.decompositions_for_jvp",
]


def pool(size: int, framework: str = "torch") -> Pool:
    """Returns the session's pool of this many ranks. It starts on its first `run`."""
    return _pool(size, framework)


class Pool:
    """Processes of one gloo world. Get one from `pool`."""

    def __init__(self, size: int, framework: str = "torch") -> None:
        self.size, self.framework = size, framework
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def run(self, fn: Callable[..., Any], *args: Any, deadline_s: float = DEADLINE_S) -> list[Any]:
        """Returns ``fn(rank, *args)`` of every rank.

        Raises:
            RankError: a rank raised, died, or did not answer within the deadline.
        """
        call = pickle.dumps((fn, args))
        if not self._processes:
            self._start()
            self._answers("the start", START_S)
        for pipe in self._pipes:
            pipe.send_bytes(call)
        return self._answers(fn.__name__, deadline_s)

    def _answers(self, name: str, deadline_s: float) -> list[Any]:
        answers = self._collect(time.monotonic() + deadline_s)
        bad = [f"--- rank {rank} {how}\n{what}" for rank, (how, what) in enumerate(answers) if how != "returned"]
        if bad:
            self.stop()
            raise RankError(f"{name} on {self.size} ranks\n" + "\n".join(bad))
        return [result for _, result in answers]

    def stop(self) -> None:
        """Ends the processes; the next `run` starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._directory is not None:
            self._directory.cleanup()
        self._processes, self._pipes, self._directory = [], [], None

    def _start(self) -> None:
        context = _context() if self.framework != "cuda" else _fresh_context()
        self._directory = tempfile.TemporaryDirectory(prefix="hpfunc-ranks-")
        for rank in range(self.size):
            pipe, theirs = context.Pipe()
            args = rank, self.size, self.framework, self._directory.name, theirs
            process = context.Process(target=_serve, args=args, daemon=True, name=f"rank {rank}")
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(pipe)

    def _collect(self, deadline: float) -> list[tuple[str, Any]]:
        answers: list[tuple[str, Any] | None] = [None] * self.size
        open_pipes = dict(zip(self._pipes, range(self.size), strict=True))
        while open_pipes:
            ready = wait(list(open_pipes), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = open_pipes.pop(pipe)
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    self._processes[rank].join(5)
                    answers[rank] = "died", f"exit code {self._processes[rank].exitcode}"
        return [("hung", self._stacks(r)) if answer is None else answer for r, answer in enumerate(answers)]

    def _stacks(self, rank: int) -> str:
        assert self._directory is not None
        os.kill(self._processes[rank].pid, signal.SIGUSR1)
        file, end, found = Path(self._directory.name) / f"stacks-{rank}", time.monotonic() + 5.0, ""
        while time.monotonic() < end:
            time.sleep(0.1)
            before, found = found, file.read_text()
            if found and found == before:  # it is written
                break
        return found


_pools: dict[tuple[int, str], Pool] = {}


def _pool(size: int, framework: str) -> Pool:
    if (size, framework) not in _pools:
        _pools[size, framework] = Pool(size, framework)
    return _pools[size, framework]


def stop_all() -> None:
    """Ends every pool."""
    for each in _pools.values():
        each.stop()


@cache
def _context() -> Any:
    # The server, and so every rank, inherits these. One thread each, and no look-up of a host name by gloo.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    root = str(Path(__file__).parents[2])
    if root not in sys.path:
        sys.path.insert(0, root)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def _fresh_context() -> Any:
    _context()  # sets the environment
    return multiprocessing.get_context("spawn")


# --- in the ranks ---------------------------------------------------------------------------------------------------
def _serve(rank: int, size: int, framework: str, directory: str, pipe: Connection) -> None:
    import torch

    backends = "gloo"
    if framework in ("simulated", "cuda"):
        backends = importlib.import_module("tests.device.harness").start(framework, rank, size)
    elif framework == "torch":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # these are ranks on CPUs, also where there is a GPU
    else:
        # Its log: errors only. What it writes about a graph that fails would go to the working directory.
        os.environ.update({"HPFUNC_BACKEND": framework, "GLOG_v": "3", "MS_OM_PATH": directory})
        importlib.import_module("hpfunc.backends").get(framework)  # before the first operator: it settles the threads
    stacks = (Path(directory) / f"stacks-{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    if framework == "cuda":  # torch warns of much there, such as that its mode for waits of the host is a prototype
        warnings.simplefilter("default")
        warnings.filterwarnings("error", "hpfunc")
    for category in (DeprecationWarning, FutureWarning):  # torch's own use, on the first jvp: before 2.14, and since
        warnings.filterwarnings("ignore", ".*torch.jit.script", category)
    # True of many models that are drawn at random, and small.
    warnings.filterwarnings("ignore", "hpfunc.sharded: (nothing can be hidden|the whole model is one unit)")
    # True of examples that are drawn, and of what shows that gradients of parts are right.
    warnings.filterwarnings("ignore", "hpfunc.sharded: the step of .* is made anew")
    warnings.filterwarnings("ignore", "hpfunc.value_and_grad: the loss uses `.local`")
    _join(rank, size, directory, backends)
    gc.freeze()  # a collection looks at what tests make, not each time at the 300,000 objects of the modules
    pipe.send_bytes(_dump(("returned", None)))  # it has started
    while True:
        try:
            fn, args = pickle.loads(pipe.recv_bytes())
            answer = "returned", fn(rank, *args)
        except EOFError:
            return
        except BaseException:
            answer = "raised", traceback.format_exc()
        pipe.send_bytes(_dump(answer))


def _join(rank: int, size: int, directory: str, backends: str = "gloo") -> None:
    from datetime import timedelta

    import torch.distributed as dist

    store = dist.FileStore(str(Path(directory) / "store"), size)
    timeout = timedelta(seconds=START_S)  # they start at different times; meshes have a timeout of their own
    dist.init_process_group(backends, store=store, rank=rank, world_size=size, timeout=timeout)


def _dump(answer: tuple[str, Any]) -> bytes:
    # Plain pickle: multiprocessing's own would share the memory of tensors instead of sending their values.
    try:
        return pickle.dumps(answer)
    except Exception:
        return pickle.dumps(("raised", f"the result cannot be pickled\n{traceback.format_exc()}"))


@cache
def mesh_of(
    shape: tuple[int, ...],
    names: tuple[str, ...],
    data_axes: tuple[str, ...] | None = None,
    timeout_s: float = GROUP_TIMEOUT_S,
) -> Any:
    """Returns the mesh of these, inside a rank; the same object each time."""
    import hpfunc as hp

    return hp.make_mesh(shape, names, data_axes, timeout_s=timeout_s)


def mesh_of_one() -> Any:
    """Returns the mesh of a process that is alone, such as that of the tests themselves; another object each time."""
    import hpfunc as hp

    return hp.make_mesh((1,), ("shard",))


def outcome(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Returns ``"SpecError: text"`` for what `fn` raises, ``"returned"`` if it raises nothing."""
    try:
        fn(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "returned"
