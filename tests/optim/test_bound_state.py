"""`Bound.state`: a training with a torch optimizer goes on from a checkpoint, on any mesh, as if it had not stopped."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import optree
import pytest
import torch

import hpfunc as hp
from hpfunc import optim
from tests.helpers.golden import assert_golden
from tests.helpers.models import Model
from tests.helpers.ranks import mesh_of, outcome

MODEL = Model(width=6, num_inputs=5, biases=(True, False), calls=(0, 1))
GOLDEN = Path(__file__).parents[1] / "golden" / "bound_state"
NUM_STEPS = 3
OPTIMIZERS = {
    "AdamW": {"lr": 0.05, "amsgrad": True},
    "SGD": {"lr": 0.05, "momentum": 0.9, "dampening": 0.5},
    "NAdam": {"lr": 0.05},
    "Adagrad": {"lr": 0.05},
    "ASGD": {"lr": 0.05},
    "RMSprop": {"lr": 0.05, "momentum": 0.5, "centered": True},
}


class Training:
    """A loop of torch's own, in float64 so that only a lost bit of state makes a difference."""

    def __init__(self, shape, names, optimizer, seed):
        self.mesh = mesh_of(shape, names)
        weights = optree.tree_map(lambda x: x + seed, MODEL.weights(torch.float64))
        specs = optree.tree_map(lambda x: hp.P("shard") if x.dim() else hp.P(), weights)
        self.bound = optim.bind(hp.shard(weights, self.mesh, specs))
        first, *others = self.bound.parameters
        groups = [{"params": [first], "lr": 0.01}, {"params": others}]
        self.optimizer = getattr(torch.optim, optimizer)(groups, **OPTIMIZERS[optimizer])
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.7)
        self.differentiate = hp.sharded(
            hp.value_and_grad(lambda params, batch: MODEL.loss(params, batch, hp.unit)), self.mesh
        )
        self.position = 0

    def run(self, num_steps):
        for _ in range(num_steps):
            batch = MODEL.batch(
                0, self.position, torch.float64
            )  # the same on all ranks: no sum depends on their number
            _, grads = self.differentiate(self.bound.params, batch)
            self.bound.set_grads(grads)
            self.optimizer.step()
            self.scheduler.step()
            self.position += 1

    def state(self, of):
        return {"train": of(self.optimizer), "scheduler": self.scheduler.state_dict(), "position": self.position}

    def resume(self, path):
        loaded = hp.checkpoint.load(path, like=self.state(self.bound.state_like), allow={"cast"})
        self.bound.load_state(self.optimizer, loaded["train"])
        self.scheduler.load_state_dict(loaded["scheduler"])
        self.position = loaded["position"]

    def wholes(self):
        return [x.clone() for x in optree.tree_leaves(hp.unshard(self.bound.params))]


def save(rank, path, shape, names, optimizer):
    training = Training(shape, names, optimizer, 0.0)
    training.run(NUM_STEPS)
    saving = hp.checkpoint.save(path, training.state(training.bound.state), asynchronous=True)
    training.run(NUM_STEPS)  # writes into what is saved
    saving.wait()
    return training.wholes()


def resume(rank, path, shape, names, optimizer):
    training = Training(shape, names, optimizer, 1.0)
    training.resume(path)
    training.run(NUM_STEPS)
    return training.wholes()


MESHES = {1: ((1,), ("shard",)), 2: ((2,), ("shard",)), 4: ((4,), ("shard",)), "2x2": ((2, 2), ("replicate", "shard"))}


def ranks_of(mesh):
    return 4 if mesh == "2x2" else mesh


@pytest.mark.processes
@pytest.mark.parametrize(
    ("optimizer", "saves", "loads"),
    [*((name, 2, 1) for name in OPTIMIZERS), ("AdamW", 4, 2), ("AdamW", "2x2", 4), ("SGD", 1, "2x2")],
)
def test_a_resumed_training_has_the_bits_of_one_that_never_stopped(pool, optimizer, saves, loads):
    with tempfile.TemporaryDirectory() as path:
        (expected, *_) = pool(ranks_of(saves)).run(save, path, *MESHES[saves], optimizer)
        for found in pool(ranks_of(loads)).run(resume, path, *MESHES[loads], optimizer):
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def mesh_of_one():
    return hp.make_mesh((1,), ("shard",))


def bound_of(weights, mesh=None):
    return optim.bind(hp.shard(weights, mesh or mesh_of_one(), hp.P("shard")))


