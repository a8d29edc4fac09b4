"""What ranks do to train a case, and how it is judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

import hpfunc as hp
from tests.models import sgd
from tests.nn.zoo import RATE, STEPS, reference
from tests.ranks import Pool, mesh_of

Tensors = dict[str, torch.Tensor]
Layout = tuple[tuple[int, ...], tuple[str, ...]]
LAYOUTS: list[Layout] = [((2,), ("shard",)), ((2, 2), ("replicate", "shard"))]


def train(rank: int, case: Any, layout: Layout) -> dict[str, tuple[Tensors, Tensors]]:
    """Returns whole final weights and the rank's own buffers, of eager and of planned steps."""
    mesh = mesh_of(*layout)
    apply, given = hp.from_module(case.module(), case.units, remat=case.remat)

    def step(params: Any, buffers: Any, args: Any, kwargs: Any) -> Any:
        def loss(params: Any) -> Any:
            outputs, after = apply.with_buffers(params, buffers, *args, **kwargs)
            return case.loss(outputs), after

        (_, after), grads = hp.value_and_grad(loss, has_aux=True)(params)
        return sgd(params, grads, RATE), after

    found = {}
    for name, run in {"eager": step, "planned": hp.sharded(step, mesh, debug=True)}.items():
        params, buffers = hp.shard(given, mesh, hp.P("shard")), apply.buffers
        for number in range(STEPS):
            args, kwargs = case.call(rank, number)
            params, buffers = run(params, buffers, args, kwargs)
        found[name] = hp.unshard(params), dict(buffers)
    assert run.followed_plan
    return found


def assert_trained(case: Any, results: list[dict[str, tuple[Tensors, Tensors]]]) -> None:
    """Fails unless every rank has the numbers of one process, and planned steps the bits of eager ones."""
    weights, buffers = reference(case, len(results))
    for rank, found in enumerate(results):
        for name in ("eager", "planned"):
            assert_close(found[name][0], weights)
            assert_close(found[name][1], buffers[rank])
        for eager, planned in zip(found["eager"], found["planned"], strict=True):
            assert eager.keys() == planned.keys()
            assert all(torch.equal(eager[path], planned[path]) for path in eager)


def assert_close(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> None:
    """Fails unless both have the same paths, and each tensor differs by at most 1e-10 of its norm."""
    assert got.keys() == want.keys()
    for path, wanted in want.items():
        error = (got[path].double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-3)
        assert error <= 1e-10, f"{path} differs by {error:.1e}"


Pools = Callable[[int], Pool]
