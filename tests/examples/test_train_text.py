"""`examples/torch/train_text.py` in small: it trains, it checks itself, and the check can fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]
# What a launch of an all-reduce does in a process whose third one is forgotten.
SKIP_ONE = """
import itertools, runpy, sys
from hpfunc.backends import get
backend, count = get("torch"), itertools.count()
launch = backend.launch
def forgetful(collective, group, sends, receives):
    if collective == "all_reduce" and next(count) == {place}:
        return []
    return launch(collective, group, sends, receives)
backend.launch = forgetful
sys.argv = sys.argv[1:]
sys.path.insert(0, "examples/torch")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def launch(num_ranks: int, *arguments: str, script: str = "examples/torch/train_text.py") -> tuple[int, str]:
    """Returns the exit code and the output of an example under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(
        [*command, script, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=200, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(("num_ranks", "mesh"), [(4, "2,2"), (2, "1,2")])
def test_training_ends_with_figures_a_sample_and_a_picture(tmp_path: Path, num_ranks: int, mesh: str) -> None:
    code, output = launch(num_ranks, "--quick", "--mesh", mesh, "--out", str(tmp_path))
    assert code == 0, output
    assert "held out:" in output
    assert "a bigram model has" in output
    assert "a sample:\ndef main(args):" in output
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "schedule.txt").read_text()
    assert "reduce_scatter" in text
    assert ("all_reduce" in text) == (mesh == "2,2")


def test_the_check_passes() -> None:
    code, output = launch(4, "--quick", "--check")
    assert code == 0, output
    assert "check passed" in output


def test_one_skipped_all_reduce_makes_the_check_fail(tmp_path: Path) -> None:
    # The first step, not yet planned, has one for each weight; after it a planned step is hit.
    script = tmp_path / "forgetful.py"
    script.write_text(SKIP_ONE.format(place=60))
    code, output = launch(4, "examples/torch/train_text.py", "--quick", "--check", script=str(script))
    assert code == 1, output
    assert "check FAILED" in output
