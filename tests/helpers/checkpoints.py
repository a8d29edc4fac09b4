"""Trees and trainings that are saved on one mesh and loaded on another."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from hypothesis import strategies as st

import hpfunc as hp
from hpfunc.checkpoint import PerRank, _format
from tests.helpers import frameworks as ops
from tests.helpers.frameworks import to_framework, to_torch
from tests.helpers.ranks import mesh_of
from tests.helpers.reference import Axes, Grid, part
from tests.helpers.strategies import entries, grids, shapes, spec
from tests.helpers.zoo import DTYPES, tensor

FORMAT_DTYPES = [getattr(torch, name) for name in _format.CODES]  # in the order of the format


def every_dtype(shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {str(dtype): tensor(shape, torch.float32, i).abs().to(dtype) for i, dtype in enumerate(FORMAT_DTYPES)}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tolist() == b.tolist()


HSDP = Grid((2, 2), ("replicate", "shard"), ("replicate", "shard"))

Cuts = tuple[Axes, ...]


def mesh_for(grid: Grid) -> hp.Mesh:
    return mesh_of(grid.sizes, grid.names, grid.data_axes)


def whole_tree(shape: tuple[int, ...], seed: int) -> dict[str, Any]:
    return {str(dtype): tensor(shape, dtype, seed + i) for i, dtype in enumerate([*DTYPES, torch.float16])}


def save(rank: int, path: str, grid: Grid, cuts: Cuts, shape: tuple[int, ...], asynchronous: bool) -> None:
    mesh = mesh_for(grid)
    whole, plain = to_framework([whole_tree(shape, 5), torch.arange(3)])
    tree = {"a": hp.shard(whole, mesh, spec(cuts)), "b": plain, "c": 0.1, "d": [True, "x"]}
    saving = hp.checkpoint.save(path, tree, asynchronous=asynchronous)
    for array in tree["a"].values():
        to_torch(array.local).zero_()  # an asynchronous save has its own copy
    saving.wait()


def load(rank: int, path: str, grid: Grid, cuts: Cuts, shape: tuple[int, ...]) -> Any:
    mesh = mesh_for(grid)
    zeros = {name: torch.zeros_like(x) for name, x in whole_tree(shape, 5).items()}
    zeros, plain = to_framework([zeros, torch.zeros(3, dtype=torch.int64)])
    like = {"a": hp.shard(zeros, mesh, spec(cuts)), "b": plain, "c": 0.0, "d": [False, ""]}
    tree = hp.checkpoint.load(path, like=like)
    assert all(not to_torch(array.local).any() for array in like["a"].values())
    assert all(array.spec == spec(cuts) for array in tree["a"].values())
    return {name: to_torch(array.local) for name, array in tree["a"].items()}, to_torch(tree["b"]), tree["c"], tree["d"]


@st.composite
def layouts(draw: Any, min_ranks: int = 1) -> tuple[Grid, Cuts, Grid, Cuts, tuple[int, ...]]:
    shape = draw(shapes())
    grid, other = draw(grids(4, min_ranks)), draw(grids(4, min_ranks))
    return grid, draw(entries(grid, len(shape))), other, draw(entries(other, len(shape))), shape


def there_and_back(pool: Any, layout: tuple[Any, ...], asynchronous: bool, saves: str, loads: str) -> None:
    """Fails unless what one framework saves comes back in the other, every bit of it."""
    grid, cuts, other, other_cuts, shape = layout
    with tempfile.TemporaryDirectory() as path:
        pool(grid.num_ranks, saves).run(save, path, grid, cuts, shape, asynchronous)
        ranks = pool(other.num_ranks, loads).run(load, path, other, other_cuts, shape)
    for rank, (arrays, plain, number, values) in enumerate(ranks):
        for name, whole in whole_tree(shape, 5).items():
            assert torch.equal(arrays[name], whole[part(shape, other_cuts, other, rank)])
        assert torch.equal(plain, torch.arange(3))
        assert (number, values) == (0.1, [True, "x"])


def params_of(mesh: hp.Mesh, seed: int = 0, shape: tuple[int, int] = (7, 5)) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(shape, generator=generator, dtype=torch.float64)
    tree = {"w": w, "b": torch.ones(shape[1], dtype=torch.float64)}
    return hp.shard(to_framework(tree), mesh, hp.P("shard"))


class Training:
    """A small model, its optimizer, its random numbers and its data."""

    def __init__(self, mesh: hp.Mesh, seed: int) -> None:
        self.optimizer = hp.optim.adamw(0.1)
        unit = hp.unit(lambda layer, x: ops.tanh(ops.matmul(x, layer["w"]) + layer["b"]))
        self.generator = torch.Generator().manual_seed(seed)
        params = [params_of(mesh, seed + layer, (7, 7)) for layer in range(3)]
        self.state = {"params": params, "opt": self.optimizer.init(params), "position": 0}

        def step_fn(params: Any, opt_state: Any, x: torch.Tensor) -> Any:
            def loss_fn(params: Any) -> torch.Tensor:
                h = x
                for layer in params:
                    h = unit(layer, h)
                return h.square().mean()

            loss, grads = hp.value_and_grad(loss_fn)(params)
            updates, opt_state = self.optimizer.update(grads, opt_state, params)
            return hp.apply_updates(params, updates), opt_state, hp.pmean(loss, mesh.data_axes)

        self.step = hp.sharded(step_fn, mesh, donate_argnums=(0, 1))
        self.mesh = mesh

    def run(self, num_steps: int) -> list[float]:
        losses = []
        for _ in range(num_steps):
            position = self.state["position"]
            batches = torch.randn(12, 7, generator=torch.Generator().manual_seed(position), dtype=torch.float64)
            x = batches.chunk(self.mesh.size)[self.mesh.axis_index(self.mesh.axis_names)]
            params, opt, loss = self.step(self.state["params"], self.state["opt"], to_framework(x))
            self.state = {"params": params, "opt": opt, "position": position + 1}
            losses.append(to_torch(loss).item())
        return losses

    def tree(self) -> dict[str, Any]:
        return self.state | {"random": PerRank(to_framework(self.generator.get_state()))}


def train_and_save(rank: int, path: str, shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    training = Training(mesh_of(shape, names), 0)
    training.run(3)
    torch.rand(rank + 1, generator=training.generator)
    saving = hp.checkpoint.save(path, training.tree(), asynchronous=True)
    losses = training.run(3)  # goes on while the thread writes, and donates what is saved
    saving.wait()
    return losses, torch.rand(1, generator=training.generator), to_torch(hp.unshard(training.state["params"]))


def resume(rank: int, path: str, shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    training = Training(mesh_of(shape, names), 1)
    fresh = training.tree()
    allow = ["misfit"] if len(shape) == 1 and shape != (4,) else []
    loaded = hp.checkpoint.load(path, fresh, allow=allow)
    training.generator.set_state(to_torch(loaded.pop("random").value))
    training.state = loaded
    assert loaded["opt"].step == 3
    return training.run(3), torch.rand(1, generator=training.generator), to_torch(hp.unshard(training.state["params"]))
