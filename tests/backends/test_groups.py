"""Groups of hpfunc beside groups of the caller."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own: torch's table of groups stays as it is made here.
PROGRAM = """
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


@pytest.mark.processes
def test_a_caller_may_destroy_a_group_of_the_same_ranks() -> None:
    """torch names a group by its ranks and the number of groups, so the next one had the name of one that lives."""
    root = Path(__file__).parents[2]
    run = [sys.executable, "-W", "error", "-c", PROGRAM]
    done = subprocess.run(run, cwd=root, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == str([[[7]]] * 4).split(), done.stdout
