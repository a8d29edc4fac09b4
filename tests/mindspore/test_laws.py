"""The laws of named-axis collectives and of whole arrays, on MindSpore: the judge is that of `tests/transforms`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import hpfunc as hp
from tests.helpers.frameworks import needs_mindspore, to_framework, to_torch
from tests.helpers.ranks import Pool, mesh_of
from tests.helpers.reference import Axes, Grid, as_numpy, expected, transposed
from tests.helpers.strategies import KINDS, calls, float_dtypes, grids, seeds
from tests.helpers.zoo import assert_same, tensor

pytestmark = [pytest.mark.processes, needs_mindspore]
ON_FOUR = grids(4, 4)
EXAMPLES = settings(max_examples=40, phases=[Phase.explicit, Phase.generate])


def called(
    rank: int, grid: Grid, axes: Axes, kind: str, options: dict[str, Any], xs: list[torch.Tensor]
) -> torch.Tensor:
    mesh = mesh_of(grid.sizes, grid.names, grid.data_axes)
    return to_torch(getattr(hp, kind)(to_framework(xs[rank]), axes, mesh=mesh, **options))


@EXAMPLES
@given(
    calls((*KINDS, "pmax", "pmin"), ON_FOUR),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64]),
    seeds,
)
def test_collectives_are_those_of_numpy(pool: Callable[..., Pool], call: Any, dtype: torch.dtype, seed: int) -> None:
    grid, axes, kind, shape, options = call
    if kind == "pmean":  # a quotient: MindSpore makes it float32 for int64, and divides no bfloat16 on the CPU
        dtype = torch.float64
    xs = [tensor(shape, dtype, seed + rank) for rank in range(grid.num_ranks)]
    for rank, got in enumerate(pool(4).run(called, grid, axes, kind, options, xs)):
        want = expected(kind, as_numpy(xs), grid, rank, axes, options)
        assert_same(got, torch.from_numpy(np.array(want)).to(dtype))


def pulled_back(
    rank: int, grid: Grid, axes: Axes, kind: str, options: dict[str, Any], xs: Any, ys: Any
) -> torch.Tensor:
    import mindspore

    x, y = to_framework(xs[rank]), to_framework(ys[rank])
    with hp.use_mesh(mesh_of(grid.sizes, grid.names, grid.data_axes)):
        pull = mindspore.ops.GradOperation(sens_param=True)(lambda t: getattr(hp, kind)(t, axes, **options))
        return to_torch(pull(x, y))


@EXAMPLES
@given(calls(meshes=ON_FOUR), float_dtypes.filter(lambda dtype: dtype != torch.bfloat16), seeds)
def test_gradients_are_those_of_shard_map(pool: Callable[..., Pool], call: Any, dtype: torch.dtype, seed: int) -> None:
    grid, axes, kind, shape, options = call
    ranks = range(grid.num_ranks)
    xs = [tensor(shape, dtype, seed + rank) for rank in ranks]
    out = expected(kind, as_numpy(xs), grid, 0, axes, options)
    ys = [tensor(np.shape(out), dtype, seed + 100 + rank) for rank in ranks]
    for rank, got in enumerate(pool(4).run(pulled_back, grid, axes, kind, options, xs, ys)):
        want = np.array(transposed(kind, as_numpy(ys), grid, rank, axes, options))
        assert_same(got, torch.from_numpy(want).to(dtype))


def there_and_back(rank: int, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    array = hp.shard(to_framework(whole), mesh, hp.P("shard"))
    moved = hp.reshard(array, hp.P(None, ("replicate", "shard")))
    straight, back = to_torch(hp.unshard(array)), to_torch(hp.unshard(moved, mesh.axis_names))
    if whole.dtype == torch.bool:
        with pytest.raises(hp.LeafError, match="cannot be added up"):
            hp.reduce(to_framework(whole), mesh, hp.P("shard"))
        return straight, back, None
    return straight, back, to_torch(hp.unshard(hp.reduce(to_framework(whole), mesh, hp.P("shard"))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(8, 4), (7, 5), (1, 3), (0, 2)])
def test_arrays_go_there_and_back(pool: Callable[..., Pool], dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    whole = tensor(shape, dtype, 3)
    for straight, moved, summed in pool(4).run(there_and_back, whole):
        assert_same(straight, whole)
        assert_same(moved, whole)
        if summed is not None:
            assert_same(summed, 4 * whole)
