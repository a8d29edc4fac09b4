"""`examples/mindspore/fsdp_demo.py` in small: it shows a plan, and all ways agree."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.helpers.examples import assert_demonstrated, said_by_the_demo
from tests.helpers.frameworks import needs_mindspore
from tests.helpers.ranks import Pool


@needs_mindspore
@pytest.mark.processes
def test_all_ways_agree_with_plain_mindspore(pool: Callable[..., Pool]) -> None:
    ranks = pool(4, "mindspore")
    assert_demonstrated(
        ranks.run(said_by_the_demo, "mindspore", "--steps", "2", deadline_s=240.0)
    )  # recorded, and planned
