"""`examples/torch/plain_loop.py` and `sharded_loop.py`: the same losses, and the difference that the page shows."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable

import pytest
import torch

from tests.docs.pages import ROOT
from tests.helpers.examples import FOLDER, example
from tests.helpers.ranks import Pool

STEPS = 12
PLAIN, SHARDED = ((FOLDER / f"{name}_loop.py").read_text() for name in ("plain", "sharded"))


def losses(rank: int, name: str) -> list[float]:
    """Returns the losses of a loop in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        return example(name).train(STEPS)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.processes
def test_both_have_the_same_losses(pool: Callable[[int], Pool]) -> None:
    want = losses(0, "plain_loop")
    assert want[-1] < want[0] - 1
    for got in pool(4).run(losses, "sharded_loop"):
        assert got == pytest.approx(want, rel=1e-12)


def difference() -> str:
    """Returns how the function `train` of the one becomes that of the other."""
    functions = (re.search(r"^def train.*?(?=^if)", text, re.MULTILINE | re.DOTALL) for text in (PLAIN, SHARDED))
    plain, sharded = (found[0].strip().splitlines() for found in functions if found)
    return "\n".join(list(difflib.unified_diff(plain, sharded, n=99, lineterm=""))[3:])


def test_the_page_shows_the_difference() -> None:
    page = (ROOT / "docs/howto/modules.md").read_text()
    assert f"\n```diff\n{difference()}\n```\n" in page, f"docs/howto/modules.md should have\n{difference()}"


def test_ten_lines_are_new_and_nothing_else_differs() -> None:
    lines = difference().splitlines()
    assert sum(line.startswith("+") for line in lines) <= 10
    assert sum(line.startswith("-") for line in lines) <= 6
    others = [re.sub(r'^""".*?"""|^def train.*?(?=^if)', "", text, flags=re.M | re.S) for text in (PLAIN, SHARDED)]
    assert others[1].replace("import hpfunc as hp\n\n", "", 1) == others[0]
