"""What an array is called, and which weight of a program it is: it depends on what the step does, and on nothing else.

Not on addresses, which Python gives to another object once one is dead; not on when the collector runs, which differs
between ranks; not on what another call, or another mesh over the same ranks, has said.
"""

from __future__ import annotations

import ast
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import hpfunc as hp
from hpfunc._running.agreement import control
from hpfunc.backends.torch.autograd import _mark
from tests.helpers.ranks import Pool, mesh_of

PACKAGE = Path(hp.__file__).parent
square = hp.unit(lambda w: (w**2).sum(), name="square")


def halves(n: int = 2) -> hp.Mesh:
    return mesh_of((n,), ("shard",))


def whole(seed: float) -> torch.Tensor:
    return torch.arange(8.0, dtype=torch.float64).reshape(4, 2) + seed


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# --- names of arrays that a step makes ------------------------------------------------------------------------------
def kept_by(who: str, rank: int) -> bool:
    return who == "all" or (who == "rank0" and rank == 0)


def names_of_a_step(rank: int, who: str, collects: bool) -> tuple[list[list[str]], list[bool], list[float]]:
    mesh, kept, found, followed, values = halves(), [], [], [], []
    a = hp.shard(whole(0.0), mesh, hp.P("shard"))

    def fn(a: hp.ShardedArray) -> Any:
        made = {name: a.with_local(a.local * 2) for name in ("used", "unused")}
        loss, _ = hp.value_and_grad(lambda tree: square(tree["used"]))(made)
        del made
        total = loss
        for n in range(6):
            fresh = a.with_local(a.local + n)
            if n == 3:  # a differentiation in between, whose arrays die
                hp.value_and_grad(square)(a.with_local(a.local))
            total = total + square(fresh)
            if kept_by(who, rank):
                kept.append(fresh)
            if collects and rank == 1:
                gc.collect()
        return total

    step = hp.sharded(fn, mesh)
    for _ in range(6):
        values.append(float(step(a)))
        assert step.last_schedule is not None
        found.append([weight.name for weight in step.last_schedule.program.weights])
        followed.append(step.followed_plan)
    return found, followed, values


@pytest.mark.parametrize("collects", [False, True])
@pytest.mark.parametrize("who", ["nobody", "all", "rank0"])
def test_a_new_array_does_not_inherit_the_name_of_a_dead_one(
    pool: Callable[..., Pool], who: str, collects: bool
) -> None:
    results = pool(2).run(names_of_a_step, who, collects)
    assert results[0] == results[1]
    names, followed, values = results[0]
    assert all(each == names[0] for each in names)
    assert followed == [False] + [True] * 5
    assert [name.startswith("args") for name in names[0]].count(True) == 2  # what is differentiated has a path
    want = float((2 * whole(0.0)).square().sum() + sum((whole(0.0) + n).square().sum() for n in range(6)))
    assert values == [want] * 6


def names_after_a_refusal(rank: int) -> list[str]:
    """A session that goes on after a refused call names arrays alike, whatever has died meanwhile."""
    mesh = halves()
    a = hp.shard(whole(0.0), mesh, hp.P("shard"))
    found = []

    def fn(a: hp.ShardedArray) -> None:
        for n in range(4):
            made = {"w": a.with_local(a.local), "b": a.with_local(a.local)}
            try:
                hp.value_and_grad(lambda tree: square(tree["w"])[None].expand(2))(made)
            except hp.LeafError as error:
                found.append(str(error))
            square(a.with_local(a.local * n))

    step = hp.sharded(fn, mesh)
    step(a)
    assert step.last_schedule is not None
    return found + [weight.name for weight in step.last_schedule.program.weights]


def test_names_after_a_refusal(pool: Callable[..., Pool]) -> None:
    ours, theirs = pool(2).run(names_after_a_refusal)
    assert ours == theirs
    assert sum(name.startswith("args") for name in ours) == 4


