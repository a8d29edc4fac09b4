"""A fault of each kind that silent wrong numbers came from, planted in the ranks: the fuzzer finds it in few cases."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from tests.fuzz.cases import Case
from tests.fuzz.draw import draw
from tests.fuzz.drive import Runner
from tests.fuzz.faults import FAULTS
from tests.helpers.ranks import Pool

COUNT, SOME = 400, 20


@pytest.fixture
def own_ranks(pool: Callable[..., Pool]) -> Iterator[None]:
    """Ranks of a test alone: they end with the fault in them."""
    pool(2).stop()
    yield
    pool(2).stop()


def _first_found(fault: Callable[[], None], kind: str) -> Case | None:
    """Returns the first of the cases in which a fault shows as what it is."""
    runner = Runner(prepare=fault)
    for first in range(0, COUNT, SOME):
        for result in runner.run([draw(seed) for seed in range(first, first + SOME)]):
            if any(re.search(kind, key) for key in result.keys):
                return result.case
    return None


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(own_ranks: None, pool: Callable[..., Pool], fault: Callable[[], None]) -> None:
    case = _first_found(fault, FAULTS[fault])
    assert case is not None, f"not found in {COUNT} cases"
    print(f"{fault.__name__}: found by seed {case.seed}")
    pool(2).stop()
    (sound,) = Runner().run([case])
    assert not sound.keys  # without the fault there is nothing to be found
