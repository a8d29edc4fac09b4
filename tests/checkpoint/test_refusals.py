"""Trees and checkpoints that do not fit, and files that changed: everything at fault is named, nothing is lost."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import hpfunc as hp
from hpfunc.checkpoint import PerRank


@pytest.fixture(scope="module")
def mesh() -> hp.Mesh:
    return hp.make_mesh((1,), ("shard",))


class State(NamedTuple):
    w: Any
    steps: int


def state(mesh: hp.Mesh, seed: int = 0) -> dict[str, Any]:
    w = torch.randn(300, 7, generator=torch.Generator().manual_seed(seed))
    return {
        "model": [hp.shard(w, mesh, hp.P("shard")), None],
        "opt": State(hp.shard(w.bfloat16(), mesh, hp.P()), 3),
        "rng": PerRank(torch.get_rng_state()),
        "name": "a ü",
        "scale": float("inf"),
    }


def same(tree: dict[str, Any], other: dict[str, Any]) -> bool:
    return (
        torch.equal(tree["model"][0].local, other["model"][0].local)
        and torch.equal(tree["opt"].w.local, other["opt"].w.local)
        and torch.equal(tree["rng"].value, other["rng"].value)
        and (tree["opt"].steps, tree["name"], tree["scale"]) == (other["opt"].steps, other["name"], other["scale"])
    )


def test_every_kind_of_leaf_comes_back(mesh: hp.Mesh, tmp_path: Path) -> None:
    saved, start = state(mesh), state(mesh, seed=1)
    start |= {"name": "", "scale": 0.0, "opt": State(start["opt"].w, 0), "rng": PerRank(torch.zeros(3).byte())}
    hp.checkpoint.save(tmp_path, saved)
    loaded = hp.checkpoint.load(tmp_path, like=start)
    assert same(loaded, saved)
    assert not same(loaded, start)
    assert loaded["model"][1] is None


def test_steps_are_numbered_kept_and_chosen(mesh: hp.Mesh, tmp_path: Path) -> None:
    assert hp.checkpoint.latest(tmp_path / "new") is None
    numbers = [hp.checkpoint.save(tmp_path / "new", {"n": n}, keep=2, mesh=mesh).step for n in range(4)]
    assert numbers == [0, 1, 2, 3]
    assert sorted(entry.name for entry in (tmp_path / "new").iterdir()) == ["step-00000002", "step-00000003"]
    assert hp.checkpoint.save(tmp_path / "new", {"n": 9}, step=9, mesh=mesh).step == 9
    assert hp.checkpoint.latest(tmp_path / "new") == 9
    assert hp.checkpoint.load(tmp_path / "new", {"n": 0}, mesh=mesh) == {"n": 9}
    assert hp.checkpoint.load(tmp_path / "new", {"n": 0}, step=2, mesh=mesh) == {"n": 2}


def test_what_was_begun_does_not_count_and_goes_with_the_next_save(mesh: hp.Mesh, tmp_path: Path) -> None:
    hp.checkpoint.save(tmp_path, {"n": 1}, step=1, mesh=mesh)
    for name in ("step-00000002.partial-77", "step-00000000.removed"):
        shutil.copytree(tmp_path / "step-00000001", tmp_path / name)
    (tmp_path / "step-notes").write_text("of the user")
    assert hp.checkpoint.latest(tmp_path) == 1
    hp.checkpoint.save(tmp_path, {"n": 2}, mesh=mesh)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000001", "step-00000002", "step-notes"]


def test_an_asynchronous_save_is_there_after_wait_or_the_next_save(mesh: hp.Mesh, tmp_path: Path) -> None:
    first = hp.checkpoint.save(tmp_path, {"n": 1}, step=1, mesh=mesh, asynchronous=True)
    assert hp.checkpoint.latest(tmp_path) is None
    second = hp.checkpoint.save(tmp_path, {"n": 2}, step=2, mesh=mesh, asynchronous=True)
    assert hp.checkpoint.latest(tmp_path) == 1
    second.wait()
    first.wait()
    assert hp.checkpoint.latest(tmp_path) == 2


def test_all_differences_are_listed_together_and_each_kind_can_be_allowed(mesh: hp.Mesh, tmp_path: Path) -> None:
    ones = hp.shard({"a": torch.ones(4), "b": torch.ones(4), "d": torch.ones(2)}, mesh, hp.P("shard"))
    hp.checkpoint.save(tmp_path, ones | {"lr": 1, "old": "x", "rng": PerRank(5)}, mesh=mesh)
    zeros = hp.shard({"a": torch.zeros(5), "b": torch.zeros(4).double(), "c": torch.zeros(3)}, mesh, hp.P("shard"))
    like = zeros | {"lr": 0.5, "d": torch.zeros(2), "rng": 7}
    with pytest.raises(hp.CheckpointError) as caught:
        hp.checkpoint.load(tmp_path, like)
    assert str(caught.value).splitlines() == [
        f"hpfunc.checkpoint.load: step 0 of {tmp_path} and the tree `like` do not fit",
        "  missing: c: shape (3,), float32",
        "  unexpected: old: str 'x'",
        "  misfit: a: shape (5,), float32, but shape (4,), float32 was saved",
        "  misfit: rng: int 7, but PerRank of 1 ranks was saved",
        "  cast: b: shape (4,), float64, but shape (4,), float32 was saved",
        "  cast: lr: float 0.5, but int 1 was saved",
        "",
        "Hint: if that is meant: allow=('missing', 'unexpected', 'misfit', 'cast'); "
        "else give a tree like the one that was saved",
    ]
    with pytest.raises(hp.CheckpointError, match=r"allow=\('missing', 'cast'\)"):
        hp.checkpoint.load(tmp_path, like, allow={"misfit", "unexpected"})
    loaded = hp.checkpoint.load(tmp_path, like, allow=("missing", "unexpected", "misfit", "cast"))
    assert torch.equal(loaded["a"].local, torch.zeros(5))
    assert torch.equal(loaded["b"].local, torch.ones(4).double())
    assert loaded["b"].dtype == torch.float64
    assert torch.equal(loaded["c"].local, torch.zeros(3))
    assert torch.equal(loaded["d"], torch.ones(2))  # a whole tensor from an array
    assert (loaded["lr"], type(loaded["lr"]), loaded["rng"]) == (1.0, float, 7)


def test_leaves_that_cannot_be_saved_are_all_named(mesh: hp.Mesh, tmp_path: Path) -> None:
    partial = hp.ShardedArray(torch.ones(4), (4,), hp.P(unreduced={"shard"}), mesh)
    complex_ = torch.ones(1, dtype=torch.complex128)
    tree = {"a": partial, "b": {1, 2}, "c.d": 1, "c": {"d": 2}, "e": complex_, "f": PerRank(partial)}
    with pytest.raises(hp.LeafError) as caught:
        hp.checkpoint.save(tmp_path, tree)
    named = [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:-2]]
    assert sorted(named) == ["a", "b", "c.d", "c.d", "e", "f"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"step": -1}, hp.UsageError, "step is an integer >= 0, got -1"),
        ({"keep": 0}, hp.UsageError, "keep is an integer >= 1, got 0"),
        ({"step": 4}, hp.CheckpointError, "step 4 is in .* already"),
    ],
)
def test_bad_arguments_of_save_are_refused(mesh: hp.Mesh, tmp_path: Path, kwargs: Any, error: Any, match: str) -> None:
    hp.checkpoint.save(tmp_path, {"n": 1}, step=4, mesh=mesh)
    with pytest.raises(error, match=match):
        hp.checkpoint.save(tmp_path, {"n": 2}, mesh=mesh, **kwargs)
    assert hp.checkpoint.load(tmp_path, {"n": 0}, mesh=mesh) == {"n": 1}
    assert len(list(tmp_path.iterdir())) == 1


def test_a_checkpoint_that_is_not_there_is_refused(mesh: hp.Mesh, tmp_path: Path) -> None:
    with pytest.raises(hp.CheckpointError, match="no complete checkpoint"):
        hp.checkpoint.load(tmp_path / "none", {"n": 0}, mesh=mesh)
    hp.checkpoint.save(tmp_path, {"n": 1}, step=4, mesh=mesh)
    with pytest.raises(hp.CheckpointError, match=r"no step 5(.|\n)*steps there: 4"):
        hp.checkpoint.load(tmp_path, {"n": 0}, step=5, mesh=mesh)
    with pytest.raises(hp.UsageError, match="got 'mising'"):
        hp.checkpoint.load(tmp_path, {"n": 0}, allow=["mising"], mesh=mesh)
    with pytest.raises(hp.MeshError, match="nothing tells which ranks"):
        hp.checkpoint.load(tmp_path, {"n": 0})


def is_other_blank(bad: bytes, good: bytes) -> bool:
    """Whether a flip has changed nothing but a blank between two words of JSON."""
    try:
        return json.loads(bad) == json.loads(good)
    except ValueError:
        return False


def test_any_flipped_bit_is_found_and_named(mesh: hp.Mesh, tmp_path: Path) -> None:
    saved = state(mesh)
    hp.checkpoint.save(tmp_path, saved)
    draw = random.Random(0)
    folder = tmp_path / "step-00000000"
    assert sorted(file.name for file in folder.iterdir()) == ["index.json", "rank-00000.safetensors"]
    for file in folder.iterdir():
        good = file.read_bytes()
        for place in [0, 8, len(good) - 1, *(draw.randrange(len(good)) for _ in range(60))]:
            bad = bytearray(good)
            bad[place] ^= 1 << draw.randrange(8)
            file.write_bytes(bad)
            if file.suffix == ".json" and is_other_blank(bytes(bad), good):
                assert same(hp.checkpoint.load(tmp_path, like=state(mesh, 1)), saved)
                continue
            with pytest.raises(hp.CheckpointError) as caught:
                hp.checkpoint.load(tmp_path, like=state(mesh, 1))
            assert str(file) in str(caught.value)
        file.write_bytes(good)
    assert same(hp.checkpoint.load(tmp_path, like=state(mesh, 1)), saved)


def test_a_flipped_byte_is_told_by_file_leaf_and_place(mesh: hp.Mesh, tmp_path: Path) -> None:
    hp.checkpoint.save(tmp_path, state(mesh))
    file = tmp_path / "step-00000000" / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start + 100] ^= 1
    file.write_bytes(data)
    with pytest.raises(hp.CheckpointError) as caught:
        hp.checkpoint.load(tmp_path, like=state(mesh))
    assert f"model.0: bytes from {start} of {file} to {start + 8400}: wrong checksum" in str(caught.value)


@pytest.mark.parametrize("name", ["index.json", "rank-00000.safetensors"])
@pytest.mark.parametrize("size", [0, 5, 1000, -2])
def test_a_cut_file_is_named(mesh: hp.Mesh, tmp_path: Path, name: str, size: int) -> None:
    hp.checkpoint.save(tmp_path, state(mesh))
    file = tmp_path / "step-00000000" / name
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(hp.CheckpointError) as caught:
        hp.checkpoint.load(tmp_path, like=state(mesh))
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("name", ["index.json", "rank-00000.safetensors"])
def test_a_file_that_is_gone_is_named(mesh: hp.Mesh, tmp_path: Path, name: str) -> None:
    hp.checkpoint.save(tmp_path, state(mesh))
    (tmp_path / "step-00000000" / name).unlink()
    with pytest.raises(hp.CheckpointError, match=name):
        hp.checkpoint.load(tmp_path, like=state(mesh))


def test_no_pickle_is_ever_read(mesh: hp.Mesh, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "exploded",))

    hp.checkpoint.save(tmp_path, state(mesh))
    for file in (tmp_path / "step-00000000").iterdir():
        good = file.read_bytes()
        file.write_bytes(pickle.dumps(Bomb()))
        with pytest.raises(hp.CheckpointError):
            hp.checkpoint.load(tmp_path, like=state(mesh))
        file.write_bytes(good)
    torch.save({"w": Bomb()}, tmp_path / "model.safetensors")
    with pytest.raises(hp.CheckpointError):
        hp.checkpoint.import_safetensors(tmp_path / "model.safetensors", like=state(mesh))
    assert not (tmp_path / "exploded").exists()
    pickle.loads(pickle.dumps(Bomb()))
    assert (tmp_path / "exploded").exists()  # it would have
    sources = Path(hp.checkpoint.__file__).parent.glob("*.py")
    assert not [file for file in sources if "pickle" in file.read_text().replace("unpickled", "")]
