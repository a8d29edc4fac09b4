"""`examples/torch/resume.py` in small: killed on 4 processes, gone on with on 2, with the losses of an unbroken run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.examples import SMALL_RUN, launch, losses_of_a_run
from tests.helpers.ranks import Pool

pytestmark = pytest.mark.processes
PARTS = ["params", "optimizer", "position", "random"]


def test_a_killed_run_goes_on_on_other_ranks(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    unbroken, _ = pool(2).run(losses_of_a_run, ["--out", str(whole)])
    (whole / "losses.json").write_text(json.dumps(unbroken))

    code, output = launch(4, *SMALL_RUN, "--out", str(parts), "--kill-at", "7", script="examples/torch/resume.py")
    assert code != 0
    assert "SIGKILL" in output
    assert sorted(entry.name for entry in parts.iterdir()) == ["step-00000003", "step-00000006"]

    compared = "--compare", str(whole), "--tolerance", "1e-13"
    code, output = launch(2, *SMALL_RUN, "--out", str(parts), *compared, script="examples/torch/resume.py")
    assert code == 0, output
    assert "resumed after step 6 on 2 ranks of torch; saved by 4 ranks of torch" in output
    assert len(json.loads((parts / "losses.json").read_text())) == 8
    assert (parts / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_each_part_of_the_state_is_needed(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    out = ["--out", str(tmp_path)]
    unbroken, _ = pool(2).run(losses_of_a_run, [*out, "--every", "6"])
    assert pool(2).run(losses_of_a_run, out)[0][6:] == unbroken[6:]
    for part in PARTS:
        curve, _ = pool(2).run(losses_of_a_run, out, part)
        assert curve[:6] == unbroken[:6]
        assert abs(curve[7] - unbroken[7]) > 1e-4, f"the run did not miss {part}"
