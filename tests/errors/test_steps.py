"""Bad use of `unit`, `value_and_grad` and `sharded`: exact texts, on all ranks, and nothing changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hpfunc as hp
from tests.helpers import frameworks as ops
from tests.helpers.refusals import cases_among, check_texts, linear, mesh, params, texts_of, total_loss, x

Tensor = torch.Tensor


def differentiating(fun: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The refusal of a whole differentiation of `fun` at `params`."""
    kept = params()
    return lambda: hp.value_and_grad(fun, **options)(kept, *(args or (x(),))), kept


# --- unit -----------------------------------------------------------------------------------------------------------
def a_unit_of_plain_tensors(rank: int) -> Any:
    kept = {"w": ops.ones(4, 4), "b": params()["layers"][0]["b"]}
    return lambda: hp.unit(linear)(kept, x()), kept


def a_unit_with_arrays_beside_its_weights(rank: int) -> Any:
    first, second = params()["layers"]
    return lambda: hp.unit(lambda p, other: p["w"])(first, second["w"]), first


def a_weight_that_escapes(rank: int) -> Any:
    return differentiating(total_loss(lambda p, x: (p["w"], x @ p["w"])[0]))


def a_view_of_a_weight_that_escapes(rank: int) -> Any:
    kept = params()
    return lambda: hp.unit(lambda p: {"out": [p["w"].t()[1:]]})(kept["layers"][0]), kept


def a_weight_written_in_place(rank: int) -> Any:
    def writes(p: Any, x: Tensor) -> Tensor:
        p["b"].detach().add_(1.0)
        return linear(p, x)

    return differentiating(total_loss(writes))


def a_weight_written_in_place_without_gradients(rank: int) -> Any:
    def writes(p: Any) -> Tensor:
        p["b"].zero_()
        return p["b"].sum()

    kept = params()
    return lambda: hp.unit(writes)(kept["layers"][0]), kept


def a_unit_under_reentrant_checkpointing(rank: int) -> Any:
    layer = hp.unit(linear)

    def loss(p: Any, x: Tensor) -> Tensor:
        x = x + 0
        x.requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of it too
            return ops.checkpoint(lambda h: layer(p["layers"][0], h), x, reentrant=True).sum()

    return differentiating(loss)


def a_unit_inside_of_a_unit(rank: int) -> Any:
    inner, kept = hp.unit(linear), params()

    def loss(p: Any, x: Tensor) -> Tensor:
        outer = hp.unit(lambda first, x: inner(p["layers"][1], linear(first, x)), name="outer")
        return outer(p["layers"][0], x).sum()

    return lambda: hp.sharded(hp.value_and_grad(loss), mesh())(kept, x()), kept


def a_remat_unit_under_torch_func(rank: int) -> Any:
    layer, kept = hp.unit(linear, remat=True), params()
    return lambda: ops.gradient(lambda x: layer(kept["layers"][0], x).sum())(x()), kept


def a_weight_written_when_it_is_computed_again(rank: int) -> Any:
    is_first = [True]

    def writes_later(p: Any, x: Tensor) -> Tensor:
        if not is_first[0]:
            p["b"].detach().add_(1.0)
        is_first[0] = False
        return linear(p, x)

    layer = hp.unit(writes_later, remat=True)
    return differentiating(lambda p, x: layer(p["layers"][0], x).sin().sum())


def a_weight_that_escapes_when_it_is_computed_again(rank: int) -> Any:
    is_first = [True]

    def escapes_later(p: Any, x: Tensor) -> Tensor:
        y = linear(p, x).sin()
        is_first[0], was_first = False, is_first[0]
        return y if was_first else p["w"]

    layer = hp.unit(escapes_later, remat=True)

    def loss(p: Any, x: Tensor) -> Tensor:
        with ops.no_early_stop():
            return layer(p["layers"][0], x).sum()

    return differentiating(loss)


def a_unit_of_a_partial_sum(rank: int) -> Any:
    partial = hp.reduce(ops.ones(4, 4), mesh(), hp.P(unreduced={"shard"}))
    return lambda: hp.unit(lambda w: w.sum())(partial), partial


def a_data_axis_outside_of_one_that_stays(rank: int) -> Any:
    from tests.helpers.ranks import mesh_of

    cut = mesh_of((2, 1), ("shard", "tp"), ("shard",))
    kept = hp.shard({"w": ops.ones(4, 4)}, cut, hp.P(("shard", "tp")))
    return lambda: hp.value_and_grad(hp.unit(lambda p: p["w"].sum()))(kept), kept


P_SHARD = hp.P("shard")


def unit_over(axes: Any, spec: hp.P = P_SHARD) -> Any:
    """The refusal of a unit over `axes`, on a mesh whose "ep" is a data axis and whose "tp" is none."""
    from tests.helpers.ranks import mesh_of

    cut = mesh_of((1, 2, 1), ("ep", "shard", "tp"), ("ep", "shard"))
    kept = hp.shard({"up": ops.ones(4, 4), "down": ops.ones(4, 4)}, cut, {"up": spec, "down": hp.P("ep", "shard")})

    def loss(p: Any) -> Tensor:
        total = ops.zeros()
        for over in axes if isinstance(axes, list) else [axes]:
            total = total + hp.unit(lambda p: p["up"].sum() + p["down"].sum(), axes=over)(p)
        return total

    return lambda: hp.value_and_grad(loss)(kept), kept


