"""Cells of MindSpore train like the plain cell on one process; planned steps have the bits of eager ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpfunc as hp
from hpfunc.checkpoint import PerRank
from tests.helpers.frameworks import needs_mindspore, to_torch
from tests.helpers.models import sgd
from tests.helpers.ranks import Pool, mesh_of

pytestmark = [pytest.mark.processes, needs_mindspore]
FSDP: Any = ((4,), ("shard",))
HSDP: Any = ((2, 2), ("replicate", "shard"))
STEPS = 10
Arrays = dict[str, np.ndarray]


def arrays_of(tree: dict[str, Any]) -> Arrays:
    return {path: to_torch(x).numpy().copy() for path, x in tree.items()}


def train(rank: int, name: str, first: Any, second: Any, path: str) -> Any:
    """Trains, saves, loads on another mesh, and trains on. Returns weights and state after both, and the judge's."""
    from tests.mindspore.cells import CASES, RATE, reference

    case = CASES[name]
    apply, given = hp.from_module(case.cell(), remat=case.remat)

    def step_fn(params: Any, buffers: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            outputs, after = apply.with_buffers(params, buffers, x)
            return case.loss(outputs), after

        (_, after), grads = hp.value_and_grad(loss, has_aux=True)(params)
        return sgd(params, grads, RATE), after

    found, state = [], {}
    for place, layout in enumerate((first, second)):
        mesh = mesh_of(*layout)
        params = hp.shard(given, mesh, hp.P("shard"))
        tree = {"params": params, "buffers": {k: PerRank(x) for k, x in apply.buffers.items()}, "position": 0}
        if place:
            tree = hp.checkpoint.load(path, like=tree)
        params, buffers = tree["params"], {k: x.value for k, x in tree["buffers"].items()}
        eager = step_fn(params, buffers, case.call(rank, tree["position"]))
        step = hp.sharded(step_fn, mesh, debug=True)
        for number in range(tree["position"], tree["position"] + STEPS):
            params, buffers = step(params, buffers, case.call(rank, number))
            if number == tree["position"]:
                same = [arrays_of(hp.unshard(p)) | arrays_of(b) for p, b in (eager, (params, buffers))]
                assert all(np.array_equal(same[0][k], same[1][k]) for k in same[1]), "the bits of the eager step"
        assert step.followed_plan
        state = {"params": params, "buffers": {k: PerRank(x) for k, x in buffers.items()}, "position": STEPS}
        hp.checkpoint.save(path, state)
        found.append((arrays_of(hp.unshard(params)), arrays_of(buffers)))
    return found, reference(replace(case, remat=False), 4, (STEPS, 2 * STEPS)) if rank == 0 else None


def assert_close(got: Arrays, want: Arrays, tolerance: float) -> None:
    """Fails unless both have the same paths, and each array differs by at most so much of its norm."""
    assert got.keys() == want.keys()
    for path, wanted in want.items():
        error = np.linalg.norm(got[path] - wanted) / max(np.linalg.norm(wanted), 1e-3)
        assert error <= tolerance, f"{path} differs by {error:.1e}"


@pytest.mark.parametrize(
    ("name", "first", "second", "tolerance"),
    [
        ("transformer", FSDP, HSDP, 1e-10),
        ("transformer, remat", HSDP, FSDP, 1e-10),
        ("convolutional", FSDP, HSDP, 1e-5),
        ("convolutional", HSDP, FSDP, 1e-5),
    ],
)
def test_training_matches_the_plain_cell_also_after_a_checkpoint(
    pool: Callable[..., Pool], tmp_path: Path, name: str, first: Any, second: Any, tolerance: float
) -> None:
    results = pool(4, "mindspore").run(train, name, first, second, str(tmp_path))
    judged = results[0][1]
    for rank, (found, _) in enumerate(results):
        for (weights, state), (want, states) in zip(found, judged, strict=True):
            assert_close(weights, want, tolerance)
            assert_close(state, states[rank], tolerance)
    (early, _), (late, _) = judged
    changed = [path for path in early if not np.array_equal(early[path], late[path])]
    assert len(changed) > len(early) / 2  # softmax does not see the bias of keys


def test_the_assert_helper_fails_on_wrong_input() -> None:
    right = {"w": np.ones(3)}
    assert_close(right, right, 1e-10)
    for wrong in ({"w": right["w"] * (1 + 1e-9)}, {"v": right["w"]}, {}):
        with pytest.raises(AssertionError):
            assert_close(wrong, right, 1e-10)
