"""`visualize` and `num_parameters`: what is said of arrays without looking at their values."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hpfunc as hp
from tests.helpers.ranks import mesh_of_one


def array(shape: tuple[int, ...], spec: hp.P, sizes: tuple[int, ...] = (2, 4), rank: int = 0) -> hp.ShardedArray:
    names = ("replicate", "shard", "tp")[: len(sizes)]
    mesh = hp.Mesh(names, sizes, names[:2], tuple(range(prod(sizes))), rank)
    made = hp.ShardedArray(None, shape, spec, mesh)
    return made.with_local(torch.zeros(made.layout.local_shape(mesh.coordinate)))


TEXTS = {
    "rows": (
        array((7, 3), hp.P("shard")),
        """
      0:3
0:2 | ranks 0, 4 |
2:4 | ranks 1, 5 |
4:6 | ranks 2, 6 |
6:7 | ranks 3, 7 |""",
    ),
    "both": (
        array((8, 8), hp.P("replicate", "shard")),
        """
      0:2      2:4      4:6      6:8
0:4 | rank 0 | rank 1 | rank 2 | rank 3 |
4:8 | rank 4 | rank 5 | rank 6 | rank 7 |""",
    ),
    "one dim": (
        array((4,), hp.P("replicate")),
        """
  0:2                 2:4
| ranks 0, 1, 2, 3 | ranks 4, 5, 6, 7 |""".replace("  0:2                 2:4", "   0:2                2:4"),
    ),
    "no dims": (array((), hp.P()), "\n| ranks 0, 1, 2, 3, 4, 5, 6, 7 |"),
    "many": (
        array((64, 2), hp.P("shard"), (32, 16)),
        """
        0:2
0:4   | ranks 0, 16, 32, 48, ..., 496 |
4:8   | ranks 1, 17, 33, 49, ..., 497 |
8:12  | ranks 2, 18, 34, 50, ..., 498 |
12:16 | ranks 3, 19, 35, 51, ..., 499 |
...   | ...                           |
48:52 | ranks 12, 28, 44, 60, ..., 508 |""",
    ),
}


@pytest.mark.parametrize("name", [name for name in TEXTS if name != "many"])
def test_the_text_is_a_grid_of_ranks(name: str) -> None:
    given_array, grid = TEXTS[name]
    title, *lines = str(hp.visualize(given_array)).splitlines()
    assert title == f"{given_array!r} on {given_array.mesh!r}"
    assert [line.split() for line in lines] == [line.split() for line in grid.strip("\n").splitlines()]


def test_the_middle_of_a_large_grid_is_left_out() -> None:
    lines = str(hp.visualize(TEXTS["many"][0])).splitlines()
    assert len(lines) == 2 + 9
    assert "ranks 0, 16, 32, 48, ..., 496" in lines[2]
    assert set(lines[6]) <= set(". |")


def test_a_tree_is_a_table_with_its_bytes() -> None:
    tree = {"layers": [array((8, 8), hp.P("shard"))], "scale": hp.freeze(array((3,), hp.P()))}
    lines = str(hp.visualize(tree)).splitlines()
    assert lines[0] == "on Mesh(replicate=2, shard=4)"
    assert lines[2].split() == ["layers.0", "(8,", "8)", "torch.float32", "P('shard')", "256", "64"]
    assert lines[3].split() == ["scale", "(3,)", "torch.float32", "P()", "frozen", "12", "12"]
    assert lines[4].split() == ["2", "arrays", "268", "76"]


@given(st.data())
def test_each_part_is_drawn_with_the_ranks_that_hold_it(data: st.DataObject) -> None:
    sizes = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    names = list(("replicate", "shard", "tp")[: len(sizes)])
    shape = tuple(data.draw(st.lists(st.integers(0, 7), max_size=3)))
    entries: list[Any] = [None] * len(shape)
    for name in names:
        if shape and data.draw(st.booleans()):
            dim = data.draw(st.integers(0, len(shape) - 1))
            entries[dim] = (*(entries[dim] or ()), name)
    made = array(shape, hp.P(*entries), sizes)
    picture = hp.visualize(made)
    document = ET.fromstring(picture.svg)
    boxes = document.findall("{*}rect")
    cut = sorted(made.mesh.axis_size(made.spec.dim_axes(dim)) for dim in range(made.ndim))
    shown = [made.mesh.axis_size(made.spec.dim_axes(dim)) for dim in range(made.ndim) if made.spec.dim_axes(dim)][:2]
    assert len(boxes) == prod(shown) if max(cut, default=1) <= 8 else len(boxes) <= 64
    words = str(picture).replace(",", " ").split()
    if len(made.mesh.ranks) <= 8:
        assert all(str(rank) in words for rank in made.mesh.ranks)


def test_it_draws_itself_and_is_saved(tmp_path: Path) -> None:
    made = array((8, 8), hp.P("replicate", "shard"))
    picture = hp.visualize({"<w>": made})
    picture.save(tmp_path / "w.svg")
    assert (tmp_path / "w.svg").read_text() == picture.svg == picture._repr_html_()
    assert "&lt;w&gt;" in picture.svg
    assert made._repr_html_() == hp.visualize(made).svg


def test_plain_tensors_are_refused() -> None:
    with pytest.raises(hp.LeafError, match=r"hpfunc.visualize: tree has leaves that are no ShardedArray"):
        hp.visualize({"w": torch.ones(2)})


# --- counting --------------------------------------------------------------------------------------------------------
def test_parameters_are_counted_globally_and_once() -> None:
    stacked = hp.shard(torch.ones(3, 4, 2), mesh_of_one(), hp.P(None, "shard"))
    tied = array((8, 8), hp.P("shard"))
    tree = {"a": tied, "b": [tied, {"c": array((5,), hp.P())}], "plain": torch.ones(2, 2), "name": "text", "none": None}
    assert hp.num_parameters(tree) == 64 + 5 + 4
    assert hp.num_parameters(hp.unstack(stacked)) == stacked.numel() == 24
    assert hp.num_parameters(tree, "b.*") == 64 + 5
    assert hp.num_parameters(hp.freeze([tied, array((5,), hp.P())], "1"), hp.is_trainable) == 64
    with pytest.raises(hp.SpecError, match=r"hpfunc.num_parameters"):
        hp.num_parameters(tree, "layers.*")
