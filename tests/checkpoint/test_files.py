"""The files are safetensors: the library of that format reads what is written here, and is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

import hpfunc as hp
from hpfunc.checkpoint import _format
from tests.helpers.checkpoints import FORMAT_DTYPES, every_dtype, same
from tests.helpers.ranks import mesh_of


@pytest.fixture(scope="module")
def mesh() -> hp.Mesh:
    return hp.make_mesh((1,), ("shard",))


def test_elements_have_the_sizes_of_torch() -> None:
    assert [_format.ITEM_BYTES[name] for name in _format.CODES] == [dtype.itemsize for dtype in FORMAT_DTYPES]


@pytest.mark.parametrize("shape", [(), (3,), (5, 0), (3, 2)])
def test_the_library_reads_each_file_of_a_checkpoint(mesh: hp.Mesh, tmp_path: Path, shape: tuple[int, ...]) -> None:
    tree = every_dtype(shape) | {'a "ü" name': torch.ones(2)}
    saving = hp.checkpoint.save(tmp_path, hp.shard(tree, mesh, hp.P()))
    found = safetensors.torch.load_file(tmp_path / f"step-{saving.step:08d}" / "rank-00000.safetensors")
    assert found.keys() == {name for name, x in tree.items() if x.numel()}  # an empty part is in no file
    assert all(same(found[name], tree[name]) for name in found)
    for name, array in hp.checkpoint.load(tmp_path, hp.shard(tree, mesh, hp.P("shard"))).items():
        assert same(array.local, tree[name])


def save(rank: int, path: str) -> None:
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    tree = every_dtype((7, 3)) | {"skipped": torch.ones(1, 1)}
    hp.checkpoint.save(path, {"params": hp.shard(tree, mesh, hp.P(None, "shard")), "step": 4})


def load(rank: int, path: str) -> list[list[Any]]:
    zeros = {name: torch.zeros_like(x) for name, x in every_dtype((7, 3)).items()}
    like = hp.shard(zeros, mesh_of((3,), ("shard",)), hp.P("shard"))
    read = hp.checkpoint.import_safetensors(path, like, rename=drop_prefix)
    assert all(read[name].dtype == zeros[name].dtype for name in zeros)
    return [read[name].local.tolist() for name in zeros]  # some dtypes cannot travel between processes


def drop_prefix(name: str) -> str | None:
    return None if name == "other" else name.removeprefix("model.")


def to_model(key: str) -> str | None:
    return None if key == "params.skipped" else "model." + key.removeprefix("params.")


def test_whole_models_are_exported_and_imported_on_other_ranks(pool: Any, tmp_path: Path) -> None:
    tree = every_dtype((7, 3))
    pool(4).run(save, str(tmp_path / "checkpoints"))
    file = hp.checkpoint.export_safetensors(tmp_path / "checkpoints", tmp_path / "a.safetensors", rename=to_model)
    found = safetensors.torch.load_file(file)
    assert found.keys() == {f"model.{name}" for name in tree}
    assert all(same(found[f"model.{name}"], tree[name]) for name in tree)
    folder = tmp_path / "files"  # as others publish large models: in several files
    folder.mkdir()
    names = sorted(tree)
    safetensors.torch.save_file({f"model.{name}": tree[name] for name in names[:5]}, folder / "a.safetensors")
    rest = {f"model.{name}": tree[name] for name in names[5:]} | {"other": torch.ones(1)}
    safetensors.torch.save_file(rest, folder / "b.safetensors", metadata={"format": "pt"})
    for source in (file, folder):
        ranks = pool(3).run(load, str(source))
        for place, name in enumerate(tree):
            assert [row for rank in ranks for row in rank[place]] == tree[name].tolist()


def test_names_that_do_not_fit_are_refused(mesh: hp.Mesh, tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "m.safetensors")
    like = hp.shard({"a": torch.zeros(3), "c": torch.zeros(1)}, mesh, hp.P("shard"))
    with pytest.raises(hp.CheckpointError) as caught:
        hp.checkpoint.import_safetensors(tmp_path / "m.safetensors", like)
    assert [line.strip() for line in str(caught.value).splitlines()[1:4]] == [
        "missing: c: shape (1,), float32",
        "unexpected: b: shape (2,), float32",
        "misfit: a: shape (3,), float32, but shape (2,), float32 was saved",
    ]
    with pytest.raises(hp.CheckpointError, match=r"stands twice(.|\n)*x: again in"):
        hp.checkpoint.import_safetensors(tmp_path / "m.safetensors", like, rename=lambda name: "x")
    hp.checkpoint.save(tmp_path / "c", like)
    with pytest.raises(hp.CheckpointError, match=r"one name to several(.|\n)*x: of a, c"):
        hp.checkpoint.export_safetensors(tmp_path / "c", tmp_path / "x.safetensors", rename=lambda key: "x")
    with pytest.raises(hp.CheckpointError, match="no complete checkpoint"):
        hp.checkpoint.export_safetensors(tmp_path / "none", tmp_path / "x.safetensors")
    assert not list(tmp_path.glob("x.*"))


@pytest.mark.parametrize("size", [0, 7, 20, -1])
def test_a_file_that_is_cut_is_refused(mesh: hp.Mesh, tmp_path: Path, size: int) -> None:
    file = tmp_path / "m.safetensors"
    safetensors.torch.save_file({"a": torch.ones(2)}, file)
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(hp.CheckpointError, match=r"is not a whole safetensors file\n  .*m\.safetensors: "):
        hp.checkpoint.import_safetensors(file, hp.shard({"a": torch.zeros(2)}, mesh, hp.P()))
