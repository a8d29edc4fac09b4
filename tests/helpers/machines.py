"""Two machines on one: network namespaces with host names of their own, joined by a cable."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUM_MACHINES = 2


@dataclass(frozen=True, slots=True)
class Machines:
    """Machines ``host0`` and ``host1``, made by `machines`.

    Attributes:
        names: of their namespaces.
        folder: where commands run; what stands in its folder ``bin`` is found by them.
    """

    names: tuple[str, ...]
    folder: Path

    def enter(self, index: int) -> list[str]:
        """Returns the command that runs the one after it on a machine."""
        named = f'hostname host{index} && exec ip netns exec {self.names[index]} "$@"'
        return ["unshare", "--uts", "bash", "-c", named, "bash"]

    def environment(self, **variables: str) -> dict[str, str]:
        """Returns the environment of a login: nothing of a launcher, this Python first."""
        path = f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
        ours = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        return kept | ours | variables

    def install(self, name: str, script: str) -> None:
        """Makes a program that commands find."""
        file = self.folder / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(script)
        file.chmod(0o755)

    def run_on_each(self, commands: list[str], deadline_s: float = 120.0) -> list[str]:
        """Runs a shell command on each machine at the same time, and returns what they print; all end well."""
        scripts = [[*self.enter(index), "bash", "-c", command] for index, command in enumerate(commands)]
        return run(scripts, self.environment(), self.folder, deadline_s)


def run(commands: list[list[str]], env: dict[str, str], folder: Path, deadline_s: float = 120.0) -> list[str]:
    """Runs commands at the same time, and returns what they print; all end well."""
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen(command, cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        for command in commands
    ]
    try:
        ended = [process.communicate(timeout=deadline_s) for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()
    codes = [process.returncode for process in started]
    assert codes == [0] * len(codes), "\n".join(text for pair in ended for text in pair)
    return [output for output, _ in ended]


@contextmanager
def machines(folder: Path) -> Iterator[Machines]:
    """Yields two machines; skips the test where they cannot be made."""
    lacking = [name for name in ("ip", "unshare", "hostname") if shutil.which(name) is None]
    if lacking or os.geteuid() != 0:
        reason = f"{', '.join(lacking)} not installed" if lacking else "only root may make network namespaces"
        pytest.skip(f"two machines cannot be played: {reason}")
    names = tuple(f"hptest{os.getpid()}n{index}" for index in range(NUM_MACHINES))
    made = subprocess.run(["ip", "netns", "add", names[0]], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"two machines cannot be played: {made.stderr.strip()}")
    try:
        for command in _cabling(names):
            subprocess.run(["ip", *command.split()], check=True)
        for name in names:  # what `ip netns exec` shows as /etc/hosts
            hosts = Path("/etc/netns") / name / "hosts"
            hosts.parent.mkdir(parents=True)
            hosts.write_text("127.0.0.1 localhost\n10.77.1.1 host0\n10.77.1.2 host1\n")
        yield Machines(names, folder)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def _cabling(names: tuple[str, ...]) -> list[str]:
    first, second = names
    cable = [f"netns add {second}", f"-n {first} link add eth0 type veth peer name eth0 netns {second}"]
    addresses = [f"-n {name} addr add 10.77.1.{place}/24 dev eth0" for place, name in enumerate(names, start=1)]
    return [*cable, *addresses, *(f"-n {name} link set {device} up" for name in names for device in ("lo", "eth0"))]
