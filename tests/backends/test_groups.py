"""Groups of hpfunc beside groups of the caller, and in worlds that end."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hpfunc as hp
from hpfunc.backends.torch import groups
from tests.helpers.ranks import Pool

# In a process of its own: torch's table of groups stays as it is made here.
DESTROYED = """
import torch.distributed as dist
from hpfunc.backends import get

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
backend, mine = get("torch"), [dist.new_group([0], use_local_synchronization=True) for _ in range(2)]
groups = [backend.group((0,), "control", "cpu", 30.0)]
for group in mine:
    dist.destroy_process_group(group)
groups += [backend.group((0,), purpose, "cpu", 30.0) for purpose in ("user", "gather", "reduce_scatter")]
names = list(dist.distributed_c10d._world.pg_names.values())
assert len({id(group) for group in groups}) == 4 and len(set(names)) == len(names), names
print([backend.exchange(group, [7], "seven", lambda *_: None) for group in groups])
dist.destroy_process_group()
"""

TWO_WORLDS = """
import os, sys, torch, torch.distributed as dist, hpfunc as hp

rank, folder = int(sys.argv[1]), sys.argv[2]
for number in range(2):
    store = dist.FileStore(f"{folder}/store{number}", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = hp.make_mesh((2,), ("shard",))
    if number == 0 and rank == 0:  # this rank has more groups behind it than the other one
        dist.new_group([0], use_local_synchronization=True)
    weights = hp.shard({"w": torch.arange(4.0)}, mesh, hp.P("shard"))
    print(hp.unshard(weights, ("shard",))["w"].tolist())
    dist.destroy_process_group()

# With both worlds ended gloo has a thread that may outlive the process's end, and then aborts it: "terminate called
# without an active exception", in 2 of some 200 runs on a loaded machine. So this program ends without destructors.
sys.stdout.flush()
os._exit(0)
"""


def run_ranks(program: str, *arguments: str, world: int = 1) -> list[str]:
    """Runs a program in new processes, and returns what each has printed."""
    root = Path(__file__).parents[2]
    commands = [[sys.executable, "-W", "error", "-c", program, str(rank), *arguments] for rank in range(world)]
    running = [
        subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    done = [each.communicate(timeout=200) for each in running]
    assert [each.returncode for each in running] == [0] * world, "\n".join(error for _, error in done)
    return [out for out, _ in done]


@pytest.mark.processes
def test_a_caller_may_destroy_a_group_of_the_same_ranks() -> None:
    """torch names a group by its ranks and the number of groups, so the next one had the name of one that lives."""
    assert run_ranks(DESTROYED) == [f"{[[[7]]] * 4}\n"]


@pytest.mark.processes
def test_a_caller_may_end_the_world_and_begin_another_one(tmp_path: Path) -> None:
    assert run_ranks(TWO_WORLDS, str(tmp_path), world=2) == [f"{[0.0, 1.0, 2.0, 3.0]}\n" * 2] * 2


@pytest.mark.parametrize("ranks", list(permutations(range(3), 2)), ids=str)
def test_names_tell_groups_apart(ranks: tuple[int, int]) -> None:
    other = (ranks[0], 3)
    names = [
        groups.group_name(*arguments)
        for arguments in ((ranks, "gather", 0), (ranks[::-1], "gather", 0), (other, "gather", 0))
    ]
    names += [groups.group_name(ranks, "gather", 1), groups.group_name(ranks, "gather small", 0)]
    assert len(set(names)) == len(names)
    assert names[0] == groups.group_name(list(ranks), "gather", 0)
    assert groups.group_name((1, 23), "gather", 0) != groups.group_name((12, 3), "gather", 0)


class Library:
    """Stands for a group, and for its library: it notes what is called, with `_group_start` as NCCL's has it or not."""

    def __init__(self, calls: list[str], name: str, *, aborts_together: bool) -> None:
        self.abort = partial(calls.append, f"abort {name}")
        if aborts_together:
            self._group_start, self._group_end = (partial(calls.append, text) for text in ("start", "end"))


@pytest.mark.parametrize("aborts_together", [True, False])
def test_communicators_of_nccl_are_aborted_together(monkeypatch: pytest.MonkeyPatch, aborts_together: bool) -> None:
    calls: list[str] = []
    libraries = [Library(calls, "gloo", aborts_together=False)]
    libraries += [Library(calls, name, aborts_together=aborts_together) for name in ("a", "b")]
    monkeypatch.setattr(groups.private, "libraries_of", lambda group: [group])
    mine = groups.Groups()
    mine._made, mine._world = dict(enumerate(libraries)), dist.group.WORLD  # type: ignore[assignment]
    mine.abort()
    aborts = ["abort gloo", "abort a", "abort b"]
    assert calls == (["start", *aborts, "end"] if aborts_together else aborts)
    assert not mine._made


# --- ranks with unequal numbers of groups ----------------------------------------------------------------------------
def beside_groups_of_some(rank: int, of_caller: list[list[int]]) -> list[Any]:
    """The caller has groups that only some ranks are in; then meshes over other parts of the world are used."""
    theirs = [dist.new_group(ranks) for ranks in of_caller]
    found: list[Any] = []
    for ranks in ([0, 1, 2], [1, 2], [0, 2], [2, 0]):
        if rank not in ranks:
            continue
        mesh = hp.Mesh(("shard",), (len(ranks),), ("shard",), tuple(ranks), rank, timeout_s=20.0)
        x = torch.full((2,), 10.0**rank)
        found.append(hp.psum(x, "shard", mesh=mesh)[0].item())
        params = hp.shard({"w": torch.arange(6.0)}, mesh, hp.P("shard"))
        step = hp.sharded(hp.value_and_grad(lambda p, x: (hp.unit(lambda q, y: q["w"] * y)(p, x)).sum()), mesh)
        for _ in range(3):
            _, grads = step(params, torch.tensor(float(rank)))
        found.append(hp.unshard(grads, ("shard",))["w"][0].item())
    for group in theirs:
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return found


@pytest.mark.processes
@pytest.mark.parametrize("of_caller", [[[0, 1]], [[2, 1], [0], [0]], [[0, 1, 2], [1, 2], [1]]], ids=str)
def test_ranks_with_unequal_numbers_of_groups_find_each_other(pool: Any, of_caller: list[list[int]]) -> None:
    """torch names such groups by how many there are in a process: ranks that disagreed waited until the timeout."""
    running: Pool = pool(3)
    found = running.run(beside_groups_of_some, of_caller)
    assert [[each[0]] for each in found] == [[111.0]] * 3
    assert found[1][2] == found[2][2] == 110.0
    assert found[0][2] == found[2][4] == 101.0
