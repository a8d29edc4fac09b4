"""The commands of `docs/howto/launch.md` for several machines, on two machines that network namespaces play.

Only numbers are changed: of processes on a machine, which are eight on the page.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.helpers.frameworks import needs_mindspore
from tests.helpers.machines import Machines, machines, run

pytestmark = pytest.mark.processes
PAGE = (ROOT / "docs/howto/launch.md").read_text()
TRAIN = """
import socket
import hpfunc as hp
from hpfunc.backends import default

mesh = hp.make_mesh((-1,), ("shard",), timeout_s=60)
if default().name == "mindspore":
    from mindspore import mint as ops
else:
    import torch as ops

params = hp.shard({"w": ops.ones((6, 3))}, mesh, hp.P("shard"))
loss = hp.unit(lambda p, x: (p["w"] * x).sum())
step = hp.sharded(lambda params, x: hp.optim.apply_updates(params, hp.grad(loss)(params, x)), mesh)
for _ in range(3):
    params = step(params, float(mesh.rank))
    hp.loop.barrier(mesh)
total = float(hp.unshard(params)["w"].sum())
print(f"rank {mesh.rank} of {mesh.size} on {socket.gethostname()}: {total}", flush=True)
"""
WANTED = 18 * (1 + 3 * 0.5)  # the mean of both ranks' gradients, three times
RANKS = re.compile(r"rank (\d) of 2 on (host\d): (\d+\.\d+)")  # ranks may write into one line


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Machines]:
    (tmp_path / "train.py").write_text(TRAIN)
    with machines(tmp_path) as made:
        yield made


def blocks(title: str) -> list[str]:
    """Returns the shell blocks of a section, for one process on each machine."""
    section = re.split(r"^#+ ", PAGE, flags=re.MULTILINE)
    (found,) = (part for part in section if part.startswith(f"{title}\n"))
    commands = re.findall(r"^```bash\n(.*?)^```$", found, flags=re.MULTILINE | re.DOTALL)
    assert commands, f"the section {title!r} has no commands"
    return [_small(command) for command in commands]


def _small(command: str) -> str:
    """Returns a command for one process on a machine in the place of eight."""
    smaller = re.sub(r"(--nproc-per-node|--ntasks-per-node|--local_worker_num|--gpus-per-node) 8\b", r"\1 1", command)
    return re.sub(r"--worker_num 16\b", "--worker_num 2", smaller)


def assert_trained(outputs: list[str]) -> None:
    found = RANKS.findall("".join(outputs))
    assert sorted(rank for rank, _, _ in found) == ["0", "1"], outputs
    assert sorted(host for _, host, _ in found) == ["host0", "host1"], outputs
    assert {float(total) for _, _, total in found} == {WANTED}, outputs


def test_the_same_command_on_each_machine(two: Machines) -> None:
    (command,) = blocks("Several machines")
    assert_trained(two.run_on_each([command, command]))


SRUN = """#!/bin/bash
# Plays `srun` for a job of one task on each of two machines.
export SLURM_NTASKS=2 SLURM_NTASKS_PER_NODE=1 SLURM_STEP_NUM_TASKS=2
SLURM_PROCID=0 SLURM_NODEID=0 SLURM_LOCALID=0 {first} "$@" & first=$!
SLURM_PROCID=1 SLURM_NODEID=1 SLURM_LOCALID=0 {second} "$@" & second=$!
wait $first && wait $second
"""


@pytest.mark.parametrize("way", [0, 1], ids=["torchrun on each machine", "a task for each process"])
def test_a_job_of_slurm(two: Machines, way: int) -> None:
    both = blocks("Slurm")
    assert len(both) == 2
    two.install("srun", SRUN.format(first=shlex.join(two.enter(0)), second=shlex.join(two.enter(1))))
    two.install("scontrol", '#!/bin/bash\n[ "$*" = "show hostnames host[0-1]" ] && printf "host0\\nhost1\\n"\n')
    (two.folder / "job.sh").write_text(both[way])
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "host[0-1]", "SLURM_NNODES": "2"}
    assert_trained(run([["bash", "job.sh"]], two.environment(**job), two.folder))


@needs_mindspore
def test_msrun_on_each_machine(two: Machines) -> None:
    (command,) = blocks("MindSpore")
    first, second = command.splitlines()
    two.run_on_each([first, second])
    assert_trained([file.read_text() for file in (two.folder / "msrun_log").glob("worker_*.log")])


@pytest.mark.parametrize(
    "outputs",
    [
        ["rank 0 of 1 on host0: 18.0", "rank 0 of 1 on host1: 18.0"],  # two jobs
        ["rank 0 of 2 on host0: 45.0", "rank 1 of 2 on host0: 45.0"],  # one machine
        ["rank 0 of 2 on host0: 18.0", "rank 1 of 2 on host1: 72.0"],  # each with its own gradients
    ],
)
def test_another_outcome_would_fail(outputs: list[str]) -> None:
    with pytest.raises(AssertionError):
        assert_trained(outputs)
