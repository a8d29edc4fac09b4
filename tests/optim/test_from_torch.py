"""`optim.from_torch`: torch's optimizers on cut weights have the numbers that they have on whole ones."""

from __future__ import annotations

import itertools
from typing import Any

import optree
import pytest
import torch

import hpfunc as hp
from hpfunc import optim
from hpfunc._values.array import is_sharded
from tests.helpers.models import Model
from tests.helpers.ranks import mesh_of
from tests.optim.trees import leaves, random_tree, same_bits

MODEL = Model(width=6, num_inputs=5, biases=(True, False), calls=(0, 1))
SHAPES = {"a": (5, 3), "b": (4, 4), "c": (2,), "d": (), "none": (0, 3)}  # over 4 ranks: uneven parts, and empty ones
NUM_STEPS = 5
MESHES = [((4,), ("shard",), hp.P("shard")), ((2, 2), ("replicate", "shard"), hp.P(("replicate", "shard")))]
OPTIONS: dict[str, dict[str, Any]] = {
    "Adadelta": {"lr": 0.5, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.05, "lr_decay": 0.1, "initial_accumulator_value": 0.1},
    "Adam": {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1},
    "Adamax": {"lr": 0.01},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "ASGD": {"lr": 0.05, "t0": 2},
    "NAdam": {"lr": 0.01, "weight_decay": 0.1},
    "RAdam": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
    "Rprop": {"lr": 0.01},
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
}
NO_DECAY: list[Any] = [(lambda path, leaf: len(leaf.shape) < 2, {"weight_decay": 0.0, "lr": 0.02})]
CASES = [
    *((name, "plain", foreach) for name, foreach in zip(OPTIONS, itertools.cycle((True, False)), strict=False)),
    ("AdamW", "groups", False),
    ("SGD", "groups", True),
    ("AdamW", "fused", None),
    ("AdamW", "schedule", True),
]


def options_of(name, kind, foreach) -> dict[str, Any]:
    options = OPTIONS[name] | ({"fused": True} if kind == "fused" else {"foreach": foreach})
    return options | ({"lr": optim.linear(0.1, 0.0, 8)} if kind == "schedule" else {})


def gradients(rank, step):
    """Of one rank; on a mesh the sum over ranks counts."""
    return random_tree(100 * rank + step, shapes=SHAPES)


def cut(tree, mesh, spec):
    return hp.shard(tree, mesh, optree.tree_map(lambda x: spec if x.dim() else hp.P(), tree))


def train_all(rank, shape, names, spec):
    mesh = mesh_of(shape, names)
    start = cut(random_tree(7, shapes=SHAPES), mesh, spec)
    specs = optree.tree_map(lambda x: x.spec, start, is_leaf=is_sharded)
    sums = [hp.reduce(gradients(rank, step), mesh, specs) for step in range(NUM_STEPS)]
    found = []
    for name, kind, foreach in CASES:
        groups = NO_DECAY if kind == "groups" else ()
        optimizer = optim.from_torch(getattr(torch.optim, name), groups=groups, **options_of(name, kind, foreach))
        params, state = start, optimizer.init(start)
        for grads in sums:
            updates, state = optimizer.update(grads, state, params)
            params = hp.apply_updates(params, updates)
        for slot in optree.tree_leaves(state.slots, is_leaf=is_sharded):
            assert is_sharded(slot) or slot.shape == ()
        found.append(leaves(params))
    return found


def reference(name, kind, foreach):
    weights, options = leaves(random_tree(7, shapes=SHAPES)), options_of(name, kind, False)
    rate, options["lr"] = options["lr"], 0.01 if kind == "schedule" else options["lr"]
    groups = [{"params": weights}]
    if kind == "groups":
        small = {"params": [w for w in weights if w.dim() < 2], **NO_DECAY[0][1]}
        groups = [{"params": [w for w in weights if w.dim() == 2]}, small]
    optimizer = getattr(torch.optim, name)(groups, **options)
    for step in range(NUM_STEPS):
        if kind == "schedule":
            optimizer.param_groups[0]["lr"] = rate(step)
        for weight, *parts in zip(weights, *(leaves(gradients(rank, step)) for rank in range(4)), strict=True):
            weight.grad = sum(parts)
        optimizer.step()
    return weights


