"""What the simulated device computes, under each of its names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.device import simulated
from tests.device.cases import CASES, plain_mesh
from tests.device.harness import assert_clean, observe, on_device
from tests.helpers.ranks import stop_all

pytestmark = pytest.mark.processes


def sim() -> Any:
    return getattr(torch, simulated.NAME)


def operators(rank: int) -> list[torch.Tensor]:
    x, w = torch.arange(6.0).view(2, 3), torch.linspace(-1, 1, 9).view(3, 3)

    def compute(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        w = w.clone().requires_grad_()
        y = torch.nn.functional.linear(x, w).tanh()
        (grad,) = torch.autograd.grad(y.square().mean(), w)
        parts = torch.cat([y, y[:, :1]], 1).t().contiguous()
        torch._foreach_add_([parts, grad], 2.0)
        return [y, parts, grad, y.nonzero(), y.sort().values, y.to(torch.bfloat16), y.max(1).indices]

    want = compute(x, w)
    got = compute(x.to(simulated.NAME), w.to(simulated.NAME))
    assert all(a.device.type == simulated.NAME for a in got)
    return [torch.stack([torch.tensor(torch.equal(a.cpu(), b)) for a, b in zip(got, want, strict=True)])]


def test_it_computes_what_a_cpu_does() -> None:
    observed = observe(operators)
    assert_clean(observed)
    assert all(bool(equal.all()) for each in observed for equal in each.result)


def random_numbers(rank: int) -> list[torch.Tensor]:
    x = torch.ones(64, device=simulated.NAME, requires_grad=True)
    seeds = []
    for wrap in (lambda fn, x: fn(x), lambda fn, x: checkpoint(fn, x, use_reentrant=False)):
        sim().manual_seed(3)
        y = wrap(lambda x: torch.nn.functional.dropout(x * x, 0.5), x)
        seeds += [y.detach().cpu(), torch.autograd.grad(y.sum(), x)[0].cpu()]
    return seeds


def test_random_numbers_can_be_drawn_again() -> None:
    for each in observe(random_numbers):
        plain, plain_grad, again, again_grad = each.result
        assert torch.equal(plain, again)
        assert torch.equal(plain_grad, again_grad)
        assert 0 < int((plain == 0).sum()) < 64


def test_a_step_has_the_bits_of_a_cpu_under_the_name_of_another_device() -> None:
    """hpfunc asks torch for its device, and nowhere for a name."""
    root = Path(__file__).parents[2]
    environment = os.environ | {"SIM_NAME": "npu", "PYTHONPATH": str(root)}
    program = "from tests.device.test_simulated_operators import run_by_name; run_by_name()"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.stdout == "['npu:0', 'npu:0']\n", done.stderr


def run_by_name() -> None:
    """Runs a step of two ranks, and prints their devices."""
    fn, world = CASES["plain"]
    on_device(fn, world=world)
    print([each.result for each in observe(name_of_device)])
    stop_all()


def name_of_device(rank: int) -> str:
    return plain_mesh().device
