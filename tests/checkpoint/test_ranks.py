"""Several ranks: errors of one are told to all, and nothing is lost; training goes on as if it had not stopped."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import hpfunc as hp
from hpfunc import backends
from hpfunc.checkpoint import _save
from tests.helpers.checkpoints import Training, params_of, resume, train_and_save
from tests.helpers.ranks import mesh_of, outcome


# --- faults ---------------------------------------------------------------------------------------------------------
@contextmanager
def full_disk() -> Iterator[None]:
    """This process may write files of 64 KiB and no larger: the write in the middle of one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def no_more_files() -> Iterator[None]:
    """This process can open no file: whatever it does with the path fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def another_user() -> Iterator[None]:
    """This process, of root, is a user who may not write."""
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


FAULTS = {
    "full": (full_disk, "File too large"),
    "unopened": (no_more_files, "Too many open files"),
    "unwritable": (another_user, "Permission denied"),
}


@contextmanager
def at_the_disk(fault: str) -> Iterator[None]:
    """The fault is there whenever the save touches the disk, and gone while ranks talk: they need files as well."""
    originals = {name: getattr(_save, name) for name in ("_begin", "write_file")}

    def with_fault(original: Any) -> Any:
        def call(*args: Any) -> Any:
            with FAULTS[fault][0]():
                return original(*args)

        return call

    for name, original in originals.items():
        setattr(_save, name, with_fault(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(_save, name, original)


def save_with_a_fault(rank: int, path: str, fault: str, who: int, asynchronous: bool) -> tuple[str, bool, list[str]]:
    mesh = mesh_of((2,), ("shard",))
    w = torch.arange(40000.0)
    tree = {"w": hp.shard(w, mesh, hp.P("shard")), "n": 1}
    hp.checkpoint.save(path, tree)
    with at_the_disk(fault) if rank == who else nullcontext():
        told = outcome(lambda: hp.checkpoint.save(path, tree, keep=1, asynchronous=asynchronous).wait())
    hp.psum(torch.zeros(1), "shard", mesh=mesh)  # the first rank has removed what was begun
    names = sorted(entry.name for entry in Path(path).iterdir())
    again = hp.checkpoint.load(path, {"w": hp.shard(torch.zeros(40000), mesh, hp.P("shard")), "n": 0})
    is_right = torch.equal(hp.unshard(again["w"]), w)
    hp.checkpoint.save(path, tree, keep=1)
    return told, is_right, names


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_rank_is_told_to_all_and_loses_nothing(pool: Any, tmp_path: Path, fault: str, who: int) -> None:
    if fault == "unwritable" and os.geteuid() != 0:
        fault = "unopened"  # only root can be another user
    asynchronous = who == 1
    tmp_path.chmod(0o755)
    ranks = pool(2).run(save_with_a_fault, str(tmp_path), fault, who, asynchronous)
    for rank, (told, is_right, names) in enumerate(ranks):
        assert is_right
        assert names == ["step-00000000"]
        assert FAULTS[fault][1] in told
        kind = (
            "CheckpointError: hpfunc.checkpoint.save: " if rank == who else "AgreementError: hpfunc.checkpoint.save: "
        )
        assert told.startswith(kind), told
        assert f"rank {who} cannot write" in told
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]


def lose_a_connection(rank: int, path: str) -> tuple[str, int | None]:
    mesh = mesh_of((2,), ("shard",))
    backend = backends.get("torch")

    def broken(group: Any, text: str) -> Any:
        raise RuntimeError("Connection reset by peer")

    backend.exchange_text, original = broken, backend.exchange_text
    try:
        told = outcome(hp.checkpoint.save, path, params_of(mesh))
    finally:
        backend.exchange_text = original
    hp.checkpoint.save(path, params_of(mesh), step=5)
    return told, hp.checkpoint.latest(path)


def test_a_connection_that_is_lost_in_the_middle(pool: Any, tmp_path: Path) -> None:
    for told, latest in pool(2).run(lose_a_connection, str(tmp_path)):
        assert told.startswith("PeerError: "), told
        assert latest == 5
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000005"]


def save_elsewhere(rank: int, paths: list[str]) -> str:
    mesh = mesh_of((2,), ("shard",))
    os.chdir(paths[rank])
    return outcome(hp.checkpoint.save, "checkpoints", params_of(mesh))


def test_storage_that_ranks_do_not_share(pool: Any, tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in "ab"]
    for path in paths:
        Path(path).mkdir()
    told = pool(2).run(save_elsewhere, paths)
    assert all("rank 1 does not see the folder that rank 0 has made" in text for text in told), told
    assert list((tmp_path / "a" / "checkpoints").iterdir()) == []


def save_what_differs(rank: int, path: str) -> list[str]:
    mesh = mesh_of((2,), ("shard",))
    arrays = params_of(mesh)
    trees = [arrays | {"x": torch.full((2,), float(rank)), "y": torch.ones(2)}, arrays | {"x": rank}]
    return [outcome(hp.checkpoint.save, path, tree) for tree in trees]


def test_what_differs_between_ranks_is_refused(pool: Any, tmp_path: Path) -> None:
    for tensors, numbers in pool(2).run(save_what_differs, str(tmp_path)):
        assert tensors.startswith(
            "LeafError: hpfunc.checkpoint.save: plain tensors differ between ranks\n  x: shape (2,)"
        )
        assert "y:" not in tensors
        assert "PerRank" in tensors
        assert "  rank 0: x: 0\n  rank 1: x: 1" in numbers
    assert list(tmp_path.iterdir()) == []


def load_damaged(rank: int, path: str) -> str:
    mesh = mesh_of((2,), ("shard",))
    tree = {"w": hp.shard(torch.arange(6.0), mesh, hp.P("shard"))}
    hp.checkpoint.save(path, tree)
    if rank == 0:
        file = Path(path) / "step-00000000" / "rank-00001.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\x00")
    hp.psum(torch.zeros(1), "shard", mesh=mesh)
    return outcome(hp.checkpoint.load, path, tree)


def test_damage_that_one_rank_reads_is_told_to_all(pool: Any, tmp_path: Path) -> None:
    for rank, told in enumerate(pool(2).run(load_damaged, str(tmp_path))):
        assert told.startswith("CheckpointError" if rank == 1 else "AgreementError")
        assert "w: bytes from" in told
        assert "rank-00001.safetensors" in told


def load_into_another_model(rank: int, path: str) -> tuple[str, bool]:
    mesh = mesh_of((2,), ("shard",))
    hp.checkpoint.save(path, {"layers": [params_of(mesh), params_of(mesh)], "head": params_of(mesh)})
    other = {"layers": [params_of(mesh, 1, (7, 4))], "tail": params_of(mesh, 2)}
    before = optree.tree_map(torch.clone, other)
    told = outcome(hp.checkpoint.load, path, other)
    is_kept = all(map(torch.equal, optree.tree_leaves(other), optree.tree_leaves(before)))
    return told.replace(path, "FOLDER"), is_kept and hp.checkpoint.latest(path) == 0


def test_a_checkpoint_of_another_model_is_refused_by_all(pool: Any, tmp_path: Path) -> None:
    for told, is_kept in pool(2).run(load_into_another_model, str(tmp_path)):
        assert is_kept
        assert told.splitlines() == [
            "CheckpointError: hpfunc.checkpoint.load: step 0 of FOLDER and the tree `like` do not fit",
            "  missing: tail.b: shape (5,), float64",
            "  missing: tail.w: shape (7, 5), float64",
            "  unexpected: head.b: shape (5,), float64",
            "  unexpected: head.w: shape (7, 5), float64",
            "  unexpected: layers.1.b: shape (5,), float64",
            "  unexpected: layers.1.w: shape (7, 5), float64",
            "  misfit: layers.0.b: shape (4,), float64, but shape (5,), float64 was saved",
            "  misfit: layers.0.w: shape (7, 4), float64, but shape (7, 5), float64 was saved",
            "",
            "Hint: if that is meant: allow=('missing', 'unexpected', 'misfit'); "
            "else give a tree like the one that was saved",
        ]


# --- training -------------------------------------------------------------------------------------------------------


HSDP = ((2, 2), ("replicate", "shard"))


def test_training_resumes_bit_for_bit_on_the_same_mesh(pool: Any, tmp_path: Path) -> None:
    saved, resumed = (pool(4).run(fn, str(tmp_path), *HSDP) for fn in (train_and_save, resume))
    for (losses, number, params), (losses2, number2, params2) in zip(saved, resumed, strict=True):
        assert losses == losses2
        assert torch.equal(number, number2)
        assert all(map(torch.equal, optree.tree_leaves(params), optree.tree_leaves(params2)))
    assert len({number.item() for _, number, _ in resumed}) == 4  # each rank has its own random numbers


@pytest.mark.parametrize(("num_ranks", "shape", "names"), [(3, (3,), ("shard",)), (4, (4,), ("shard",))])
def test_training_resumes_on_another_mesh_with_the_same_losses(
    pool: Any, tmp_path: Path, num_ranks: int, shape: tuple[int, ...], names: tuple[str, ...]
) -> None:
    saved = pool(4).run(train_and_save, str(tmp_path), *HSDP)
    for losses, _, params in pool(num_ranks).run(resume, str(tmp_path), shape, names):
        assert losses == pytest.approx(saved[0][0], rel=1e-10)
        torch.testing.assert_close(params, saved[0][2], rtol=1e-10, atol=1e-12)


def test_a_state_of_each_rank_needs_as_many_ranks(pool: Any, tmp_path: Path) -> None:
    pool(4).run(train_and_save, str(tmp_path), *HSDP)
    for text in pool(2).run(refused, str(tmp_path)):
        assert "misfit: random: PerRank shape (5056,), uint8, but PerRank of 4 ranks was saved, and 2 load" in text


def refused(rank: int, path: str) -> str:
    return outcome(hp.checkpoint.load, path, Training(mesh_of((2,), ("shard",)), 1).tree())