# --- which weight an array is ---------------------------------------------------------------------------------------
def argument_of_an_earlier_call(rank: int, order: str) -> list[tuple[float, bool]]:
    """The first call keeps its arguments; later ones use them beside their own."""
    mesh, kept = halves(), {}
    results = []

    def fn(params: dict[str, hp.ShardedArray]) -> Any:
        kept.setdefault("first", params)
        old, new = square(kept["first"]["w"]), square
        if order == "old first":
            return old - 3 * new(params["w"])
        return -3 * new(params["w"]) + square(kept["first"]["w"])

    step = hp.sharded(fn, mesh)
    for n in range(5):
        result = step({"w": hp.shard(whole(float(n)), mesh, hp.P("shard"))})
        want = float(whole(0.0).square().sum() - 3 * whole(float(n)).square().sum())
        assert float(result) == want, (n, float(result), want)
        results.append((float(result), step.followed_plan))
    return results


@pytest.mark.parametrize("order", ["old first", "new first"])
def test_an_argument_of_an_earlier_call_is_not_one_of_this_call(pool: Callable[..., Pool], order: str) -> None:
    ours, theirs = pool(2).run(argument_of_an_earlier_call, order)
    assert ours == theirs
    assert ours[-1][1]


def gradient_beside_an_earlier_one(rank: int, place: int, is_planned: bool) -> torch.Tensor:
    """A handle that an ended differentiation has left behind is a constant, wherever it stands in the unit."""
    mesh, left = halves(), []
    product = hp.unit(lambda ws: (ws[0] * ws[1]).sum(), name="product")
    a, b = (hp.shard(whole(seed), mesh, hp.P("shard")) for seed in (1.0, 5.0))

    def fn(a: hp.ShardedArray, b: hp.ShardedArray) -> Any:
        def first(w: hp.ShardedArray) -> Any:
            left.append(w)
            return square(w)

        hp.value_and_grad(first)(a)
        constant = left.pop()

        def second(w: hp.ShardedArray) -> Any:
            return product([constant, w] if place else [w, constant])

        return hp.value_and_grad(second)(b)[1]

    step = hp.sharded(fn, mesh) if is_planned else fn
    for _ in range(3):
        gradient = step(a, b)
    return hp.unshard(gradient)


@pytest.mark.parametrize("is_planned", [False, True])
@pytest.mark.parametrize("place", [0, 1])
def test_what_an_ended_differentiation_left_is_a_constant(
    pool: Callable[..., Pool], place: int, is_planned: bool
) -> None:
    for gradient in pool(2).run(gradient_beside_an_earlier_one, place, is_planned):
        assert torch.equal(gradient, whole(1.0))


# --- memory ---------------------------------------------------------------------------------------------------------
def test_a_name_keeps_no_array_alive() -> None:
    """An array that a step makes, and that no unit uses, is freed with its last handle; all others with the step."""
    a = hp.shard(whole(0.0), hp.make_mesh((1,), ("shard",)), hp.P("shard"))
    alive: list[Callable[[], Any]] = []

    def fn(a: hp.ShardedArray) -> Any:
        made = {name: a.with_local(a.local * 2) for name in ("used", "unused")}
        used, unused = (weakref.ref(made[name].local) for name in ("used", "unused"))
        loss, grads = hp.value_and_grad(lambda tree: square(tree["used"]))(made)
        alive.extend([used, unused, weakref.ref(grads["unused"].local)])
        del made, grads
        assert unused() is None
        assert alive[-1]() is None
        return loss

    with no_collector():
        for run in (fn, hp.sharded(fn, a.mesh)):
            for _ in range(3):
                run(a)
                assert [ref() for ref in alive] == [None] * len(alive)
                alive.clear()


