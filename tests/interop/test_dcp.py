"""torch's distributed checkpoints: what FSDP2 saves goes on here, what is saved here goes on under FSDP2.

All on another mesh, with the optimizer's state, judged by one process that trains the plain module; see `tests.nn`.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import hpfunc as hp
from hpfunc import interop
from tests.helpers.ranks import mesh_of
from tests.helpers.zoo import DTYPES, tensor
from tests.nn.training import FEWER, FSDP, HSDP, Layout, Pools, Training, assert_trained
from tests.nn.zoo import CASES, DECAY, EPS, NUM_STEPS, Found, rate

pytestmark = pytest.mark.processes
CASE = CASES["stack"]  # 6 and 10 rows, which 4 do not divide


# --- training goes on -------------------------------------------------------------------------------------------------
class Theirs:
    """The same training as FSDP2 and torch.optim do it."""

    def __init__(self, layout: Layout) -> None:
        mesh = interop.to_device_mesh(mesh_of(*layout))
        self.module: Any = CASE.module()
        for block in self.module.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.module, mesh=mesh)
        weights = list(self.module.parameters())
        groups = [
            {"params": [w for w in weights if (w.dim() > 1) == is_matrix], "weight_decay": DECAY if is_matrix else 0.0}
            for is_matrix in (True, False)
        ]
        self.optimizer = torch.optim.AdamW(groups, eps=EPS)

    def run(self, rank: int, first: int) -> Found:
        for step in range(first, first + NUM_STEPS):
            args, kwargs = CASE.call(rank, step)
            CASE.loss(self.module(*args, **kwargs)).backward()
            for group in self.optimizer.param_groups:
                group["lr"] = rate(step)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return Found({path: w.detach().full_tensor() for path, w in self.module.named_parameters()}, {})

    def save(self, path: str) -> None:
        model, optimizer = get_state_dict(self.module, self.optimizer)
        dcp.save({"model": model, "optim": optimizer}, checkpoint_id=path)

    def load(self, path: str) -> None:
        model, optimizer = get_state_dict(self.module, self.optimizer)  # makes the optimizer's state, too
        dcp.load({"model": model, "optim": {"state": optimizer["state"]}}, checkpoint_id=path)
        set_state_dict(self.module, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def as_theirs(params: Any, mu: Any, nu: Any, step: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Returns the state of a model and AdamW under their names, in the memory of ours; and the steps in it."""
    steps = {path: torch.tensor(float(step)) for path in params}
    weights, means, squares = (interop.to_dtensor(tree) for tree in (params, mu, nu))
    state = {path: {"exp_avg": means[path], "exp_avg_sq": squares[path], "step": steps[path]} for path in params}
    return {"model": weights, "optim": {"state": state}}, steps


def ours_first(rank: int, layout: Layout, path: str) -> Found:
    training = Training(CASE, layout)
    found = training.run(training.planned, rank, NUM_STEPS)
    opt = training.state["opt"]
    dcp.save(as_theirs(training.state["params"], opt.mu, opt.nu, opt.step)[0], checkpoint_id=path)
    return found


def ours_second(rank: int, layout: Layout, path: str) -> Found:
    training = Training(CASE, layout)
    params, mu, nu = (optree.tree_map(torch.empty_like, training.state["params"]) for _ in range(3))
    state, steps = as_theirs(params, mu, nu, 0)
    dcp.load(state, checkpoint_id=path)  # writes into the memory of the arrays
    (step,) = {int(x) for x in steps.values()}
    opt = training.state["opt"]._replace(step=step, mu=mu, nu=nu)
    training.state |= {"params": params, "opt": opt, "step": step}
    return training.run(training.planned, rank, NUM_STEPS)


def theirs_first(rank: int, layout: Layout, path: str) -> Found:
    training = Theirs(layout)
    found = training.run(rank, 0)
    training.save(path)
    return found


def theirs_second(rank: int, layout: Layout, path: str) -> Found:
    training = Theirs(layout)
    training.load(path)
    return training.run(rank, NUM_STEPS)


@pytest.mark.parametrize(("first", "second"), [(theirs_first, ours_second), (ours_first, theirs_second)])
def test_training_goes_on_in_the_other_library_on_another_mesh(
    pool: Pools, tmp_path: Path, first: Any, second: Any
) -> None:
    before = pool(4).run(first, HSDP, str(tmp_path), deadline_s=240.0)  # FSDP2 loads much of torch first
    after = pool(3).run(second, FEWER, str(tmp_path), deadline_s=240.0)
    assert_trained(CASE, before, after)


