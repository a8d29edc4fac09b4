"""The norm that counts each element once, clipping by it, and what is not finite: the same on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch

import hpfunc as hp
from hpfunc import optim
from hpfunc._values.array import is_sharded
from tests.helpers import frameworks as ops
from tests.helpers.frameworks import to_framework, to_torch
from tests.helpers.ranks import Pool, mesh_of
from tests.optim.trees import random_tree, same_bits

P = hp.P
# Dims that divide, that do not, and that are shorter than the mesh, so that some ranks hold nothing.
SHAPES = {
    "even": (8, 4),
    "uneven": (5, 3),
    "short": (1, 4),
    "layers": [{"w": (4, 4), "b": (4,)}, {"w": (2, 4), "b": ()}],
}
TP = {
    "even": P(("tp", "shard")),
    "uneven": P("shard"),  # replicated over "tp"
    "short": P("shard", "tp"),
    "layers": [{"w": P("shard", "tp"), "b": P("tp")}, {"w": P("tp"), "b": P()}],
}
CASES = {
    "one": ((1, 1), ("replicate", "shard"), None, P("shard")),
    "fsdp on 2": ((2,), ("shard",), None, P("shard")),
    "fsdp": ((4,), ("shard",), None, P("shard")),
    "hsdp": ((2, 2), ("replicate", "shard"), None, P("shard")),
    "mixed": (
        (2, 2),
        ("replicate", "shard"),
        None,
        {"even": P("shard"), "uneven": P(), "short": P("shard"), "layers": [P("shard"), P(("replicate", "shard"))]},
    ),
    "fsdp and tp": ((2, 2), ("shard", "tp"), ("shard",), TP),
}


def norms(rank: int, case: str, seed: int, poison: tuple[str, float] | None) -> Any:
    """Returns the norm, whether all is finite, the clipped gradients, and the last two inside of a planned step."""
    shape, names, data_axes, specs = CASES[case]
    mesh, tree = mesh_of(shape, names, data_axes), random_tree(seed, shapes=SHAPES)
    if poison is not None:
        tree[poison[0]].view(-1)[-1] = poison[1]  # an element of one shard
    grads = hp.shard(to_framework(tree), mesh, specs)

    def step(grads: Any) -> Any:
        clipped, _ = hp.clip_by_global_norm(0.5).update(grads, ())
        return hp.global_norm(grads), optim.all_finite(grads), clipped

    norm, finite, clipped = step(grads)
    run = hp.sharded(step, mesh)
    for _ in range(2):
        planned = run(grads)
    assert run.followed_plan
    norm, finite, *again = to_torch((norm, finite, *planned[:2]))
    assert torch.equal(torch.nan_to_num(again[0]), torch.nan_to_num(norm))
    assert (finite.dtype, finite.shape, bool(again[1])) == (torch.bool, (), bool(finite))
    return float(norm), bool(finite), optree.tree_leaves(to_torch(hp.unshard(clipped, mesh.axis_names)))


def size_of(case: str) -> int:
    return math.prod(CASES[case][0])


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES)
def test_each_element_counts_once(pool: Callable[[int], Pool], case: str) -> None:
    for seed in range(2):
        tree = optree.tree_leaves(random_tree(seed, shapes=SHAPES))
        expected = math.sqrt(sum(float(x.square().sum()) for x in tree))
        results = pool(size_of(case)).run(norms, case, seed, None)
        assert len({norm for norm, _, _ in results}) == 1
        for norm, finite, clipped in results:
            assert finite
            assert norm == pytest.approx(expected, rel=1e-12)
            for got, x in zip(clipped, tree, strict=True):
                torch.testing.assert_close(got, x * (0.5 / expected), rtol=1e-12, atol=0)


@pytest.mark.processes
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("case", "leaf"), [("fsdp", "even"), ("mixed", "short"), ("fsdp and tp", "uneven")])
def test_what_is_not_finite_on_one_rank_reaches_all(
    pool: Callable[[int], Pool], case: str, leaf: str, poison: float
) -> None:
    for norm, finite, clipped in pool(4).run(norms, case, 0, (leaf, poison)):
        assert not finite
        assert math.isnan(norm) if math.isnan(poison) else norm == math.inf
        assert not all(x.isfinite().all() for x in clipped)


def messages(rank: int) -> Any:
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    tree = hp.shard([ops.ones(4) for _ in range(20)], mesh, [P("shard")] * 10 + [P()] * 10)
    found = []
    for fn in (optim.global_norm, optim.all_finite):
        step = hp.sharded(fn, mesh)
        value = step(tree)
        assert step.last_counters is not None
        found += [float(value), sum(step.last_counters.bytes_sent.values())]
    return found


@pytest.mark.processes
def test_one_number_is_sent_for_each_set_of_axes(pool: Callable[[int], Pool]) -> None:
    for norm, norm_bytes, finite, finite_bytes in pool(4).run(messages):
        assert norm == pytest.approx(math.sqrt(80))
        assert norm_bytes <= 8
        assert finite
        assert finite_bytes <= 2 * 3 * 4  # to and from three others


def own_tensors(rank: int) -> tuple[bool, bool, bool]:
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    own = to_framework(torch.tensor([1.0, math.inf if rank == 2 else 1.0]))
    with hp.use_mesh(mesh):
        inside = optim.all_finite(own)
    beside = optim.all_finite({"array": hp.shard(ops.ones(4), mesh, P("shard")), "own": own})
    return bool(inside), bool(beside), bool(optim.all_finite(own))


@pytest.mark.processes
def test_plain_tensors_may_differ_between_ranks(pool: Callable[[int], Pool]) -> None:
    for rank, found in enumerate(pool(4).run(own_tensors)):
        assert found == (False, False, rank != 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_largest_numbers_are_finite(dtype: torch.dtype) -> None:
    most = torch.full((64,), torch.finfo(dtype).max, dtype=dtype)
    assert optim.all_finite([most, -most, torch.ones(0, dtype=dtype)])
    for bad in (math.nan, math.inf, -math.inf):
        assert not optim.all_finite([most, torch.tensor([1.0, bad], dtype=dtype)])
    assert optim.all_finite(torch.ones(0, dtype=dtype))
    assert optim.all_finite({}) is True


def test_clipping_leaves_small_gradients_alone() -> None:
    tree = random_tree(0)
    clipped, _ = optim.clip_by_global_norm(1e9).update(tree, ())
    assert same_bits(clipped, tree)
    zeros = optree.tree_map(torch.zeros_like, tree)
    assert same_bits(optim.clip_by_global_norm(1.0).update(zeros, ())[0], zeros)
    assert optim.global_norm({}) == 0.0
    assert optim.clip_by_global_norm(1.0).update({}, ()) == ({}, ())


@pytest.mark.parametrize("max_norm", [0.0, 1e-30, 0.5, 1e30])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (2, 0)], ids=str)
def test_gradients_of_zeros_stay_zeros(shape: tuple[int, ...], max_norm: float) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        zeros = {"w": torch.zeros(shape, dtype=dtype), "b": torch.zeros(2, dtype=dtype)}
        assert same_bits(optim.clip_by_global_norm(max_norm).update(zeros, ())[0], zeros)


def test_a_limit_of_zero_leaves_zeros_and_what_is_not_finite_shows() -> None:
    clip = optim.clip_by_global_norm(0.0)
    assert torch.equal(clip.update(torch.tensor([3.0, -4.0]), ())[0], torch.zeros(2))
    for limit in (0.0, 0.5):
        for bad in (math.nan, math.inf):
            grads = torch.tensor([1.0, 0.0, bad])
            theirs = torch.nn.Parameter(torch.zeros(3))
            theirs.grad = grads.clone()
            torch.nn.utils.clip_grad_norm_([theirs], limit)
            ours = optim.clip_by_global_norm(limit).update(grads, ())[0]
            assert torch.equal(ours.isnan(), theirs.grad.isnan())
            assert torch.equal(ours.nan_to_num(), theirs.grad.nan_to_num())


@pytest.mark.parametrize("max_norm", [-1.0, -math.inf, math.nan, math.inf, "1", None, True])
def test_a_limit_that_is_no_number_is_refused(max_norm: Any) -> None:
    with pytest.raises(hp.PolicyError, match="max_norm must be a number >= 0, got"):
        optim.clip_by_global_norm(max_norm)


def test_the_names_at_the_top_are_the_same_functions() -> None:
    assert hp.global_norm is optim.global_norm
    assert hp.clip_by_global_norm is optim.clip_by_global_norm


# --- other norms, groups, and one collective for log and clip -------------------------------------------------------
def layer_of(path: str, leaf: Any) -> str:
    return path.partition(".")[0]


def other_norms(rank: int, case: str, order: float) -> Any:
    """Returns the norm, those of groups, and what is clipped by it, of a planned step; all as of the recorded one."""
    shape, names, data_axes, specs = CASES[case]
    mesh = mesh_of(shape, names, data_axes)
    grads = hp.shard(to_framework(random_tree(3, shapes=SHAPES)), mesh, specs)

    def step(grads: Any) -> Any:
        norm, groups = hp.global_norm(grads, order, groups=layer_of)
        clipped = hp.clip_with_norm(grads, 0.5, norm)
        by_itself, _ = hp.clip_by_global_norm(0.5, order).update(grads, ())
        return norm, hp.global_norm(grads, order), groups, clipped, by_itself

    run = hp.sharded(step, mesh)
    recorded, planned = run(grads), run(grads)
    assert run.followed_plan
    assert same_bits(to_torch(recorded), to_torch(planned))
    norm, alone, groups, *clipped = planned
    both = [optree.tree_leaves(to_torch(hp.unshard(tree, mesh.axis_names))) for tree in clipped]
    for x, y in zip(*both, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-14, atol=0)  # groups are added up in another order
    assert float(alone) == pytest.approx(float(norm), rel=1e-14)
    return float(norm), {label: float(x) for label, x in groups.items()}, both[0]


def torch_norm(tree: Any, order: float) -> float:
    return float(torch.nn.utils.get_total_norm(optree.tree_leaves(tree), order))


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES)
def test_norms_are_those_of_torch(pool: Callable[[int], Pool], case: str) -> None:
    tree = random_tree(3, shapes=SHAPES)
    for order in (1.0, 2.0, 3.5, math.inf):
        weights = [torch.nn.Parameter(torch.zeros_like(x)) for x in optree.tree_leaves(tree)]
        for weight, gradient in zip(weights, optree.tree_leaves(tree), strict=True):
            weight.grad = gradient.clone()
        want = float(torch.nn.utils.clip_grad_norm_(weights, 0.5, order))
        results = pool(size_of(case)).run(other_norms, case, order)
        assert len({norm for norm, _, _ in results}) == 1
        for norm, groups, clipped in results:
            assert norm == pytest.approx(want, rel=1e-12)
            assert groups == pytest.approx({name: torch_norm(part, order) for name, part in tree.items()}, rel=1e-12)
            for got, weight in zip(clipped, weights, strict=True):
                # torch divides by the norm plus 1e-6.
                torch.testing.assert_close(got * (want / (want + 1e-6)), weight.grad, rtol=1e-12, atol=0)


def collectives_of_a_step(rank: int, per_group: bool, order: float) -> Any:
    """Returns the collectives that a step's plan leaves to its caller, which logs a norm and clips by it."""
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    params = hp.shard([ops.ones(4, 4), ops.ones(5), ops.ones()], mesh, [P("shard"), P(("replicate", "shard")), P()])
    square = hp.unit(lambda p: sum((x**2).sum() for x in p))
    optimizer = optim.sgd(0.1)

    def step(params: Any, state: Any) -> Any:
        _, grads = hp.value_and_grad(square)(params)
        norm = hp.global_norm(grads, order, groups=(lambda path, leaf: path) if per_group else None)
        whole = norm[0] if per_group else norm
        updates, state = optimizer.update(hp.clip_with_norm(grads, 0.5, whole), state, params)
        return hp.apply_updates(params, updates), state, norm

    run = hp.sharded(step, mesh, donate_argnums=(0, 1))
    state = optimizer.init(params)
    for _ in range(2):
        params, state, _ = run(params, state)
    assert run.followed_plan
    assert run.last_schedule is not None
    return [event.name for event in run.last_schedule.program.events if event.kind == "collective"]