def a_unit_over_an_axis_without_data(rank: int) -> Any:
    return unit_over(("shard", "tp"))


def a_unit_over_an_unknown_axis(rank: int) -> Any:
    return unit_over("shrad")


def an_axis_of_a_unit_outside_of_one_that_stays(rank: int) -> Any:
    return unit_over("shard", hp.P(("shard", "ep")))


def one_array_over_different_axes(rank: int) -> Any:
    return unit_over([None, "shard"], hp.P(("ep", "shard")))


# --- value_and_grad -------------------------------------------------------------------------------------------------
def reducing_in_the_loss(reduce: Callable[..., Any]) -> Any:
    inner = total_loss(linear)
    return differentiating(lambda p, x: reduce(inner(p, x), "shard"))


def psum_in_a_mean_loss(rank: int) -> Any:
    return reducing_in_the_loss(hp.psum)


def pmean_in_a_mean_loss(rank: int) -> Any:
    return reducing_in_the_loss(hp.pmean)


def pvary_in_a_mean_loss(rank: int) -> Any:
    return reducing_in_the_loss(hp.pvary)


def a_call_inside_a_call(rank: int) -> Any:
    inner = total_loss(linear)

    def outer(p: Any, x: Tensor) -> Tensor:
        value, _ = hp.value_and_grad(inner)(p, x)
        return value

    return differentiating(outer)


def a_graph_of_an_ended_call(rank: int) -> Any:
    kept, leaked = params(), []

    def loss(p: Any, x: Tensor) -> Tensor:
        y = hp.unit(linear)(p["layers"][0], x)
        leaked.append(y)
        return y.sum()

    hp.value_and_grad(loss)(kept, x())
    return lambda: leaked[0].sum().backward(), kept


def a_loss_that_is_no_scalar(rank: int) -> Any:
    return differentiating(lambda p, x: hp.unit(linear)(p["layers"][0], x))


def a_loss_that_is_an_integer(rank: int) -> Any:
    return differentiating(lambda p, x: ops.arange(4)[3])


def a_loss_that_is_no_tensor(rank: int) -> Any:
    return differentiating(lambda p, x: 3.0)


def a_result_without_its_aux(rank: int) -> Any:
    return differentiating(total_loss(linear), has_aux=True)


def an_argument_that_is_not_there(rank: int) -> Any:
    return differentiating(total_loss(linear), argnums=2)


def integer_weights(rank: int) -> Any:
    kept = hp.shard({"w": ops.ones(4), "table": ops.arange(4)}, mesh(), hp.P("shard"))
    return lambda: hp.value_and_grad(hp.unit(lambda p: p["w"].sum()))(kept), kept


def weights_on_two_meshes(rank: int) -> Any:
    from tests.helpers.ranks import mesh_of

    other = mesh_of((2, 1), ("replicate", "shard"))
    kept = {"w": hp.shard(ops.ones(4), mesh(), hp.P("shard")), "b": hp.shard(ops.ones(4), other, hp.P("shard"))}
    return lambda: hp.value_and_grad(lambda p: p["w"].local.sum())(kept), kept


def numerics_of_an_integer_dtype(rank: int) -> Any:
    return lambda: hp.Numerics(param_dtype=torch.int32), None


def an_unknown_reduction(rank: int) -> Any:
    return lambda: hp.Numerics(reduce_op="max"), None


# --- sharded --------------------------------------------------------------------------------------------------------
def descend(p: Any, x: Tensor) -> Any:
    loss, grads = hp.value_and_grad(total_loss(linear))(p, x)
    return hp.optim.apply_updates(p, grads), loss


def an_argument_that_was_donated(rank: int) -> Any:
    step = hp.sharded(descend, mesh(), donate_argnums=0)
    gone = params()
    kept, _ = step(gone, x())
    return lambda: step(gone, x()), kept


def an_argument_that_was_donated_to_a_planned_step(rank: int) -> Any:
    step = hp.sharded(descend, mesh(), donate_argnums=0)
    gone, _ = step(params(), x())
    kept, _ = step(gone, x())
    return lambda: step(gone, x()), kept


def a_donated_argument_used_inside_after_its_update(rank: int) -> Any:
    def late(p: Any, x: Tensor) -> Any:
        new, _ = descend(p, x)
        return new, p["layers"][0]["w"].local.sum()

    kept = params()
    return lambda: hp.sharded(late, mesh(), donate_argnums=0)(params(), x()), kept


def an_argument_on_another_mesh(rank: int) -> Any:
    from tests.helpers.ranks import mesh_of

    kept = params()
    return lambda: hp.sharded(descend, mesh_of((2, 1), ("replicate", "shard")))(kept, x()), kept


def a_donation_that_is_not_there(rank: int) -> Any:
    kept = params()
    return lambda: hp.sharded(descend, mesh(), donate_argnums=(0, 5))(kept, x()), kept


