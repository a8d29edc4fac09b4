"""What autograd returns is borrowed: gradients with any strides, and tensors that others hold too, give the right sums.

Each case is a unit whose weights get such gradients. It runs on every rank with data of its own: eagerly, recorded and
planned, in all ways to collect gradients, and is compared with plain torch on one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F

import hpfunc as hp
from tests.helpers.ranks import Pool, mesh_of

pytestmark = pytest.mark.processes

Tensor = torch.Tensor
D = torch.float64


class Kept(torch.autograd.Function):
    """Returns the same tensor as the gradient of each call: it keeps that for itself, as fused kernels may."""

    memory = torch.empty(4, 6, dtype=D)

    @staticmethod
    def forward(ctx: Any, w: Tensor, how: int) -> Tensor:
        ctx.how = how
        return w * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        kept = Kept.memory.copy_(gradients[0])
        return (kept, kept.view(4, 6), torch.from_numpy(kept.numpy()))[ctx.how], None


KEPT = ("kept by its function", "a view of it is kept", "its memory is kept by numpy")


def real_part(w: Tensor) -> Tensor:
    return torch.view_as_complex(w.reshape(4, 3, 2)).conj().real


# By name: the shapes of the weights, and what is computed of them and of x of shape (8, 4, 6).
CASES: dict[str, tuple[list[tuple[int, ...]], Callable[..., Tensor]]] = {
    "transposed by einsum": ([(4, 6)], lambda x, w: torch.einsum("bti,oi->bto", x, w)),
    "heads by einsum": ([(2, 6, 3)], lambda x, w: torch.einsum("btd,hdk->bhtk", x, w)),
    "experts, transposed": ([(8, 5, 6)], lambda x, w: torch.bmm(x, w.transpose(1, 2))),
    "elementwise with the transpose": ([(6, 4)], lambda x, w: x * w.T),
    "channels last": (
        [(4, 8, 3, 3)],
        lambda x, w: F.conv2d(x.reshape(1, 8, 4, 6).contiguous(memory_format=torch.channels_last), w),
    ),
    "expanded": ([(4, 6)], lambda x, w: w.sum() + x.sum((1, 2)) * w.mean()),
    "one tensor for two weights": ([(4, 6), (4, 6)], lambda x, a, b: torch.tanh(x * (a + b))),
    "one tensor for three weights": ([(4, 6)] * 3, lambda x, a, b, c: x * (a + b + c)),
    "views of one tensor": ([(4, 6), (24,)], lambda x, a, b: x * (a + b.view(4, 6))),
    "parts of one tensor": ([(2, 6), (2, 6)], lambda x, a, b: (x * torch.cat([a, b])).square()),
    "shared with the input": ([(8, 4, 6)], lambda x, w: torch.tanh(x) + w),
    "kept by its function": ([(4, 6)], lambda x, w: x * Kept.apply(w, 0)),
    "a view of it is kept": ([(4, 6)], lambda x, w: x * Kept.apply(w, 1)),
    "its memory is kept by numpy": ([(4, 6)], lambda x, w: x * Kept.apply(w, 2)),
    "conjugate": ([(4, 6)], lambda x, w: x[..., :3] * real_part(w)),
    "none for one of them": ([(4, 6), (3, 2)], lambda x, a, b: x * a),
    "sparse": ([(10, 4)], lambda x, w: F.embedding(x[..., 0].abs().mul(3).long() % 10, w, sparse=True)),
}


def weights(name: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=D) for shape in CASES[name][0]]


def examples(rank: int) -> Tensor:
    return torch.randn(8, 4, 6, generator=torch.Generator().manual_seed(1 + rank), dtype=D)


def loss_of(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The unit twice, around something else: gradients of two uses are added up."""

    def loss(ws: list[Any], x: Tensor) -> Tensor:
        return call(ws, torch.sin(x)).square().mean() + call(ws, x).mean()

    return loss


def wanted(name: str, num_ranks: int) -> list[Tensor]:
    """Returns the mean over all ranks of plain torch's gradients."""
    ws = [w.requires_grad_() for w in weights(name)]
    compute = CASES[name][1] if name not in KEPT else lambda x, w: x * w  # torch itself would add up the last one
    loss = loss_of(lambda ws, x: compute(x, *ws))
    total = torch.stack([loss(ws, examples(rank)) for rank in range(num_ranks)]).mean()
    gradients = torch.autograd.grad(total, ws, allow_unused=True)
    return [torch.zeros_like(w) if g is None else g.to_dense() for w, g in zip(ws, gradients, strict=True)]


def overlaps(a: Tensor, b: Tensor) -> bool:
    """Returns whether writing into one tensor changes the other."""
    before = b.clone()
    kept = a.clone()
    a.fill_(7.5)
    same = torch.equal(b, before)
    a.copy_(kept)
    return not same


WAYS = ("once", "local", "scatter")


def found(
    rank: int, name: str, mesh_shape: tuple[int, ...], axes: tuple[str, ...], spec: Any, gather: Any, way: Any
) -> list[list[Tensor]]:
    """Returns the whole gradients: eager, recorded, and planned twice."""
    mesh = mesh_of(mesh_shape, axes, axes)
    unit = hp.unit(lambda ws, x: CASES[name][1](x, *ws), axes=gather)
    params = hp.shard(weights(name), mesh, spec)
    grad_fn = hp.value_and_grad(loss_of(unit))
    if way != "once":
        grad_fn = hp.accumulate(grad_fn, 2, mode=way, batch_argnums=1)
    step = hp.sharded(grad_fn, mesh, policy=hp.Policy(pack_below_bytes=0))
    results = []
    for call in (grad_fn, step, step, step):
        _, gradients = call(params, examples(rank))
        results.append([w.clone() for w in hp.unshard(gradients)])
        local = [g.local for g in gradients]
        assert not any(overlaps(a, b) for a in local for b in local if a is not b and a.numel() and b.numel())
        assert not any(overlaps(a, Kept.memory) for a in local if a.numel())
    assert step.followed_plan
    for w, whole in zip(hp.unshard(params), weights(name), strict=True):
        assert torch.equal(w, whole)
    return results


