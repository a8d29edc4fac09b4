"""What ranks do to train a case, save it, and go on elsewhere; and how it is judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import hpfunc as hp
from hpfunc.optim import adamw
from tests.helpers.ranks import Pool, mesh_of
from tests.helpers.zoo import bits
from tests.nn.zoo import DECAY, EPS, NUM_STEPS, Found, Tensors, rate, reference

Layout = tuple[tuple[int, ...], tuple[str, ...]]
FSDP: Layout = ((4,), ("shard",))
HSDP: Layout = ((2, 2), ("replicate", "shard"))
FEWER: Layout = ((3,), ("shard",))
NUM_EAGER = 2  # planned: one step that is recorded, one that follows its plan

Pools = Callable[[int], Pool]


class Training:
    """A case on a mesh. Its state is what a checkpoint holds."""

    def __init__(self, case: Any, layout: Layout) -> None:
        self.case, self.mesh = case, mesh_of(*layout)
        apply, given = hp.from_module(case.module(), case.units, remat=case.remat)
        decays = {path: w.dim() > 1 for path, w in given.items()}
        optimizer = adamw(rate, eps=EPS, weight_decay=DECAY, mask=decays)
        params = hp.shard(given, self.mesh, hp.P("shard"))
        self.state = {"params": params, "opt": optimizer.init(params), "buffers": dict(apply.buffers), "step": 0}

        def step(params: Any, opt_state: Any, buffers: Any, args: Any, kwargs: Any) -> Any:
            def loss(params: Any) -> Any:
                outputs, after = apply.with_buffers(params, buffers, *args, **kwargs)
                return case.loss(outputs), after

            (_, after), grads = hp.value_and_grad(loss, has_aux=True)(params)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return hp.apply_updates(params, updates), opt_state, after

        self.eager, self.planned = step, hp.sharded(step, self.mesh, debug=True)

    def run(self, step: Any, rank: int, num_steps: int) -> Found:
        """Returns whole weights and the rank's own buffers after some more steps."""
        state = self.state
        for number in range(state["step"], state["step"] + num_steps):
            args, kwargs = self.case.call(rank, number)
            params, opt, buffers = step(state["params"], state["opt"], state["buffers"], args, kwargs)
            state = {"params": params, "opt": opt, "buffers": buffers, "step": number + 1}
        self.state = state
        return Found(hp.unshard(state["params"]), state["buffers"])


def train(rank: int, case: Any, layout: Layout, path: str) -> Found:
    """Trains, compares the first planned steps with eager ones bit by bit, and saves."""
    training = Training(case, layout)
    start = training.state
    eager = training.run(training.eager, rank, NUM_EAGER)
    training.state = start
    assert same_bits(training.run(training.planned, rank, NUM_EAGER), eager)
    found = training.run(training.planned, rank, NUM_STEPS - NUM_EAGER)
    assert training.planned.followed_plan
    axes, mesh = training.mesh.axis_names, training.mesh
    means = {name: hp.pmean(x, axes, mesh=mesh) if x.is_floating_point() else x for name, x in found.buffers.items()}
    hp.checkpoint.save(path, training.state | {"buffers": means}, step=NUM_STEPS)
    return found


def resume(rank: int, case: Any, layout: Layout, path: str) -> Found:
    """Goes on from a checkpoint."""
    training = Training(case, layout)
    training.state = hp.checkpoint.load(path, like=training.state)
    assert training.state["step"] == NUM_STEPS
    found = training.run(training.planned, rank, NUM_STEPS)
    assert training.planned.followed_plan
    return found


def same_bits(a: Found, b: Found) -> bool:
    """Returns whether all tensors have the same bits."""
    return all(
        x.keys() == y.keys() and all(torch.equal(bits(x[path]), bits(y[path])) for path in x)
        for x, y in zip(a, b, strict=True)
    )


def assert_trained(case: Any, *legs: Sequence[Found]) -> None:
    """Fails unless after each leg every rank has the numbers of one process."""
    expected = reference(case, tuple(len(leg) for leg in legs))
    for leg, (weights, buffers) in zip(legs, expected, strict=True):
        for rank, found in enumerate(leg):
            assert_close(found.weights, weights)
            assert_close(found.buffers, buffers[rank])


def assert_close(got: Mapping[str, torch.Tensor], want: Tensors) -> None:
    """Fails unless both have the same paths, and each tensor differs by at most 1e-10 of its norm."""
    assert got.keys() == want.keys()
    for path, wanted in want.items():
        error = (got[path].double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-3)
        assert error <= 1e-10, f"{path} differs by {error:.1e}"
