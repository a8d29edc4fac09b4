"""`resume.py` from torch to MindSpore and back: one run, one curve."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.examples import SMALL_RUN, losses_of_a_run
from tests.helpers.frameworks import needs_mindspore
from tests.helpers.ranks import Pool

ARGUMENTS = [*SMALL_RUN, "--dtype", "float32"]


@needs_mindspore
@pytest.mark.processes
def test_a_run_goes_on_in_the_other_framework(pool: Callable[..., Pool], tmp_path: Path) -> None:
    arguments = [*ARGUMENTS, "--out", str(tmp_path), "--every"]
    unbroken, *_ = pool(2, "torch").run(losses_of_a_run, [*arguments, "4"])  # saves after 4 and 8 of 8 steps
    shutil.rmtree(tmp_path / "step-00000008")
    there, *_ = pool(4, "mindspore").run(losses_of_a_run, [*arguments, "6"], "", "mindspore", deadline_s=200.0)
    assert there[:4] == unbroken[:4]
    assert there[4:] != unbroken[4:]  # computed, not read
    assert there == pytest.approx(unbroken, rel=1e-5)
    back, *_ = pool(2, "torch").run(losses_of_a_run, [*arguments, "9"])  # from step 6 of MindSpore
    assert back[:6] == there[:6]
    assert back[6:] != there[6:]
    assert back == pytest.approx(unbroken, rel=1e-5)
