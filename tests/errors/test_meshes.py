"""Meshes whose data axes nobody knows, and arrays of two meshes: exact texts, on all ranks, and nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hpfunc as hp
from tests.helpers import frameworks as ops
from tests.helpers.frameworks import to_torch
from tests.helpers.ranks import mesh_of
from tests.helpers.refusals import cases_among, check_texts, mesh, texts_of

P = hp.P


def nameless() -> hp.Mesh:
    return mesh_of((2, 1), ("x", "y"))


def weights_on(place: hp.Mesh, spec: hp.PartitionSpec) -> Any:
    return {"w": hp.shard(ops.ones(4), place, spec)}


def square(p: Any) -> Any:
    return (p["w"] ** 2).sum()


def differentiate(p: Any) -> Any:
    return hp.value_and_grad(hp.unit(square))(p)


def a_mesh_in_a_with_statement(rank: int) -> Any:
    def call() -> None:
        with mesh():
            pass

    return call, None


# --- data axes that nobody knows ------------------------------------------------------------------------------------
def a_gradient_without_data_axes(rank: int) -> Any:
    kept = weights_on(nameless(), P())
    return lambda: hp.value_and_grad(lambda p: square({"w": p["w"].local}))(kept), kept


def a_gradient_of_plain_tensors_without_data_axes(rank: int) -> Any:
    kept = {"w": ops.ones(4)}

    def call() -> Any:
        with hp.use_mesh(nameless()):
            return hp.grad(square)(kept)

    return call, kept


def a_gradient_without_any_array(rank: int) -> Any:
    kept = {"w": ops.ones(4)}
    return lambda: hp.grad(square)(kept), kept


def a_step_without_data_axes(rank: int) -> Any:
    kept = weights_on(nameless(), P("x"))
    return lambda: hp.sharded(differentiate, nameless())(kept), kept


def accumulating_without_data_axes(rank: int) -> Any:
    kept = weights_on(nameless(), P("x"))
    return lambda: hp.accumulate(hp.value_and_grad(hp.unit(square)), 2)(kept), kept


def a_unit_without_data_axes(rank: int) -> Any:
    kept = weights_on(nameless(), P("x"))
    return lambda: hp.unit(square)(kept), kept


def a_gradient_on_an_axis_of_tensor_parallelism(rank: int) -> Any:
    kept = weights_on(mesh_of((2,), ("tp",)), P("tp"))
    return lambda: differentiate(kept), kept


def unsharding_without_data_axes(rank: int) -> Any:
    kept = weights_on(nameless(), P("x"))
    return lambda: hp.unshard(kept), kept


def reducing_without_data_axes(rank: int) -> Any:
    kept = ops.ones(4)
    return lambda: hp.reduce(kept, nameless(), P("x")), kept


# --- arrays of two meshes -------------------------------------------------------------------------------------------
def of_two_meshes() -> Any:
    other = mesh_of((2, 1), ("replicate", "shard"))
    return {**weights_on(mesh(), P("shard")), "b": hp.shard(ops.ones(4), other, P("shard"))}


def total(p: Any) -> Any:
    return p["w"].sum() + p["b"].sum()


def a_unit_of_two_meshes(rank: int) -> Any:
    kept = of_two_meshes()
    return lambda: hp.unit(total, name="total")(kept), kept


def a_unit_of_two_meshes_inside_a_gradient(rank: int) -> Any:
    kept = of_two_meshes()

    def loss(p: Any) -> Any:
        return hp.unit(total, name="total")({"w": p["w"], "b": kept["b"]})

    return lambda: hp.value_and_grad(loss)({"w": kept["w"]}), kept


def a_unit_of_two_meshes_that_look_alike(rank: int) -> Any:
    kept = weights_on(mesh(), P("shard")) | {"b": weights_on(mesh_of((2,), ("shard",), None, 16.0), P("shard"))["w"]}
    return lambda: hp.unit(total, name="total")(kept), kept


def weights_captured_from_another_mesh(rank: int) -> Any:
    kept = weights_on(mesh_of((2, 1), ("replicate", "shard")), P("shard"))
    return hp.sharded(lambda: hp.unit(square)(kept), mesh()), kept


def weights_captured_by_a_gradient_from_another_mesh(rank: int) -> Any:
    kept = weights_on(mesh_of((2, 1), ("replicate", "shard")), P("shard"))
    own = weights_on(mesh(), P("shard"))
    differentiated = hp.value_and_grad(lambda own: hp.unit(square)(own) + hp.unit(square)(kept))
    return lambda: differentiated(own), (own, kept)


def a_gradient_of_a_captured_array_of_another_mesh(rank: int) -> Any:
    kept = weights_on(mesh_of((2, 1), ("replicate", "shard")), P("shard"))
    return hp.sharded(lambda: differentiate(kept), mesh()), kept


def a_gradient_of_plain_tensors_with_weights_of_another_mesh(rank: int) -> Any:
    kept = weights_on(mesh_of((2, 1), ("replicate", "shard")), P("shard"))

    def call() -> Any:
        with hp.use_mesh(mesh()):
            return hp.grad(lambda scale: scale * hp.unit(square)(kept))(ops.ones(1).sum())

    return call, kept


CASES = cases_among(globals())


@pytest.mark.parametrize("name", CASES)
def test_refusals(name: str) -> None:
    check_texts(texts_of(CASES[name]), name)


# --- what is meant is done ------------------------------------------------------------------------------------------
def gradients(rank: int, names: tuple[str, ...], given: Any, planned: bool) -> list[torch.Tensor]:
    place = hp.make_mesh((2, 1), names, given, timeout_s=20.0)
    params = {"w": hp.shard(ops.arange(4.0), place, P())}
    loss = hp.unit(lambda p, x: (x * p["w"] ** 2).sum())
    step = hp.sharded(hp.value_and_grad(loss), place) if planned else hp.value_and_grad(loss)
    return [to_torch(step(params, float(rank + 1))[1]["w"].local) for _ in range(3)]


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("name", ["dp", "data", "fsdp", "batch", "dp_replicate", "dp_shard", "DP", "ddp", "replica"])
def test_axes_of_data_are_known_by_their_names(pool: Callable[[int], Any], name: str, planned: bool) -> None:
    for found in pool(2).run(gradients, (name, "tp"), None, planned):
        for each in found:
            assert torch.equal(each, 2 * 1.5 * torch.arange(4.0))


@pytest.mark.parametrize("planned", [False, True])
def test_no_axis_is_one_if_that_is_said(pool: Callable[[int], Any], planned: bool) -> None:
    for rank, found in enumerate(pool(2).run(gradients, ("x", "y"), (), planned)):
        for each in found:
            assert torch.equal(each, 2.0 * (rank + 1) * torch.arange(4.0))


def gradient_of_inputs(rank: int) -> torch.Tensor:
    params = weights_on(mesh(), P("shard"))
    loss = hp.unit(lambda p, x: (x * (rank + 1) * p["w"]).sum())
    return to_torch(hp.grad(loss, argnums=1)(params, ops.ones(4)))


def test_the_mesh_of_a_gradient_is_that_of_any_argument(pool: Callable[[int], Any]) -> None:
    for rank, found in enumerate(pool(2).run(gradient_of_inputs)):
        assert torch.equal(found, torch.full((4,), rank + 1.0))
