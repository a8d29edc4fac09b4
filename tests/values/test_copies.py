"""Copies of arrays, writes into their memory, and what takes them for plain tensors: each works, or is refused."""

from __future__ import annotations

import copy
import io
import multiprocessing
import operator
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import optree
import pytest
import torch

import hpfunc as hp
from hpfunc.interop import from_local, to_dtensor, to_numpy
from tests.helpers.ranks import Pool, mesh_of, mesh_of_one, outcome

IMMUTABLE = "an array is immutable, and was written into"
square = hp.unit(lambda p: (p["w"] ** 2).sum(), name="square")


SHARD = hp.P("shard")


def made(*shape: int, spec: hp.P = SHARD) -> hp.ShardedArray:
    count = torch.Size(shape).numel()
    return hp.shard(torch.arange(float(count)).reshape(shape), mesh_of_one(), spec)


# --- copies ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda a: copy.deepcopy({"a": [a]})["a"][0]])
@pytest.mark.parametrize("kind", ["array", "row", "scalar", "gradient"])
def test_a_copy_has_memory_of_its_own(how: Callable[[Any], Any], kind: str) -> None:
    array = {"array": made(4, 3), "row": made(4, 3, spec=hp.P())[1], "scalar": made(spec=hp.P())}.get(kind)
    if array is None:
        array = hp.grad(square)({"w": made(4, 3)})["w"]
    want = array.local.clone()
    copied = how(array)
    assert (copied.layout, copied.dtype) == (array.layout, array.dtype)
    assert torch.equal(copied.local, want)
    assert copied.local.data_ptr() != array.local.data_ptr()
    assert torch.equal(hp.unshard(array), hp.unshard(copied))
    assert not copied.is_donated


def test_one_array_at_two_places_is_one_in_a_deep_copy() -> None:
    array = made(4)
    first, second = copy.deepcopy([array, array])
    assert first is second


def test_a_copy_outlives_the_donated_array_and_the_other_way_round() -> None:
    mesh, found = mesh_of_one(), []

    def fn(p: Any) -> Any:
        found.append(copy.deepcopy(p["w"]))
        return hp.apply_updates(p, optree.tree_map(torch.ones_like, p))

    params = {"w": made(4)}
    new = hp.sharded(fn, mesh, donate_argnums=0)(params)
    assert torch.equal(found[0].local, torch.arange(4.0))
    assert torch.equal(new["w"].local, torch.arange(4.0) + 1)
    with pytest.raises(hp.DonatedError, match="was donated"):
        copy.deepcopy(params)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_a_copy_of_what_is_differentiated_is_refused(how: Callable[[Any], Any]) -> None:
    left = []

    def loss(p: Any) -> Any:
        left.append(p["w"])
        return square({"w": how(p["w"])})

    with pytest.raises(hp.UsageError, match="copied while it is differentiated"):
        hp.value_and_grad(loss)({"w": made(4)})
    assert torch.equal(how(left[0]).local, torch.arange(4.0))  # when it has ended


