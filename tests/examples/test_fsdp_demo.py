"""`fsdp_demo.py` of both frameworks in small: it shows a plan, all ways agree, and a wrong one does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.helpers.examples import EXAMPLES, assert_demonstrated, example, said_by_the_demo
from tests.helpers.ranks import Pool


@pytest.mark.processes
def test_all_ways_agree_with_plain_torch(pool: Callable[[int], Pool]) -> None:
    results = pool(4).run(said_by_the_demo, "torch", "--dtype", "float64")
    assert_demonstrated(results)
    _, middle, _, costs, *_ = results[0][1].split("\n\n")
    page = (EXAMPLES.parent / "docs/howto/examples.md").read_text()
    for text in (middle, costs):
        assert f"\n```text\n{text}\n```\n" in page, f"docs/howto/examples.md should have\n{text}"


@pytest.mark.parametrize(("change", "verdict"), [(0.0, True), (1e-9, False)])
def test_another_weight_is_found(change: float, verdict: bool) -> None:
    fsdp: Any = example("fsdp_demo").fsdp
    right = [np.ones(4)], [2.0, 1.0]
    found = [right for _ in fsdp.WAYS]
    found[0] = [np.ones(4) + change], [2.0, 1.0]
    said: list[str] = []
    assert fsdp.compare(found, right, 1e-10, said.append) == verdict
    found[0], found[3] = right, ([np.ones(4)], [2.0, 1.0 + change])
    assert fsdp.compare(found, right, 1e-8, said.append) == verdict  # bits of HSDP
