"""A user's script: a type checker in its strictest mode finds a forgotten argument, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
from __future__ import annotations

from dataclasses import dataclass

import torch

import hpfunc as hp


@hp.register_dataclass
@dataclass(frozen=True)
class Layer:
    weight: torch.Tensor
    bias: torch.Tensor


@hp.unit
def layer(p: Layer, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return torch.tanh(x @ p.weight + p.bias) * scale


def loss_fn(params: list[Layer], x: torch.Tensor) -> torch.Tensor:
    for p in params:
        x = layer(p, x)
    return x.square().mean()


mesh = hp.make_mesh(1, "shard")
params: list[Layer] = hp.shard([Layer(torch.eye(4), torch.ones(4)) for _ in range(2)], mesh, hp.P("shard"))
optimizer = hp.optim.adamw(1e-3)
state = optimizer.init(params)


def step_fn(params: list[Layer], state: object, x: torch.Tensor) -> tuple[list[Layer], object, torch.Tensor]:
    loss, grads = hp.value_and_grad(loss_fn)(params, x)
    updates, state = optimizer.update(grads, state, params)
    return hp.apply_updates(params, updates), state, loss


step = hp.sharded(step_fn, mesh, donate_argnums=(0, 1))


@hp.sharded(mesh=mesh)
def evaluate(params: list[Layer], x: torch.Tensor) -> float:
    return loss_fn(params, x).item()


for _ in range(2):
    params, state, loss = step(params, state, torch.ones(2, 4))
    print(loss.item(), evaluate(params, torch.ones(2, 4)) + 1.0)
many = hp.accumulate(hp.value_and_grad(loss_fn), 2)
value, grads = many(params, torch.ones(4, 4))
print(value.item(), step.last_schedule, step.policy, hp.num_parameters(params))
"""
MISTAKES = {
    "step(params, state, torch.ones(2, 4))": "step(params, state)",
    "layer(p, x)": "layer(p)",
    "hp.value_and_grad(loss_fn)(params, x)": "hp.value_and_grad(loss_fn)(params)",
    "evaluate(params, torch.ones(2, 4))": "evaluate(params)",
    "many(params, torch.ones(4, 4))": "many(params)",
}


def errors_of(folder: Path) -> list[str]:
    """Returns the lines of code in which pyright finds an error, in its strictest mode."""
    run = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(folder)]
    done = subprocess.run(run, capture_output=True, text=True, check=False, cwd=folder)
    found = json.loads(done.stdout)["generalDiagnostics"]
    lines = {path.name: path.read_text().splitlines() for path in folder.glob("*.py")}
    return [
        f"{Path(each['file']).stem}: {lines[Path(each['file']).name][each['range']['start']['line']].strip()}"
        for each in found
        if each["severity"] == "error"
    ]


@pytest.mark.slow
def test_a_forgotten_argument_is_found_and_nothing_else(tmp_path: Path) -> None:
    settings = '{"typeCheckingMode": "strict", "reportMissingModuleSource": false}'
    (tmp_path / "pyrightconfig.json").write_text(settings)
    (tmp_path / "right.py").write_text(SCRIPT)
    for number, (right, wrong) in enumerate(MISTAKES.items()):
        assert SCRIPT.count(right) == 1, right
        (tmp_path / f"wrong{number}.py").write_text(SCRIPT.replace(right, wrong))
    found = errors_of(tmp_path)
    assert not [each for each in found if each.startswith("right")], found
    for number, wrong in enumerate(MISTAKES.values()):
        assert any(each.startswith(f"wrong{number}: ") and wrong in each for each in found), (wrong, found)
    assert {each.partition(":")[0] for each in found} == {f"wrong{number}" for number in range(len(MISTAKES))}
