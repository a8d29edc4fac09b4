"""One tree as two: laws of `partition` and `combine`, and training of some weights beside frozen ones."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import hpfunc as hp
from hpfunc._values.array import is_sharded
from hpfunc._values.tree import dotted_paths
from hpfunc.planning.ops import Launch
from tests.helpers import frameworks as ops
from tests.helpers.frameworks import to_framework, to_torch
from tests.helpers.leaves import assert_same_bits
from tests.helpers.ranks import Pool, mesh_of
from tests.helpers.zoo import assert_same, trees

P = hp.P
ZOO = trees()
nested = st.recursive(
    st.none() | st.integers(0, 9) | st.just("text"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=12,
)


def leaves(tree: Any) -> list[Any]:
    return optree.tree_leaves(tree, is_leaf=is_sharded)


def paths(tree: Any) -> list[str]:
    return dotted_paths(tree, is_sharded)


# --- laws -------------------------------------------------------------------------------------------------------------
@given(tree=nested, data=st.data())
def test_combine_undoes_partition(tree: Any, data: Any) -> None:
    every = paths(tree)
    chosen = set(data.draw(st.lists(st.sampled_from(every), unique=True))) if every else set()
    selected, rest = hp.partition(tree, lambda path, leaf: path in chosen)
    assert set(paths(selected)) == chosen
    assert set(paths(rest)) == set(every) - chosen
    assert hp.combine(selected, rest) == hp.combine(rest, selected) == tree
    assert hp.combine(tree) == tree
    nothing, everything = hp.partition(tree, lambda path, leaf: False)
    assert leaves(nothing) == []
    assert everything == tree


@pytest.mark.parametrize("name", ZOO)
def test_every_kind_of_node_is_kept(name: str) -> None:
    tree = ZOO[name]
    arrays = hp.shard(tree, hp.make_mesh((1,), ("shard",)), P("shard"))
    selected, rest = hp.partition(arrays, lambda path, leaf: leaf.shape[:1] == (4,))
    assert all(a.shape[:1] == (4,) for a in leaves(selected))
    whole = hp.combine(rest, selected)
    assert all(a is b for a, b in zip(leaves(whole), leaves(arrays), strict=True))
    assert_same(hp.unshard(whole), tree)


def test_three_parts() -> None:
    tree = {"a": 1, "b": [2, 3], "c": None}
    first, rest = hp.partition(tree, "a")
    second, third = hp.partition(rest, "b.0")
    assert hp.combine(third, first, second) == tree


@given(st.lists(st.sampled_from(["*", "layers.*", "*.w", "layers.?.w", "layers.[01].b", "head", "*a*"]), min_size=1))
def test_patterns_are_those_of_fnmatch_on_dotted_paths(patterns: list[str]) -> None:
    tree = {"head": 0, "layers": [{"w": i, "b": -i} for i in range(12)]}
    selected, _ = hp.partition(tree, patterns)
    assert paths(selected) == [name for name in paths(tree) if any(fnmatch.fnmatchcase(name, p) for p in patterns)]


def test_paths_name_keys_indices_and_fields() -> None:
    assert paths(ZOO["nested"]) == ["embed.w", "layers.0.b", "layers.0.w", "layers.1.b", "layers.1.w"]
    assert paths(ZOO["named"]) == ["weight", "bias.weight"]
    assert paths(ZOO["registered"]) == ["box.content.content"]
    assert paths(ZOO["leaf"]) == [""]
    assert paths({("k", 1): 2, "a.b": 3}) == ["a.b", "('k', 1)"]


def test_only_arrays_of_floats_are_floating() -> None:
    mesh = hp.make_mesh((1,), ("shard",))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert hp.is_floating("", torch.ones(2, dtype=dtype))
        assert hp.is_floating("", hp.shard(torch.ones(2, dtype=dtype), mesh, P()))
    for other in (torch.arange(2), torch.ones(2, dtype=torch.bool), hp.shard(torch.arange(2), mesh, P()), 1.0, "x"):
        assert not hp.is_floating("", other)


# --- training beside frozen weights -----------------------------------------------------------------------------------
WIDTH, RANK, NUM_LAYERS, STEPS = 8, 2, 3, 3


def model() -> Any:
    """Frozen matrices with an index table and a mask, trained adapters and a trained head beside them."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) / 3

    layers = [
        {
            "w": draw(WIDTH, WIDTH),
            "lora_a": draw(RANK, WIDTH),
            "lora_b": draw(WIDTH, RANK),
            "order": torch.randperm(WIDTH, generator=generator),
            "mask": torch.rand(WIDTH, generator=generator) < 0.7,
        }
        for _ in range(NUM_LAYERS)
    ]
    return {"layers": layers, "head": {"w": draw(5, WIDTH)}}


def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    y = ops.linear(x, p["w"]) + ops.linear(ops.linear(x, p["lora_a"]), p["lora_b"])
    return x + ops.tanh(y[:, p["order"]] * p["mask"])


def head(p: Any, x: torch.Tensor) -> torch.Tensor:
    return ops.linear(x, p["w"])


def loss_of(params: Any, x: torch.Tensor, unit: Callable[..., Any] = lambda fn: fn) -> torch.Tensor:
    layer_unit, head_unit = unit(layer), unit(head)
    for p in params["layers"]:
        x = layer_unit(p, x)
    return head_unit(params["head"], x).square().mean()


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


