"""Every dtype in every operation: the right bits, or one refusal on all ranks that names every leaf.

The table: what only carries elements takes all dtypes, also those that gloo does not know. Sums refuse those that have
none (bool, 8-bit floats), `pmax` and `pmin` those without an order (complex). Gradients are of floats; 8-bit floats are
reduced in another dtype, which `Numerics` must give.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch

import hpfunc as hp
from tests.helpers.ranks import Pool, mesh_of, outcome

FLOAT8 = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
INTEGERS = (*UNSIGNED, torch.int8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (*FLOATS, *FLOAT8, *INTEGERS, *COMPLEX, torch.bool)
NO_SUM = (*FLOAT8, torch.bool)
MESHES = [((2,), ("shard",)), ((3,), ("shard",)), ((2, 2), ("replicate", "shard"))]

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_mesh = pytest.mark.parametrize("grid", MESHES, ids=str)


def any_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Returns elements of any bits, NaN among those of floats."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    data = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator)
    return data.to(torch.uint8).view(dtype)


def small(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Returns integers whose sums are exact in every dtype; those of integers go around."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 8, shape, generator=generator)
    if dtype in INTEGERS:
        values = values + (1 << (8 * dtype.itemsize - 1)) - 4
    if dtype in COMPLEX:
        return torch.complex(values.double(), values.double().flip(0)).to(dtype)
    return values.to(dtype)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).tolist()


def assert_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert bits(got) == bits(want)


# --- what carries ---------------------------------------------------------------------------------------------------
CARRIED = [(8, 3), (5, 2), (1, 4), (2, 1, 3)]  # even, uneven, fewer rows than ranks, a dim of one


def carried(rank: int, grid: Any, dtype: torch.dtype) -> None:
    mesh = mesh_of(*grid)
    xs, others = ([any_bits(shape, dtype, seed + n) for n, shape in enumerate(CARRIED)] for seed in (0, 10))
    mine = xs if rank == 1 else others
    arrays = hp.shard(mine, mesh, hp.P("shard"), broadcast_from=1, check_replicas=False)
    for x, whole in zip(xs, hp.unshard(arrays), strict=True):
        assert_bits(whole, x)
    for spec in (hp.P(None, "shard"), hp.P(), hp.P("shard")):
        arrays = hp.reshard(arrays, spec)
        for x, whole in zip(xs, hp.unshard(arrays), strict=True):
            assert_bits(whole, x)
    made = hp.init(lambda: [x.clone() for x in xs], mesh, hp.P("shard"))
    for x, array in zip(xs, made, strict=True):
        assert_bits(hp.unshard(array), x)
    with_nan = hp.shard(xs, mesh, hp.P(), check_replicas=True)
    for x, array in zip(xs, with_nan, strict=True):
        assert_bits(array.local, x)


@each_mesh
@each_dtype
def test_arrays_of_every_dtype_are_cut_and_gathered(pool: Callable[..., Pool], dtype: torch.dtype, grid: Any) -> None:
    pool(math.prod(grid[0])).run(carried, grid, dtype)


def moved(rank: int, dtype: torch.dtype, n: int) -> None:
    mesh, xs = mesh_of((n,), ("shard",)), [any_bits((n, 3), dtype, seed) for seed in range(n)]
    mine, turn = xs[rank], [(k, (k + 1) % n) for k in range(n)]
    with hp.use_mesh(mesh):
        assert_bits(hp.all_gather(mine, "shard"), torch.stack(xs))
        assert_bits(hp.ppermute(mine, "shard", turn), xs[rank - 1])
        assert_bits(hp.all_to_all(mine, "shard", 0, 0), torch.stack([x[rank] for x in xs]))
        assert_bits(hp.pvary(mine, "shard"), mine)
        scalar = mine.reshape(-1)[:1].expand(1)  # an element that does not lie beside another one
        assert_bits(hp.ppermute(scalar, "shard", turn), xs[rank - 1].reshape(-1)[:1])


@each_dtype
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_collectives_carry_every_dtype(pool: Callable[..., Pool], dtype: torch.dtype, num_ranks: int) -> None:
    pool(num_ranks).run(moved, dtype, num_ranks)


def conjugated(rank: int, dtype: torch.dtype) -> None:
    """Tensors that only stand for a conjugate, or for a negative, travel as what they stand for."""
    mesh, xs = mesh_of((2,), ("shard",)), [small((2, 2), dtype, seed) for seed in range(2)]
    lazy = [lambda x: x.conj(), lambda x: x.conj().imag]
    with hp.use_mesh(mesh):
        for look in lazy:
            views = [look(x) for x in xs]
            plain, mine = [view.resolve_conj().resolve_neg() for view in views], views[rank]
            assert mine.is_conj() or mine.is_neg()
            assert_bits(hp.all_gather(mine, "shard"), torch.stack(plain))
            assert torch.equal(hp.psum(mine, "shard"), plain[0] + plain[1])  # signs of zeros may differ
            assert_bits(hp.ppermute(mine, "shard", [(0, 1), (1, 0)]), plain[1 - rank])
            assert_bits(hp.all_to_all(mine, "shard", 0, 0), torch.stack([x[rank] for x in plain]))
            array = hp.shard(views[0], mesh, hp.P("shard"))
            assert_bits(hp.unshard(array), plain[0])
            part = array.with_local(look(array.local.resolve_conj()) if mine.is_complex() else array.local)
            step = hp.sharded(hp.unit(lambda w: w * 1), mesh)
            whole = hp.unshard(part)
            assert_bits(whole, plain[0].conj().resolve_conj() if mine.is_complex() else plain[0])
            for _ in range(3):
                assert_bits(step(part), whole)


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_lazy_conjugates_travel_as_what_they_stand_for(pool: Callable[..., Pool], dtype: torch.dtype) -> None:
    pool(2).run(conjugated, dtype)


# --- what adds up, and the largest ----------------------------------------------------------------------------------
def sums(rank: int, dtype: torch.dtype, num_ranks: int) -> list[str]:
    xs = [small((num_ranks, 3), dtype, seed) for seed in range(num_ranks)]
    mesh, mine = mesh_of((num_ranks,), ("shard",)), xs[rank]
    with hp.use_mesh(mesh):
        texts = [
            outcome(hp.psum, {"a": mine, "b": torch.ones(1), "c": [mine]}, "shard"),
            outcome(hp.pmean, mine, "shard"),
            outcome(hp.psum_scatter, mine, "shard"),
            outcome(hp.reduce, {"w": mine, "v": torch.ones(2), "u": mine}, mesh, hp.P("shard")),
        ]
        if texts[0] == "returned":
            total = expected_sum(xs, dtype)
            assert_bits(hp.psum(mine, "shard"), total)
            assert_bits(hp.psum_scatter(mine, "shard"), total[rank])
            array = hp.reduce(mine, mesh, hp.P("shard"))
            assert_bits(hp.unshard(array), total)
            assert_bits(hp.reduce(mine, mesh, hp.P()).local, total)
            assert hp.pmean(mine, "shard").is_floating_point() or mine.is_complex()
    return texts


def expected_sum(xs: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    if dtype in INTEGERS:
        modulus = 1 << (8 * dtype.itemsize)
        values = [sum(column) % modulus for column in zip(*(x.reshape(-1).tolist() for x in xs), strict=True)]
        signed = dtype not in UNSIGNED
        values = [v - modulus if signed and v >= modulus // 2 else v for v in values]
        return torch.tensor(values, dtype=dtype).reshape(xs[0].shape)
    wide = torch.complex128 if dtype in COMPLEX else torch.float64
    return torch.stack([x.to(wide) for x in xs]).sum(0).to(dtype)


@each_dtype
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sums_are_right_or_refused_by_all(pool: Callable[..., Pool], dtype: torch.dtype, num_ranks: int) -> None:
    first, *others = pool(num_ranks).run(sums, dtype, num_ranks)
    assert all(texts == first for texts in others)
    if dtype not in NO_SUM:
        assert first == ["returned"] * 4
        return
    name = str(dtype).removeprefix("torch.")
    for text, leaves in zip(first, [("x['a']", "x['c'][0]"), ("x",), ("x",), ("tree['w']", "tree['u']")], strict=True):
        assert "elements of this dtype cannot be added up" in text
        assert text.startswith("LeafError: ")
        assert all(f"  {leaf}: shape {(num_ranks, 3)}, {name}" in text for leaf in leaves)
        assert "x['b']" not in text
        assert "tree['v']" not in text


def extreme(rank: int, dtype: torch.dtype, kind: str, of: Callable[..., float]) -> str:
    mesh, xs = mesh_of((3,), ("shard",)), [small((2, 5), dtype, seed) for seed in range(3)]
    text = outcome(getattr(hp, kind), xs[rank], "shard", mesh=mesh)
    if text == "returned":
        columns = zip(*((x.float() if dtype in FLOAT8 else x).reshape(-1).tolist() for x in xs), strict=True)
        want = torch.tensor([of(column) for column in columns], dtype=dtype if dtype in INTEGERS else None)
        assert_bits(getattr(hp, kind)(xs[rank], "shard", mesh=mesh), want.reshape(2, 5).to(dtype))
    return text


@each_dtype
@pytest.mark.parametrize(("kind", "of"), [("pmax", max), ("pmin", min)])
def test_extremes_are_right_or_refused_by_all(
    pool: Callable[..., Pool], dtype: torch.dtype, kind: str, of: Callable[..., float]
) -> None:
    for text in pool(3).run(extreme, dtype, kind, of):
        if dtype in COMPLEX:
            assert text.startswith(
                f"LeafError: hpfunc.{kind}: complex numbers have no order\n  x: shape (2, 5), complex"
            )
        else:
            assert text == "returned"


# --- weights of units -----------------------------------------------------------------------------------------------
def frozen(rank: int, grid: Any, dtype: torch.dtype, pack_below_bytes: int) -> None:
    """A unit sees the bits of weights that are not trained; eager, recorded and planned."""
    mesh, xs = mesh_of(*grid), [any_bits(shape, dtype, n) for n, shape in enumerate(CARRIED)]
    tree = {"even": xs[0], "uneven": xs[1], "short": xs[2], "inner": xs[3]}
    specs = {"even": hp.P("shard"), "uneven": hp.P("shard"), "short": hp.P("shard"), "inner": hp.P(None, None, "shard")}
    buffers, w = hp.shard(tree, mesh, specs), hp.shard(torch.ones(4), mesh, hp.P("shard"))
    seen: list[dict[str, list[int]]] = []

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        seen.append({name: bits(value) for name, value in p["buffers"].items()})
        return (p["w"] * x).sum()

    def grad_fn(w: Any, buffers: Any, x: torch.Tensor) -> Any:
        return hp.value_and_grad(lambda w: hp.unit(fn)({"w": w, "buffers": buffers}, x))(w)

    step = hp.sharded(grad_fn, mesh, policy=hp.Policy(pack_below_bytes=pack_below_bytes))
    x = torch.arange(4.0) + rank
    for call in (grad_fn, step, step, step):
        _, gradient = call(w, buffers, x)
        assert torch.equal(hp.unshard(gradient), torch.arange(4.0) + (mesh.size - 1) / 2)
    assert seen == [{name: bits(value) for name, value in tree.items()}] * 4


@pytest.mark.parametrize("grid", [MESHES[0], MESHES[2]], ids=str)
@each_dtype
def test_units_see_frozen_weights_of_every_dtype(pool: Callable[..., Pool], dtype: torch.dtype, grid: Any) -> None:
    for pack_below_bytes in (0, 1 << 20):
        pool(math.prod(grid[0])).run(frozen, grid, dtype, pack_below_bytes)


def trained(rank: int, dtype: torch.dtype, grid: Any, numerics: hp.Numerics) -> Any:
    mesh = mesh_of(*grid)
    tree = {"a": small((4, 2), dtype, 0), "b": [small((3,), dtype, 1)], "c": torch.ones(2)}
    params = hp.shard(tree, mesh, hp.P("shard"))

    def loss_fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        twice = hp.unit(lambda p, x: (p["a"].float() * x).sum() + p["b"][0].float().sum() * p["c"].sum())
        return twice(p, x) + twice(p, 2 * x) + p["a"].local.float().sum() * 0

    grad_fn = hp.value_and_grad(loss_fn, numerics=numerics)
    step, x = hp.sharded(grad_fn, mesh), torch.full((4, 2), 1.0 + rank)
    if (text := outcome(grad_fn, params, x)) != "returned":
        return [text, outcome(step, params, x)]
    return [optree.tree_map(torch.clone, hp.unshard(call(params, x)[1])) for call in (grad_fn, step, step)]


@pytest.mark.parametrize("dtype", FLOAT8[:4], ids=str)
@each_mesh
def test_gradients_of_8_bit_floats_need_a_dtype_to_be_reduced_in(
    pool: Callable[..., Pool], dtype: torch.dtype, grid: Any
) -> None:
    num_ranks, name = math.prod(grid[0]), str(dtype).removeprefix("torch.")
    for texts in pool(num_ranks).run(trained, dtype, grid, hp.Numerics()):
        for text in texts:
            assert "LeafError: hpfunc.value_and_grad: gradients cannot be added up in this dtype" in text
            for leaf in ("args[0]['a']: shape (4, 2)", "args[0]['b'][0]: shape (3,)"):
                assert leaf + f", spec P('shard'), reduced in {name}, accumulated in {name}" in text
            assert "args[0]['c']" not in text
    remedy = hp.Numerics(reduce_dtype="float32", accum_dtype="float32")
    for gradients in pool(num_ranks).run(trained, dtype, grid, remedy):
        for gradient in gradients:
            mean = 1 + (num_ranks - 1) / 2
            assert torch.equal(gradient["a"], torch.full((4, 2), 3 * mean))
            assert torch.equal(gradient["b"][0], torch.full((3,), 4.0))


# --- optimizers and checkpoints -------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_optimizers_refuse_8_bit_floats(dtype: torch.dtype) -> None:
    tree = {"a": torch.ones(3), "b": [torch.ones(2).to(dtype), torch.ones(0, 2).to(dtype)]}
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("tree", lambda: hp.global_norm(tree)),
        ("tree", lambda: hp.optim.all_finite(tree)),
        ("tree", lambda: hp.clip_by_global_norm(1.0).update(tree, ())),
        ("params", lambda: hp.apply_updates(tree, tree)),
        ("params", lambda: hp.optim.adamw(0.1).init(tree)),
    ]
    for name, call in calls:
        text, kind = outcome(call), str(dtype).removeprefix("torch.")
        assert text.startswith("LeafError: ")
        assert f"{name} has leaves of 8-bit floats, which have no arithmetic" in text
        assert f"{name}['b'][0]: shape (2,), {kind}" in text
        assert f"{name}['b'][1]: shape (0, 2), {kind}" in text
        assert "['a']" not in text


def saved(rank: int, dtype: torch.dtype, path: str) -> str:
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    tree = {f"w{n}": any_bits(shape, dtype, n) for n, shape in enumerate([*CARRIED, (1, 1)])}
    tree |= {"none": torch.zeros((0, 4), dtype=dtype), "empty": torch.zeros((3, 0), dtype=dtype)}
    arrays = hp.shard(tree, mesh, hp.P("shard"))
    if (text := outcome(hp.checkpoint.save, path, arrays)) == "returned":
        for spec in (hp.P("shard"), hp.P(), hp.P(None, ("replicate", "shard"))):
            like = hp.shard(optree.tree_map(torch.zeros_like, tree), mesh, spec)
            loaded = hp.unshard(hp.checkpoint.load(path, like))
            for name, x in tree.items():
                assert_bits(loaded[name], x)
    return text


@each_dtype
def test_checkpoints_keep_the_bits_or_refuse(pool: Callable[..., Pool], dtype: torch.dtype, tmp_path: Any) -> None:
    not_there = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.complex128)
    for text in pool(4).run(saved, dtype, str(tmp_path / "saved")):
        if dtype in not_there:
            assert text.startswith("LeafError: hpfunc.checkpoint.save: leaves of tree cannot stand in a checkpoint")
        else:
            assert text == "returned"