@pytest.mark.processes
@pytest.mark.parametrize("per_group", [False, True])
@pytest.mark.parametrize(("order", "kind"), [(2.0, "psum"), (math.inf, "pmax")])
def test_log_and_clip_share_one_collective(
    pool: Callable[[int], Pool], per_group: bool, order: float, kind: str
) -> None:
    for names in pool(4).run(collectives_of_a_step, per_group, order):
        size = 3 if per_group else 1
        assert names == [f"{kind} over ('replicate', 'shard'): shape ({size},), float32"]


def copies_of(tree: Any) -> list[torch.Tensor]:
    arrays = [x for x in optree.tree_leaves(tree, is_leaf=is_sharded) if is_sharded(x)]
    return [to_torch(array.local).clone() for array in arrays]


def refused(rank: int, planned: bool, bad: float) -> Any:
    """Returns what a step says of a gradient that is not finite on rank 1, and whether it can go on."""
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    params = hp.shard({"w": ops.ones(4, 2), "b": ops.ones(3)}, mesh, P("shard"))
    loss = hp.unit(lambda p, x: (p["w"] * x).sum() + p["b"].square().sum())
    optimizer = optim.chain(optim.clip_by_global_norm(0.5, error_if_nonfinite=True), optim.adamw(0.1))

    def step_fn(params: Any, state: Any, x: Any) -> Any:
        grads = hp.grad(loss)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return hp.apply_updates(params, updates), state

    step = hp.sharded(step_fn, mesh, donate_argnums=(0, 1))
    state = optimizer.init(params)
    for _ in range(2 if planned else 0):
        params, state = step(params, state, ops.ones(4, 2))
    before = copies_of((params, state))
    x = torch.ones(4, 2)
    x[0, 0] = bad if rank == 1 else 1.0
    with pytest.raises(hp.LeafError) as error:
        step(params, state, to_framework(x))
    assert len(before) == 6
    assert same_bits(before, copies_of((params, state)))
    for _ in range(2):
        params, state = step(params, state, ops.ones(4, 2))
    return str(error.value), float(hp.global_norm(params))


