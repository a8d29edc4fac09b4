"""Weights of many layers in one array: rows are weights of their own, and their gradients those of the array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch

import hpfunc as hp
from hpfunc._values.array import is_sharded
from tests.helpers import frameworks as ops
from tests.helpers.frameworks import to_framework, to_torch
from tests.helpers.leaves import assert_close, assert_same_bits, local_leaves
from tests.helpers.ranks import Pool, mesh_of, outcome

D, L = 6, 4


def weights() -> Any:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) / 3

    tree = {"layers": {"w": draw(L, D, D), "b": draw(L, D), "pair": draw(L, 2, D)}, "head": draw(D)}
    return to_framework(tree)


def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    return ops.tanh(ops.linear(x, p["w"], p["b"]) + p["first"] * p["second"])


def loss(params: Any, x: torch.Tensor, unit: Callable[..., Any] = hp.unit) -> torch.Tensor:
    block = unit(layer)
    stacked = params["layers"]
    for i in (0, 1, 2, 2):  # one is called twice, and the last one never
        pair = stacked["pair"][i]
        x = block({"w": stacked["w"][i], "b": stacked["b"][i], "first": pair[0], "second": pair[1]}, x)
    return (unit(lambda w, x: x @ w)(params["head"], x)).square().mean()


def data(rank: int) -> torch.Tensor:
    return torch.randn(5, D, generator=torch.Generator().manual_seed(7 + rank), dtype=torch.float64)


def train(rank: int, policy: hp.Policy | None, num_microbatches: int) -> Any:
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    specs = {"layers": {"w": hp.P(None, "shard"), "b": hp.P(None, "shard"), "pair": hp.P()}, "head": hp.P("shard")}
    params = hp.shard(weights(), mesh, specs)
    grad_fn = hp.accumulate(hp.value_and_grad(loss), num_microbatches)
    step: Any = grad_fn if policy is None else hp.sharded(grad_fn, mesh, policy=policy, debug=True)
    for _ in range(2):
        _, grads = step(params, to_framework(torch.cat([data(rank)] * num_microbatches)))
    assert policy is None or step.followed_plan
    assert optree.tree_structure(grads) == optree.tree_structure(params)
    names = [weight.name for weight in step.last_schedule.program.weights] if policy is not None else []
    return local_leaves(grads), optree.tree_leaves(to_torch(hp.unshard(grads))), names


@pytest.mark.processes
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_rows_are_weights_of_their_own(pool: Callable[[int], Pool], num_microbatches: int) -> None:
    eager = pool(4).run(train, None, num_microbatches)
    leaves, treedef = optree.tree_flatten(weights())
    leaves = [leaf.requires_grad_() for leaf in leaves]
    tree: Any = optree.tree_unflatten(treedef, leaves)
    total = torch.stack([loss(tree, data(rank), lambda fn: fn) for rank in range(4)]).mean()
    want = list(torch.autograd.grad(total, leaves))
    for policy in (hp.Policy(), hp.Policy(prefetch=2, pack_below_bytes=float("inf")), hp.Policy.zero1()):
        for (local, whole, names), (eager_local, _, _) in zip(
            pool(4).run(train, policy, num_microbatches), eager, strict=True
        ):
            assert_close(whole, want, 1e-12)
            assert_same_bits(local, eager_local)
            assert "params['layers']['w'][2]" in names
            assert "params['layers']['pair'][1][0]" in names


def array(*spec: str | None) -> hp.ShardedArray:
    mesh = hp.make_mesh((1,), ("shard",))
    return hp.shard(torch.arange(24.0).reshape(3, 4, 2), mesh, hp.P(*spec or (None, "shard")))


def test_rows_of_an_array_share_its_memory() -> None:
    stacked = array()
    assert [row.shape for row in stacked] == [(4, 2)] * 3
    assert stacked[-1].spec == hp.P("shard")
    assert torch.equal(stacked[-1].local, stacked.local[2])
    assert stacked[1].local.data_ptr() == stacked.local[1].data_ptr()
    assert torch.equal(array(None)[1][3].local, stacked.local[1, 3])
    assert [tree["w"].shape for tree in hp.unstack({"w": stacked})] == [(4, 2)] * 3


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda: array("shard")[0], "SpecError: hpfunc.ShardedArray: the rows of an array are cut"),
        (lambda: array()[0:2], "UsageError: hpfunc.ShardedArray: an array is indexed with slice(0, 2, None)"),
        (lambda: array()[3], "IndexError: row 3 of an array of 3 rows"),
        (lambda: hp.unstack({"w": array(), "v": torch.ones(2)}), "SpecError: hpfunc.unstack: arrays have different"),
        (lambda: hp.unstack({"w": array("shard")}), "SpecError: hpfunc.unstack: the rows of an array are cut"),
    ],
)
def test_what_has_no_rows_is_refused(wrong: Callable[[], Any], text: str) -> None:
    assert outcome(wrong).startswith(text)


def test_a_row_of_a_donated_array_raises() -> None:
    stacked = array()
    row = stacked[0]
    step = hp.sharded(lambda a: a.with_local(a.local + 1), stacked.mesh, donate_argnums=0)
    step(stacked)
    with pytest.raises(hp.DonatedError):
        _ = row.local


def test_a_row_may_be_an_argument_and_a_result() -> None:
    stacked = array()
    step = hp.sharded(lambda a: (a, a[0]), stacked.mesh)
    whole, row = step(stacked)
    assert is_sharded(row)
    assert torch.equal(row.local, whole.local[0])
    assert torch.equal(hp.sharded(lambda a: a.local + 1, stacked.mesh)(row), row.local + 1)
