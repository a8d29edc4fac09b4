"""How a refusal is judged: its exact text on every rank, nothing has changed, and all ranks can go on at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import torch

import hpfunc as hp
from tests.helpers import frameworks as ops
from tests.helpers.frameworks import to_framework, to_torch
from tests.helpers.golden import assert_golden
from tests.helpers.ranks import mesh_of, outcome, pool
from tests.helpers.zoo import bits

GOLDEN = Path(__file__).parents[1] / "golden" / "errors"
Case = Callable[[int], tuple[Callable[[], Any], Any]]  # rank -> (what is refused, what must not change)


def mesh(n: int = 2) -> hp.Mesh:
    return mesh_of((2, 2), ("replicate", "shard")) if n == 4 else mesh_of((n,), ("shard",), None, 15.0)


def params() -> Any:
    """Two layers of a (4, 4) weight and a bias, the same on all ranks of a mesh of two."""
    tree = {"layers": [{"w": torch.eye(4) * (k + 1), "b": torch.zeros(4)} for k in range(2)]}
    return hp.shard(to_framework(tree), mesh(), hp.P("shard"))


def linear(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ p["w"] + p["b"]


def total_loss(layer: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A loss that calls `layer` as a unit, twice."""
    call = hp.unit(layer)

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        for weights in p["layers"]:
            x = call(weights, x)
        return x.square().mean()

    return loss


def x() -> torch.Tensor:
    return ops.ones(3, 4)


def cases_among(names: dict[str, Any]) -> dict[str, Case]:
    """Returns the cases that a module has so far: of its functions those whose one argument is the rank."""
    functions = {
        name: fn for name, fn in names.items() if inspect.isfunction(fn) and fn.__module__ == names["__name__"]
    }
    return {name: fn for name, fn in functions.items() if list(inspect.signature(fn).parameters) == ["rank"]}


def judge(rank: int, case: Case, n: int) -> str:
    """Runs on each rank: returns the text of the refusal."""
    call, kept = case(rank)
    before = snapshot(kept)
    text = outcome(call)
    after = snapshot(kept)
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True] * len(before), "changed"
    assert_usable(rank, n)
    return text


def snapshot(tree: Any) -> list[torch.Tensor]:
    leaves = optree.tree_leaves(tree, is_leaf=lambda x: isinstance(x, hp.ShardedArray))
    held = [leaf._owner.local if isinstance(leaf, hp.ShardedArray) else leaf for leaf in leaves]
    return [bits(to_torch(x)).clone() for x in held if ops.is_tensor(x)]


def assert_usable(rank: int, n: int) -> None:
    """Fails unless a step over the same ranks gives the right numbers."""
    w = hp.shard(ops.arange(6.0), mesh(n), hp.P("shard"))
    square = hp.unit(lambda w, x: (x * w**2).sum())
    for _ in range(2):
        _, gradient = hp.value_and_grad(square)(w, float(rank + 1))
        mean = sum(range(1, n + 1)) / n
        assert torch.equal(to_torch(hp.unshard(gradient)), 2 * mean * torch.arange(6.0))


def texts_of(case: Case, n: int = 2, deadline_s: float = 60.0, framework: str = "torch") -> list[str]:
    return pool(n, framework).run(judge, case, n, deadline_s=deadline_s)


def check_texts(texts: list[str], name: str, folder: str = "") -> None:
    """Fails unless every rank was refused, in the words of ``tests/golden/errors/name.txt``.

    The file has one text if all ranks got the same, else one for each rank. See `assert_golden`.
    Texts of another framework that differ from those of torch are in a folder of their own.
    """
    assert "returned" not in texts, texts
    different = len(set(texts)) > 1
    whole = "\n".join(f"--- rank {rank}\n{text}" for rank, text in enumerate(texts)) if different else texts[0]
    assert_golden(whole, GOLDEN / folder / f"{name}.txt")