@pytest.mark.processes
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_norm_that_is_not_finite_is_refused_on_all_ranks(
    pool: Callable[[int], Pool], planned: bool, bad: float
) -> None:
    results = pool(4).run(refused, planned, bad)
    assert len(set(results)) == 1
    text, norm = results[0]
    shown = "nan" if math.isnan(bad) else "inf"
    assert text.splitlines()[0] == f"hpfunc.optim.clip_by_global_norm: the norm is {shown}"
    assert f"tree['w']: shape (4, 2), spec P('shard'), largest {shown}" in text
    assert "tree['b']" not in text
    assert math.isfinite(norm)


def test_a_finite_norm_passes() -> None:
    tree = random_tree(0)
    assert optim.global_norm(tree, error_if_nonfinite=True) == optim.global_norm(tree)
    assert optim.global_norm({}, groups=layer_of, error_if_nonfinite=True) == (0.0, {})
    assert optim.clip_with_norm({}, 1.0, 0.0) == {}


@pytest.mark.parametrize("order", [0, -1.0, -math.inf, math.nan, "fro", None, True])
def test_an_order_that_is_no_positive_number_is_refused(order: Any) -> None:
    for fn in (lambda: optim.global_norm({}, order), lambda: optim.clip_by_global_norm(1.0, order)):
        with pytest.raises(hp.PolicyError, match="ord must be a number > 0, got"):
            fn()