def in_specs_that_do_not_fit(rank: int) -> Any:
    kept = params()
    return lambda: hp.sharded(descend, mesh(), in_specs=(None, hp.P("shrad")))(kept, x()), kept


def no_mesh(rank: int) -> Any:
    return lambda: hp.sharded(descend), None


def a_step_that_needs_a_value(rank: int) -> Any:
    def branches(p: Any, x: Tensor) -> Any:
        loss, _ = descend(p, x)[1], None
        return loss if loss > 0 else -loss

    kept = params()
    return lambda: hp.sharded(branches, mesh()).lower(kept, x()), kept


def a_negative_prefetch(rank: int) -> Any:
    return lambda: hp.Policy(prefetch=-1), None


def an_unknown_release(rank: int) -> Any:
    return lambda: hp.Policy(release="sometimes"), None


def a_link_without_speed(rank: int) -> Any:
    return lambda: hp.Link(latency_s=1e-5, bytes_per_s=0), None


def a_probe_inside_a_step(rank: int) -> Any:
    return hp.sharded(lambda: hp.probe(mesh(), "shard"), mesh()), None


def a_probe_of_an_unknown_axis(rank: int) -> Any:
    return lambda: hp.probe(mesh(), "shrad"), None


# --- ranks that disagree --------------------------------------------------------------------------------------------
def ranks_disagree_on_the_shapes_of_arguments(rank: int) -> Any:
    kept = hp.shard(ops.ones(4, 4), mesh(), hp.P("shard"))
    other = hp.shard(ops.ones(6, 4), mesh(), hp.P("shard"))
    return lambda: hp.sharded(lambda w: w, mesh())(other if rank else kept), kept


def ranks_disagree_on_the_first_unit(rank: int) -> Any:
    def loss(p: Any, x: Tensor) -> Tensor:
        return hp.unit(linear)(p["layers"][rank], x).sum()

    return differentiating(loss)


def ranks_disagree_on_the_number_of_units(rank: int) -> Any:
    def loss(p: Any, x: Tensor) -> Tensor:
        for layer in p["layers"][: 1 + rank]:
            x = hp.unit(linear)(layer, x)
        return x.sum()

    kept = params()
    step = hp.sharded(hp.value_and_grad(loss), mesh())
    return lambda: step(kept, x()), kept


def ranks_disagree_on_a_collective(rank: int) -> Any:
    step = hp.sharded(lambda x: hp.psum(x[: 2 + rank], "shard"), mesh())
    return lambda: step(x()), None


def one_rank_leaves_its_plan(rank: int) -> Any:
    """On the third step, when both ranks follow their plan, rank 1 uses the layers in another order."""
    calls = [0]

    def loss(p: Any, x: Tensor) -> Tensor:
        layers = p["layers"][::-1] if rank == 1 and calls[0] == 3 else p["layers"]
        for layer in layers:
            x = hp.unit(linear)(layer, x)
        return x.sum()

    def step_fn(p: Any, x: Tensor) -> Any:
        calls[0] += 1
        return hp.value_and_grad(loss)(p, x)

    kept, step = params(), hp.sharded(step_fn, mesh())
    for _ in range(2):
        step(kept, x())
    assert step.followed_plan
    return lambda: step(kept, x()), kept


def one_rank_donates_what_is_gone(rank: int) -> Any:
    step = hp.sharded(descend, mesh(), donate_argnums=0)
    gone = params()
    kept, _ = step(gone, x())
    return lambda: step(gone if rank == 1 else kept, x()), None


# --- ranks that hold, or pass, something else ----------------------------------------------------------------------
def drifted(by: int) -> Any:
    """Two arrays that all ranks hold whole, but for what is added to those of this rank."""
    pair = hp.shard({"mu": ops.arange(6.0), "scale": ops.ones(3)}, mesh(), hp.P())
    return {name: x.with_local(x.local + float(by)) for name, x in pair.items()}


def replicas_that_drifted_apart(rank: int) -> Any:
    tree = {"w": params()["layers"][0]["w"], **drifted(rank)}
    return lambda: hp.debug.check_replicas(tree), tree


def arguments_that_drifted_apart(rank: int) -> Any:
    tree = drifted(rank)
    return lambda: hp.sharded(hp.unit(lambda p: (p["mu"] * 2).sum()), mesh())(tree), tree


def arguments_in_another_order(rank: int) -> Any:
    pair = [layer["w"] for layer in params()["layers"]]
    step = hp.sharded(hp.unit(lambda ws: (ws[0] - 2 * ws[1]).sum()), mesh())
    return lambda: step(pair[::-1] if rank else pair), pair


def no_array_to_check(rank: int) -> Any:
    return lambda: hp.debug.check_replicas({"w": ops.ones(3)}), None


def a_check_of_replicas_inside_a_step(rank: int) -> Any:
    tree = params()
    return lambda: hp.sharded(hp.debug.check_replicas, mesh())(tree), tree


CASES = cases_among(globals())


@pytest.mark.parametrize("name", CASES)
def test_refusals(name: str) -> None:
    check_texts(texts_of(CASES[name]), name)
