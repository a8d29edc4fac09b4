"""Recomputation: `unit(fn, remat=True)` and torch's checkpointing give the same bits, forget, and gather exactly."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import hpfunc as hp
from tests.helpers import frameworks as ops
from tests.helpers.chain import WAYS, D, again, data, layers
from tests.helpers.frameworks import to_framework, to_torch
from tests.helpers.leaves import assert_same_bits, local_leaves
from tests.helpers.models import Layout, Model, P, layouts, models, policies
from tests.helpers.ranks import Pool, mesh_of
from tests.helpers.ranks import pool as pool_of
from tests.helpers.waiting import settled

pytestmark = pytest.mark.processes
LAYERS = 6
Unit = Callable[..., Any]


# --- the same step, recomputed in many ways -------------------------------------------------------------------------
def first_half(p: Any, x: torch.Tensor) -> torch.Tensor:
    return ops.dropout(ops.tanh(ops.linear(x, p["w"] * 0.5, p["b"])), 0.3)


def block(p: Any, x: torch.Tensor) -> torch.Tensor:
    return ops.linear(first_half(p, x).sin(), p["w"]) + x


def block_with_a_checkpoint(p: Any, x: torch.Tensor) -> torch.Tensor:
    """Twice: what is no tensor among the arguments is kept, and so is what a function closes over."""
    return F.linear(again(lambda h: torch.sin(h) + 0 * p["b"].sum(), again(first_half, p, x)), p["w"]) + x


def plain(unit: Unit, params: Any, x: Any) -> Any:
    for p in params:
        x = unit(p, x).sin() * 2
    return x


def around_one(unit: Unit, params: Any, x: Any) -> Any:
    for p in params:
        x = torch.sin(again(unit, p, x)) * 2
    return x


def around_two(unit: Unit, params: Any, x: Any) -> Any:
    for i in range(0, len(params), 2):
        x = again(plain, unit, params[i : i + 2], x)
    return x


def around_half(unit: Unit, params: Any, x: Any) -> Any:
    """Checkpoints hold a unit and part of what its caller does."""
    x = again(lambda x: torch.sin(unit(params[0], x)), x)
    for p in params[1:]:
        x = again(lambda x, p=p: torch.sin(unit(p, x * 2)), x)
    return x * 2


def nested(unit: Unit, params: Any, x: Any) -> Any:
    for i in range(0, len(params), 2):
        x = again(around_one, unit, params[i : i + 2], x)
    return x


def without_early_stop(unit: Unit, params: Any, x: Any) -> Any:
    for p in params:
        x = torch.sin(again(unit, p, x, early_stop=False)) * 2
    return x


@dataclass(frozen=True)
class Case:
    """A way to recompute.

    Attributes:
        gathers: of a step, of units, with prefetch 0 and 1; eager it is one more than with prefetch 0, as nothing stays
            whole from the last forward to the first backward.
    """

    gathers: tuple[int, int]
    call: Callable[..., Any] = plain
    fn: Callable[..., Any] = block
    remat: bool = False


# Two gathers for each unit: forward, and one for recomputation and backward together. Less those at the turn: the last
# `prefetch + 1` units stay whole. Around two units the first of them is whole for recomputation, then for its backward.
TWO, THREE = (2 * LAYERS - 1, 2 * LAYERS - 2), (5 * LAYERS // 2, 2 * LAYERS - 2)
CASES = {
    "plain": Case(TWO),
    "around one": Case(TWO, around_one),
    "around one, no early stop": Case(TWO, without_early_stop),
    "around two": Case(THREE, around_two),
    "around half of the caller": Case(TWO, around_half),
    "nested": Case(THREE, nested),
    "inside": Case(TWO, fn=block_with_a_checkpoint),
    "remat": Case(TWO, remat=True),
    "remat, around one": Case(TWO, around_one, remat=True),
    "remat, around two": Case(THREE, around_two, remat=True),
    "remat, nested": Case(THREE, nested, remat=True),
    "remat, inside": Case(TWO, fn=block_with_a_checkpoint, remat=True),
}
Result = tuple[list[torch.Tensor], int]


def run_case(rank: int, name: str) -> list[Result]:
    """Returns local gradients and the state of the generator, and the number of gathers: eager, prefetch 0, 1 and 3."""
    case = CASES[name]
    mesh = mesh_of((2,), ("shard",))
    params = hp.shard(layers(LAYERS), mesh, P("shard"))
    unit = hp.unit(case.fn, name="block", remat=case.remat)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return case.call(unit, params, x).square().mean()

    found = []
    for prefetch in (0, 1, 3):
        policy = hp.Policy(prefetch=prefetch, pack_below_bytes=float("inf"))
        run = hp.sharded(hp.value_and_grad(loss), mesh, debug=True, policy=policy)
        for call in range(2):
            ops.seed(10 + rank)
            _, grads = run(params, data(rank))
            assert run.followed_plan == (call == 1)
            counters: Any = run.last_counters
            num_gathers = counters.collectives["all_gather"] // (1 if call else 2)  # eager packs no weight and bias
            found.append(([*local_leaves(grads), ops.random_state()], num_gathers))
    return [found[0], *found[1::2]]


@cache
def plain_results() -> list[list[Result]]:
    return pool_of(2).run(run_case, "plain")


@pytest.mark.parametrize("name", CASES)
def test_recomputation_changes_no_bit_and_gathers_exactly(pool: Callable[[int], Pool], name: str) -> None:
    """Dropout has the same masks in both runs, and the generator goes on as if there had been one."""
    for results, (want, *_) in zip(pool(2).run(run_case, name), plain_results(), strict=True):
        for leaves, _ in results:
            assert_same_bits(leaves, want[0])
        none, one = CASES[name].gathers
        eager = 2 * LAYERS if CASES[name].gathers == TWO else none
        assert [count for _, count in results][:3] == [eager, none, one]


# --- any model ------------------------------------------------------------------------------------------------------


def model_gradients(
    rank: int,
    model: Model,
    layout: Layout,
    policy: hp.Policy | None,
    way: str,
    num_microbatches: int,
    dtype: str | None,
) -> tuple[list[torch.Tensor], bool]:
    mesh = mesh_of(layout.shape, layout.names)
    weights = model.weights()
    params = hp.shard(to_framework(weights), mesh, layout.specs(weights))
    numerics = hp.Numerics(param_dtype=dtype, cast_inputs=dtype is not None)
    step: Any = hp.value_and_grad(lambda p, b: model.loss(p, b, WAYS[way]), numerics=numerics)
    step = hp.accumulate(step, num_microbatches)
    run: Any = step if policy is None else hp.sharded(step, mesh, policy=policy, debug=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*nothing can be hidden", hp.HpfuncWarning)  # some models are that small
        for _ in range(2):
            loss, grads = run(params, to_framework(model.batch(rank, 0)))
    return [to_torch(loss), *local_leaves(grads)], policy is None or run.followed_plan


@settings(max_examples=12, phases=[Phase.explicit, Phase.generate])  # an example that fails costs a new pool
@given(
    model=models(),
    layout=layouts([(2,), (3,), (2, 2)]),
    policy=st.none() | policies,
    way=st.sampled_from([way for way in WAYS if way != "plain"]),
    num_microbatches=st.sampled_from([1, 1, 3]),
    dtype=st.sampled_from([None, None, "bfloat16"]),
)
def test_recomputed_models_have_the_bits_of_the_eager_reference(
    pool: Callable[[int], Pool],
    model: Model,
    layout: Layout,
    policy: hp.Policy | None,
    way: str,
    num_microbatches: int,
    dtype: str | None,
) -> None:
    ranks = pool(layout.num_ranks)
    eager = ranks.run(model_gradients, model, layout, None, "plain", num_microbatches, dtype)
    found = ranks.run(model_gradients, model, layout, policy, way, num_microbatches, dtype)
    for (got, followed), (want, _) in zip(found, eager, strict=True):
        assert followed
        assert_same_bits(got, want)


# --- it really forgets, and really computes again -------------------------------------------------------------------
class Storages(TorchDispatchMode):
    """Notes each storage that an operator makes, and counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[StorageWeakRef, int] = {}
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.calls[name] = self.calls.get(name, 0) + 1
        for leaf in optree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.made[StorageWeakRef(leaf.untyped_storage())] = leaf.untyped_storage().nbytes()
        return out

    def live(self, num_bytes: int) -> int:
        """Returns how many storages of this size are alive."""
        return sum(size == num_bytes and not ref.expired() for ref, size in self.made.items())


