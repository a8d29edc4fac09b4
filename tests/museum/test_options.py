"""Options that are taken and then forgotten, and parts of a state that are not saved."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import hpfunc as hp
from hpfunc.planning.planner import plan
from hpfunc.planning.policy import Policy
from tests.helpers.leaves import assert_close
from tests.helpers.models import sgd
from tests.helpers.ranks import Pool
from tests.museum.pieces import HSDP
from tests.museum.steps import draw, gradient, grid, plain, size_of, whole
from tests.planning.programs import stack, weight

processes = pytest.mark.processes
PROGRAM = stack(*((weight(f"w{i}", 4096, HSDP), weight(f"b{i}", 64, HSDP)) for i in range(5)))

OPTIONS: dict[str, Any] = {
    "prefetch": 3,
    "release": "never",
    "pack_below_bytes": 0,
    "prefetch_backward": 0,
    "gather_budget_bytes": 40_000,
    "release_overrides": {"layer1": "never"},
    "reduce_bucket_bytes": math.inf,
    "communicators": 1,
}


@pytest.mark.parametrize("name", [field.name for field in fields(Policy)])
def test_each_option_changes_the_plan(name: str) -> None:
    """hyper-parallel 278 (from the list): a wrapper took an option and did not pass it on.

    Nothing fails: the defaults are used, and the run is slower or takes more memory. Here every field of a policy has
    a value that plans other ops for one program; a new field without one fails this test.
    """
    usual = plan(PROGRAM, Policy())
    other = plan(PROGRAM, Policy(**{name: OPTIONS[name]}))
    assert usual.slots != other.slots


NUMERICS: dict[str, Any] = {
    "param_dtype": "float32",
    "reduce_dtype": "float32",
    "accum_dtype": "float32",
    "output_dtype": "float32",
    "cast_inputs": True,
    "reduce_op": "sum",
}


def seen_dtypes(rank: int, numerics: hp.Numerics, way: str) -> Any:
    """Returns what a unit and its caller see: dtypes, and the gradient."""
    mesh = grid("two replicas of two shards")
    params = hp.shard({"a": draw(4, 4, seed=1), "b": draw(4, seed=2)}, mesh, hp.P("shard"))
    seen: list[str] = []

    def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
        seen[:] = [str(p["a"].dtype), str(x.dtype)]
        return torch.tanh((x.to(p["a"].dtype) @ p["a"]) * p["b"])

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        y = hp.unit(layer)(p, x)
        seen.append(str(y.dtype))
        return y.double().square().sum()

    step: Any = hp.grad(loss, numerics=numerics)
    step = hp.sharded(step, mesh) if way == "planned" else step
    for _ in range(3 if way == "planned" else 1):
        grads = step(params, draw(3, 4, seed=10 + rank))
    return seen, [str(g.dtype) for g in grads.values()], whole(grads, mesh)


@processes
@pytest.mark.parametrize("way", ["eager", "planned"])
@pytest.mark.parametrize("name", [field.name for field in fields(hp.Numerics)])
def test_each_option_changes_the_numbers(pool: Callable[[int], Pool], name: str, way: str) -> None:
    """hyper-parallel 278, cosmos-framework 161: an option that says how gradients are reduced did nothing.

    Here each field of `Numerics` is seen by the unit, by the caller, or in the bits of the gradient.
    """
    both = {"param_dtype": "float32"} if name == "cast_inputs" else {}
    usual = pool(4).run(seen_dtypes, hp.Numerics(**both), way)[0]
    other = pool(4).run(seen_dtypes, hp.Numerics(**{**both, name: NUMERICS[name]}), way)[0]
    same = usual[:2] == other[:2] and all(map(torch.equal, usual[2], other[2]))
    assert not same


# --- adapters -------------------------------------------------------------------------------------------------------
RATE = 0.1


def base() -> Any:
    return [draw(6, 6, seed=seed) for seed in range(2)]


def adapters(seed: int = 0) -> Any:
    return [{"down": draw(6, 3, seed=20 + k + seed), "up": draw(3, 6, seed=30 + k + seed)} for k in range(2)]


def adapted(parts: Any, x: torch.Tensor, frozen: Any, unit: Callable[..., Any] = hp.unit) -> torch.Tensor:
    layer = unit(lambda p, x: torch.tanh(x @ p["w"] + x @ p["down"] @ p["up"]))
    for w, part in zip(frozen, parts, strict=True):
        x = layer({"w": w, **part}, x)
    return x.square().mean()


def rows(rank: int, step: int) -> torch.Tensor:
    return draw(4, 6, seed=100 * rank + step)


def finetuned(rank: int, mesh_name: str, folder: str, resumed: bool) -> Any:
    """Two steps and a save of the adapters only; or a start with other ones, a load, and two steps more."""
    mesh = grid(mesh_name)
    frozen = hp.shard(base(), mesh, hp.P("shard"))
    parts = hp.shard(adapters(seed=7 if resumed else 0), mesh, hp.P("shard"))
    if resumed:
        parts = hp.checkpoint.load(folder, parts)
    step = hp.sharded(hp.grad(adapted), mesh)
    for number in range(2):
        parts = sgd(parts, step(parts, rows(rank % 2, number + 2 * resumed), frozen), RATE)
    if not resumed:
        hp.checkpoint.save(folder, parts)
    return whole(parts, mesh)


@processes
@pytest.mark.parametrize("mesh_name", ["two shards", "two replicas of two shards"])
def test_the_adapters_of_all_ranks_are_saved(pool: Callable[[int], Pool], mesh_name: str, tmp_path: Path) -> None:
    """accelerate 3971, 4206: of an adapter's weights only rank 0's part was in the file.

    Loading put that on rank 0, and left the others with what a fresh start had drawn: with N ranks all but one Nth of
    the training was lost, and the loss hid it. Here each rank writes what it owns, also of a part of the arrays, and a
    run that starts from other numbers goes on as one process would, also on another mesh.
    """
    want = adapters()
    for step in range(4):
        batches = [rows(rank, step) for rank in range(2)]
        _, *grads = gradient(lambda p, xs=batches: torch.stack([adapted(p, x, base(), plain) for x in xs]).mean(), want)
        pairs = iter(grads)
        want = [{name: part[name] - RATE * next(pairs) for name in ("down", "up")} for part in want]
    pool(2).run(finetuned, "two shards", str(tmp_path), False)
    leaves = [part[name] for part in want for name in ("down", "up")]
    for found in pool(size_of(mesh_name)).run(finetuned, mesh_name, str(tmp_path), True):
        assert_close(found, leaves, 1e-12)
