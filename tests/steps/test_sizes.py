"""Arrays of no elements, of one, with fewer rows than ranks, or that do not lie one element behind the other.

Whole steps over units of such weights, and what is done to trees of them, against one process in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optree
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import hpfunc as hp
from hpfunc import optim
from tests.helpers.ranks import Pool, mesh_of
from tests.helpers.reference import Axes, Grid
from tests.helpers.strategies import entries, spec
from tests.helpers.zoo import assert_same

pytestmark = pytest.mark.processes
EXAMPLES = settings(max_examples=25, phases=[Phase.explicit, Phase.generate])
GRIDS = [
    Grid(sizes, names, names)
    for sizes, names in [((2,), ("shard",)), ((4,), ("shard",)), ((2, 2), ("replicate", "shard")), ((3,), ("shard",))]
]
edge_shapes = st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 5]), max_size=3).map(tuple)


@dataclass(frozen=True)
class Small:
    """A weight.

    Attributes:
        cuts: for each dim, the axes that cut it.
        use: how its unit uses it: its gradient is dense, expanded, transposed, or there is none.
        lies: how its local part lies in memory.
        is_frozen: it is not differentiated.
    """

    shape: tuple[int, ...]
    cuts: tuple[Axes, ...]
    use: str = "dense"
    lies: str = "plain"
    is_frozen: bool = False

    def value(self, seed: int, dtype: torch.dtype) -> torch.Tensor:
        if self.lies == "expanded":
            return torch.full((), seed / 8 - 0.5, dtype=dtype).expand(self.shape)
        generator = torch.Generator().manual_seed(seed)
        return (torch.randn(self.shape, generator=generator, dtype=torch.float64) / 3).to(dtype)

    def scalar(self, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Returns a number that depends on the weight as `use` says."""
        if self.use == "unused":
            return x.sum() * 0
        if self.use == "expanded":
            return w.sum() * x.mean()
        factors = torch.arange(1.0, w.numel() + 1, dtype=w.dtype)
        if self.use == "dense":
            return (torch.tanh(w) * factors.reshape(w.shape)).sum() * x.mean()
        order = tuple(reversed(range(w.dim())))
        turned = w.permute(order)
        return (turned.square() * factors.reshape(turned.shape)).sum() * x.mean()


smalls_of = {
    grid: edge_shapes.flatmap(
        lambda shape, grid=grid: st.builds(
            Small,
            st.just(shape),
            entries(grid, len(shape)),
            st.sampled_from(["dense", "dense", "expanded", "transposed", "unused"]),
            st.sampled_from(["plain", "plain", "expanded", "turned", "gaps"]),
            st.sampled_from([False, False, False, True]),
        )
    )
    for grid in GRIDS
}


@dataclass(frozen=True)
class Net:
    """Units, each with some weights, and the order in which they are called."""

    grid: Grid
    units: tuple[tuple[Small, ...], ...]
    calls: tuple[int, ...]

    def tree(self, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
        return [{f"w{k}": w.value(7 * u + k, dtype) for k, w in enumerate(ws)} for u, ws in enumerate(self.units)]

    def specs(self) -> list[dict[str, hp.P]]:
        return [{f"w{k}": spec(w.cuts) for k, w in enumerate(unit)} for unit in self.units]

    def loss(
        self, trained: Any, frozen: Any, x: torch.Tensor, unit: Callable[..., Any] = lambda fn: fn
    ) -> torch.Tensor:
        for u in self.calls:
            weights = self.units[u]

            def fn(p: Any, x: torch.Tensor, weights: tuple[Small, ...] = weights) -> torch.Tensor:
                return torch.tanh(x + sum(w.scalar(p[f"w{k}"].to(x.dtype), x) for k, w in enumerate(weights)))

            x = unit(fn)(trained[u] | frozen[u], x) if weights else torch.tanh(x)
        return x.square().mean()

    def split(self, tree: Any) -> tuple[Any, Any]:
        kept = [[(f"w{k}", w.is_frozen) for k, w in enumerate(unit)] for unit in self.units]

        def part(wanted: bool) -> Any:
            units = zip(kept, tree, strict=True)
            return [{name: leaves[name] for name, frozen in unit if frozen == wanted} for unit, leaves in units]

        return part(False), part(True)


@st.composite
def nets(draw: Any) -> Net:
    grid = draw(st.sampled_from(GRIDS))
    units = tuple(tuple(draw(st.lists(smalls_of[grid], max_size=4))) for _ in range(draw(st.integers(1, 4))))
    calls = draw(st.lists(st.integers(0, len(units)), min_size=1, max_size=5))
    usual = Small((5,), (("shard",),))  # a loss depends on something
    return Net(grid, ((usual,), *units), (0, *calls))


def laid_out(array: hp.ShardedArray, lies: str) -> hp.ShardedArray:
    """Returns the array with its local part somewhere else in memory."""
    local = array.local
    if lies == "expanded":  # all its elements are the same
        first = local.reshape(-1)[:1]
        return array.with_local(first.reshape(()).expand(local.shape)) if local.numel() else array
    if lies == "turned":
        order = tuple(reversed(range(local.dim())))
        return array.with_local(local.permute(order).contiguous().permute(order))
    if lies == "gaps":
        wide = torch.zeros((*local.shape, 2), dtype=local.dtype)
        wide[..., 0] = local
        return array.with_local(wide[..., 0])
    return array


def batch(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 + rank), dtype=torch.float64).to(dtype)


