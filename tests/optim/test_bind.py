"""`optim.bind`: weights and torch parameters in one memory, for loops that stay imperative."""

from __future__ import annotations

import optree
import pytest
import torch

import hpfunc as hp
from hpfunc import optim
from tests.helpers.models import Model
from tests.helpers.ranks import mesh_of, outcome

MODEL = Model(width=6, num_inputs=5, biases=(True, False), calls=(0, 1))
NUM_STEPS = 4


def loss_fn(params, batch):
    return MODEL.loss(params, batch, hp.unit)


def imperative(rank, shape, names, spec):
    mesh = mesh_of(shape, names)
    weights = MODEL.weights(torch.float64)
    params = hp.shard(weights, mesh, optree.tree_map(lambda x: spec if x.dim() else hp.P(), weights))
    memory = [x.data_ptr() for x in optree.tree_leaves(params)]
    bound = optim.bind(params)
    assert [x.data_ptr() for x in bound.parameters] == memory
    assert [x.data_ptr() for x in optree.tree_leaves(bound.params)] == memory
    assert "DonatedError" in outcome(hp.unshard, params["embed"]["w"])
    optimizer = torch.optim.AdamW(bound.parameters, lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    differentiate = hp.sharded(hp.value_and_grad(loss_fn), mesh)
    for step in range(NUM_STEPS):
        _, grads = differentiate(bound.params, MODEL.batch(rank, step, torch.float64))
        bound.set_grads(grads)
        for parameter, gradient in zip(bound.parameters, optree.tree_leaves(grads), strict=True):
            assert parameter.grad.data_ptr() == gradient.data_ptr()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return [x.clone() for x in optree.tree_leaves(hp.unshard(bound.params))]


def one_process():
    tree = optree.tree_map(lambda x: x.requires_grad_(), MODEL.weights(torch.float64))
    optimizer = torch.optim.AdamW(optree.tree_leaves(tree), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        torch.stack([MODEL.loss(tree, MODEL.batch(rank, step, torch.float64)) for rank in range(4)]).mean().backward()
        optimizer.step()
        scheduler.step()
    return [x.detach() for x in optree.tree_leaves(tree)]


@pytest.mark.processes
@pytest.mark.parametrize(
    "mesh", [((4,), ("shard",), hp.P("shard")), ((2, 2), ("replicate", "shard"), hp.P("shard"))], ids=["4", "2x2"]
)
def test_an_imperative_loop_trains_as_one_process(pool, mesh):
    expected = one_process()
    for found in pool(4).run(imperative, *mesh):
        assert all((a - b).abs().max() < 1e-12 for a, b in zip(found, expected, strict=True))


def overflowing(rank, shares):
    mesh = mesh_of((4,), ("shard",))
    bound = optim.bind(hp.shard({"w": torch.ones(3)}, mesh, hp.P("shard")))  # the last rank has no element
    optimizer = torch.optim.SGD(bound.parameters, lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    found = []
    for bad in (False, True, False):
        gradient = torch.full_like(bound.parameters[0], 8.0)
        if bad and rank == 1:
            gradient.fill_(torch.inf)
        bound.set_grads({"w": bound.params["w"].with_local(gradient)})
        scaler.scale(torch.ones(()))  # a loop scales its loss
        if shares:
            bound.unscale(scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()
        found.append((bound.params["w"].local.tolist(), scaler.get_scale()))
    return found


@pytest.mark.processes
def test_an_overflow_on_one_rank_skips_the_step_on_all(pool):
    first, second, third = zip(*pool(4).run(overflowing, True), strict=True)
    assert first == (([0.5], 16.0),) * 3 + (([], 16.0),)
    assert second == (([0.5], 8.0),) * 3 + (([], 8.0),)
    assert third == (([0.0], 16.0),) * 3 + (([], 16.0),)
    alone = pool(4).run(overflowing, False)
    assert len({found[1][1] for found in alone}) == 2  # without `unscale` the scales of the ranks part


def test_a_scaler_that_is_not_enabled_does_nothing():
    mesh = hp.make_mesh((1,), ("shard",))
    bound = optim.bind(hp.shard({"w": torch.ones(2)}, mesh, hp.P("shard")))
    bound.set_grads(hp.shard({"w": torch.full((2,), 3.0)}, mesh, hp.P("shard")))
    bound.unscale(torch.amp.GradScaler("cpu", enabled=False), torch.optim.SGD(bound.parameters))
    assert [x.grad.tolist() for x in bound.parameters] == [[3.0, 3.0]]


def test_parameters_have_names_for_groups_and_gradients_their_dtype():
    mesh = hp.make_mesh((1,), ("shard",))
    weights = {"norm": torch.ones(2, dtype=torch.bfloat16), "w": torch.ones(2, 2)}
    bound = optim.bind(hp.shard(weights, mesh, hp.P("shard")))
    assert bound.names == ("norm", "w")
    assert [name for name, _ in bound.named_parameters] == ["norm", "w"]
    bound.set_grads(hp.shard(optree.tree_map(lambda x: x.float(), weights), mesh, hp.P("shard")))
    assert [x.grad.dtype for x in bound.parameters] == [torch.bfloat16, torch.float32]


def bind_rows():
    stacked = hp.shard(torch.ones(2, 2), hp.make_mesh((1,), ("shard",)), hp.P(None, "shard"))
    optim.bind(hp.unstack(stacked))


def bind_twice():
    array = hp.shard(torch.ones(2), hp.make_mesh((1,), ("shard",)), hp.P("shard"))
    optim.bind({"embed": array, "head": array})


def bind_two_meshes():
    meshes = [hp.make_mesh((1,), (name,)) for name in ("shard", "x")]
    optim.bind([hp.shard(torch.ones(2), mesh, hp.P()) for mesh in meshes])


def grads_of_another_tree():
    array = hp.shard(torch.ones(2), hp.make_mesh((1,), ("shard",)), hp.P("shard"))
    optim.bind({"w": array}).set_grads([array.with_local(torch.ones(2))])


ERRORS = {
    bind_rows: "a weight is a row of an array",
    bind_twice: "a weight stands at two places of the tree",
    bind_two_meshes: "a weight lies on another mesh",
    grads_of_another_tree: "grads and params are different trees",
    lambda: optim.bind({"w": torch.ones(2)}): "not a ShardedArray",
    lambda: optim.bind({}): "params has no leaf, or a leaf that is not a ShardedArray",
}


@pytest.mark.parametrize("call", ERRORS)
def test_what_is_refused_is_said(call):
    with pytest.raises(hp.HpfuncError, match=ERRORS[call]):
        call()
