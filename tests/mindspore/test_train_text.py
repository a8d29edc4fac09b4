"""`examples/mindspore/train_text.py` in small: it trains, and it agrees with one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.examples import launch
from tests.helpers.frameworks import needs_mindspore

pytestmark = [pytest.mark.processes, needs_mindspore]
SCRIPT = "examples/mindspore/train_text.py"


def test_training_ends_with_figures_a_sample_and_a_picture(tmp_path: Path) -> None:
    code, output = launch(2, "--quick", "--mesh", "1,2", "--out", str(tmp_path), script=SCRIPT)
    assert code == 0, output
    assert "a bigram model has" in output
    assert "a sample:\ndef main(args):" in output
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert "reduce_scatter" in (tmp_path / "schedule.txt").read_text()


def test_the_check_passes() -> None:
    code, output = launch(2, "--quick", "--check", "--mesh", "1,2", script=SCRIPT)
    assert code == 0, output
    assert "check passed" in output
