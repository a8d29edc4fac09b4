"""What the executor does with memory and messages: copies, pointers, lifetimes, counters, leaving a plan."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import optree
import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hpfunc as hp
from hpfunc._values.array import is_sharded
from hpfunc.backends import Counters, get
from tests.helpers import frameworks as ops
from tests.helpers.chain import D, chain, data, layer, layer_unit, layers, step
from tests.helpers.frameworks import to_framework, to_torch
from tests.helpers.leaves import assert_same_bits, local_leaves
from tests.helpers.models import Layout, Model, P
from tests.helpers.peak_memory import peak_memory
from tests.helpers.ranks import Pool, mesh_of, outcome
from tests.helpers.waiting import settled

pytestmark = pytest.mark.processes


# --- nothing is copied ----------------------------------------------------------------------------------------------
class Copies(TorchDispatchMode):
    """Notes every operator that copies at least `numel` elements."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.found = numel, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        is_copy = name in ("copy_", "cat", "clone", "contiguous", "_to_copy", "stack")
        if is_copy and isinstance(out, torch.Tensor) and out.numel() >= self.numel:
            self.found.append(f"{name} of {tuple(out.shape)}")
        if name == "_foreach_copy_":
            self.found += [f"{name} of {tuple(x.shape)}" for x in args[0] if x.numel() >= self.numel]
        return out


