"""Checkpoints on MindSpore, and across frameworks: cases and judges are those of `tests/checkpoint`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import safetensors.torch
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

import hpfunc as hp
from tests.helpers.checkpoints import HSDP, every_dtype, layouts, resume, same, there_and_back, train_and_save
from tests.helpers.frameworks import needs_mindspore, to_framework, to_torch
from tests.helpers.ranks import Pool, mesh_of, outcome
from tests.helpers.reference import Grid

pytestmark = [pytest.mark.processes, needs_mindspore]
FSDP = Grid((4,), ("shard",), ("shard",))
WAYS = [("mindspore", "mindspore"), ("mindspore", "torch"), ("torch", "mindspore")]
EMPTY = (HSDP, (("shard", "replicate"),), FSDP, (("shard",),), (2,))  # on both sides


@settings(phases=[Phase.explicit, Phase.generate], deadline=None, max_examples=9)
@given(layouts(4), st.booleans(), st.sampled_from(WAYS))
@example(EMPTY, True, WAYS[1])
@example(EMPTY, False, WAYS[2])
@example((HSDP, (), FSDP, (), ()), True, WAYS[0])
def test_any_layout_comes_back_in_any_other(
    pool: Callable[..., Pool], layout: tuple[Any, ...], asynchronous: bool, way: tuple[str, str]
) -> None:
    there_and_back(pool, layout, asynchronous, *way)


def test_training_resumes_bit_for_bit_and_in_the_other_framework(pool: Callable[..., Pool], tmp_path: Path) -> None:
    where, hsdp = str(tmp_path), (HSDP.sizes, HSDP.names)
    for saves, other in (("mindspore", "torch"), ("torch", "mindspore")):
        saved = pool(4, saves).run(train_and_save, where, *hsdp)
        again = pool(4, saves).run(resume, where, *hsdp)
        for (losses, number, params), (losses2, number2, params2) in zip(saved, again, strict=True):
            assert losses == losses2
            assert torch.equal(number, number2)
            assert all(map(torch.equal, optree.tree_leaves(params), optree.tree_leaves(params2)))
        for losses, number, params in pool(4, other).run(resume, where, FSDP.sizes, FSDP.names):
            assert losses == pytest.approx(saved[0][0], rel=1e-10)
            assert number in [number for _, number, _ in saved]
            torch.testing.assert_close(params, saved[0][2], rtol=1e-10, atol=1e-12)


def without_float8(shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {name: x for name, x in every_dtype(shape).items() if "float8" not in name}


def exchange_files(rank: int, path: str) -> tuple[list[Any], str]:
    mesh = mesh_of(HSDP.sizes, HSDP.names)
    tree = without_float8((7, 3))
    hp.checkpoint.save(f"{path}/saved", hp.shard(to_framework(tree), mesh, hp.P("shard")))
    zeros = {name: torch.zeros_like(x) for name, x in tree.items()}
    like = hp.shard(to_framework(zeros), mesh_of(FSDP.sizes, FSDP.names), hp.P(None, "shard"))
    read = hp.checkpoint.import_safetensors(f"{path}/other.safetensors", like, allow={"unexpected"})
    assert all(read[name].dtype == like[name].dtype for name in tree)
    wide = {"torch.float8_e5m2": like["torch.float32"]}
    bad = outcome(hp.checkpoint.import_safetensors, f"{path}/other.safetensors", wide, allow={"unexpected", "cast"})
    return [to_torch(read[name].local).tolist() for name in tree], bad


def test_whole_models_are_exported_and_imported(pool: Callable[..., Pool], tmp_path: Path) -> None:
    tree, every = without_float8((7, 3)), every_dtype((7, 3))
    safetensors.torch.save_file(every, tmp_path / "other.safetensors")
    ranks = pool(4, "mindspore").run(exchange_files, str(tmp_path))
    for rank, (values, refused) in enumerate(ranks):
        for got, whole in zip(values, tree.values(), strict=True):
            assert got == whole[:, rank : rank + 1].tolist()
        assert refused.startswith("CheckpointError: hpfunc.checkpoint: MindSpore takes no float8_e5m2 from the host")
    file = hp.checkpoint.export_safetensors(tmp_path / "saved", tmp_path / "exported.safetensors")
    found = safetensors.torch.load_file(file)
    assert found.keys() == tree.keys()
    assert all(same(found[name], tree[name]) for name in tree)