LAYOUTS = {
    "cut": ((2,), ("shard",), hp.P("shard"), None),
    "whole on each of two": ((2,), ("shard",), hp.P(), None),
    "not gathered, not reduced": ((1, 2), ("shard", "ep"), hp.P("shard"), "shard"),
}


# Some weights have a row for each example, so that the batch cannot be cut into micro-batches.
WHOLE_BATCH = ("shared with the input", "channels last", "experts, transposed")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for name in CASES for way in WAYS if way == "once" or name not in WHOLE_BATCH]
)
def test_a_borrowed_gradient_counts_once(pool: Callable[[int], Pool], name: str, layout: str, way: str) -> None:
    answers = pool(2).run(found, name, *LAYOUTS[layout], way)
    mean = wanted(name, 2)
    for eager, *steps in answers:
        for gradients in (eager, *steps):
            for gradient, right in zip(gradients, mean, strict=True):
                torch.testing.assert_close(gradient, right, rtol=1e-11, atol=1e-13)
        for gradients in steps:
            assert all(map(torch.equal, gradients, eager))


def plain_leaves(rank: int) -> list[bool]:
    """Plain tensors and local parts that get one tensor as their gradient."""
    mesh = mesh_of((2,), ("shard",))
    array = hp.shard(torch.arange(4, dtype=D), mesh, hp.P("shard"))

    def loss(tree: Any) -> Tensor:
        return ((tree["a"] + tree["b"] + tree["array"].local) ** 2).sum()

    tree = {"a": torch.ones(2, dtype=D), "b": torch.ones(2, dtype=D) * 2, "array": array}
    _, gradients = hp.value_and_grad(loss, numerics=hp.Numerics(reduce_op="sum"))(tree)
    local = [gradients["a"], gradients["b"], gradients["array"].local]
    return [overlaps(x, y) for x in local for y in local if x is not y]


def test_gradients_of_plain_leaves_and_local_parts_share_no_memory(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(plain_leaves) == [[False] * 6] * 2


def twice(rank: int, spec: Any) -> list[list[Tensor]]:
    """One array at two, and at three, places of one unit call."""
    mesh = mesh_of((2,), ("shard",))
    unit = hp.unit(lambda q, x: (q["a"] * x + q["b"] ** 2 + torch.sin(q["c"]) * q["d"]).sum())
    params = hp.shard({"w": torch.arange(5, dtype=D), "v": torch.ones(5, dtype=D)}, mesh, spec)

    def loss(p: Any, x: Tensor) -> Tensor:
        used = {"a": p["w"], "b": p["w"], "c": p["w"], "d": p["v"]}
        return unit(used, x) + unit(used | {"c": p["v"]}, 2 * x)

    grad_fn = hp.value_and_grad(loss)
    step = hp.sharded(grad_fn, mesh)
    x = torch.arange(5, dtype=D) + rank
    return [[*optree.tree_leaves(hp.unshard(call(params, x)[1]))] for call in (grad_fn, step, step)]


@pytest.mark.parametrize("spec", [hp.P("shard"), hp.P()], ids=["cut", "whole"])
def test_one_array_at_several_places_of_a_unit(pool: Callable[[int], Pool], spec: Any) -> None:
    w, v = torch.arange(5, dtype=D).requires_grad_(), torch.ones(5, dtype=D).requires_grad_()

    def loss(x: Tensor) -> Tensor:
        first = (w * x + w**2 + torch.sin(w) * v).sum()
        return first + (w * 2 * x + w**2 + torch.sin(v) * v).sum()

    total = torch.stack([loss(torch.arange(5, dtype=D) + rank) for rank in range(2)]).mean()
    right = torch.autograd.grad(total, [v, w])  # in the order of the leaves of a dict
    for results in pool(2).run(twice, spec):
        for gradients in results:
            assert all(torch.equal(a, b) for a, b in zip(gradients, results[0], strict=True))
            torch.testing.assert_close(gradients, list(right), rtol=1e-12, atol=1e-13)


def test_a_gradient_that_nobody_else_has_is_not_copied() -> None:
    """On one rank the delivered gradient is the tensor that autograd made."""
    mesh = hp.make_mesh((1,), ("shard",))
    made: list[int] = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
            (gradient,), (x, w) = gradients, ctx.saved_tensors
            of_w = x.T @ gradient
            made.append(of_w.data_ptr())
            return gradient @ w.T, of_w

    params = hp.shard(torch.ones(6, 5), mesh, hp.P("shard"))
    unit = hp.unit(lambda w, x: Noted.apply(x, w).square().sum())
    step = hp.sharded(hp.value_and_grad(unit), mesh)
    for _ in range(3):
        _, gradient = step(params, torch.ones(4, 6))
    assert step.followed_plan
    assert gradient.local.data_ptr() == made[-1]
    assert step.last_counters is not None
    assert step.last_counters.bytes_copied == 0