def test_a_state_without_a_slot_would_part_from_the_run():
    """What the parity above shows: each slot, and the options of the groups, make a difference."""
    training = Training((1,), ("shard",), "AdamW", 0.0)
    training.run(NUM_STEPS)
    kept = copy.deepcopy(training.bound.state(training.optimizer))
    training.run(NUM_STEPS)
    expected = training.wholes()
    for spoil in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step", "lr", None):
        state = copy.deepcopy(kept)
        if spoil == "lr":
            state["groups"][0]["lr"] *= 2
        elif spoil is not None:
            state["slots"][spoil] = optree.tree_map(torch.zeros_like, state["slots"][spoil])
        again = Training((1,), ("shard",), "AdamW", 0.0)
        again.run(NUM_STEPS)
        again.bound.load_state(again.optimizer, state)
        again.run(NUM_STEPS)
        same = all(torch.equal(a, b) for a, b in zip(again.wholes(), expected, strict=True))
        assert same == (spoil is None), spoil


def test_frozen_weights_are_not_in_the_state():
    mesh = mesh_of_one()
    params = hp.freeze(hp.shard({"base": torch.ones(2), "w": torch.ones(2)}, mesh, hp.P("shard")), "base")
    bound = optim.bind(params)
    optimizer = torch.optim.Adam(bound.parameters)
    assert optree.tree_paths(bound.state(optimizer)["params"]) == [("w", "local")]
    bound.load_state(optimizer, bound.state(optimizer))
    assert bound.params["base"].is_frozen


def test_the_state_before_the_first_step_is_empty_and_loads():
    bound = bound_of({"w": torch.ones(3), "n": torch.ones(())})
    optimizer = torch.optim.Adam(bound.parameters)
    state = copy.deepcopy(bound.state(optimizer))
    assert state["slots"] == {}
    like = bound.state_like(optimizer)
    assert not any(optimizer.state.values())
    assert like["slots"]["exp_avg"]["w"].shape == (3,)
    assert like["slots"]["step"]["w"].shape == ()
    bound.set_grads(optree.tree_map(torch.ones_like, bound.params))
    optimizer.step()
    after = bound.state(optimizer)
    assert optree.tree_structure(after) == optree.tree_structure(like)
    bound.load_state(optimizer, state)
    assert not optimizer.state[bound.parameters[0]]
    assert bound.params["w"].local.tolist() == [1.0] * 3


class RowMeans(torch.optim.Optimizer):
    """Keeps a number for each row."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "schedule": len})

    def step(self, closure=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for x in group["params"]:
                self.state[x]["row"] = x.detach().mean(1)
        return 0.0


def state_of_rows(like):
    bound = bound_of({"w": torch.ones(3, 2), "v": torch.ones(4, 3)})
    optimizer = RowMeans(bound.parameters)
    if not like:
        optimizer.step()
    return (bound.state_like if like else bound.state)(optimizer)


def options_that_are_functions():
    bound = bound_of({"w": torch.ones(3)})
    bound.state(RowMeans(bound.parameters))


def other_parameters():
    bound = bound_of({"w": torch.ones(3)})
    bound.state(torch.optim.SGD([*bound.parameters, torch.nn.Parameter(torch.ones(2))]))


def closures():
    bound = bound_of({"w": torch.ones(3)})
    bound.state_like(torch.optim.LBFGS(bound.parameters))


def other_groups():
    bound = bound_of({"v": torch.ones(3), "w": torch.ones(3)})
    v, w = bound.parameters
    state = bound.state(torch.optim.SGD([{"params": [v]}, {"params": [w]}]))
    bound.load_state(torch.optim.SGD([{"params": [w]}, {"params": [v]}]), state)


def other_shapes():
    one, two = bound_of({"w": torch.ones(3)}), bound_of({"w": torch.ones(4)})
    two.load_state(torch.optim.SGD(two.parameters), one.state(torch.optim.SGD(one.parameters)))


def a_state_dict_of_torch():
    bound = bound_of({"w": torch.ones(3)})
    optimizer = torch.optim.SGD(bound.parameters)
    bound.load_state(optimizer, optimizer.state_dict())


def rows_of_a_step_that_was_taken():
    state_of_rows(like=False)


def rows_of_a_step_to_come():
    state_of_rows(like=True)


REFUSED = [
    rows_of_a_step_that_was_taken,
    rows_of_a_step_to_come,
    options_that_are_functions,
    other_parameters,
    closures,
    other_groups,
    other_shapes,
    a_state_dict_of_torch,
]


@pytest.mark.parametrize("call", REFUSED, ids=lambda call: call.__name__)
def test_what_is_refused_is_said(call):
    assert_golden(outcome(call), GOLDEN / f"{call.__name__}.txt")
