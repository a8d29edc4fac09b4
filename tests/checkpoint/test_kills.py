"""SIGKILL in the middle of saves loses no checkpoint that was complete. `kills.py` does it as often as one likes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.checkpoint import kills

NUM_KILLS = 6


@pytest.mark.processes
def test_kills_lose_no_complete_checkpoint(tmp_path: Path) -> None:
    draw, last = random.Random(1), -1
    for _ in range(NUM_KILLS):
        last = max(kills.kill_once(tmp_path, last + 1, draw), kills.newest(tmp_path))
    assert last > 0


def test_a_lost_checkpoint_is_seen(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="step 3 was complete, the latest is -1"):
        kills.check(tmp_path, 3)
