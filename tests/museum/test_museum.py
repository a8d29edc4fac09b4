"""The museum itself: its judges can fail, and its page names every piece."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from hpfunc.planning.planner import plan
from hpfunc.planning.policy import Policy
from tests.museum.pieces import HSDP, judge, not_ordered
from tests.museum.steps import WAYS, assert_all_close
from tests.planning.edits import left_out
from tests.planning.programs import layers

HERE = Path(__file__).parent
THREE = plan(layers(3, HSDP, 64), Policy())
BROKEN = not_ordered(THREE, "free gradient w2", after="reduce_scatter layer2")


def test_a_judge_of_schedules_fails() -> None:
    says = "free gradient w2: *not ordered after reduce_scatter layer2"
    judge(THREE, BROKEN, HSDP, says)
    wrong = [
        (BROKEN, BROKEN, says, "wrong"),  # the mended one is not safe
        (THREE, THREE, says, "wrong"),  # the broken one is
        (THREE, BROKEN, "free gradient w1: *", "wrong"),  # rejected in other words
        (THREE, BROKEN, says, "stuck"),  # shown otherwise
    ]
    for mended, broken, words, shows in wrong:
        with pytest.raises((AssertionError, RuntimeError)):
            judge(mended, broken, HSDP, words, shows, num_timings=20)
    with pytest.raises(AssertionError):
        left_out(THREE, "no such op")


def test_a_judge_of_steps_fails() -> None:
    right = [torch.ones(2, dtype=torch.float64)]
    assert_all_close([[right] * len(WAYS)] * 2, right)
    ways = [*[right] * (len(WAYS) - 1), [right[0] + 1e-9]]
    with pytest.raises(AssertionError, match=f"rank 1, {WAYS[-1]}"):
        assert_all_close([[right] * len(WAYS), ways], right)


def test_the_page_names_every_piece() -> None:
    page = (HERE / "README.md").read_text()
    named = set(re.findall(r"\btest_\w+(?=`)", page))
    for path in HERE.glob("test_*.py"):
        if path.name == Path(__file__).name:
            continue
        tests = re.findall(r'^def (test_\w+)\(.*?:\n    """(.*?)"""', path.read_text(), re.MULTILINE | re.DOTALL)
        pieces = {name for name, text in tests if re.search(r"\d{2,}", text.splitlines()[0])}
        assert pieces <= named, f"{path.name}: {sorted(pieces - named)}"
    there = {name for path in HERE.glob("test_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)}
    assert named <= there, f"the page names tests that are not there: {sorted(named - there)}"
