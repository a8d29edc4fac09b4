"""`make_mesh` and `Mesh.from_device_mesh`: from processes to a mesh."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import hpfunc as hp
from tests.helpers.ranks import mesh_of, outcome

ROOT = Path(__file__).parents[2]


def described(mesh: hp.Mesh) -> tuple[Any, ...]:
    return mesh.axis_names, mesh.sizes, mesh.data_axes, mesh.ranks, mesh.rank, mesh.device, mesh.framework


# --- make_mesh ------------------------------------------------------------------------------------------------------
def meshes(rank: int) -> list[tuple[Any, ...]]:
    return [
        described(hp.make_mesh(4, "shard")),
        described(hp.make_mesh((2, 2), ("replicate", "shard"))),
        described(hp.make_mesh((-1, 2), ("replicate", "shard"))),
        described(hp.make_mesh((4, 1, -1), ("a", "b", "shard"))),
        described(hp.make_mesh((2, 2), ("dp", "tp"), "dp")),
        described(hp.make_mesh((2, 2), ("dp", "tp"))),
        described(hp.make_mesh((2, 2), ("nodes", "devices"))),
    ]


def test_a_mesh_is_made_of_the_group_that_exists(pool: Any) -> None:
    ranks = (0, 1, 2, 3)
    for rank, found in enumerate(pool(4).run(meshes)):
        rest = (ranks, rank, "cpu", "torch")
        assert found == [
            (("shard",), (4,), ("shard",), *rest),
            (("replicate", "shard"), (2, 2), ("replicate", "shard"), *rest),
            (("replicate", "shard"), (2, 2), ("replicate", "shard"), *rest),
            (("a", "b", "shard"), (4, 1, 1), ("shard",), *rest),
            (("dp", "tp"), (2, 2), ("dp",), *rest),
            (("dp", "tp"), (2, 2), ("dp",), *rest),
            (("nodes", "devices"), (2, 2), (), *rest),
        ]


def refused(rank: int) -> list[str]:
    return [
        outcome(hp.make_mesh, 3, "shard"),
        outcome(hp.make_mesh, (3, -1), ("replicate", "shard")),
        outcome(hp.make_mesh, (-1, -1), ("replicate", "shard")),
        outcome(hp.make_mesh, (0, 2), ("replicate", "shard")),
        outcome(hp.make_mesh, (2,), ("replicate", "shard")),
        outcome(hp.make_mesh, (2, 1), ("shard", "shard")),
        outcome(hp.make_mesh, (2, 1), ("replicate", "shard"), "shrad"),
        outcome(hp.make_mesh, (2, 1), ("replicate", "data-axis")),
        outcome(hp.make_mesh, (), ()),
    ]


def test_a_mesh_that_does_not_fit_is_refused(pool: Any) -> None:
    first, second = pool(2).run(refused)
    assert first == second
    assert all(text.startswith("MeshError: hpfunc.") for text in first), first


def test_without_a_launcher_the_world_has_one_process() -> None:
    assert not dist.is_initialized()
    mesh = hp.make_mesh((1, -1), ("replicate", "shard"))
    assert described(mesh) == (("replicate", "shard"), (1, 1), ("replicate", "shard"), (0,), 0, "cpu", "torch")
    assert not dist.is_initialized()  # nothing was started for it
    x = torch.arange(3.0)
    assert torch.equal(hp.unshard(hp.shard(x, mesh, hp.P("shard"), broadcast_from=0, check_replicas=True)), x)
    assert torch.equal(hp.psum(x, ("replicate", "shard"), mesh=mesh), x)


# --- device meshes --------------------------------------------------------------------------------------------------
def of_device_mesh(rank: int) -> Any:
    made = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    mesh = hp.Mesh.from_device_mesh(made, timeout_s=20.0)
    x = torch.arange(10.0).reshape(5, 2)
    array = hp.shard(x, mesh, hp.P(("replicate", "shard")))
    part = hp.Mesh.from_device_mesh(made["shard"], timeout_s=20.0)  # this rank's row of it
    row = hp.psum(torch.tensor(float(rank)), "shard", mesh=part)
    long = init_device_mesh("cpu", (1, 4, 1), mesh_dim_names=("replicate", "shard", "tp"))
    return (
        described(mesh),
        array.local,
        hp.unshard(array),
        described(part),
        row,
        described(hp.Mesh.from_device_mesh(long, data_axes=("replicate", "shard"))),
    )


def test_device_meshes_become_meshes(pool: Any) -> None:
    x = torch.arange(10.0).reshape(5, 2)
    for rank, (mesh, local, whole, part, row, long) in enumerate(pool(4).run(of_device_mesh)):
        axes = ("replicate", "shard")
        assert mesh == (axes, (2, 2), axes, (0, 1, 2, 3), rank, "cpu", "torch")
        assert torch.equal(local, x[2 * rank : 2 * rank + 2])
        assert torch.equal(whole, x)
        mine = (0, 1) if rank < 2 else (2, 3)
        assert part == (("shard",), (2,), ("shard",), mine, rank, "cpu", "torch")
        assert row == sum(mine)
        assert long == ((*axes, "tp"), (1, 4, 1), axes, (0, 1, 2, 3), rank, "cpu", "torch")


def nameless(rank: int) -> str:
    return outcome(hp.Mesh.from_device_mesh, init_device_mesh("cpu", (2,)))


def test_a_device_mesh_without_names_is_refused(pool: Any) -> None:
    for text in pool(2).run(nameless):
        assert text.startswith("MeshError: hpfunc.Mesh.from_device_mesh: the DeviceMesh has no dim names")
        assert "mesh_dim_names" in text


# --- which mesh is meant --------------------------------------------------------------------------------------------
def test_use_mesh_nests() -> None:
    outer, inner = hp.make_mesh((1,), ("a",)), hp.make_mesh((1,), ("b",))
    with hp.use_mesh(outer):
        with hp.use_mesh(inner):
            assert hp.axis_size("b") == 1
            with pytest.raises(hp.MeshError, match="no mesh axis 'a'"):
                hp.axis_size("a")
        assert hp.axis_index("a") == 0
    with pytest.raises(hp.MeshError, match="no mesh is in use"):
        hp.axis_size("a")


def test_a_step_puts_its_mesh_in_use() -> None:
    mesh = hp.make_mesh((1,), ("shard",))
    assert hp.sharded(lambda: hp.axis_size("shard"), mesh)() == 1


# --- launchers and machines -----------------------------------------------------------------------------------------
SCRIPT = """
import sys
from pathlib import Path
import torch
import hpfunc as hp
mesh = hp.make_mesh((1, -1), ("replicate", "shard"), timeout_s=60)
x = torch.arange(6.0)
array = hp.shard(x, mesh, hp.P("shard"))
assert torch.equal(hp.unshard(array), x)
Path(sys.argv[1], str(mesh.rank)).write_text(f"{mesh}: {array.local.tolist()}")
"""


@pytest.mark.slow
@pytest.mark.processes
def test_torchrun_starts_the_world(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(script), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    for rank, half in enumerate(("[0.0, 1.0, 2.0]", "[3.0, 4.0, 5.0]")):
        assert (tmp_path / str(rank)).read_text() == f"Mesh(replicate=1, shard=2): {half}"


def machine_warnings(rank: int, per_machine: int, names: tuple[str, str]) -> list[str]:
    import warnings

    os.environ["LOCAL_WORLD_SIZE"] = str(per_machine)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hp.make_mesh((2, 2), names)
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
    return [f"{warning.category.__name__}: {warning.message}" for warning in caught]


@pytest.mark.parametrize(
    ("per_machine", "names", "warns"),
    [
        (2, ("shard", "replicate"), True),
        (2, ("replicate", "shard"), False),
        (4, ("shard", "replicate"), False),
        (1, ("shard", "replicate"), False),  # both span machines
        (2, ("fsdp", "dp"), True),
        (2, ("dp_shard", "dp_replicate"), True),
        (2, ("dp", "fsdp"), False),
        (2, ("shard", "tp"), False),
    ],
)
def test_gathers_across_machines_are_warned_of(pool: Any, per_machine: int, names: Any, warns: bool) -> None:
    for texts in pool(4).run(machine_warnings, per_machine, names):
        assert len(texts) == warns
        for text in texts:
            assert text.startswith(f"HpfuncWarning: hpfunc.make_mesh: the {names[0]!r} axis spans machines")
            assert f"make {names[0]!r} the last axis" in text


def kept(rank: int) -> bool:
    return mesh_of((2,), ("shard",)) == hp.make_mesh((2,), ("shard",), timeout_s=20.0)


def test_equal_arguments_give_equal_meshes(pool: Any) -> None:
    assert pool(2).run(kept) == [True, True]
