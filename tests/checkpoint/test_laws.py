"""What is saved on one mesh comes back on any other, every bit of it, and no rank reads what it does not need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

import hpfunc as hp
from hpfunc.checkpoint import _read
from tests.helpers.checkpoints import HSDP, Cuts, layouts, mesh_for, there_and_back
from tests.helpers.reference import Grid, part
from tests.helpers.strategies import spec

FSDP3 = Grid((3,), ("shard",), ("shard",))


@settings(phases=[Phase.explicit, Phase.generate], deadline=None, max_examples=10)
@given(layouts(), st.booleans())
@example((FSDP3, (("shard",), ()), HSDP, ((), ("shard",)), (5, 7)), False)
@example((HSDP, (("shard", "replicate"),), FSDP3, (("shard",),), (2,)), True)  # empty parts on both sides
def test_any_layout_comes_back_in_any_other(pool: Any, layout: tuple[Any, ...], asynchronous: bool) -> None:
    there_and_back(pool, layout, asynchronous, "torch", "torch")


def read_part(rank: int, path: str, grid: Grid, cuts: Cuts) -> tuple[int, bool]:
    mesh = mesh_for(grid)
    like = {"w": hp.shard(torch.zeros(4, 1 << 20), mesh, spec(cuts))}
    read = 0

    class Counted(_read.Reader):
        def __exit__(self, *args: Any) -> None:
            nonlocal read
            read += self.bytes_read
            super().__exit__(*args)

    from hpfunc.checkpoint import _load

    _load.Reader, original = Counted, _load.Reader
    try:
        tree = hp.checkpoint.load(path, like=like)
    finally:
        _load.Reader = original
    return read, torch.equal(tree["w"].local, large()[part((4, 1 << 20), cuts, grid, rank)])


def large() -> torch.Tensor:
    return torch.arange(4 << 20, dtype=torch.float32).reshape(4, 1 << 20)


def save_large(rank: int, path: str) -> None:
    hp.checkpoint.save(path, {"w": hp.shard(large(), mesh_for(HSDP), hp.P("shard"))})


def test_each_rank_reads_the_blocks_of_its_own_part(pool: Any, tmp_path: Path) -> None:
    pool(4).run(save_large, str(tmp_path))
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors")) < 17 << 20  # replicas are written once
    for cuts in (("shard",), ()), ((), ("shard",)):
        for read, is_right in pool(4).run(read_part, str(tmp_path), Grid((4,), ("shard",), ("shard",)), cuts):
            assert is_right
            assert read == 4 << 20  # of 16 MiB


@given(st.data())
def test_blocks_are_those_that_hold_the_box(data: Any) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), max_size=4).map(tuple))
    box = []
    for n in shape:
        start = data.draw(st.integers(0, n - 1))
        box.append(slice(start, data.draw(st.integers(start + 1, n))))
    item, block = data.draw(st.sampled_from([1, 2, 8])), data.draw(st.integers(1, 9))
    places = torch.arange(torch.Size(shape).numel() * item).reshape(*shape, item)[tuple(box)]
    assert _read.blocks_of(shape, tuple(box), item, block) == sorted(set((places.flatten() // block).tolist()))
