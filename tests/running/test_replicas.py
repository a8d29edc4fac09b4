"""Ranks that pass different arrays, and arrays whose replicas have drifted apart: found, named, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hpfunc as hp
from tests.helpers.ranks import Pool, mesh_of, outcome

DTYPES = ["float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "int64", "int8", "uint8", "bool", "complex64"]


def mesh4() -> hp.Mesh:
    return mesh_of((2, 2), ("replicate", "shard"))


def values(dtype: str, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 7).reshape(shape).to(getattr(torch, dtype))


def flipped(array: hp.ShardedArray, index: int, rank: int, at: tuple[int, ...]) -> hp.ShardedArray:
    """The array with one bit of one element flipped on the ranks `at`."""
    if rank not in at:
        return array
    local = array.local.clone()
    bits = local.view(-1).view(torch.uint8).view(-1)
    bits[index * local.element_size()] ^= 1
    return array.with_local(local)


# --- the check ------------------------------------------------------------------------------------------------------
def one_flipped_bit(rank: int, dtype: str, index: int) -> tuple[str, str]:
    mesh = mesh4()
    tree = {"w": values(dtype, 6, 3), "empty": values(dtype, 0, 3), "scale": values(dtype)}
    specs = {"w": hp.P("shard"), "empty": hp.P(None, "shard"), "scale": hp.P()}
    params = hp.shard(tree, mesh, specs)
    before = outcome(hp.debug.check_replicas, params)
    return before, outcome(hp.debug.check_replicas, params | {"w": flipped(params["w"], index, rank, (3,))})


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_flipped_bit_is_found_in_every_dtype(pool: Callable[..., Pool], dtype: str) -> None:
    index = 7  # of the part of shard 1, which begins at row 3: [2, 1] of it
    texts = pool(4).run(one_flipped_bit, dtype, index)
    assert len(set(texts)) == 1
    fine, text = texts[0]
    assert fine == "returned"
    assert text.startswith("LeafError: hpfunc.debug.check_replicas: ranks hold different values of one part")
    assert "tree['w']: shape (6, 3), spec P('shard'): at [5, 1] " in text
    assert "on rank 1, " in text
    assert "on rank 3\n" in text
    assert "scale" not in text


def first_difference(rank: int, index: int, numel: int, spec: tuple[Any, ...], ranks: tuple[int, ...]) -> str:
    array = hp.shard(torch.zeros(numel, dtype=torch.float64), mesh4(), hp.P(*spec))
    if rank in ranks and index < array.local.shape[0]:
        local = array.local.clone()
        local[index:] += torch.rand(local.shape[0] - index, generator=torch.Generator().manual_seed(rank)) + 1.0
        array = array.with_local(local)
    return outcome(hp.debug.check_replicas, [array])


@pytest.mark.parametrize("numel", [1, 2, 7, 65])
@pytest.mark.parametrize(("spec", "ranks"), [((), (2,)), (("shard",), (0,)), (("shard",), (2, 3)), ((), (1, 3))])
def test_the_first_element_that_differs_is_named(
    pool: Callable[..., Pool], numel: int, spec: tuple[Any, ...], ranks: tuple[int, ...]
) -> None:
    num_parts = 2 if spec else 1
    for index in sorted({0, numel // num_parts // 2, max(0, numel // num_parts - 1)}):
        texts = pool(4).run(first_difference, index, numel, spec, ranks)
        assert len(set(texts)) == 1
        block = -(-numel // num_parts)
        starts = [0] if not spec else [block * s for s in (0, 1) if any(r % 2 == s for r in ranks)]
        want = [start + index for start in starts if start + index < min(numel, start + block)]
        for place in want:
            assert f"at [{place}] " in texts[0], texts[0]
        assert (texts[0] == "returned") == (not want)


def kept_apart(rank: int) -> list[str]:
    """What is no replica may differ: cut parts, partial sums, local tensors; NaNs of the same bits are the same."""
    mesh = mesh4()
    cut = hp.shard(torch.arange(8.0), mesh, hp.P(("replicate", "shard")))
    half = hp.shard(torch.arange(8.0), mesh, hp.P("shard"))
    partial = hp.ShardedArray(torch.full((4,), float(rank)), (8,), hp.P("shard", unreduced={"replicate"}), mesh)
    nan = half.with_local(torch.full((4,), float("nan")))
    tree = {"cut": cut, "nan": nan, "partial": partial, "mine": torch.tensor(rank), "count": rank}
    zeros = half.with_local(torch.zeros(4) if rank < 2 else -torch.zeros(4))
    experts = mesh_of((2, 2), ("shard", "tp"))
    tp = hp.ShardedArray(torch.full((2,), float(rank // 2)), (4,), hp.P("shard"), experts)  # same along tp
    apart = hp.ShardedArray(torch.full((2,), float(rank)), (4,), hp.P("shard"), experts)
    return [outcome(hp.debug.check_replicas, x) for x in (tree, zeros, tp, {"a": {"b": apart}})]


def test_what_is_compared(pool: Callable[..., Pool]) -> None:
    for fine, zeros, tp, apart in pool(4).run(kept_apart):
        assert fine == tp == "returned"
        assert "at [0] 0.0 on rank 0, -0.0 on rank 2; at [4] 0.0 on rank 1, -0.0 on rank 3" in zeros
        assert "tree['a']['b']: shape (4,), spec P('shard'): at [0] 0.0 on rank 0, 1.0 on rank 1; at [2] 2.0" in apart


def refused(rank: int) -> list[str]:
    mesh = mesh4()
    a = hp.shard(torch.ones(4), mesh, hp.P())
    other = hp.shard(torch.ones(4), mesh_of((4,), ("shard",)), hp.P())
    trees = [[a.local], [a, other], [a] if rank else [a, a]]
    step = hp.sharded(hp.debug.check_replicas, mesh)
    return [*(outcome(hp.debug.check_replicas, tree) for tree in trees), outcome(step, a)]


def test_what_cannot_be_checked_is_refused_on_all_ranks(pool: Callable[..., Pool]) -> None:
    for local, meshes, trees, inside in pool(4).run(refused):
        assert local.startswith("LeafError: hpfunc.debug.check_replicas: tree has no ShardedArray")
        assert meshes.startswith("SpecError: hpfunc.debug.check_replicas: arrays lie on different meshes")
        assert trees.startswith("AgreementError: hpfunc.debug.check_replicas: ranks disagree")
        assert inside.startswith("UsageError: hpfunc.debug.check_replicas: it is called inside of a step")


def counted(rank: int) -> tuple[int, int]:
    """How many exchanges a check costs when all is well, and when something is not."""
    from hpfunc._running.agreement import control

    params = hp.shard([torch.zeros(64) for _ in range(20)], mesh4(), hp.P())
    backend: Any = control(mesh4()).backend
    plain, calls = backend.exchange, []
    found = []
    try:
        backend.exchange = lambda *args: (calls.append(len(args[1])), plain(*args))[1]
        for tree in (params, [flipped(params[0], 5, rank, (1,)), *params[1:]]):
            outcome(hp.debug.check_replicas, tree)
            found.append(len(calls))
            calls.clear()
    finally:
        del backend.exchange
    return found[0], found[1]


def test_a_check_that_finds_nothing_is_one_exchange(pool: Callable[..., Pool]) -> None:
    for fine, bad in pool(4).run(counted):
        assert fine == 2  # what is compared, and the digests
        assert bad == 2 + 7  # 64 elements are halved 6 times, and once more for a single one


# --- steps ----------------------------------------------------------------------------------------------------------
square = hp.unit(lambda p: (p["w"] ** 2).sum(), name="square")
add = hp.unit(lambda ws: (ws[0] ** 2 + 3 * ws[1]).sum(), name="add")


def drifting_step(rank: int, debug: bool, at_call: int) -> list[str]:
    mesh, texts, used = mesh4(), [], []

    def fn(params: Any) -> Any:
        used.append(1)
        return hp.value_and_grad(square)(params)[0]

    step = hp.sharded(fn, mesh, debug=debug)
    params = {"b": hp.shard(torch.ones(3), mesh, hp.P()), "w": hp.shard(torch.arange(8.0), mesh, hp.P("shard"))}
    drifted = params | {"w": flipped(params["w"], 1, rank, (2,))}
    for n in range(4):
        calls = len(used)
        texts.append(outcome(step, drifted if n == at_call else params))
        assert len(used) == calls + (texts[-1] == "returned")
    return texts


@pytest.mark.parametrize(("debug", "at_call"), [(False, 0), (True, 0), (True, 1), (True, 3)])
def test_a_step_refuses_arguments_that_drifted_before_it_uses_them(
    pool: Callable[..., Pool], debug: bool, at_call: int
) -> None:
    results = pool(4).run(drifting_step, debug, at_call)
    assert results[1:] == results[:1] * 3
    text = results[0].pop(at_call)
    assert results[0] == ["returned"] * 3
    assert text.startswith("LeafError: hpfunc.sharded: ranks hold different values of one part")
    assert "params['w']: shape (8,), spec P('shard'): at [1] 1.0 on rank 0, " in text


def swapped_step(rank: int, spec: tuple[Any, ...], debug: bool, at_call: int, how: str) -> list[str]:
    """Rank 1 passes (b, a) for (a, b): of equal shape, and cut, so that no two ranks hold the same part."""
    mesh = mesh_of((2,), ("shard",))
    step = hp.sharded(lambda a, b: hp.value_and_grad(add)([a, b])[0], mesh, debug=debug)
    a, b = (hp.shard(torch.arange(8.0) + n, mesh, hp.P(*spec)) for n in (0, 100))
    if how == "made":
        b = hp.init(lambda: torch.arange(8.0) - 3, mesh, hp.P(*spec))
    if how == "updated":
        a, b = (x.with_local(x.local - 1) for x in (a, b))
    if how == "rows":
        rows = hp.shard(torch.arange(16.0).reshape(2, 8), mesh, hp.P(None, *spec))
        a, b = rows[0], rows[1]
    return [outcome(step, *((b, a) if n == at_call and rank == 1 else (a, b))) for n in range(3)]


@pytest.mark.parametrize("how", ["sharded", "made", "updated", "rows"])
@pytest.mark.parametrize(("debug", "at_call"), [(False, 0), (True, 0), (True, 2)])
def test_swapped_arguments_of_equal_shape_are_found(
    pool: Callable[..., Pool], debug: bool, at_call: int, how: str
) -> None:
    ours, theirs = pool(2).run(swapped_step, ("shard",), debug, at_call, how)
    assert ours == theirs
    text = ours.pop(at_call)
    assert ours == ["returned"] * 2
    assert text.startswith("AgreementError: hpfunc.sharded: ranks pass different arrays in one place")
    assert "a: shape (8,), spec P('shard'): rank 1 passes what rank 0 passes as b" in text
    assert "b: shape (8,), spec P('shard'): rank 1 passes what rank 0 passes as a" in text


def another_array(rank: int) -> list[str]:
    mesh = mesh_of((2,), ("shard",))
    a, b, c = (hp.shard(torch.arange(8.0) + n, mesh, hp.P("shard")) for n in range(3))
    step = hp.sharded(lambda a, b: add([a, b]), mesh)
    return [outcome(step, a, c if rank else b), outcome(step, a, b)]


def test_an_array_that_the_other_rank_does_not_pass_is_found(pool: Callable[..., Pool]) -> None:
    ours, theirs = pool(2).run(another_array)
    assert ours == theirs
    assert "b: shape (8,), spec P('shard'): rank 1 passes another array than rank 0" in ours[0]
    assert ours[1] == "returned"


def correct_programs(rank: int) -> list[str]:
    """Nothing of a correct program is refused: local work of one rank, arrays without a birth, failures before."""
    import optree

    mesh = mesh_of((2,), ("shard",))
    a, b = (hp.shard(torch.arange(8.0) + n, mesh, hp.P("shard")) for n in range(2))
    texts = [outcome(hp.shard, torch.ones(3 + rank), mesh, hp.P("shard"))]  # ranks disagree
    if rank == 1:
        for _ in range(3):  # looks at its part, alone
            optree.tree_map(lambda x: x * 2, {"a": a, "b": b})
            a.with_local(a.local + 1)
    c = hp.shard(torch.arange(8.0), mesh, hp.P("shard"))
    doubled = optree.tree_map(lambda x: x * 2, c)
    step = hp.sharded(lambda a, b: hp.value_and_grad(add)([a, b]), mesh, debug=True)
    for pair in ((a, c), (c, a), (doubled, a), (doubled if rank else c, b)):
        texts.append(outcome(step, *pair))

    def fails(a: Any) -> None:
        if rank:
            raise ValueError("mine")
        square({"w": a})

    texts.append(outcome(hp.sharded(fails, mesh), a)[:9])
    texts.append(outcome(step, a, hp.shard(torch.arange(8.0), mesh, hp.P("shard"))))
    return texts


def test_correct_programs_are_not_refused(pool: Callable[..., Pool]) -> None:
    for rank, texts in enumerate(pool(2).run(correct_programs)):
        assert texts[0].startswith("AgreementError")
        assert texts[5] == ("ValueError" if rank else "PeerError:")[:9]
        assert texts[1:5] + texts[6:] == ["returned"] * 5
