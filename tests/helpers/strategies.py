"""What hypothesis draws: meshes, shapes, specs, dtypes."""

from __future__ import annotations

import itertools
import math
from typing import Any

from hypothesis import strategies as st

import hpfunc as hp
from tests.helpers.reference import Axes, Grid
from tests.helpers.zoo import DTYPES

POOL_SIZES = (1, 2, 3, 4, 6, 8)
NAMES = (("shard",), ("replicate", "shard"), ("shard", "tp"), ("tp", "shard"), ("replicate", "shard", "tp"))


def grids(max_ranks: int = 8, min_ranks: int = 1) -> st.SearchStrategy[Grid]:
    """Meshes of 1 to 3 axes, axes of size 1 among them, with any choice of data axes.

    The number of ranks is drawn first: there are more meshes of many ranks, and they take longer.
    """
    found: dict[int, set[Grid]] = {}
    for names in NAMES:
        for sizes in itertools.product((1, 2, 3, 4, 6, 8), repeat=len(names)):
            if math.prod(sizes) in POOL_SIZES and min_ranks <= math.prod(sizes) <= max_ranks:
                data = {names[:1], names, tuple(name for name in names if name != "tp")}
                found.setdefault(math.prod(sizes), set()).update(Grid(sizes, names, axes) for axes in data)
    by_size = [sorted(found[n], key=lambda g: (len(g.sizes), g.sizes, g.names, g.data_axes)) for n in sorted(found)]
    return st.sampled_from(by_size).flatmap(st.sampled_from)


def axes_of(grid: Grid, min_size: int = 1) -> st.SearchStrategy[Axes]:
    """Some axes of a mesh, in any order."""
    return st.permutations(grid.names).flatmap(
        lambda names: st.integers(min_size, len(names)).map(lambda k: tuple(names[:k]))
    )


def shapes(max_dims: int = 3, max_size: int = 9) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes: no dims, dims of size 0 or 1 in every second of them, dims that do not divide."""
    some, edges = st.integers(0, max_size), st.sampled_from([0, 1, 1, min(2, max_size), max_size])
    return st.lists(some | edges, max_size=max_dims).map(tuple)


@st.composite
def entries(draw: Any, grid: Grid, ndim: int) -> tuple[Axes, ...]:
    """For each dim the axes that cut it: any, each at most once, in any order."""
    names = draw(st.permutations(grid.names))
    places = draw(st.lists(st.integers(-1, ndim - 1), min_size=len(names), max_size=len(names)))
    return tuple(tuple(n for n, p in zip(names, places, strict=True) if p == dim) for dim in range(ndim))


def spec(cuts: tuple[Axes, ...], unreduced: Axes = ()) -> hp.P:
    """The `P` of these entries, in its shortest form."""
    short: list[Any] = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in cuts]
    while short and short[-1] is None:
        short.pop()
    return hp.P(*short, unreduced=unreduced)


dtypes = st.sampled_from(DTYPES)
float_dtypes = st.sampled_from([dtype for dtype in DTYPES if dtype.is_floating_point])
seeds = st.integers(0, 1000)

KINDS = ("psum", "pmean", "pvary", "all_gather", "psum_scatter", "all_to_all", "ppermute")


@st.composite
def calls(
    draw: Any, kinds: tuple[str, ...] = KINDS, meshes: st.SearchStrategy[Grid] | None = None
) -> tuple[Grid, Axes, str, tuple[int, ...], dict[str, Any]]:
    """A mesh, axes of it, a collective, a shape that it takes, and its further arguments."""
    grid, kind = draw(grids() if meshes is None else meshes), draw(st.sampled_from(kinds))
    axes = draw(axes_of(grid))
    n, shape, options = grid.size(axes), draw(shapes(max_size=4)), {}
    tiled = draw(st.booleans())
    if kind == "all_gather":
        dims = len(shape) if tiled and shape else len(shape) + 1
        tiled = tiled and bool(shape)
        options = {"dim": draw(st.integers(-dims, dims - 1)), "tiled": tiled}
    elif kind == "psum_scatter":
        shape = shape or (1,)
        dim = draw(st.integers(-len(shape), len(shape) - 1))
        shape = resized(shape, dim, n * shape[dim] if tiled else n)
        options = {"scatter_dim": dim, "tiled": tiled}
    elif kind == "all_to_all":
        shape = shape or (1,)
        split, concat = (draw(st.integers(0, len(shape) - 1)) for _ in range(2))
        shape = resized(shape, split, n * shape[split] if tiled else n)
        options = {"split_dim": split, "concat_dim": concat, "tiled": tiled}
    elif kind == "ppermute":
        sources, targets = (draw(st.permutations(range(n))) for _ in range(2))
        options = {"perm": list(zip(sources, targets, strict=True))[: draw(st.integers(0, n))]}
    return grid, axes, kind, shape, options


def resized(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    sizes = list(shape)
    sizes[dim] = size
    return tuple(sizes)
