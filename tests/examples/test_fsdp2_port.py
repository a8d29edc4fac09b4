"""`examples/torch/fsdp2_port.py`: the port has FSDP2's bits, and clips as FSDP2 does."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable

import pytest
import torch

from tests.helpers.examples import example
from tests.helpers.ranks import Pool

STEPS = 6
Found = tuple[list[float], dict[str, torch.Tensor]]


def both(rank: int, max_norm: float) -> list[Found]:
    """Returns losses and weights of the program, and of its port."""
    module = example("fsdp2_port")
    with contextlib.redirect_stderr(io.StringIO()):  # the progress bar
        return [train(STEPS, max_norm) for train in (module.train_with_fsdp2, module.train)]


@pytest.mark.processes
def test_the_port_has_the_bits_of_fsdp2(pool: Callable[[int], Pool]) -> None:
    for theirs, ours in pool(2).run(both, 1e9):
        assert ours[0] == theirs[0]
        assert ours[0][-1] < ours[0][0]
        assert ours[1].keys() == theirs[1].keys()
        assert all(torch.equal(ours[1][name], weight) for name, weight in theirs[1].items())


@pytest.mark.processes
def test_the_port_clips_as_fsdp2_does(pool: Callable[[int], Pool]) -> None:
    unclipped = pool(2).run(both, 1e9)[0][1]
    for theirs, ours in pool(2).run(both, 0.05):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
        assert ours[0] != pytest.approx(unclipped[0], rel=1e-4)
        for name, weight in theirs[1].items():
            torch.testing.assert_close(ours[1][name], weight, rtol=1e-4, atol=1e-5)
