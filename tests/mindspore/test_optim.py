"""Optimizers on MindSpore give what they give on torch, whose operators they are on a CPU.

Not to the last bit: that depends on where in memory a tensor begins, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch

import hpfunc as hp
from tests.helpers.frameworks import needs_mindspore, to_framework, to_torch
from tests.helpers.leaves import assert_close
from tests.helpers.models import Layout, Model, P
from tests.helpers.ranks import Pool, mesh_of

pytestmark = [pytest.mark.processes, needs_mindspore]
LAYOUT = Layout((2, 2), ("replicate", "shard"), P("shard"), P("shard"))
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: hp.optim.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: hp.optim.adamw(hp.optim.warmup_cosine(1e-2, 2, 10), weight_decay=0.1),
    "clipped": lambda: hp.optim.chain(hp.clip_by_global_norm(0.01), hp.optim.adamw(1e-2)),
}


def updated(rank: int, name: str, donate: tuple[int, ...]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns this rank's weights after three updates by gradients that do not depend on the framework, and a norm."""
    mesh, weights = mesh_of(LAYOUT.shape, LAYOUT.names), Model().weights()
    params = hp.shard(to_framework(weights), mesh, LAYOUT.specs(weights))
    optimizer = OPTIMIZERS[name]()

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return hp.apply_updates(params, updates), state

    run, state = hp.sharded(step, mesh, donate_argnums=donate), optimizer.init(params)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        drawn = optree.tree_map(lambda w: torch.randn(w.shape, generator=generator), weights)
        grads = hp.shard(to_framework(drawn), mesh, LAYOUT.specs(weights))
        params, state = run(params, state, grads)
    return optree.tree_leaves(to_torch(params)), to_torch(hp.global_norm(params))


@pytest.mark.parametrize("donate", [(), (0, 1)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_those_of_torch(pool: Callable[..., Pool], name: str, donate: tuple[int, ...]) -> None:
    pairs = zip(pool(4).run(updated, name, donate), pool(4, "torch").run(updated, name, ()), strict=True)
    for (got, norm), (want, want_norm) in pairs:
        assert_close(got, [x.double() for x in want], 1e-6)
        assert_close([norm], [want_norm.double()], 1e-6)
