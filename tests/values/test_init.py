"""`init` builds what ``shard(init_fn())`` builds, and never holds the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import nn

import hpfunc as hp
from hpfunc._values.array import is_sharded
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.ranks import mesh_of, outcome
from tests.helpers.zoo import Linear, assert_same


# --- what users write -----------------------------------------------------------------------------------------------
def nested() -> Any:
    layers = [{"w": torch.randn(4, 6) * 0.02, "b": torch.zeros(6)} for _ in range(2)]
    return {"embed": torch.empty(7, 4).normal_(std=0.1), "layers": layers, "scale": torch.ones(()), "head": None}


def by_nn_init() -> Any:
    w, q = torch.empty(4, 6), torch.empty(5, 5, dtype=torch.float64)
    nn.init.xavier_uniform_(w)
    nn.init.kaiming_uniform_(q, a=2.0)
    return Linear(w, nn.init.orthogonal_(torch.empty(5, 5))), q, nn.init.eye_(torch.empty(3, 4))


def of_modules() -> Any:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))
    return dict(model.named_parameters())


def in_place() -> Any:
    w = torch.zeros(4, 4)
    w[1:3].uniform_()
    w.fill_diagonal_(1.0)
    w.mul_(0.5).add_(torch.arange(4.0))
    b = torch.empty(4)
    b.copy_(w.sum(1))
    return {"w": w, "b": b}


def tied() -> Any:
    w = torch.randn(6, 4)
    return {"embed": w, "head": w, "first": w[:2], "turned": w.t(), "again": w.clone()}


def of_other_dtypes() -> Any:
    return {
        "bf16": torch.randn(5, 3).to(torch.bfloat16),
        "ints": torch.arange(9).reshape(3, 3),
        "perm": torch.randperm(7),
        "mask": torch.ones(4, 4, dtype=torch.bool).tril(),
        "split": list(torch.randn(6, 2).split(3)),
    }


def with_generator() -> Any:
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(3, generator=generator), torch.rand(5, 2, generator=generator)]


def seeded_for_each_layer() -> Any:
    found = [torch.randn(3)]
    for layer in range(3):
        torch.manual_seed(layer)
        found.append(torch.randn(4, 2))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        found.append(torch.randn(2))
    return [*found, torch.randn(3)]


def of_another_default_dtype() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = nn.Linear(4, 3)
    finally:
        torch.set_default_dtype(before)
    return [model.weight, model.bias, torch.ones(3)]


CONSTANT = torch.arange(8.0)


def around_a_constant() -> Any:
    return {"scaled": CONSTANT * torch.rand(8), "itself": CONSTANT}


def unused_draws() -> Any:
    torch.randn(100)
    w = torch.randn(4)
    torch.randn(50)
    return w


FUNCTIONS = [
    nested,
    by_nn_init,
    of_modules,
    in_place,
    tied,
    of_other_dtypes,
    with_generator,
    seeded_for_each_layer,
    of_another_default_dtype,
    around_a_constant,
    unused_draws,
]


def both_ways(rank: int, size: int, init_fn: Callable[[], Any]) -> Any:
    mesh = mesh_of((size,), ("shard",))
    torch.manual_seed(1)
    wanted = hp.shard(init_fn(), mesh, hp.P("shard"))
    wanted_next = torch.rand(3)
    torch.manual_seed(1)
    got = hp.init(init_fn, mesh, hp.P("shard"))
    return (locals_of(wanted), shapes_of(wanted), wanted_next), (locals_of(got), shapes_of(got), torch.rand(3))


def locals_of(arrays: Any) -> Any:
    return optree.tree_map(lambda a: a.local, arrays, is_leaf=is_sharded)


def shapes_of(arrays: Any) -> Any:
    return optree.tree_map(lambda a: (a.shape, str(a.spec)), arrays, is_leaf=is_sharded)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("init_fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_init_is_shard_of_the_result(pool: Any, init_fn: Callable[[], Any], size: int) -> None:
    for (wanted, shapes, wanted_next), (got, got_shapes, got_next) in pool(size).run(both_ways, size, init_fn):
        assert_same(got, wanted)
        assert got_shapes == shapes
        assert_same(got_next, wanted_next)  # the generator was left in the same state


def with_a_tree_of_specs(rank: int) -> Any:
    mesh = mesh_of((2,), ("shard",))
    specs = {"embed": hp.P(None, "shard"), "layers": hp.P("shard"), "scale": hp.P(), "head": None}
    return shapes_of(hp.init(nested, mesh, specs))


def test_specs_are_a_prefix_of_the_result(pool: Any) -> None:
    layer = {"w": ((4, 6), "P('shard')"), "b": ((6,), "P('shard')")}
    wanted = {"embed": ((7, 4), "P(None, 'shard')"), "layers": [layer, layer], "scale": ((), "P()"), "head": None}
    assert pool(2).run(with_a_tree_of_specs) == [wanted] * 2


# --- memory ---------------------------------------------------------------------------------------------------------


NUM_LEAVES, LEAF_BYTES = 8, 1 << 20


def big() -> Any:
    return [torch.empty(1 << 10, 1 << 8).normal_() * 0.02 for _ in range(NUM_LEAVES)]


def peaks(rank: int) -> tuple[int, int, int]:
    mesh = mesh_of((4,), ("shard",))
    hp.init(lambda: torch.ones(4), mesh, hp.P("shard"))  # groups are made
    with LiveBytes() as deferred:
        kept = hp.init(big, mesh, hp.P("shard"))
        left = deferred.live()
    torch.manual_seed(0)  # ranks give the same values
    with LiveBytes() as plain:
        hp.shard(big(), mesh, hp.P("shard"))
    assert len(kept) == NUM_LEAVES
    return deferred.peak, left, plain.peak


def test_about_one_leaf_is_whole_at_a_time(pool: Any) -> None:
    shards = NUM_LEAVES * LEAF_BYTES // 4
    for deferred, left, plain in pool(4).run(peaks):
        assert shards <= left <= 1.01 * shards
        # `normal_() * 0.02` holds two whole leaves for a moment, whoever runs it.
        assert deferred <= shards + 2 * LEAF_BYTES + (1 << 16)
        assert plain >= NUM_LEAVES * LEAF_BYTES


def test_the_count_of_live_bytes_sees_what_is_kept() -> None:
    with LiveBytes() as mode:
        kept = [torch.zeros(256), torch.zeros(256)[:1]]
        torch.zeros(1000)
        assert mode.live() == 2048
    assert len(kept) == 2
    assert mode.peak == 2048 + 4000


# --- what is refused ------------------------------------------------------------------------------------------------
def asks_for_a_value() -> Any:
    w = torch.randn(4)
    return w if w.sum() > 0 else -w


def asks_for_a_number() -> Any:
    return torch.randn(4) * torch.rand(1).item()


def has_no_static_shape() -> Any:
    return torch.arange(4).nonzero()


def returns_a_number() -> Any:
    return {"w": torch.ones(3), "eps": 1e-5}


def raises() -> Any:
    raise KeyError("the user's own")


def refused(rank: int) -> list[str]:
    mesh = mesh_of((2,), ("shard",))
    functions = [asks_for_a_value, asks_for_a_number, has_no_static_shape, returns_a_number, raises]
    state = torch.get_rng_state()
    texts = [outcome(hp.init, fn, mesh, hp.P("shard")) for fn in functions]
    assert_same(torch.get_rng_state(), state)
    return [*texts, outcome(hp.init, nested, mesh, hp.P("shrad")), outcome(hp.init, nested, mesh, hp.P("shard"))]


def test_what_cannot_be_deferred_is_refused(pool: Any) -> None:
    first, second = pool(2).run(refused)
    assert first == second
    kinds = [text.split(":")[0] for text in first]
    assert kinds == ["LoweringError"] * 3 + ["LeafError", "KeyError", "SpecError", "returned"], first
    assert "init_fn needs the value of a tensor" in first[0]


def fails_on_one_rank(rank: int) -> list[str]:
    mesh = mesh_of((2,), ("shard",))
    mine = [asks_for_a_value, raises, nested]
    return [outcome(hp.init, fn if rank == 1 else nested, mesh, hp.P("shard")) for fn in mine]


def test_a_failure_on_one_rank_is_told_on_all(pool: Any) -> None:
    first, second = pool(2).run(fails_on_one_rank)
    assert [text.split(":")[0] for text in second] == ["LoweringError", "KeyError", "returned"]
    assert [text.split(":")[0] for text in first] == ["AgreementError", "AgreementError", "returned"]
    assert "rank 1 refuses to go on" in first[0]