def test_a_step_keeps_no_argument_alive() -> None:
    mesh = hp.make_mesh((1,), ("shard",))
    with no_collector():
        for run in (hp.value_and_grad(square), hp.sharded(hp.value_and_grad(square), mesh), square):
            for _ in range(3):
                a = hp.shard(whole(0.0), mesh, hp.P("shard"))
                local = weakref.ref(a.local)
                run(a)
                del a
                assert local() is None


def test_a_hook_is_told_from_a_later_one_at_its_address_and_not_kept() -> None:
    def hook() -> Callable[[Any], Any]:
        return lambda x: x

    marks = []
    for _ in range(50):
        made = hook()
        assert _mark(made) == _mark(made)
        marks.append(_mark(made))
    del made
    assert all(a != b for i, a in enumerate(marks) for b in marks[:i])
    assert all(mark() is None for mark in marks)


# --- meshes over the same ranks -------------------------------------------------------------------------------------
def test_meshes_over_the_same_ranks_wait_as_long_as_each_asks_for() -> None:
    patient, hasty = (hp.make_mesh((1,), ("shard",), timeout_s=seconds) for seconds in (600.0, 2.0))
    held = control(patient)
    assert control(hasty).timeout_s == 2.0
    assert held.timeout_s == control(patient).timeout_s == 600.0
    assert held.standing is control(hasty).standing  # the board and the count of steps are those of the ranks


def waits_of_two_meshes(rank: int) -> tuple[str, bool]:
    """Rank 1 is late by more than the hasty mesh waits, for a step on the patient one."""
    import time

    patient, hasty = (mesh_of((2,), ("shard",), None, seconds) for seconds in (30.0, 1.5))
    for mesh in (hasty, patient, hasty):
        square(hp.shard(whole(0.0), mesh, hp.P("shard")))
    w = hp.shard(whole(1.0), patient, hp.P("shard"))
    step = hp.sharded(hp.value_and_grad(square), patient)
    for n in range(3):
        hp.shard(whole(0.0), hasty, hp.P("shard"))
        if rank == 1 and n in (0, 2):
            time.sleep(3.0)
        loss, gradient = step(w)
    return f"{float(loss):g}", torch.equal(hp.unshard(gradient), 2 * whole(1.0))


def test_a_hasty_mesh_does_not_end_the_step_of_a_patient_one(pool: Callable[..., Pool]) -> None:
    want = f"{float(whole(1.0).square().sum()):g}", True
    assert pool(2).run(waits_of_two_meshes) == [want, want]


# --- no other keys --------------------------------------------------------------------------------------------------
HELD = {  # where an id is taken: what holds the object for as long as the id is kept
    "_values/partition.py": "the list of leaves, of the function",
    "backends/mindspore/ascend.py": "the table itself, which drops an entry with its object",
    "backends/torch/abstract.py": "the list of recorded calls, an argument of the function",
    "backends/torch/arguments.py": "the value of the entry",
    "checkpoint/_adapters.py": "a memo of deepcopy for an argument of the function; the state dict, of the function",
    "checkpoint/_hub.py": "the module, an argument of the function",
    "integrations/_module.py": "the module, an argument of the function; the parameters of `Bound`",
    "integrations/accelerate.py": "the module and the optimizers, which the accelerator holds",
    "nn/_blocks.py": "the module, an argument of the function",
    "nn/_choose.py": "the module, an argument of the function",
    "nn/_parts.py": "the module, an argument of the function",
    "nn/_slots.py": "the value of the entry",
    "nn/mindspore/skeleton.py": "the list of cells, which the skeleton holds",
    "nn/torch/module.py": "a memo of deepcopy, whose entries are the objects themselves",
    "optim/_bound_state.py": "the parameters, and the groups of the optimizer, which the state holds",
    "nn/torch/skeleton.py": "a memo of deepcopy for an argument of the function; the skeleton, of its modules",
}


def test_ids_are_taken_only_where_their_objects_are_held() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "id":
                found.add(str(path.relative_to(PACKAGE)))
    assert found == set(HELD)
