"""`examples/torch/train_text.py` in small: it trains, it checks itself, and the check can fail.

torchrun starts it once, as a user does. The other runs are in ranks that are there already and have imported torch,
which is what such a start spends its time on: there the file is run as a program all the same.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest

from hpfunc.backends import get
from tests.helpers.examples import ROOT, launch
from tests.helpers.ranks import Pool

pytestmark = pytest.mark.processes
FILE = "examples/torch/train_text.py"


def assert_trained(output: str, folder: Path, has_replicas: bool) -> None:
    """Fails unless a run has printed figures and a sample, and left a schedule and a picture."""
    assert "held out:" in output
    assert "a bigram model has" in output
    assert "a sample:\ndef main(args):" in output
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")
    text = (folder / "schedule.txt").read_text()
    assert "reduce_scatter" in text
    assert ("over all_reduce@" in text) == has_replicas


def test_torchrun_starts_it(tmp_path: Path) -> None:
    code, output = launch(2, "--quick", "--mesh", "1,2", "--out", str(tmp_path))
    assert code == 0, output
    assert_trained(output, tmp_path, has_replicas=False)


def program(rank: int, *arguments: str, forgotten: int | None = None) -> tuple[int, str]:
    """Runs the file as a program; returns its exit code and what it printed. One all-reduce may be forgotten."""
    backend, count, output = cast(Any, get("torch")), itertools.count(), io.StringIO()
    launch = backend.launch

    def forgetful(collective: str, group: Any, sends: Any, receives: Any) -> Any:
        if collective == "all_reduce" and next(count) == forgotten:
            return []
        return launch(collective, group, sends, receives)

    backend.launch = forgetful
    try:
        with (
            mock.patch.object(sys, "argv", [FILE, *arguments]),
            mock.patch.object(sys, "path", [str((ROOT / FILE).parent), *sys.path]),
            contextlib.redirect_stdout(output),
            pytest.raises(SystemExit) as end,
        ):
            runpy.run_path(str(ROOT / FILE), run_name="__main__")
    finally:
        del backend.launch
    return cast(int, end.value.code), output.getvalue()


def test_training_ends_with_figures_a_sample_and_a_picture(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    (code, output), *others = pool(4).run(program, "--quick", "--mesh", "2,2", "--out", str(tmp_path))
    assert code == 0
    assert_trained(output, tmp_path, has_replicas=True)
    assert others == [(0, "")] * 3  # one rank talks


def test_the_check_passes(pool: Callable[[int], Pool]) -> None:
    (code, output), *others = pool(4).run(program, "--quick", "--check")
    assert code == 0, output
    assert "check passed" in output
    assert [code for code, _ in others] == [0] * 3


def forgetful(rank: int) -> tuple[int, str]:
    # The first step, not yet planned, has one for each weight; after it a planned step is hit.
    return program(rank, "--quick", "--check", forgotten=60)


def test_one_skipped_all_reduce_makes_the_check_fail(pool: Callable[[int], Pool]) -> None:
    (code, output), *others = pool(4).run(forgetful)
    assert code == 1, output
    assert "check FAILED" in output
    assert [code for code, _ in others] == [1] * 3