# --- without a pickle -------------------------------------------------------------------------------------------------
def whole_tree() -> dict[str, Any]:
    return {str(dtype): tensor((7, 3), dtype, i) for i, dtype in enumerate(DTYPES)} | {
        "few": torch.ones(1, 2),
        "scalar": torch.tensor(4.0),
        "layers": [{"b": torch.arange(5.0)}],
    }


def write(rank: int, path: str) -> None:
    params = hp.shard(whole_tree(), mesh_of(*HSDP), hp.P("shard"))
    writer = HuggingFaceStorageWriter(f"{path}/dcp", save_distributed=True)
    dcp.save({"params": interop.to_dtensor(params)}, storage_writer=writer)
    hp.checkpoint.save(f"{path}/ours", {"params": params})
    if rank == 0:
        Path(f"{path}/whole").mkdir()
        hp.checkpoint.export_safetensors(f"{path}/ours", f"{path}/whole/model.safetensors")


@contextlib.contextmanager
def without_pickle() -> Any:
    """Loading anything that is pickled fails."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("pickle.load", "torch.load"):
            patch.setattr(name, None)
        yield


def read(rank: int, path: str, layout: Layout) -> list[bool]:
    found = []
    for name in ("dcp", "whole"):
        params = hp.shard(optree.tree_map(torch.zeros_like, whole_tree()), mesh_of(*layout), hp.P("shard"))
        with without_pickle():
            dcp.load({"params": interop.to_dtensor(params)}, storage_reader=HuggingFaceStorageReader(f"{path}/{name}"))
        found += map(torch.equal, optree.tree_leaves(hp.unshard(params)), optree.tree_leaves(whole_tree()))
    return found


@pytest.mark.parametrize(("num_ranks", "layout"), [(4, FSDP), (3, FEWER)])
def test_safetensors_by_torch_and_ours_are_read_by_torch_on_another_mesh(
    pool: Pools, tmp_path: Path, num_ranks: int, layout: Layout
) -> None:
    pool(4).run(write, str(tmp_path))
    assert {file.suffix for file in (tmp_path / "dcp").iterdir()} == {".safetensors"}
    for found in pool(num_ranks).run(read, str(tmp_path), layout):
        assert len(found) == 2 * len(optree.tree_leaves(whole_tree()))
        assert all(found)


def test_a_pickle_would_be_noticed(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "x")
    with without_pickle(), pytest.raises(TypeError):
        torch.load(tmp_path / "x")


def their_whole(rank: int, path: str) -> None:
    module: Any = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))
    for w in module.parameters():
        nn.init.constant_(w, w.numel())
    fully_shard(module, mesh=interop.to_device_mesh(mesh_of(*FSDP)))
    writer = HuggingFaceStorageWriter(path, save_distributed=True, enable_consolidation=True)
    dcp.save(module.state_dict(), storage_writer=writer)


def imported(rank: int, path: str) -> list[bool]:
    shapes = {"0.weight": (5, 3), "0.bias": (5,), "1.weight": (7, 5), "1.bias": (7,)}
    like = hp.shard({name: torch.zeros(shape) for name, shape in shapes.items()}, mesh_of(*FEWER), hp.P("shard"))
    found = hp.unshard(hp.checkpoint.import_safetensors(path, like))
    return [bool((x == x.numel()).all()) for x in found.values()]


def test_whole_arrays_that_torch_has_put_together_are_imported(pool: Pools, tmp_path: Path) -> None:
    pool(4).run(their_whole, str(tmp_path))
    assert pool(3).run(imported, str(tmp_path)) == [[True] * 4] * 3


def test_parts_of_arrays_are_no_whole_ones(pool: Pools, tmp_path: Path) -> None:
    pool(4).run(write, str(tmp_path))
    mesh = hp.make_mesh((1,), ("shard",))
    like = hp.shard({"params": whole_tree()}, mesh, hp.P("shard"))
    with pytest.raises(hp.CheckpointError, match=r"stands twice in the files\n(.|\n)*HuggingFaceStorageReader"):
        hp.checkpoint.import_safetensors(tmp_path / "dcp", like)