def dumps(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer


@pytest.mark.parametrize("how", [pickle.dumps, dumps, ForkingPickler.dumps, multiprocessing.SimpleQueue().put])
@pytest.mark.parametrize("what", ["array", "tree", "row", "bound", "step", "module"])
def test_what_cannot_be_pickled_is_refused_when_it_is_written(how: Callable[[Any], Any], what: str) -> None:
    value: Any = {"array": made(4), "tree": {"a": [made(4)]}, "row": made(4, 3, spec=hp.P())[0]}.get(what)
    if what == "bound":
        value = hp.optim.bind({"w": made(4)})
    if what == "step":
        value = hp.sharded(operator.neg, mesh_of_one())
    if what == "module":
        value = hp.from_module(torch.nn.Linear(2, 2))[0]
    with pytest.raises(hp.UsageError, match=r"cannot be pickled(.|\n)*Hint: .*hpfunc"):
        how(value)


def test_the_remedy_is_true(tmp_path: Path) -> None:
    array = made(4, 3)
    assert torch.equal(pickle.loads(pickle.dumps(hp.unshard(array))), hp.unshard(array))
    hp.checkpoint.save(tmp_path, {"a": array})
    assert torch.equal(hp.checkpoint.load(tmp_path, {"a": array})["a"].local, array.local)


def test_functions_are_their_own_copies_and_bound_weights_none() -> None:
    step = hp.sharded(operator.neg, mesh_of_one())
    apply = hp.from_module(torch.nn.Linear(2, 2))[0]
    assert copy.deepcopy([step, apply]) == [step, apply]
    bound = hp.optim.bind({"w": made(4)})
    with pytest.raises(hp.UsageError, match=r"share no memory(.|\n)*bind\(copy.deepcopy\(bound.params\)\)"):
        copy.deepcopy(bound)
    again = hp.optim.bind(copy.deepcopy(bound.params))
    with torch.no_grad():
        again.parameters[0].add_(1)
    assert torch.equal(again.params["w"].local, bound.params["w"].local + 1)


# --- not a tensor ---------------------------------------------------------------------------------------------------
REFUSED: dict[str, Callable[[Any], Any]] = {
    "asarray": np.asarray,
    "array": np.array,
    "mean": np.mean,
    "plus an ndarray": lambda a: np.ones(3) + a,
    "stack": lambda a: np.stack([a, a]),
    "bool": bool,
    "not": operator.not_,
    "if": lambda a: 1 if a else 0,
    "any": lambda a: any([a]),
    "== array": lambda a: a == copy.copy(a),
    "!= array": lambda a: a != copy.copy(a),
    "== number": lambda a: a == 0,
    "number ==": lambda a: 0.0 == a,  # noqa: SIM300 - the other side asks
    "== tensor": lambda a: a == torch.ones(4, 3),
    "tensor ==": lambda a: torch.ones(4, 3) == a,
    "== ndarray": lambda a: a == np.ones(3),
    "as_tensor": torch.as_tensor,
    "len": len,
    "tensor": torch.tensor,
    "list": list,
    "float": float,
    "in": lambda a: 1 in a,
}


@pytest.mark.parametrize("shape", [(4, 3), (), (1,)])
@pytest.mark.parametrize("name", list(REFUSED))
def test_what_would_be_silently_wrong_is_refused(name: str, shape: tuple[int, ...]) -> None:
    array = made(*shape, spec=hp.P("shard") if shape else hp.P())
    with pytest.raises((hp.HpfuncError, TypeError)):
        REFUSED[name](array)


def test_an_array_is_itself_and_a_key() -> None:
    a, b = made(4), made(4)
    same = a
    assert a == same
    assert a in [b, a][1:]
    assert {a: 1, b: 2}[b] == 2
    assert all(a != other for other in (None, "a", (1, 2)))
    rows = made(3, 2, spec=hp.P(None, "shard"))
    assert len(rows) == len(list(rows)) == len(list(reversed(rows))) == 3
    assert np.array_equal(to_numpy(a), np.arange(4.0))


# --- writes ---------------------------------------------------------------------------------------------------------
WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "add_": lambda x: x.add_(1),
    "item": lambda x: x.__setitem__(0, 3.0),
    "view": lambda x: x.view(-1)[0].fill_(2.0),
    "detach": lambda x: x.detach().mul_(2),
    "data": torch.nn.init.normal_,
    "foreach": lambda x: torch._foreach_add_([x], 1.0),
    "out": lambda x: torch.add(torch.ones(()), torch.ones(()), out=x.view(-1)[1]),
    "copy_": lambda x: x.copy_(torch.zeros_like(x)),
}


def optimizer_step(x: torch.Tensor) -> None:
    parameter = torch.nn.Parameter(x)
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=0.5).step()


WRITES["optimizer"] = optimizer_step


def uses(mesh: hp.Mesh, folder: Path) -> dict[str, Callable[[Any], Any]]:
    step = hp.sharded(hp.value_and_grad(square), mesh)
    step({"w": made(4, 3)})  # it has a plan
    return {
        "unit": square,
        "value_and_grad": hp.value_and_grad(square),
        "step": hp.sharded(square, mesh),
        "planned step": step,
        "unshard": hp.unshard,
        "save": lambda p: hp.checkpoint.save(folder, p),
        "update": lambda p: hp.apply_updates(p, copy.deepcopy(p)),
        "norm": hp.global_norm,
    }


def origins(mesh: hp.Mesh) -> dict[str, Callable[[], Any]]:
    return {
        "shard": lambda: made(4, 3),
        "init": lambda: hp.init(lambda: torch.ones(4, 3), mesh, hp.P("shard")),
        "step": lambda: hp.sharded(lambda a: a.with_local(a.local * 2), mesh)(made(4, 3)),
        "out_specs": hp.sharded(lambda: torch.ones(4, 3), mesh, out_specs=hp.P("shard")),
        "used before": lambda: used(made(4, 3).with_local(torch.ones(4, 3))),
    }


def used(array: hp.ShardedArray) -> hp.ShardedArray:
    square({"w": array})
    return array


@pytest.mark.parametrize("write", sorted(WRITES))
@pytest.mark.parametrize("use", ["unit", "value_and_grad", "step", "planned step", "unshard", "save", "update", "norm"])
def test_a_write_is_noticed_on_use(write: str, use: str, tmp_path: Path) -> None:
    params = {"w": made(4, 3), "b": made(2)}
    call = uses(params["w"].mesh, tmp_path)[use]
    _ = params["b"].local  # to read it is not to write it
    WRITES[write](params["w"].local)
    with pytest.raises(hp.UsageError, match=IMMUTABLE) as caught:
        call(params)
    assert "w" in str(caught.value).splitlines()[1]
    assert "with_local(new)" in str(caught.value)
    assert "(2,)" not in str(caught.value)
    call(params | {"w": params["w"].with_local(params["w"].local)})  # the remedy


