"""``python -m hpfunc demo``."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest


@pytest.mark.processes
def test_demo_trains_and_shows_the_plan() -> None:
    command = [sys.executable, "-m", "hpfunc", "demo", "--ranks", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
    assert done.stdout.startswith("2 ranks on cpu")
    assert "reduce_scatter block.2" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120
