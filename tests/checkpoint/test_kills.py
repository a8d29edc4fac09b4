"""SIGKILL in the middle of saves loses no checkpoint that was complete. `kills.py` does it as often as one likes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.checkpoint import kills

NUM_KILLS = 4


@pytest.mark.processes
def test_kills_lose_no_complete_checkpoint(tmp_path: Path) -> None:
    draw, last = random.Random(1), -1
    for _ in range(NUM_KILLS):
        last = max(kills.kill_once(tmp_path, last + 1, draw), kills.newest(tmp_path))
    assert last >= NUM_KILLS - 1


@pytest.mark.processes
def test_a_kill_before_any_action_on_the_disk_loses_no_checkpoint(tmp_path: Path) -> None:
    for step in range(kills.KEEP):
        assert not kills.kill_before(tmp_path, step, 1000)
    action, seen = 0, set()
    while kills.kill_before(tmp_path, kills.KEEP + action, action):
        seen |= {entry.name.split(".")[-1].split("-")[0] for entry in tmp_path.iterdir()}
        action += 1
    assert action > 10
    assert seen == {"step", "partial", "removed"}  # it was killed while one is made, and while one is removed


def test_a_lost_checkpoint_is_seen(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="step 3 was complete, the latest is -1"):
        kills.check(tmp_path, 3)