@pytest.mark.parametrize("origin", ["shard", "init", "step", "out_specs", "used before"])
def test_a_write_is_noticed_wherever_the_array_comes_from(origin: str) -> None:
    array = origins(mesh_of_one())[origin]()
    assert square({"w": array}).isfinite()
    array.local.add_(1)
    with pytest.raises(hp.UsageError, match=IMMUTABLE):
        square({"w": array})


def test_a_write_through_a_row_is_noticed() -> None:
    stacked = made(3, 4, spec=hp.P(None, "shard"))
    stacked[1].local.zero_()
    with pytest.raises(hp.UsageError, match=IMMUTABLE):
        square({"w": stacked[0]})


@pytest.mark.parametrize("num_calls", [0, 2])
def test_a_write_in_a_step_is_noticed_in_that_step(num_calls: int) -> None:
    writes = []

    def fn(p: Any) -> Any:
        result = square(p)
        if writes:
            p["w"].local.sub_(0.5)
        return result

    step = hp.sharded(fn, mesh_of_one())
    for _ in range(num_calls):
        step({"w": made(4, 3)})
    writes.append(1)
    with pytest.raises(hp.UsageError, match=rf"hpfunc.sharded: {IMMUTABLE}\n  p\['w'\]: shape \(4, 3\)"):
        step({"w": made(4, 3)})


def test_what_may_be_written_is_not_refused() -> None:
    """Donated memory, bound parameters, memory that is shared by contract, tensors that nobody counts."""
    mesh = mesh_of_one()
    optimizer = hp.optim.adamw(0.1)
    params = {"w": made(4, 3)}
    state = optimizer.init(params)

    def train(p: Any, s: Any) -> Any:
        _, grads = hp.value_and_grad(square)(p)
        updates, s = optimizer.update(grads, s, p)
        return hp.apply_updates(p, updates), s

    step = hp.sharded(train, mesh, donate_argnums=(0, 1))
    for _ in range(4):
        params, state = step(params, state)
        assert params["w"].local.isfinite().all()

    def by_hand(p: Any) -> Any:
        return {"w": p["w"].with_local(p["w"].local.sub_(0.1))}

    step = hp.sharded(by_hand, mesh, donate_argnums=0)
    for _ in range(3):
        params = step(params)

    bound = hp.optim.bind(params)
    sgd, step = torch.optim.SGD(bound.parameters, lr=0.1), hp.sharded(lambda p: (hp.value_and_grad(square)(p), p), mesh)
    for _ in range(3):
        (_, grads), same = step(bound.params)
        assert torch.equal(same["w"].local, bound.params["w"].local)
        bound.set_grads(grads)
        sgd.step()
        square(same)

    shared = from_local(torch.ones(4), (4,), hp.P("shard"), mesh)
    for array, local in ((shared, shared.local), (bound.params["w"], bound.parameters[0].detach())):
        square({"w": array})
        local.add_(1)
        square({"w": array})
    with torch.inference_mode():
        array = made(4).with_local(torch.ones(4))
        hp.unshard(array)
        array.local.add_(1)
        assert torch.equal(hp.unshard(array), torch.full((4,), 2.0))


def memory_shared_with_a_dtensor(rank: int) -> torch.Tensor:
    params = {"w": hp.shard(torch.arange(8.0), mesh_of((2,), ("shard",)), hp.P("shard"))}
    square(params)
    to_dtensor(params)["w"].to_local().add_(1)  # as torch.distributed.checkpoint.load does
    square(params)
    return hp.unshard(params["w"])


def test_what_shares_memory_with_a_dtensor_may_be_written(pool: Callable[..., Pool]) -> None:
    for whole in pool(2).run(memory_shared_with_a_dtensor):
        assert torch.equal(whole, torch.arange(8.0) + 1)


def one_rank_writes(rank: int, is_planned: bool) -> list[str]:
    """The rank that has written says so, and the others end with it; then all go on."""
    mesh = mesh_of((2,), ("shard",))
    step = hp.sharded(hp.value_and_grad(square), mesh)
    params = {"w": hp.shard(torch.arange(8.0), mesh, hp.P("shard"))}
    if is_planned:
        step(params)
    if rank == 1:
        params["w"].local.add_(1)
    texts = [outcome(step, params)]
    new = {"w": hp.shard(torch.arange(8.0), mesh, hp.P("shard"))}
    for _ in range(3):
        _, grads = step(new)
        assert torch.equal(hp.unshard(grads["w"]), 2 * torch.arange(8.0))
    return texts


@pytest.mark.parametrize("is_planned", [False, True])
def test_a_write_on_one_rank_ends_all(pool: Callable[..., Pool], is_planned: bool) -> None:
    (theirs,), (mine,) = pool(2).run(one_rank_writes, is_planned)
    assert mine.startswith(f"UsageError: hpfunc.sharded: {IMMUTABLE}\n  p['w']: shape (8,)")
    assert theirs.startswith(("PeerError: hpfunc: rank 1 failed", "AgreementError"))
    assert IMMUTABLE in theirs
