"""`fsdp_demo.py` of both frameworks in small: it shows a plan, all ways agree, and a wrong one does not."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.examples.test_parallel import EXAMPLES, example
from tests.helpers.ranks import Pool, mesh_of

SMALL = ["--dim", "32", "--layers", "2", "--context", "16", "--batch", "2", "--steps", "3"]


def said(rank: int, framework: str, *arguments: str) -> tuple[int, str]:
    """Returns the exit code of the demo, and what it says."""
    module, output = example("fsdp_demo", framework), io.StringIO()
    args = module.fsdp.options(None, [*SMALL, *arguments])
    with contextlib.redirect_stdout(output):
        code = module.fsdp.main(args, module.FRAMEWORK, module.judge, mesh_of)
    return code, output.getvalue()


def assert_demonstrated(codes_and_outputs: list[tuple[int, str]]) -> None:
    """Asserts that the demo ended well and showed three kinds of communication between two backwards."""
    assert [code for code, _ in codes_and_outputs] == [0] * 4, codes_and_outputs
    output = codes_and_outputs[0][1]
    kinds = [line.split()[0] for line in output.split("\n\n")[1].splitlines()]
    between = kinds[kinds.index("compute") + 1 :]
    assert sorted(between) == ["all_reduce", "compute", "gather", "reduce_scatter"]
    assert between[-1] == "compute"
    assert "HSDP in five ways: equal bits" in output
    assert output.endswith("all agree\n")


@pytest.mark.processes
def test_all_ways_agree_with_plain_torch(pool: Callable[[int], Pool]) -> None:
    results = pool(4).run(said, "torch", "--dtype", "float64")
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