def gradients(
    rank: int, net: Net, policy: hp.Policy, numerics: hp.Numerics, dtype: torch.dtype, mode: str | None
) -> list[list[torch.Tensor]]:
    """Returns the whole gradients of the weights: eager, recorded, and by a plan, twice."""
    mesh = mesh_of(net.grid.sizes, net.grid.names, net.grid.data_axes)
    arrays = hp.shard(net.tree(dtype), mesh, net.specs())
    arrays = [
        {name: laid_out(array, small.lies) for (name, array), small in zip(leaves.items(), unit, strict=True)}
        for leaves, unit in zip(arrays, net.units, strict=True)
    ]
    trained, frozen = net.split(arrays)
    before = [
        leaf.local.clone() for leaf in optree.tree_leaves(arrays, is_leaf=lambda x: isinstance(x, hp.ShardedArray))
    ]
    grad_fn = hp.value_and_grad(lambda p, x, frozen: net.loss(p, frozen, x, hp.unit), numerics=numerics)
    if mode is not None:
        grad_fn = hp.accumulate(grad_fn, 2, mode=mode, batch_argnums=1)
    step, found = hp.sharded(grad_fn, mesh, policy=policy, debug=True), []
    for call in (grad_fn, step, step, step):
        _, grads = call(trained, batch(rank, dtype), frozen)
        found.append([leaf.clone() for leaf in optree.tree_leaves(hp.unshard(grads))])
    assert step.followed_plan
    leaves = optree.tree_leaves(arrays, is_leaf=lambda x: isinstance(x, hp.ShardedArray))
    assert all(torch.equal(leaf.local, old) for leaf, old in zip(leaves, before, strict=True))
    return found


