"""`survey`: the `Facts` of this process."""

from __future__ import annotations

import importlib.util
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from ... import backends
from . import machine
from .facts import Facts, Loading
from .software import TESTED

T = TypeVar("T")
_CHILD_S = 120
_TRY = """
import sys
from hpfunc import backends
try:
    backends.get(sys.argv[1])
except Exception as error:
    print(f"{type(error.__cause__ or error).__name__}: {error.__cause__ or error}")
    sys.exit(3)
"""


def survey(framework: str | None = None, *, tries_all: bool = False) -> Facts:
    """Returns what there is in this process and on its machine. Never raises.

    Args:
        framework: the backend in use; default: that which `make_mesh` would use. It is loaded.
        tries_all: whether to try to load the other backends, too, each in a process of its own.
    """
    used = framework or backends.default_name()
    loadings = {name: _loading(name, used, tries_all=tries_all) for name in backends.names()}
    versions = {name: found for name in ("hpfunc", *TESTED) if (found := _version(name)) is not None}
    gpus = _attempt(machine.gpus, None)
    facts = Facts(
        env=dict(os.environ),
        versions=versions | {"Python": platform.python_version()},
        where=str(Path(backends.__file__).parents[1]),
        backends=loadings,
        used=used,
        gpus=None if gpus is None else gpus[0],
        npus=_attempt(machine.npus, ()),
        driver_cuda=gpus[1] or None if gpus else None,
        machine=platform.machine(),
        num_cores=_attempt(machine.num_cores, os.cpu_count() or 1),
        shm_bytes=_attempt(machine.shared_memory, None),
        open_files=_attempt(lambda: machine.limit("RLIMIT_NOFILE"), None),
        locked_bytes=_attempt(lambda: machine.limit("RLIMIT_MEMLOCK"), None),
        stack_bytes=_attempt(lambda: machine.limit("RLIMIT_STACK"), None),
        memory_bytes=_attempt(machine.memory, None),
        interfaces=_attempt(machine.interfaces, None),
        infiniband=_attempt(machine.infiniband, ()),
        host_name=_attempt(socket.gethostname, ""),
        addresses=_attempt(lambda: machine.addresses(socket.gethostname()), ()),
        time_s=time.time(),
        tick_s=time.get_clock_info("perf_counter").resolution,
    )
    return _with_framework(facts)


def _attempt(ask: Callable[[], T], otherwise: T) -> T:
    try:
        return ask()
    except Exception:  # a strange machine must not keep the doctor from looking at the rest
        return otherwise


def _version(name: str) -> str | None:
    return _attempt(lambda: metadata.version(name), None)


def _with_framework(facts: Facts) -> Facts:
    if facts.used not in facts.backends or facts.backends[facts.used].state != "loads":
        return facts
    found = _attempt(lambda: backends.installed(facts.used), None)
    if found is None:
        return facts
    name = "mindspore" if facts.used == "mindspore" else "torch"
    return replace(
        facts,
        versions={**facts.versions, name: found.version},
        accelerator=found.accelerator,
        num_threads=found.num_threads,
        nccl=found.nccl,
    )


def _loading(name: str, used: str, *, tries_all: bool) -> Loading:
    if not is_installed(name):
        return Loading("absent")
    if name == used:
        return _load(name)
    return _try_apart(name) if tries_all else Loading("untried")


def is_installed(name: str) -> bool:
    """Returns whether there is a package of this name. A folder without code, which Python would import, is none."""
    try:
        found = importlib.util.find_spec(name)
    except Exception:  # finders of others may raise anything
        return False
    return found is not None and found.origin is not None


def _load(name: str) -> Loading:
    try:
        backends.get(name)
    except (Exception, SystemExit) as error:  # a broken installation may raise anything
        cause = error.__cause__ or error
        return Loading("fails", _first_line(f"{type(cause).__name__}: {cause}"))
    return Loading("loads")


def _try_apart(name: str) -> Loading:
    command = [sys.executable, "-c", _TRY, name]
    try:
        done = subprocess.run(command, timeout=_CHILD_S, capture_output=True, text=True, errors="replace", check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return Loading("fails", _first_line(f"{type(error).__name__}: {error}"))
    if done.returncode == 0:
        return Loading("loads")
    if done.returncode < 0:
        name = _attempt(lambda: signal.Signals(-done.returncode).name, f"signal {-done.returncode}")
        return Loading("fails", f"its import ends with {name}")
    said = done.stdout.strip() or done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
    return Loading("fails", _first_line(said))


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[0][:200]
