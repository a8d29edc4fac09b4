"""`examples/torch/resume.py` in small: killed on 4 processes, gone on with on 2, with the losses of an unbroken run."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hpfunc as hp
from tests.examples.test_parallel import example
from tests.examples.test_train_text import launch
from tests.helpers.ranks import Pool, mesh_of

pytestmark = pytest.mark.processes
SMALL = ["--steps", "8", "--every", "3", "--dim", "32", "--layers", "1", "--context", "16", "--dtype", "float64"]
PARTS = ["params", "optimizer", "position", "random"]


def losses(rank: int, arguments: list[str], forgotten: str = "", framework: str = "torch") -> list[float]:
    """Returns the curve of a run, which may forget a part of what it loads."""
    module = example("resume", framework)
    resuming, mesh = module.resuming, mesh_of((-1,), ("shard",))

    def load(path: Path, like: Any) -> Any:
        state = hp.checkpoint.load(path, like=like)
        return state | {name: like[name] for name in state if name == forgotten}

    names = {**vars(hp.checkpoint), "load": load}
    vars(resuming)["hp"] = SimpleNamespace(**{**vars(hp), "checkpoint": SimpleNamespace(**names)})
    args = resuming.options(None, [*SMALL, *arguments])
    with contextlib.redirect_stdout(io.StringIO()):
        return resuming.train(args, mesh, resuming.text.standard_library(), module.FRAMEWORK, print)


def test_a_killed_run_goes_on_on_other_ranks(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    unbroken, _ = pool(2).run(losses, ["--out", str(whole)])
    (whole / "losses.json").write_text(json.dumps(unbroken))

    code, output = launch(4, *SMALL, "--out", str(parts), "--kill-at", "7", script="examples/torch/resume.py")
    assert code != 0
    assert "SIGKILL" in output
    assert sorted(entry.name for entry in parts.iterdir()) == ["step-00000003", "step-00000006"]

    compared = "--compare", str(whole), "--tolerance", "1e-13"
    code, output = launch(2, *SMALL, "--out", str(parts), *compared, script="examples/torch/resume.py")
    assert code == 0, output
    assert "resumed after step 6 on 2 ranks of torch; saved by 4 ranks of torch" in output
    assert len(json.loads((parts / "losses.json").read_text())) == 8
    assert (parts / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_each_part_of_the_state_is_needed(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    out = ["--out", str(tmp_path)]
    unbroken, _ = pool(2).run(losses, [*out, "--every", "6"])
    assert pool(2).run(losses, out)[0][6:] == unbroken[6:]
    for part in PARTS:
        curve, _ = pool(2).run(losses, out, part)
        assert curve[:6] == unbroken[:6]
        assert abs(curve[7] - unbroken[7]) > 1e-4, f"the run did not miss {part}"
