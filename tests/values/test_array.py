"""`ShardedArray` as a value: immutable, a pytree node, its handles; and the options of `shard`."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch

import hpfunc as hp
from tests.helpers.ranks import mesh_of, mesh_of_one, outcome
from tests.helpers.zoo import Box, assert_same, tensor, trees


@pytest.fixture
def array() -> hp.ShardedArray:
    return hp.shard(tensor((4, 3), torch.float32), mesh_of_one(), hp.P("shard"))


# --- a value --------------------------------------------------------------------------------------------------------
def test_what_it_says_about_itself(array: hp.ShardedArray) -> None:
    assert (array.shape, array.dtype, array.spec) == ((4, 3), torch.float32, hp.P("shard"))
    assert array.mesh is array.layout.mesh
    assert repr(array) == "ShardedArray(shape=(4, 3), dtype=torch.float32, spec=P('shard'))"
    assert not array.is_donated


@pytest.mark.parametrize("name", ["shape", "spec", "mesh", "layout", "local", "dtype", "new_attribute"])
def test_nothing_can_be_set(array: hp.ShardedArray, name: str) -> None:
    with pytest.raises(AttributeError, match="immutable"):
        setattr(array, name, None)


def test_its_memory_is_its_own() -> None:
    x = tensor((4, 3))
    array = hp.shard(x, mesh_of_one(), hp.P("shard"))
    want = x.clone()
    x.zero_()
    assert_same(array.local, want)
    hp.unshard(array).zero_()
    assert_same(array.local, want)


def test_with_local_keeps_the_layout(array: hp.ShardedArray) -> None:
    other = array.with_local(torch.zeros(4, 3))
    assert other.layout is array.layout
    assert other.local.sum() == 0
    assert array.local.sum() != 0


# --- a pytree -------------------------------------------------------------------------------------------------------
def test_tree_map_sees_local_tensors(array: hp.ShardedArray) -> None:
    doubled = optree.tree_map(lambda t: 2 * t, {"w": array})
    assert isinstance(doubled["w"], hp.ShardedArray)
    assert doubled["w"].layout is array.layout
    assert_same(doubled["w"].local, 2 * array.local)


def test_paths_name_the_local_tensor(array: hp.ShardedArray) -> None:
    (accessor,) = optree.tree_accessors({"w": [array]})
    assert accessor.codify("params") == "params['w'][0].local"
    assert accessor({"w": [array]}) is array.local


def test_arrays_of_other_layouts_have_another_structure(array: hp.ShardedArray) -> None:
    same = hp.shard(tensor((4, 3)), mesh_of_one(), hp.P("shard"))
    turned = hp.shard(tensor((4, 3)), mesh_of_one(), hp.P(None, "shard"))
    assert optree.tree_structure(array) == optree.tree_structure(same)
    assert optree.tree_structure(array) != optree.tree_structure(turned)
    with pytest.raises(ValueError, match="node data"):
        optree.tree_map(torch.add, array, turned)


def test_unflatten_takes_any_child(array: hp.ShardedArray) -> None:
    described = optree.tree_map(lambda t: tuple(t.shape), array)
    assert described.local == (4, 3)
    assert repr(described) == "ShardedArray(shape=(4, 3), dtype=?, spec=P('shard'))"


@pytest.mark.parametrize("name", trees())
def test_specs_follow_any_tree(name: str) -> None:
    tree, mesh = trees()[name], mesh_of_one()
    specs = optree.tree_map(lambda x: hp.P(*["shard"][: x.dim()]), tree)
    arrays = hp.shard(tree, mesh, specs)
    found = optree.tree_leaves(arrays, is_leaf=lambda x: isinstance(x, hp.ShardedArray))
    assert [a.spec for a in found] == optree.tree_leaves(specs)


def test_one_spec_stands_for_a_subtree_and_spares_scalars() -> None:
    tree = {"a": {"w": tensor((4, 2)), "s": tensor(())}, "b": Box(tensor((4,)))}
    arrays = hp.shard(tree, mesh_of_one(), {"a": hp.P("shard"), "b": None})
    assert (arrays["a"]["w"].spec, arrays["a"]["s"].spec, arrays["b"].content.spec) == (hp.P("shard"), hp.P(), hp.P())
    with pytest.raises(hp.SpecError, match="more entries"):
        hp.shard(tensor(()), mesh_of_one(), hp.P("shard"))


# --- donation -------------------------------------------------------------------------------------------------------
def test_a_donated_array_is_gone(array: hp.ShardedArray) -> None:
    def replaced(w: hp.ShardedArray, kept: hp.ShardedArray) -> Any:
        assert w.is_donated
        assert not kept.is_donated
        return w.with_local(w.local + 1), kept

    kept = array.with_local(torch.ones(4, 3))
    step = hp.sharded(replaced, array.mesh, donate_argnums=0)
    want = array.local + 1
    after, same = step(array, kept)
    assert_same(after.local, want)
    assert_same(same.local, torch.ones(4, 3))
    assert_same(kept.local, torch.ones(4, 3))
    assert repr(array) == "ShardedArray(shape=(4, 3), spec=P('shard'), donated to hpfunc.sharded(replaced))"
    for use in (lambda: array.local, lambda: array.dtype, lambda: hp.unshard(array), lambda: optree.tree_leaves(array)):
        with pytest.raises(hp.DonatedError, match=r"was donated to hpfunc.sharded\(replaced\)"):
            use()
    with pytest.raises(hp.DonatedError):
        step(array, kept)
    after, _ = step(after, kept)  # what came out may go in again
    assert_same(after.local, want + 1)


def test_an_array_that_is_returned_as_it_came_survives_its_donation(array: hp.ShardedArray) -> None:
    want = array.local.clone()
    after = hp.sharded(lambda w: w, array.mesh, donate_argnums=0)(array)
    assert_same(after.local, want)
    with pytest.raises(hp.DonatedError):
        _ = array.local


def test_a_step_that_fails_leaves_what_was_not_donated(array: hp.ShardedArray) -> None:
    def fails(w: hp.ShardedArray, kept: hp.ShardedArray) -> Any:
        raise KeyError("no such batch")

    want, kept = array.local.clone(), array.with_local(torch.ones(4, 3))
    with pytest.raises(KeyError, match="no such batch"):
        hp.sharded(fails, array.mesh, donate_argnums=0)(array, kept)
    assert_same(kept.local, torch.ones(4, 3))
    assert_same(array.local, want)  # nothing had consumed it yet


# --- options of shard -----------------------------------------------------------------------------------------------
def broadcast(rank: int, source: int) -> Any:
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    mine = {"w": tensor((5, 2), torch.bfloat16, rank), "s": tensor((), torch.int64, rank)}
    before = {key: x.clone() for key, x in mine.items()}
    arrays = hp.shard(mine, mesh, hp.P("shard"), broadcast_from=source)
    assert_same(mine, before)
    return hp.unshard(arrays)


@pytest.mark.parametrize("source", [0, 3])
def test_broadcast_from_takes_the_values_of_one_rank(pool: Any, source: int) -> None:
    want = {"w": tensor((5, 2), torch.bfloat16, source), "s": tensor((), torch.int64, source)}
    for got in pool(4).run(broadcast, source):
        assert_same(got, want)


def refused(rank: int) -> list[str]:
    mesh, x = mesh_of((2,), ("shard",)), torch.ones(4)
    return [
        outcome(hp.shard, x, mesh, hp.P("shard"), broadcast_from=7),
        outcome(hp.shard, {"w": 1.0}, mesh, hp.P("shard")),
        outcome(hp.shard, hp.shard(x, mesh, hp.P()), mesh, hp.P("shard")),
        outcome(hp.shard, {"w": x}, mesh, {"v": hp.P("shard")}),
        outcome(hp.shard, {"w": x}, mesh, {"w": "shard"}),
    ]


def test_what_cannot_be_sharded(pool: Any) -> None:
    first, second = pool(2).run(refused)
    assert first == second
    kinds = [text.split(":")[0] for text in first]
    assert kinds == ["SpecError", "LeafError", "LeafError", "SpecError", "SpecError"], first