def reference(net: Net) -> list[torch.Tensor]:
    trained, frozen = net.split(net.tree(torch.float64))
    leaves, treedef = optree.tree_flatten(trained)
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    tree = optree.tree_unflatten(treedef, leaves)
    losses = [net.loss(tree, frozen, batch(rank, torch.float64)) for rank in range(net.grid.num_ranks)]
    if not leaves:
        return []
    found = torch.autograd.grad(torch.stack(losses).mean(), leaves, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


policies = st.builds(
    hp.Policy,
    prefetch=st.integers(0, 3),
    release=st.sampled_from(["forward", "backward", "never"]),  # zero3, zero2, zero1
    pack_below_bytes=st.sampled_from([None, 0, 30, math.inf]),
    prefetch_backward=st.sampled_from([None, None, 0, 2]),
    reduce_bucket_bytes=st.sampled_from([0, 0, 100, math.inf]),
)


@EXAMPLES
@given(nets(), policies)
def test_gradients_of_every_size_are_those_of_one_process(
    pool: Callable[..., Pool], net: Net, policy: hp.Policy
) -> None:
    want = reference(net)
    for found in pool(net.grid.num_ranks).run(gradients, net, policy, hp.Numerics(), torch.float64, None):
        for grads in found:
            torch.testing.assert_close(grads, want, rtol=1e-11, atol=1e-13)


NUMERICS = [
    hp.Numerics(param_dtype="bfloat16", reduce_dtype="float32"),
    hp.Numerics(param_dtype="bfloat16", accum_dtype="float64"),
    hp.Numerics(reduce_dtype="float16", reduce_op="sum"),
    hp.Numerics(reduce_dtype="float16"),
]


@EXAMPLES
@given(nets(), policies, st.sampled_from([hp.Numerics(), *NUMERICS]), st.sampled_from([None, "scatter", "local"]))
def test_every_schedule_gives_the_bits_of_the_eager_reference(
    pool: Callable[..., Pool], net: Net, policy: hp.Policy, numerics: hp.Numerics, mode: str | None
) -> None:
    for eager, *others in pool(net.grid.num_ranks).run(gradients, net, policy, numerics, torch.float32, mode):
        for grads in others:
            for got, want in zip(grads, eager, strict=True):
                assert_same(got, want)


# --- trees ----------------------------------------------------------------------------------------------------------
OPTIMIZERS: dict[str, Callable[[], optim.Optimizer]] = {
    "sgd": lambda: optim.sgd(0.1),
    "momentum": lambda: optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda: optim.adamw(0.1),
    "clipped": lambda: optim.chain(optim.clip_by_global_norm(0.3), optim.scale_by_adam(), optim.scale(-0.1)),
    "zero": lambda: optim.chain(optim.clip_by_global_norm(0.0), optim.add_decayed_weights(0.1)),
    "torch Adam": lambda: optim.from_torch(torch.optim.Adam, lr=0.1),
    "torch SGD": lambda: optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "finite": lambda: optim.apply_if_finite(optim.adamw(0.1)),
}


def descend(optimizer: optim.Optimizer, params: Any, grads: Any) -> Any:
    state = optimizer.init(params)
    for _ in range(3):
        updates, state = optimizer.update(grads, state, params)
        params = hp.apply_updates(params, updates)
    return params


@st.composite
def trees(draw: Any) -> tuple[Grid, tuple[Small, ...]]:
    grid = draw(st.sampled_from(GRIDS))
    return grid, tuple(draw(st.lists(smalls_of[grid], min_size=1, max_size=5)))


def tree_of(smalls: tuple[Small, ...], seed: int) -> list[torch.Tensor]:
    return [small.value(seed + k, torch.float64) for k, small in enumerate(smalls)]


def arrays_of(grid: Grid, smalls: tuple[Small, ...], seed: int) -> list[Any]:
    mesh = mesh_of(grid.sizes, grid.names, grid.data_axes)
    arrays = hp.shard(tree_of(smalls, seed), mesh, [spec(small.cuts) for small in smalls])
    return [laid_out(array, small.lies) for array, small in zip(arrays, smalls, strict=True)]


def optimized(rank: int, grid: Grid, smalls: tuple[Small, ...], name: str) -> Any:
    mesh = mesh_of(grid.sizes, grid.names, grid.data_axes)
    params, grads = arrays_of(grid, smalls, 0), arrays_of(grid, smalls, 50)
    before = [array.local.clone() for array in params + grads]
    step = hp.sharded(lambda p, g: descend(OPTIMIZERS[name](), p, g), mesh)
    found = [descend(OPTIMIZERS[name](), params, grads), *(step(params, grads) for _ in range(2))]
    for array, old in zip(params + grads, before, strict=True):
        assert torch.equal(array.local, old)
    donating = hp.sharded(hp.apply_updates, mesh, donate_argnums=0)
    added = donating([array.with_local(array.local[...]) for array in params], grads)
    norm, finite = hp.global_norm(grads), bool(optim.all_finite(grads))
    return hp.unshard(found), hp.unshard(added), norm, finite


@EXAMPLES
@given(trees(), st.sampled_from(sorted(OPTIMIZERS)))
def test_optimizers_give_the_numbers_of_one_process(
    pool: Callable[..., Pool], tree: tuple[Grid, tuple[Small, ...]], name: str
) -> None:
    grid, smalls = tree
    params, grads = ([x.clone() for x in tree_of(smalls, seed)] for seed in (0, 50))
    want = descend(OPTIMIZERS[name](), params, grads)
    norm = math.sqrt(sum(float(g.square().sum()) for g in grads))
    for found, added, its_norm, finite in pool(grid.num_ranks).run(optimized, grid, smalls, name):
        for weights in found:
            torch.testing.assert_close(weights, want, rtol=1e-12, atol=1e-15)
        assert all(torch.equal(a, p + g) for a, p, g in zip(added, params, grads, strict=True))
        assert its_norm.item() == pytest.approx(norm, rel=1e-12)
        assert finite


def moved(rank: int, grid: Grid, smalls: tuple[Small, ...], others: tuple[hp.P, ...], path: str) -> None:
    """Whatever carries arrays from one place to another keeps every bit."""
    mesh, xs = mesh_of(grid.sizes, grid.names, grid.data_axes), tree_of(smalls, 0)
    arrays, specs = arrays_of(grid, smalls, 0), [spec(small.cuts) for small in smalls]
    assert_same(hp.unshard(arrays), xs)
    assert_same(hp.unshard(hp.reshard(arrays, list(others))), xs)
    assert_same(hp.unshard(hp.init(lambda: [x.clone() for x in xs], mesh, specs)), xs)
    zeros = [torch.zeros_like(x) for x in xs]
    assert_same(hp.unshard(hp.shard(xs if rank == 1 else zeros, mesh, specs, broadcast_from=1)), xs)
    assert_same(hp.unshard(hp.shard(xs, mesh, specs, check_replicas=True)), xs)
    total = hp.reduce([x * (rank + 1) for x in xs], mesh, specs)
    n = mesh.size * (mesh.size + 1) // 2
    torch.testing.assert_close(hp.unshard(total), [x * n for x in xs], rtol=1e-14, atol=0)
    hp.checkpoint.save(path, arrays)
    for wanted in (specs, list(others)):
        assert_same(hp.unshard(hp.checkpoint.load(path, hp.shard(zeros, mesh, wanted))), xs)


@EXAMPLES
@given(trees(), st.data())
def test_arrays_of_every_size_are_moved(
    pool: Callable[..., Pool], tmp_path_factory: Any, tree: tuple[Grid, tuple[Small, ...]], data: Any
) -> None:
    grid, smalls = tree
    others = tuple(spec(data.draw(entries(grid, len(small.shape)))) for small in smalls)
    pool(grid.num_ranks).run(moved, grid, smalls, others, str(tmp_path_factory.mktemp("saved")))


def bound(rank: int, smalls: tuple[Small, ...]) -> Any:
    grid = GRIDS[0]
    params, grads = arrays_of(grid, smalls, 0), arrays_of(grid, smalls, 50)
    kept = hp.optim.bind(params)
    optimizer = torch.optim.Adam(kept.parameters, lr=0.1, foreach=False)
    for _ in range(2):
        kept.set_grads(grads)
        for parameter in kept.parameters:
            parameter.grad.mul_(1.0)  # as a scaler does
        kept.note_gradients()
        optimizer.step()
    return hp.unshard(kept.params)


def test_bound_weights_may_lie_anywhere(pool: Callable[..., Pool]) -> None:
    kinds = [
        (shape, lies) for shape in [(4, 2), (1, 2), (0, 3), (3,)] for lies in ("plain", "expanded", "turned", "gaps")
    ]
    smalls = tuple(Small(shape, (("shard",), ())[: len(shape)], lies=lies) for shape, lies in kinds)
    want = [torch.nn.Parameter(x.clone()) for x in tree_of(smalls, 0)]
    optimizer = torch.optim.Adam(want, lr=0.1, foreach=False)
    for _ in range(2):
        for parameter, gradient in zip(want, tree_of(smalls, 50), strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    for found in pool(2).run(bound, smalls):
        torch.testing.assert_close(found, [parameter.detach() for parameter in want], rtol=1e-12, atol=1e-15)