@pytest.mark.processes
@pytest.mark.parametrize("mesh", MESHES, ids=["4", "2x2"])
def test_cut_weights_are_trained_as_whole_ones(pool, mesh):
    ranks = pool(4).run(train_all, *mesh)
    start = leaves(random_tree(7, shapes=SHAPES))
    for case, *found in zip(CASES, *ranks, strict=True):
        expected = reference(*case)
        for i, want in enumerate(expected):
            assert not want.numel() or (want - start[i]).abs().max() > 1e-3, case
            parts = [weights[i] for weights in found]
            got = torch.cat(parts) if want.dim() else parts[0]
            assert got.shape == want.shape
            assert torch.equal(got, want) or (got - want).abs().max() < 1e-12, case


def planned_and_eager(rank):
    mesh = mesh_of((4,), ("shard",))
    optimizer = optim.from_torch(torch.optim.AdamW, groups=[("*.b", {"weight_decay": 0.0})], lr=0.01)

    def step_fn(params, state, batch):
        _, grads = hp.value_and_grad(lambda params, batch: MODEL.loss(params, batch, hp.unit))(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return hp.apply_updates(params, updates), state

    found, planned = [], hp.sharded(step_fn, mesh, donate_argnums=(0, 1))
    for step in (step_fn, planned):
        params = cut(MODEL.weights(torch.float64), mesh, hp.P("shard"))
        state = optimizer.init(params)
        for number in range(4):
            params, state = step(params, state, MODEL.batch(rank, number, torch.float64))
        found.append((params, state.slots))
    assert planned.followed_plan
    return same_bits(*found)


@pytest.mark.processes
def test_a_planned_step_has_the_bits_of_the_eager_one(pool):
    assert pool(4).run(planned_and_eager) == [True] * 4


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("name", OPTIONS)
def test_arguments_keep_their_bits_and_an_update_repeats(name, foreach):
    mesh = hp.make_mesh((1,), ("shard",))
    shapes = {"a": (5, 3), "b": (), "none": (0, 3)}
    params, *grads = (hp.shard(random_tree(seed, shapes=shapes), mesh, hp.P("shard")) for seed in range(3))
    optimizer = optim.from_torch(getattr(torch.optim, name), foreach=foreach, maximize=False, **OPTIONS[name])
    _, state = optimizer.update(grads[0], optimizer.init(params), params)
    kept = optree.tree_map(torch.clone, (params, grads, state.slots))
    first = optimizer.update(grads[1], state, params)
    assert same_bits((params, grads, state.slots), kept)
    second = optimizer.update(grads[1], state, params)
    assert same_bits(first[0], second[0])
    assert same_bits(first[1].slots, second[1].slots)
    assert first[1].step == 2


@pytest.mark.parametrize("name", ["Adamax", "SGD"])
def test_a_donated_state_is_updated_in_place(name):
    mesh = hp.make_mesh((1,), ("shard",))
    params, grads = (hp.shard(random_tree(seed), mesh, hp.P("shard")) for seed in range(2))
    optimizer = optim.from_torch(getattr(torch.optim, name), **OPTIONS[name])
    _, state = optimizer.update(grads, optimizer.init(params), params)
    memory = sorted(x.data_ptr() for x in leaves(state.slots) if x.dim())
    step = hp.sharded(lambda state: optimizer.update(grads, state, params)[1], mesh, donate_argnums=0)
    assert sorted(x.data_ptr() for x in leaves(step(state).slots) if x.dim()) == memory


def test_weights_of_16_bits_have_float32_state_and_are_rounded_once():
    params, grads = random_tree(0, torch.bfloat16), random_tree(1, torch.bfloat16)
    optimizer = optim.from_torch(torch.optim.AdamW, lr=0.01)
    updates, state = optimizer.update(grads, optimizer.init(params), params)
    assert {x.dtype for x in leaves((updates, state.slots))} == {torch.float32}
    wide = [x.float() for x in leaves(params)]
    for weight, gradient in zip(wide, leaves(grads), strict=True):
        weight.grad = gradient.float()
    torch.optim.AdamW(wide, lr=0.01).step()
    for got, want in zip(leaves(optim.apply_updates(params, updates)), wide, strict=True):
        assert torch.equal(got, want.bfloat16())


def test_a_step_lowers():
    mesh = hp.make_mesh((1,), ("shard",))
    params = hp.shard(random_tree(0), mesh, hp.P("shard"))
    optimizer = optim.from_torch(torch.optim.NAdam, lr=0.01)
    square = hp.unit(lambda params: sum(x.square().sum() for x in optree.tree_leaves(params)))

    def step_fn(params, state):
        _, grads = hp.value_and_grad(square)(params)
        updates, state = optimizer.update(grads, state, params)
        return hp.apply_updates(params, updates), state

    step = hp.sharded(step_fn, mesh)
    params, state = step(params, optimizer.init(params))
    assert step.last_schedule is not None
    assert step.lower(params, state).program.fingerprint == step.last_schedule.program.fingerprint


def test_what_is_not_element_wise_works_on_whole_weights_alone():
    mesh = hp.make_mesh((1,), ("shard",))  # an axis of one rank cuts nothing
    params = hp.shard({"w": torch.randn(4, 3, generator=torch.Generator().manual_seed(0))}, mesh, hp.P("shard"))
    optimizer = optim.from_torch(torch.optim.Muon, lr=0.1)
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    weight = params["w"].local.clone()
    weight.grad = params["w"].local.clone()
    torch.optim.Muon([weight], lr=0.1).step()
    torch.testing.assert_close(optim.apply_updates(params, updates)["w"].local, weight)


class Doubtful(torch.optim.SGD):
    """A class that nobody has looked at."""


def cut_over_two():
    mesh = hp.Mesh(("shard",), (2,), ("shard",), (0, 1))
    return {"w": hp.ShardedArray(torch.ones(2, 3), (4, 3), hp.P("shard"), mesh)}


def whole_on_the_same_mesh():
    return hp.ShardedArray(torch.ones(4, 3), (4, 3), hp.P(), cut_over_two()["w"].mesh)


def update_twice(params, other):
    optimizer = optim.from_torch(torch.optim.SGD, momentum=0.9)
    _, state = optimizer.update(params, optimizer.init(params), params)
    optimizer.update(other, state, other)


ERRORS = {
    "no class": (lambda: optim.from_torch(torch.optim.SGD([torch.ones(1)])), "is not a class of torch.optim"),
    "a closure": (lambda: optim.from_torch(torch.optim.LBFGS), "LBFGS calls the loss itself"),
    "a bad option": (lambda: optim.from_torch(torch.optim.SGD, lr=-1.0), "SGD refuses its options: Invalid learning"),
    "an unknown option": (lambda: optim.from_torch(torch.optim.SGD, beta=1.0), "SGD refuses its options"),
    "a bad option of a group": (
        lambda: optim.from_torch(torch.optim.SGD, groups=[("w", {"momentum": -1.0})]),
        "SGD refuses its options: Invalid momentum",
    ),
    "Muon on parts": (
        lambda: optim.from_torch(torch.optim.Muon).init(cut_over_two()),
        r"Muon is not known to be element-wise, and weights are cut\n  params\['w'\]: shape \(4, 3\), spec P",
    ),
    "an unknown class on parts": (lambda: optim.from_torch(Doubtful).init(cut_over_two()), "Doubtful is not known"),
    "a group of nothing": (
        lambda: optim.from_torch(torch.optim.SGD, groups=[("x", {"lr": 0.1})]).init(cut_over_two()),
        "from_torch: a pattern selects no leaf",
    ),
    "no params": (
        lambda: optim.from_torch(torch.optim.SGD).update(torch.ones(2), optim.TorchState(0, {})),
        "update needs params",
    ),
    "another state": (
        lambda: optim.from_torch(torch.optim.SGD).update(torch.ones(2), (), torch.ones(2)),
        "the state is not an instance of TorchState, but of tuple",
    ),
    "a state of other weights": (lambda: update_twice(torch.ones(2), {"w": torch.ones(2)}), "does not fit params"),
    "a state of another spec": (
        lambda: update_twice(cut_over_two(), {"w": whole_on_the_same_mesh()}),
        "does not fit params",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_is_refused_is_said(name):
    call, text = ERRORS[name]
    with pytest.raises(hp.HpfuncError, match=text):
        call()


def test_the_word_of_the_caller_counts():
    params = cut_over_two()
    optimizer = optim.from_torch(Doubtful, elementwise=True, lr=0.5)
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    assert (updates["w"].local == -0.5).all()
