"""`visualize`: how arrays lie on their mesh, as text, HTML and SVG."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import optree

from .array import ShardedArray, check_sharded, is_sharded
from .tree import dotted_paths

_MOST = 8  # rows, columns, and ranks of a cell that are shown; more are left out in the middle
_LINE, _HEIGHT, _LETTER = 18, 40, 8  # pixels


@dataclass(frozen=True)
class _Grid:
    """An array as a table: two of its dims, the first ones that are cut.

    Attributes:
        dims: the dims of the rows and of the columns, None where there is no such dim.
        rows: what each row holds along its dim.
        columns: what each column holds along its dim.
        ranks: by row and column, which ranks hold the cell.
    """

    dims: tuple[int | None, int | None]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    ranks: dict[tuple[int, int], list[int]]

    @classmethod
    def of(cls, array: ShardedArray) -> _Grid:
        """Returns the grid of an array. An array of one dim is one row, one without dims is one cell."""
        layout, mesh = array.layout, array.mesh
        dims = sorted(range(array.ndim), key=lambda dim: (not array.spec.dim_axes(dim), dim))[:2]
        row, column = (None, None, *sorted(dims))[-2:]
        places: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        held: dict[tuple[int, int], tuple[slice, ...]] = {}
        for rank, coordinate in zip(mesh.ranks, mesh.coordinates(), strict=True):
            place = tuple(
                0 if dim is None else mesh.index_of(coordinate, array.spec.dim_axes(dim)) for dim in (row, column)
            )
            places[place[0], place[1]].append(rank)
            held[place[0], place[1]] = layout.local_slices(coordinate)

        def ranges(dim: int | None, which: int) -> tuple[str, ...]:
            if dim is None:
                return ("",)
            parts = {place[which]: slices[dim] for place, slices in held.items()}
            return tuple(f"{part.start}:{part.stop}" for _, part in sorted(parts.items()))

        return cls((row, column), ranges(row, 0), ranges(column, 1), dict(places))


class Picture:
    """How arrays lie on their mesh. `str` is a text; in a notebook it is drawn.

    Attributes:
        text: the grid of one array, or a table of a tree.
        svg: the grids as an SVG document.
    """

    def __init__(self, named: Sequence[tuple[str, ShardedArray]]) -> None:
        self._named = named

    @cached_property
    def _grids(self) -> list[_Grid]:
        return [_Grid.of(array) for _, array in self._named]

    @cached_property
    def text(self) -> str:
        """See `Picture`."""
        if len(self._named) == 1 and not self._named[0][0]:
            return "\n".join(_text_grid(self._named[0][1], self._grids[0]))
        return "\n".join(_table(self._named))

    @cached_property
    def svg(self) -> str:
        """See `Picture`."""
        pairs = zip(self._named, self._grids, strict=True)
        return _document([(f"{name}: " * bool(name) + _title(array, grid), grid) for (name, array), grid in pairs])

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.svg

    def save(self, path: str | Path) -> None:
        """Writes the SVG document into a file."""
        Path(path).write_text(self.svg)


def visualize(tree: Any) -> Picture:
    """Returns how an array, or each array of a tree, lies on its mesh: which ranks hold which part.

    Args:
        tree: a `ShardedArray` or a pytree of them.

    Raises:
        LeafError: a leaf is not a `ShardedArray`.

    Communication: none; the picture is the same on all ranks but for the bytes, which are those of this rank.

    Source: `jax.debug.visualize_array_sharding`.

    >>> import torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> hpfunc.visualize(hpfunc.shard(torch.ones(4, 2), mesh, hpfunc.P("shard")))
    ShardedArray(shape=(4, 2), dtype=torch.float32, spec=P('shard')) on Mesh(shard=1)
          0:2
    0:4 | rank 0 |
    """
    check_sharded("hpfunc.visualize", "tree", tree, "pass sharded arrays only")
    arrays = optree.tree_leaves(tree, is_leaf=is_sharded)
    return Picture(list(zip(dotted_paths(tree, is_sharded), arrays, strict=True)))


ShardedArray._drawn = lambda array: visualize(array).svg


def _title(array: ShardedArray, grid: _Grid) -> str:
    shown = f"; rows: dim {grid.dims[0]}, columns: dim {grid.dims[1]}" if array.ndim > 2 else ""
    return f"{array!r} on {array.mesh!r}{shown}"


def _ranks(ranks: Sequence[int]) -> str:
    shown = list(map(str, ranks))
    if len(shown) > _MOST:
        shown = [*shown[: _MOST // 2], "...", shown[-1]]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(shown)}"


def _chosen(count: int) -> list[int | None]:
    """Returns which of so many rows or columns are shown; None stands for those that are left out."""
    if count <= _MOST:
        return list(range(count))
    return [*range(_MOST // 2), None, *range(count - _MOST // 2, count)]


def _text_grid(array: ShardedArray, grid: _Grid) -> list[str]:
    columns = _chosen(len(grid.columns))
    rows = [["", *("..." if c is None else grid.columns[c] for c in columns)]]
    for r in _chosen(len(grid.rows)):
        if r is None:
            rows.append(["..."] * (len(columns) + 1))
        else:
            rows.append([grid.rows[r], *("..." if c is None else _ranks(grid.ranks[r, c]) for c in columns)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns) + 1)]
    head, *body = [[text.ljust(width) for text, width in zip(row, widths, strict=True)] for row in rows]
    lines = [f"{row[0]} | {' | '.join(row[1:])} |".lstrip() for row in body]
    return [_title(array, grid), *(["   ".join(head).rstrip()] if any(grid.columns) else []), *lines]


def _table(named: Sequence[tuple[str, ShardedArray]]) -> list[str]:
    rows = [("array", "shape", "dtype", "spec", "bytes", "here")]
    total, here = 0, 0
    for name, array in named:
        local = int(array._value.nbytes)
        total, here = total + array.nbytes, here + local
        frozen = " frozen" * array.is_frozen
        rows.append(
            (name, str(array.shape), str(array.dtype), f"{array.spec}{frozen}", f"{array.nbytes:,}", f"{local:,}")
        )
    rows.append((f"{len(named)} arrays", "", "", "", f"{total:,}", f"{here:,}"))
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    aligned = [
        "  ".join(t.rjust(w) if i > 3 else t.ljust(w) for i, (t, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    meshes = dict.fromkeys(repr(array.mesh) for _, array in named)
    return [f"on {' and '.join(meshes)}", *aligned]


def _document(grids: Sequence[tuple[str, _Grid]]) -> str:
    parts, top, width = list[str](), 0, 0
    for title, grid in grids:
        rows, columns = _chosen(len(grid.rows)), _chosen(len(grid.columns))
        cell = _LETTER * max(len(_ranks(ranks)) for ranks in grid.ranks.values()) + 12
        left, first = _LETTER * max(map(len, grid.rows)) + 4, top + 2 * _LINE
        parts.append(_text(0, top + _LINE - 4, title))
        for j, c in enumerate(columns):
            parts.append(_text(left + j * cell + 4, first - 4, "..." if c is None else grid.columns[c]))
        for i, r in enumerate(rows):
            y = first + i * _HEIGHT
            parts.append(_text(0, y + _HEIGHT // 2 + 4, "..." if r is None else grid.rows[r]))
            for j, c in enumerate(columns):
                if r is not None and c is not None:
                    hue = (r * len(grid.columns) + c) * 360 // len(grid.ranks)
                    parts.append(_box(left + j * cell, y, cell, hue, _ranks(grid.ranks[r, c])))
        width = max(width, left + len(columns) * cell, _LETTER * len(title))
        top = first + len(rows) * _HEIGHT + _LINE
    size = f'viewBox="0 0 {width} {top}" width="{width}" height="{top}"'
    style = 'font-family="monospace" font-size="12" fill="currentColor"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{"".join(parts)}</svg>'


def _text(x: int, y: int, text: str) -> str:
    return f'<text x="{x}" y="{y}">{html.escape(text)}</text>'


def _box(x: int, y: int, width: int, hue: int, text: str) -> str:
    place = f'x="{x}" y="{y}" width="{width - 2}" height="{_HEIGHT - 2}" rx="3"'
    label = f'<text x="{x + 6}" y="{y + _HEIGHT // 2 + 4}" fill="black">{html.escape(text)}</text>'
    return f'<rect {place} fill="hsl({hue},60%,80%)"/>{label}'
