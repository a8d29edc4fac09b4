"""`examples/torch/jax_style.py`: two ranks against the same pure functions on plain tensors, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch

import hpfunc as hp
from tests.helpers.examples import example
from tests.helpers.leaves import assert_close
from tests.helpers.ranks import Pool, mesh_of

STEPS, RANKS = 4, 2


def sharded(rank: int) -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        state, log = example("jax_style").train(mesh_of((RANKS,), ("shard",)), STEPS)
        return hp.unshard(state.params), log
    finally:
        torch.set_default_dtype(torch.float32)


def plain() -> Any:
    """Returns weights and losses of torch alone, on the batches of both ranks."""
    module = example("jax_style")
    torch.set_default_dtype(torch.float64)
    try:
        params, data, log = module.init_params(), module.text.standard_library(), []
    finally:
        torch.set_default_dtype(torch.float32)
    leaves, treedef = optree.tree_flatten(params)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    optimizer = torch.optim.AdamW(leaves, weight_decay=0.01)
    rate = hp.optim.warmup_cosine(1e-2, 5, module.STEPS)
    for number in range(STEPS):
        tree = optree.tree_unflatten(treedef, leaves)
        batches = [module.batch(data, number, part) for part in range(RANKS)]
        loss = torch.stack([module.loss_fn(tree, *batch, unit=lambda fn: fn) for batch in batches]).mean()
        optimizer.zero_grad()
        loss.backward()
        largest = {f"{p}": float(x.grad.abs().max()) for p, x in zip(optree.tree_paths(tree), leaves, strict=True)}
        torch.nn.utils.clip_grads_with_norm_(
            leaves, 1.0, torch.nn.utils.get_total_norm([x.grad for x in leaves]) - 1e-6
        )
        optimizer.param_groups[0]["lr"] = rate(number)
        optimizer.step()
        log.append((float(loss.detach()), sorted(largest.values())))
    return [leaf.detach() for leaf in leaves], log


@pytest.mark.processes
def test_two_ranks_train_as_the_plain_functions_do(pool: Callable[[int], Pool]) -> None:
    want, wanted_log = plain()
    for params, log in pool(RANKS).run(sharded):
        assert_close(optree.tree_leaves(params), want, 1e-9)
        for said, (loss, largest) in zip(log, wanted_log, strict=True):
            assert said["loss"] == pytest.approx(loss, rel=1e-12)
            assert said["largest"] == pytest.approx(largest[-1], rel=1e-10)
            groups = sorted(x for name, x in said.items() if name not in ("loss", "largest"))
            assert groups == pytest.approx(largest, rel=1e-10)