def kept(rank: int, name: str, planned: bool, num_weights: int) -> tuple[int, int, dict[str, int]]:
    """Returns how many weights and activations are alive between forward and backward, and the counts of a step.

    So many weights are to be alive: it waits until no more are.
    """
    case = CASES[name]
    mesh = mesh_of((2,), ("shard",))
    params = hp.shard([{"w": p["w"], "b": p["b"]} for p in layers(LAYERS)], mesh, P("shard"))
    unit = hp.unit(case.fn, name="block", remat=case.remat)
    alive = []
    seen = Storages()

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        out = case.call(unit, params, x).sum()
        gc.collect()
        alive.append((settled(lambda: seen.live(4 * D * D), lambda n: n <= num_weights), seen.live(4 * 4 * D)))
        return out

    run: Any = hp.value_and_grad(loss)
    if planned:
        run = hp.sharded(run, mesh, policy=hp.Policy(prefetch=0, pack_below_bytes=0))
        run(params, data(rank))
    with seen:
        run(params, data(rank))
    return (*alive[-1], seen.calls)


# Activations that a unit leaves, and that its caller keeps: the caller saves what `sin` gets, the unit its argument.
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize(
    ("name", "activations", "runs", "weights"),
    [
        ("remat", 2 * LAYERS, 2, 1),  # planned, the last unit stays whole for its backward
        ("around one", 2 * LAYERS, 2, 1),
        ("around two", LAYERS // 2, 2, 0),
        ("nested", LAYERS // 2, 3, 0),
        ("remat, around two", LAYERS // 2, 3, 0),
    ],
)
def test_nothing_of_the_inside_is_kept_and_it_is_computed_again(
    pool: Callable[[int], Pool], name: str, activations: int, runs: int, weights: int, planned: bool
) -> None:
    for num_weights, num_activations, calls in pool(2).run(kept, name, planned, weights * planned):
        assert num_weights == weights * planned
        assert num_activations == activations
        assert calls["tanh"] == runs * LAYERS


def test_what_is_not_recomputed_is_kept(pool: Callable[[int], Pool]) -> None:
    """So the test above can fail."""
    for num_weights, num_activations, calls in pool(2).run(kept, "plain", False, LAYERS - 1):
        assert num_weights == LAYERS - 1  # `w * 0.5`; the first layer's argument wants no gradient
        assert num_activations > 4 * LAYERS
        assert calls["tanh"] == LAYERS


@pytest.mark.parametrize("name", ["inside", "remat, inside"])
def test_weights_that_a_checkpoint_inside_holds_are_given_back(pool: Callable[[int], Pool], name: str) -> None:
    for num_weights, _, _ in pool(2).run(kept, name, True, 1):
        assert num_weights == 1


def kept_after(rank: int, name: str) -> int:
    """Returns how many storages of past steps are alive without the help of the garbage collector."""
    case = CASES[name]
    mesh = mesh_of((2,), ("shard",))
    params = hp.shard(layers(LAYERS), mesh, P("shard"))
    unit = hp.unit(case.fn, name="block", remat=case.remat)
    run = hp.sharded(hp.value_and_grad(lambda p, x: case.call(unit, p, x).sum()), mesh)
    run(params, data(rank))
    gc.collect()
    gc.disable()
    try:
        with Storages() as seen:
            for _ in range(2):
                run(params, data(rank))
        return settled(lambda: seen.live(4 * D * D) + seen.live(4 * 4 * D), lambda number: number == 0)
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["around two", "inside", "remat", "remat, nested"])
def test_a_recomputed_step_that_is_over_keeps_nothing(pool: Callable[[int], Pool], name: str) -> None:
    assert pool(2).run(kept_after, name) == [0, 0]


# --- arguments, outputs, frozen weights -----------------------------------------------------------------------------
def many_outputs(p: Any, x: torch.Tensor, *, scale: float, table: dict[str, Any]) -> Any:
    y = ops.tanh(ops.linear(x, p["w"], p["b"])) * scale * table["gain"]
    return {"y": y, "places": y.argmax(-1), "detached": ops.stopped(y) * 2, "none": None, "unused": y.cos()}


def with_many_outputs(rank: int, remat: bool, planned: bool) -> tuple[list[torch.Tensor], dict[str, int]]:
    """The unit closes over what is differentiated, has a frozen layer, and a last one that leads nowhere."""
    mesh = mesh_of((2,), ("shard",))
    shards = hp.shard(layers(4), mesh, P("shard"))

    def loss(trained: Any, plain: torch.Tensor, frozen: Any, x: torch.Tensor) -> Any:
        def fn(p: Any, x: torch.Tensor, **kwargs: Any) -> Any:
            out = many_outputs(p, x, **kwargs)
            return out | {"y": out["y"] + plain.exp()}

        call = hp.unit(fn, name="block", remat=remat)
        total = ops.zeros()
        for p in (frozen, trained[0], frozen, *trained[1:]):
            out = call(p, x, scale=2.0, table={"gain": plain[:1], "name": "table"})
            assert out["none"] is None
            assert "int" in str(out["places"].dtype).lower()
            x = out["y"]
            total = total + out["detached"].sum() * x.mean()
        call(trained[0], x, scale=1.0, table={"gain": plain[:1]})
        return total + out["places"].sum(), out["places"]

    run: Any = hp.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    run = hp.sharded(run, mesh, debug=True) if planned else run
    for _ in range(2):
        with Storages() as seen:
            (_, places), (grads, direct) = run(shards[1:], ops.ones(D) / 3, shards[0], data(rank))
    return [*local_leaves(grads), *to_torch([direct, places])], seen.calls


@pytest.mark.parametrize("planned", [False, True])
def test_remat_of_a_unit_with_many_kinds_of_arguments_and_outputs(pool: Callable[[int], Pool], planned: bool) -> None:
    ranks = pool(2)
    for (got, calls), (want, plain_calls) in zip(
        ranks.run(with_many_outputs, True, planned), ranks.run(with_many_outputs, False, False), strict=True
    ):
        assert_same_bits(got, want)
        if ranks.framework != "torch":  # calls are those of torch's operators
            continue
        assert calls["tanh"] == 2 * plain_calls["tanh"]
        assert calls["addmm"] == 2 * plain_calls["addmm"]
        assert calls["mm"] == plain_calls["mm"]  # only backward has them; a frozen weight gets none


def recomputed_events(rank: int) -> list[str]:
    """A layer that is used four times, two and two under one checkpoint; and a unit that needs no backward."""
    mesh = mesh_of((2,), ("shard",))
    first, frozen = hp.shard(layers(2), mesh, P("shard"))
    unit = hp.unit(block, name="block")

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        def two(x: torch.Tensor, frozen: Any) -> torch.Tensor:
            x = x + unit(frozen, torch.ones(1, D))
            with torch.no_grad():
                x = x + unit(frozen, torch.ones(1, D))
            return unit(p, unit(p, x))

        return again(two, again(two, x, frozen), frozen).sum()

    run = hp.sharded(hp.value_and_grad(loss), mesh, debug=True)
    for _ in range(2):
        run(first, data(rank))
    assert run.followed_plan
    program = run.schedules[-1].program
    return [program.describe(event) for event in program.events if event.unit in (None, 1)]


def test_a_recompute_has_the_number_of_the_use_that_it_repeats(pool: Callable[[int], Pool]) -> None:
    for events in pool(2).run(recomputed_events):
        assert [event.replace(" block.1", "") for event in events] == [
            *("forward", "forward#1", "forward#2", "forward#3"),
            *("recompute#2", "recompute#3", "backward#3", "backward#2"),
            *("recompute", "recompute#1", "backward#1", "backward"),
            *("end backward", "end step"),
        ]


# --- collectives and random numbers ---------------------------------------------------------------------------------
def tensor_parallel(rank: int, way: str, policy: hp.Policy | None) -> tuple[list[torch.Tensor], str]:
    """Returns gradients of blocks that sum over "tp" inside, and the first letters of all events."""
    mesh = mesh_of((2, 2), ("shard", "tp"), ("shard",))
    generator = torch.Generator().manual_seed(3)
    weights = [{name: torch.randn(8, 8, generator=generator) / 3 for name in ("up", "down")} for _ in range(3)]
    params = hp.shard(to_framework(weights), mesh, [{"up": P(("tp", "shard")), "down": P("shard", "tp")}] * 3)

    def tp_block(p: Any, x: torch.Tensor) -> torch.Tensor:
        h = hp.psum(ops.linear(ops.tanh(ops.linear(hp.pvary(x, "tp"), p["up"])), p["down"]), "tp")
        return x + h.sin()

    unit = WAYS[way](tp_block)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for p in params:
            x = unit(p, x)
        return x.square().mean()

    batch = to_framework(torch.randn(2, 4, 8, generator=generator))[mesh.axis_index("shard")]
    run = hp.sharded(hp.value_and_grad(loss), mesh, policy=policy or hp.Policy())  # debug=True would compare more
    for _ in range(1 if policy is None else 2):
        _, grads = run(params, batch)
    assert run.followed_plan == (policy is not None)
    schedule: Any = run.last_schedule
    kinds = "".join(event.kind[0] for event in schedule.program.events)
    return local_leaves(grads), kinds


@cache
def plain_tensor_parallel(ranks: Pool) -> list[tuple[list[torch.Tensor], str]]:
    return ranks.run(tensor_parallel, "plain", None)


@pytest.mark.parametrize("policy", [None, hp.Policy(prefetch=0), hp.Policy(prefetch=2)])
@pytest.mark.parametrize(("way", "backward"), [("remat", "bcc" * 3), ("checkpoint", "rcbc" * 3)])
def test_collectives_of_a_block_run_again_in_backward(
    pool: Callable[[int], Pool], way: str, backward: str, policy: hp.Policy | None
) -> None:
    """In forward a block does one, the `psum`; in backward again, and then that of the transposed `pvary`."""
    found = pool(4).run(tensor_parallel, way, policy)
    for (got, kinds), (want, plain_kinds) in zip(found, plain_tensor_parallel(pool(4)), strict=True):
        assert_same_bits(got, want)
        # Nobody wants the gradient of the first block's argument.
        assert plain_kinds == "fc" * 3 + ("bc" * 3)[:-1] + "ee"
        assert kinds == "fc" * 3 + backward[:-1] + "ee"


def masks(rank: int, remat: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the dropout mask of this rank, and the gradient that it leaves."""
    mesh = mesh_of((2, 2), ("shard", "tp"), ("shard",))
    w = hp.shard(ops.ones(64), mesh, P("shard"))
    drop = hp.unit(lambda w: ops.dropout(w.sin(), 0.5), remat=remat)
    seen = []

    def loss(w: Any) -> torch.Tensor:
        seen.append(drop(w))
        return seen[0].sum()

    ops.seed(5 + hp.axis_index(mesh.data_axes, mesh=mesh))
    gradient = hp.grad(loss)(w)
    return to_torch(seen[0]).detach() != 0, to_torch(hp.unshard(gradient))


def test_ranks_along_data_axes_have_their_own_random_numbers(pool: Callable[[int], Pool]) -> None:
    """The rule of docs/howto/recompute.md. Ranks 0 and 1 differ along "tp", ranks 0 and 2 along "shard"."""
    plain, remat = pool(4).run(masks, False), pool(4).run(masks, True)
    for found in (plain, remat):
        mask = [m for m, _ in found]
        assert torch.equal(mask[0], mask[1])
        assert torch.equal(mask[2], mask[3])
        assert not torch.equal(mask[0], mask[2])
        mean = (mask[0].float() + mask[2].float()) * torch.cos(torch.ones(64))
        assert_same_bits([gradient for _, gradient in found], [mean] * 4)