def copies(rank: int, spec: hp.P, pack_below_bytes: float) -> list[str]:
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    params = hp.shard([{"w": p["w"], "v": p["w"]} for p in layers(3)], mesh, spec)
    unit = hp.unit(lambda p, x: torch.tanh(F.linear(F.linear(x, p["w"]), p["v"])), name="matrices")
    policy = hp.Policy(pack_below_bytes=pack_below_bytes)
    run = hp.sharded(hp.value_and_grad(lambda p, x: chain(p, x, unit)), mesh, policy=policy)
    run(params, data(rank))
    with Copies(D * D // 2) as found:
        run(params, data(rank))
    assert run.followed_plan
    return found.found


def test_an_even_cut_of_the_first_dim_is_never_copied(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(copies, P("shard"), 0) == [[]] * 4


def test_what_is_packed_or_cut_elsewhere_is_copied(pool: Callable[[int], Pool]) -> None:
    """So the test above can fail."""
    assert all(pool(4).run(copies, P("shard"), 1e9))
    assert all(pool(4).run(copies, P(None, "shard"), 0))


def pointers(rank: int) -> dict[str, list[int]]:
    """Returns addresses: what the reduce-scatter's sums write, what is all-reduced, what comes back."""
    mesh, backend = mesh_of((2, 2), ("replicate", "shard")), cast(Any, get("torch"))
    params = hp.shard(layers(3), mesh, P("shard"))
    run = hp.sharded(step, mesh, policy=hp.Policy(pack_below_bytes=0))
    run(params, data(rank))
    seen: dict[str, list[int]] = {"sum": [], "all_reduce": []}
    launch, sum_parts = backend.launch, backend.sum_parts

    def watch_launch(collective: Any, group: Any, sends: Any, receives: Any) -> Any:
        if collective == "all_reduce":
            seen["all_reduce"] += [x.data_ptr() for x in receives]
        return launch(collective, group, sends, receives)

    def watch_sum(target: Any, parts: Any) -> None:
        seen["sum"].append(target.data_ptr())
        sum_parts(target, parts)

    backend.launch, backend.sum_parts = watch_launch, watch_sum
    try:
        _, grads = run(params, data(rank))
    finally:
        del backend.launch, backend.sum_parts
    leaves = local_leaves(grads)
    return seen | {
        "gradients": [x.data_ptr() for x in leaves],
        "buffers": [x.untyped_storage().data_ptr() for x in leaves],
    }


def test_a_gradient_stays_where_its_reduce_scatter_put_it(pool: Callable[[int], Pool]) -> None:
    for seen in pool(4).run(pointers):
        assert set(seen["gradients"]) == set(seen["sum"])
        assert set(seen["buffers"]) == set(seen["all_reduce"])
        assert len(seen["all_reduce"]) == 3  # one for each unit, bias and weight together
        assert all(address % 4 == 0 for address in seen["gradients"])
        starts = dict(zip(seen["gradients"], seen["buffers"], strict=True))
        assert all((address - start) % 512 == 0 for address, start in starts.items())


# --- lifetimes ------------------------------------------------------------------------------------------------------
def whole_units(rank: int, policy: hp.Policy) -> list[int]:
    """Returns how many units were whole, or being gathered, at each allocation of a whole weight in a planned step."""
    mesh, backend = mesh_of((2,), ("shard",)), cast(Any, get("torch"))
    sizes = [16 + 2 * i for i in range(6)]
    weights = [{"w": torch.ones(n, n) / n, "b": torch.zeros(2)} for n in sizes]
    params = hp.shard(weights, mesh, P("shard"))
    unit = hp.unit(lambda p, x: (torch.tanh(x @ p["w"]).sum() * p["w"].new_ones(p["w"].shape[0])) + p["b"].sum())

    def loss(params: Any) -> torch.Tensor:
        x = torch.ones(16)
        for p, after in zip(params, [*sizes[1:], 1], strict=True):
            x = unit(p, x).sum().expand(after)
        return x.sum()

    numerics = hp.Numerics(reduce_dtype="float64")  # so that no other buffer looks like a whole weight
    run = hp.sharded(hp.value_and_grad(loss, numerics=numerics), mesh, policy=policy)
    run(params)
    live: dict[StorageWeakRef, int] = {}
    counts: list[int] = []
    empty = backend.empty
    most = policy.prefetch + 1 if policy.release == "forward" else len(sizes)

    def num_live() -> int:
        return len({n for ref, n in live.items() if not ref.expired()})

    def watch(shape: Any, dtype: str, device: str, *, zero: bool = False) -> Any:
        out = empty(shape, dtype, device, zero=zero)
        if dtype == "float32" and out.numel() in [n * n for n in sizes]:
            live[StorageWeakRef(out.untyped_storage())] = out.numel()
            counts.append(settled(num_live, lambda number: number <= most))
        return out

    backend.empty = watch
    try:
        run(params)
    finally:
        del backend.empty
    assert run.followed_plan
    assert hp.check(run.last_schedule).max_whole_units <= max(counts) or policy.release != "forward"
    return counts


@pytest.mark.parametrize("prefetch", [0, 1, 2, 4])
def test_at_most_prefetch_and_one_units_are_whole(pool: Callable[[int], Pool], prefetch: int) -> None:
    for counts in pool(2).run(whole_units, hp.Policy(prefetch=prefetch, pack_below_bytes=0)):
        assert max(counts) == prefetch + 1


def test_all_units_are_whole_if_the_policy_says_so(pool: Callable[[int], Pool]) -> None:
    for counts in pool(2).run(whole_units, hp.Policy(release="backward", pack_below_bytes=0)):
        assert max(counts) == 6
        assert len(counts) == 6  # gathered once


# --- counters and names ---------------------------------------------------------------------------------------------
def count_step(rank: int, policy: hp.Policy) -> Counters:
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    params = hp.shard(layers(4), mesh, P("shard"))
    run = hp.sharded(step, mesh, policy=policy)
    for _ in range(2):
        run(params, data(rank))
    assert run.last_counters is not None
    return run.last_counters


def test_counters_of_a_step(pool: Callable[[int], Pool]) -> None:
    weight, bias = 4 * D * D, 4 * D
    for counters in pool(4).run(count_step, hp.Policy(prefetch=1, pack_below_bytes=0)):
        # The last two units of the forward stay for the backward: 4 + 2 gathers of a weight and a bias.
        assert counters.collectives == {"all_gather": 12, "all_to_all": 8, "all_reduce": 4}
        assert counters.bytes_sent["all_gather"] == 6 * (weight + bias) // 2
        assert counters.bytes_sent["all_to_all"] == 4 * (weight + bias) // 2
        # Two replicas: each sends its half of the buffer and gets it back; slices are aligned to 512 bytes.
        assert counters.bytes_sent["all_reduce"] == 4 * (weight // 2 + 512)
        assert counters.wait_s > 0
    for counters in pool(4).run(count_step, hp.Policy(prefetch=1, release="never", pack_below_bytes=1e9)):
        assert counters.collectives == {"all_gather": 4, "all_to_all": 4, "all_reduce": 4}


# --- timing changes nothing -----------------------------------------------------------------------------------------
def delayed(rank: int, slow_rank: int, slow_launch: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns gradients of an eager step, and of a planned one in which one launch of one rank comes late."""
    mesh, backend = mesh_of((2, 2), ("replicate", "shard")), cast(Any, get(ops.framework()))
    params = hp.shard(layers(3), mesh, P("shard"))
    _, want = step(params, data(rank))
    run = hp.sharded(step, mesh, policy=hp.Policy(pack_below_bytes=0), debug=True)
    run(params, data(rank))
    launch, count = backend.launch, iter(range(1000))

    def late(*args: Any) -> Any:
        if next(count) == slow_launch and rank == slow_rank:
            time.sleep(0.05)
        return launch(*args)

    backend.launch = late
    try:
        _, grads = run(params, data(rank))
    finally:
        del backend.launch
    assert next(count) > slow_launch
    return local_leaves(want), local_leaves(grads)


@pytest.mark.parametrize("slow_launch", range(10))  # four gathers, three reduce-scatters and all-reduces
def test_a_delayed_collective_changes_no_bit(pool: Callable[[int], Pool], slow_launch: int) -> None:
    for want, got in pool(4).run(delayed, slow_launch % 4, slow_launch):
        assert_same_bits(got, want)


# --- steps that change ----------------------------------------------------------------------------------------------
def changing(rank: int, orders: list[tuple[int, ...]]) -> list[tuple[bool, list[torch.Tensor], list[torch.Tensor]]]:
    """Calls one step with another order of layers each time; returns (planned, gradients, eager gradients)."""
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    params = hp.shard(layers(4), mesh, P("shard"))
    order: list[tuple[int, ...]] = [()]

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return chain([params[i] for i in order[0]], x)

    def changing_step(params: Any, x: torch.Tensor) -> Any:
        return hp.value_and_grad(loss)(params, x)

    run = hp.sharded(changing_step, mesh, policy=hp.Policy(prefetch=2), debug=True)
    found = []
    for order[0] in orders:
        _, want = changing_step(params, data(rank))
        _, grads = run(params, data(rank))
        found.append((run.followed_plan, local_leaves(grads), local_leaves(want)))
    return found


def test_a_step_that_changes_goes_on_and_is_planned_anew(pool: Callable[[int], Pool]) -> None:
    orders = [(0, 1, 2, 3), (0, 1, 2, 3), (0, 2, 1, 3), (0, 2, 1, 3), (0, 1), (3, 0, 1, 2, 3, 3), (0, 1, 2, 3)]
    for results in pool(4).run(changing, orders):
        assert [planned for planned, _, _ in results] == [False, True, False, True, False, False, False]
        for _, got, want in results:
            assert_same_bits(got, want)


def leaving_in_backward(rank: int) -> tuple[list[bool], list[torch.Tensor], list[torch.Tensor]]:
    """In the third call a hook sums a gradient over ranks in the middle of the backward: no plan knew of that."""
    mesh = mesh_of((3, 1), ("replicate", "shard"))
    params = hp.shard(layers(4), mesh, P("shard"))
    is_hooked = [False]

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        x = chain_to(params[:2], x)
        if is_hooked[0]:
            x.register_hook(lambda g: g + 0 * hp.psum(g, "shard", mesh=mesh) + 0 * hp.psum(g, "replicate", mesh=mesh))
        return chain(params[2:], x)

    run = hp.sharded(hp.value_and_grad(loss), mesh, debug=True, policy=hp.Policy(pack_below_bytes=0))
    followed = []
    for is_hooked[0] in (False, False, True, True):
        _, grads = run(params, data(rank))
        followed.append(run.followed_plan)
        if followed[-1:] == [False]:
            left = local_leaves(grads)
    return followed, left, local_leaves(step(params, data(rank))[1])


def chain_to(params: Any, x: torch.Tensor) -> torch.Tensor:
    for p in params:
        x = layer_unit(p, x)
    return x


def test_a_plan_can_be_left_in_the_middle_of_the_backward(pool: Callable[[int], Pool]) -> None:
    for followed, got, want in pool(3).run(leaving_in_backward):
        assert followed == [False, True, False, True]
        assert_same_bits(got, want)


def checkpointed(rank: int, planned: bool, per_call: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    mesh = mesh_of((2,), ("shard",))
    params = hp.shard(layers(4), mesh, P("shard"))
    unit = hp.unit(layer)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        def some(x: torch.Tensor, start: int) -> torch.Tensor:
            for p in params[start : start + per_call]:
                x = unit(p, x)
            return x

        for start in range(0, 4, per_call):
            x = checkpoint(some, x, start, use_reentrant=False)
        return x.square().mean()

    def checkpointed_step(params: Any, x: torch.Tensor) -> Any:
        return hp.value_and_grad(loss)(params, x)

    run = hp.sharded(checkpointed_step, mesh, debug=True) if planned else checkpointed_step
    for _ in range(3):
        _, grads = run(params, data(rank))
    return local_leaves(grads), local_leaves(step(params, data(rank))[1])


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("per_call", [1, 2])
def test_activation_checkpointing_around_units(pool: Callable[[int], Pool], planned: bool, per_call: int) -> None:
    for got, want in pool(2).run(checkpointed, planned, per_call):
        assert_same_bits(got, want)


# --- lowering, forward only, frozen, donation -----------------------------------------------------------------------
def lowered(rank: int) -> tuple[bool, bool, list[torch.Tensor], list[torch.Tensor]]:
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    params = hp.shard(layers(3), mesh, P("shard"))
    before = [x.clone() for x in local_leaves(params)]
    run = hp.sharded(step, mesh)
    found = run.lower(params, data(rank))
    after = local_leaves(params)
    run(params, data(rank))
    same = found.schedule == run.last_schedule and str(found.schedule) == str(run.last_schedule)
    return same, found.program == run.schedules[0].program, before, after


def test_lower_finds_what_a_call_would_do(pool: Callable[[int], Pool]) -> None:
    for same_schedule, same_program, before, after in pool(4).run(lowered):
        assert same_schedule
        assert same_program
        assert_same_bits(after, before)


def forward_only(rank: int) -> tuple[bool, torch.Tensor, torch.Tensor]:
    mesh = mesh_of((2,), ("shard",))
    params = hp.shard(layers(3), mesh, P("shard"))
    run = hp.sharded(chain, mesh)
    for _ in range(2):
        found = run(params, data(rank))
    want = chain(layers(3), data(rank), layer)
    return run.followed_plan, *to_torch((found, want))


def test_a_forward_only_step(pool: Callable[[int], Pool]) -> None:
    for followed, got, want in pool(2).run(forward_only):
        assert followed
        assert torch.equal(got, want)


def frozen(rank: int) -> tuple[dict[str, int], list[torch.Tensor], list[torch.Tensor]]:
    """Differentiates the middle layer only."""
    mesh = mesh_of((2,), ("shard",))
    params = hp.shard(layers(3), mesh, P("shard"))

    def loss(trained: Any, first: Any, last: Any, x: torch.Tensor) -> torch.Tensor:
        return chain([first, trained, last], x)

    run = hp.sharded(lambda p, x: hp.value_and_grad(loss)(p[1], p[0], p[2], x), mesh, debug=True)
    for _ in range(2):
        _, grads = run(params, data(rank))
    assert run.followed_plan
    assert run.last_counters is not None
    _, want = step(params, data(rank))
    return run.last_counters.collectives, local_leaves(grads), local_leaves(want[1])


def test_frozen_weights_are_gathered_but_not_reduced(pool: Callable[[int], Pool]) -> None:
    for collectives, got, want in pool(2).run(frozen):
        assert_same_bits(got, want)
        assert collectives["all_to_all"] == 1  # the small weights of one unit share a message
        assert collectives["all_gather"] == 3  # the first unit has no backward; two stay whole at the turn


def donated(rank: int) -> tuple[bool, bool, str]:
    mesh = mesh_of((2,), ("shard",))
    params = hp.shard(layers(2), mesh, P("shard"))
    optimizer = hp.optim.adamw(1e-2)
    state = optimizer.init(params)

    def train(params: Any, state: Any, x: torch.Tensor) -> Any:
        _, grads = hp.value_and_grad(chain)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return hp.apply_updates(params, updates), state

    addresses = [x.data_ptr() for x in local_leaves(params)]
    run = hp.sharded(train, mesh, donate_argnums=(0, 1))
    new, _ = run(params, state, data(rank))
    try:
        local_leaves(params)
        text = "no error"
    except hp.DonatedError as error:
        text = str(error)
    plain = hp.sharded(train, mesh)
    kept = [x.clone() for x in local_leaves(new)]
    plain(new, optimizer.init(new), data(rank))
    same = all(torch.equal(a, b) for a, b in zip(kept, local_leaves(new), strict=True))
    return addresses == [x.data_ptr() for x in local_leaves(new)], same, text


def test_donated_arrays_are_updated_in_place_and_others_never(pool: Callable[[int], Pool]) -> None:
    for in_place, same, text in pool(2).run(donated):
        assert in_place
        assert same
        assert "was donated to" in text


def second_differentiation(rank: int) -> tuple[bool, list[torch.Tensor], list[torch.Tensor]]:
    """Two calls of value_and_grad in one step, the second at the point that the first one leads to."""
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    params = hp.shard(layers(3), mesh, P("shard"))

    def two(params: Any, x: torch.Tensor) -> Any:
        _, grads = hp.value_and_grad(chain)(params, x)
        moved = optree.tree_map(lambda p, g: p.with_local(p.local - 0.1 * g.local), params, grads, is_leaf=is_sharded)
        return hp.value_and_grad(chain)(moved, x)[1]

    run = hp.sharded(two, mesh, debug=True)
    for _ in range(2):
        grads = run(params, data(rank))
    return run.followed_plan, local_leaves(grads), local_leaves(two(params, data(rank)))


def test_two_differentiations_in_one_step(pool: Callable[[int], Pool]) -> None:
    for followed, got, want in pool(4).run(second_differentiation):
        assert followed
        assert_same_bits(got, want)


def local_parts(rank: int, layout: Layout) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A penalty on the local parts, and an array gathered outside of a unit, beside the units."""
    mesh = mesh_of(layout.shape, layout.names)
    model = Model()
    weights = model.weights(torch.float64)
    params = hp.shard(to_framework(weights), mesh, layout.specs(weights))
    num_shards = mesh.axis_size("shard")

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        whole = hp.unshard(params["head"])["w"]
        penalty = sum(p.local.square().sum() for p in optree.tree_leaves(params["layers"], is_leaf=is_sharded))
        return model.loss(params, x, hp.unit) + whole.sum() ** 2 + num_shards * penalty

    run = hp.sharded(lambda p, x: hp.value_and_grad(loss)(p, x)[1], mesh, debug=True)
    for _ in range(2):
        grads = run(params, to_framework(model.batch(rank, 0, torch.float64)))
    leaves, treedef = optree.tree_flatten(weights)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    tree: Any = optree.tree_unflatten(treedef, leaves)
    losses = [model.loss(tree, model.batch(r, 0, torch.float64)) for r in range(layout.num_ranks)]
    # A part that every rank holds is penalised by each of them: `num_shards` times as much as a part that is cut.
    square = [p.square().sum() * (num_shards if p.dim() == 0 else 1) for p in optree.tree_leaves(tree["layers"])]
    total = torch.stack(losses).mean() + tree["head"]["w"].sum() ** 2 + torch.stack(square).sum()
    return optree.tree_leaves(to_torch(hp.unshard(grads))), list(torch.autograd.grad(total, leaves))


def test_local_parts_and_gathered_arrays_are_differentiated_too(pool: Callable[[int], Pool]) -> None:
    layout = Layout((2, 2), ("replicate", "shard"), P("shard"), P("shard"))
    for got, want in pool(4).run(local_parts, layout):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_the_peak_of_the_plan_is_the_peak_of_the_process(tmp_path: Path) -> None:
    large, small = peak_memory(1536, tmp_path), peak_memory(64, tmp_path)
    measured, planned = (large[key] - small[key] for key in ("measured", "planned"))
    assert abs(measured - planned) <= 0.15 * planned, (large, small)


def kept_by_past_steps(rank: int, planned: bool) -> list[str]:
    """Returns what is still alive of steps whose results were dropped, without the help of the garbage collector."""
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    params = hp.shard(layers(3), mesh, P("shard"))
    run = hp.sharded(step, mesh) if planned else step
    run(params, data(rank))
    run(params, data(rank))
    gc.collect()
    gc.disable()
    try:
        refs = []
        for _ in range(2):
            loss, grads = run(params, data(rank))
            refs += [("gradient", StorageWeakRef(x.untyped_storage())) for x in local_leaves(grads)]
            refs.append(("loss", StorageWeakRef(loss.untyped_storage())))
            del loss, grads
        return settled(lambda: [name for name, ref in refs if not ref.expired()], lambda names: not names)
    finally:
        gc.enable()


@pytest.mark.parametrize("planned", [False, True])
def test_a_step_that_is_over_keeps_nothing(pool: Callable[[int], Pool], planned: bool) -> None:
    assert pool(4).run(kept_by_past_steps, planned) == [[]] * 4


def objects_of_steps() -> Counter[str]:
    gc.collect()
    names = Counter(type(x).__name__ for x in gc.get_objects())
    return Counter({name: names[name] for name in ("Session", "Run", "Use", "Planned", "TorchTape", "MindSporeTape")})


def more_than(before: Counter[str]) -> dict[str, int]:
    """Returns how many more objects of steps there are than before."""

    def more() -> dict[str, int]:
        return {name: number - before[name] for name, number in objects_of_steps().items()}

    return settled(more, lambda found: max(found.values()) <= 0)


def objects_of_past_steps(rank: int) -> dict[str, int]:
    """Returns how many more there are than before: a step of another test that failed may have left some."""
    before = objects_of_steps()
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    params = hp.shard(layers(3), mesh, P("shard"))
    run = hp.sharded(step, mesh)
    for _ in range(5):
        run(params, data(rank))
    return more_than(before)


def test_the_objects_of_a_step_die_with_it(pool: Callable[[int], Pool]) -> None:
    for found in pool(4).run(objects_of_past_steps):
        assert max(found.values()) <= 0, found


def fail_backward(gradient: torch.Tensor) -> torch.Tensor:
    raise ValueError("in backward")


def failed_steps(rank: int, planned: bool, place: str) -> dict[str, int]:
    """Returns how many objects of steps that fail at a place are left."""
    mesh = mesh_of((2,), ("shard",))
    params = hp.shard(layers(3), mesh, P("shard"))
    fails = [False]

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        x = layer_unit(p[0], x)
        if fails[0] and place == "backward":
            x = ops.with_backward(x, fail_backward)
        x = chain_to(p[1:], x)
        if fails[0] and place == "forward":
            raise ValueError("in forward")
        return x if fails[0] and place == "no scalar" else x.square().mean()

    run: Any = hp.value_and_grad(loss)
    run = hp.sharded(run, mesh) if planned else run
    for fails[0] in (False, False):
        run(params, data(rank))
    before = objects_of_steps()
    for fails[0] in (True, True):
        outcome(run, params, data(rank))
    fails[0] = False
    run(params, data(rank))
    return more_than(before)


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("place", ["forward", "backward", "no scalar"])
def test_a_failed_step_keeps_nothing(pool: Callable[[int], Pool], place: str, planned: bool) -> None:
    for found in pool(2).run(failed_steps, planned, place):
        assert max(found.values()) <= 0, found  # one of before may have been let go of meanwhile