class Matmuls(TorchDispatchMode):
    """Counts matrix products, of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("mm", "addmm", "matmul", "bmm")
        return func(*args, **(kwargs or {}))


NAMES = {f"trained['layers'][{i}]['lora_{x}']" for i in range(NUM_LAYERS) for x in "ab"} | {"trained['head']['w']"}
TRAINED = ["layers.*.lora_*", "head.w"]


def lora(rank: int, layout: tuple[Any, ...], policy: hp.Policy | None) -> dict[str, Any]:
    mesh = mesh_of(*layout)
    params = hp.shard(to_framework(model()), mesh, P("shard"))
    optimizer = hp.optim.sgd(0.1, momentum=0.9)
    trained, frozen = hp.partition(params, TRAINED)
    before = [(x.data_ptr(), x.clone()) for x in optree.tree_leaves(to_torch(frozen))]

    def step(trained: Any, state: Any, frozen: Any, x: torch.Tensor) -> Any:
        def loss(trained: Any, x: torch.Tensor) -> torch.Tensor:
            return loss_of(hp.combine(trained, frozen), x, hp.unit)

        _, grads = hp.value_and_grad(loss)(trained, x)
        updates, state = optimizer.update(grads, state, trained)
        return hp.apply_updates(trained, updates), state, grads

    run: Any = step if policy is None else hp.sharded(step, mesh, policy=policy, donate_argnums=(0, 1), debug=True)
    state = optimizer.init(trained)
    for number in range(STEPS):
        with Matmuls() as matmuls:
            trained, state, grads = run(trained, state, frozen, to_framework(batch(rank, number)))
    after = [(x.data_ptr(), x) for x in optree.tree_leaves(to_torch(frozen))]
    schedule = None if policy is None else run.last_schedule
    return {
        "paths": [paths(trained), paths(grads), paths(state.momentum)],
        "frozen": all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(before, after, strict=True)),
        "matmuls": matmuls.count,
        "reduced": None if schedule is None else reduced(schedule),
        "weights": optree.tree_leaves(to_torch(hp.unshard(hp.combine(trained, frozen), mesh.axis_names))),
    }


def reduced(schedule: hp.Schedule) -> tuple[set[str], set[str], int]:
    """Which weights train, which have a gradient buffer, and how many elements are sent to be reduced too many."""
    weights = schedule.program.weights
    trained = {weight.name for weight in weights if weight.trainable}
    buffered = {weights[b.weight].name for b in schedule.buffers if b.kind == "gradient" and b.weight is not None}
    launches = [op for op in schedule.ops if isinstance(op, Launch) and op.collective == "all_to_all"]
    sent = sum(region.numel for op in launches for region in op.reads)
    return trained, buffered, sent - sum(weight.whole_numel for weight in weights if weight.trainable)


def in_one_process(num_ranks: int, where: list[str]) -> tuple[list[torch.Tensor], int]:
    """The weights after the same steps, dense, and the matrix products of one rank's step."""
    trained, frozen = hp.partition(model(), where)
    flat, treedef = optree.tree_flatten(trained)
    momentum = [torch.zeros_like(x) for x in flat]
    count = 0
    for number in range(STEPS):
        flat = [x.detach().requires_grad_() for x in flat]
        total = torch.zeros((), dtype=torch.float64)
        for rank in range(num_ranks):
            with Matmuls() as matmuls:
                tree = hp.combine(optree.tree_unflatten(treedef, flat), frozen)
                loss = loss_of(tree, batch(rank, number)) / num_ranks
                loss.backward()
            count, total = matmuls.count, total + loss.detach()
        for i, x in enumerate(flat):
            assert x.grad is not None
            momentum[i] = 0.9 * momentum[i] + x.grad
            flat[i] = x.detach() - 0.1 * momentum[i]
    return optree.tree_leaves(hp.combine(optree.tree_unflatten(treedef, flat), frozen)), count


def test_the_counter_sees_a_weight_gradient_that_nobody_needs() -> None:
    frozen = in_one_process(1, TRAINED)[1]
    assert in_one_process(1, ["layers.*.w", *TRAINED])[1] == frozen + NUM_LAYERS


LAYOUTS = [((4,), ("shard",)), ((2, 2), ("replicate", "shard"))]
POLICIES = [None, hp.Policy(), hp.Policy(prefetch=2, release="backward", pack_below_bytes=0)]


@pytest.mark.processes
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_adapters_train_beside_frozen_weights(pool: Callable[[int], Pool], layout: Any) -> None:
    want, num_matmuls = in_one_process(4, TRAINED)
    eager = None
    for policy in POLICIES:
        ranks = pool(4)
        results = ranks.run(lora, layout, policy)
        for found in results:
            assert found["frozen"]
            assert found["paths"] == [paths(hp.partition(model(), TRAINED)[0])] * 3
            assert found["matmuls"] == (num_matmuls if ranks.framework == "torch" else 0)
            if policy is not None:
                trained, buffered, excess = found["reduced"]
                assert trained == buffered == NAMES
                assert excess == 0
            for a, b in zip(found["weights"], want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        eager = eager or results
        for found, reference in zip(results, eager, strict=True):
            assert_same_bits(found["weights"], reference["weights"])
