"""`optim.bind`: weights and torch parameters in one memory, for loops that stay imperative."""

from __future__ import annotations

import itertools

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


def overflowing(rank):
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
        bound.unscale(scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()
        found.append((bound.params["w"].local.tolist(), scaler.get_scale()))
    return found


@pytest.mark.processes
def test_an_overflow_on_one_rank_skips_the_step_on_all(pool):
    first, second, third = zip(*pool(4).run(overflowing), strict=True)
    assert first == (([0.5], 16.0),) * 3 + (([], 16.0),)
    assert second == (([0.5], 8.0),) * 3 + (([], 8.0),)
    assert third == (([0.0], 16.0),) * 3 + (([], 16.0),)


class _Changes:
    """What a loop may do between `set_grads` and the step. Each would part the ranks, or is elementwise and says so."""

    @staticmethod
    def clip_by_norm(bound, optimizer):
        torch.nn.utils.clip_grad_norm_(bound.parameters, 0.5)

    @staticmethod
    def clip_by_value(bound, optimizer):
        torch.nn.utils.clip_grad_value_(bound.parameters, 0.5)

    @staticmethod
    def scale(bound, optimizer):
        for x in bound.parameters:
            x.grad = x.grad / x.grad.norm()

    @staticmethod
    def scaled_step(bound, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)


def changed(rank, name, kind, spec):
    mesh = mesh_of((2,), ("shard",))
    bound = optim.bind(hp.shard({"w": torch.ones(4), "b": torch.ones(3)}, mesh, spec))
    optimizer = {
        "sgd": lambda: torch.optim.SGD(bound.parameters, lr=0.5),
        "fused": lambda: torch.optim.AdamW(bound.parameters, lr=0.5, fused=True),
        "foreach": lambda: torch.optim.AdamW(bound.parameters, lr=0.5, foreach=True),
    }[kind]()

    def step():
        bound.set_grads(optree.tree_map(lambda x: x * (1.0 + rank), bound.params))
        getattr(_Changes, name)(bound, optimizer)
        optimizer.step()

    before = [x.detach().clone() for x in bound.parameters]
    text = outcome(step)
    return text, all(torch.equal(x, y) for x, y in zip(before, bound.parameters, strict=True))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *itertools.product(["clip_by_norm", "clip_by_value", "scale"], ["sgd", "fused", "foreach"]),
        ("scaled_step", "fused"),  # a scaler tells no other optimizer what it found
    ],
)
def test_gradients_that_a_rank_changed_by_itself_are_refused(pool, name, kind):
    for text, is_unchanged in pool(2).run(changed, name, kind, hp.P("shard")):
        assert text.startswith("UsageError: hpfunc.optim.bind: ")
        assert "  b\n  w\n" in text
        assert is_unchanged


@pytest.mark.processes
def test_gradients_of_whole_weights_may_be_changed(pool):
    assert [text for text, _ in pool(2).run(changed, "clip_by_norm", "sgd", hp.P())] == ["returned"] * 2


def changed_by_element(rank):
    mesh = mesh_of((2,), ("shard",))
    bound = optim.bind(hp.shard({"w": torch.ones(4)}, mesh, hp.P("shard")))
    optimizer = torch.optim.SGD(bound.parameters, lr=0.5)
    for _ in range(2):
        bound.set_grads(optree.tree_map(torch.clone, bound.params))
        torch.nn.utils.clip_grad_value_(bound.parameters, 0.25)
        bound.note_gradients()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()  # without gradients it does nothing
    return [x.tolist() for x in bound.parameters]


@pytest.mark.processes
def test_gradients_that_are_noted_may_be_changed(pool):
    assert pool(2).run(changed_by_element) == [[[0.75, 0.75]]] * 2


def test_an_optimizer_of_the_leaves_of_a_tree_is_warned_of():
    mesh = hp.make_mesh((1,), ("shard",))
    params = hp.shard({"w": torch.ones(2)}, mesh, hp.P("shard"))
    optimizer = torch.optim.SGD(optree.tree_leaves(params), lr=0.5)
    with pytest.warns(hp.HpfuncWarning, match=r"none of its parameters has a gradient.*\n*.*hpfunc.optim.bind"):
        optimizer.step()
    frozen = torch.nn.Linear(2, 2)
    frozen.bias.requires_grad_(False)
    torch.optim.SGD(frozen.parameters(), lr=0.5).step()  # one of them may have a gradient some time


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
