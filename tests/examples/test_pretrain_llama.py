"""`examples/torch/pretrain_llama.py` in small, beside plain torch in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import hpfunc as hp
from tests.helpers.examples import example
from tests.helpers.ranks import Pool, mesh_of

pytestmark = pytest.mark.processes
OPTIONS = ["--steps", "4", "--context", "16"]


def losses_of_example(rank: int) -> tuple[list[float], list[str]]:
    module, said = example("pretrain_llama"), []
    vars(module)["HALF"] = hp.Numerics()  # to compare with, in float64
    torch.set_default_dtype(torch.float64)
    try:
        mesh = mesh_of((1, 2), ("replicate", "shard"))
        return module.train(module.options(OPTIONS), mesh, said.append), said
    finally:
        torch.set_default_dtype(torch.float32)


def plain_losses() -> list[float]:
    """The same training in one process, on the batches of both ranks."""
    module = example("pretrain_llama")
    args, data = module.options(OPTIONS), module.text.standard_library()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)  # other random numbers than in float32
    try:
        model = module.build(args.size, args.context)
    finally:
        torch.set_default_dtype(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.1)
    rate, losses = hp.optim.warmup_cosine(args.rate, 1, args.steps), []
    for number in range(args.steps):
        loss = torch.zeros((), dtype=torch.float64)
        for rank in range(2):
            inputs, labels = map(torch.from_numpy, data.batch(0, number, rank, args.batch, args.context))
            loss = loss + F.cross_entropy(model(inputs).logits.flatten(0, 1), labels.flatten()) / 2
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = rate(number)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_losses_are_those_of_plain_torch(pool: Callable[[int], Pool]) -> None:
    (losses, said), (others, _) = pool(2).run(losses_of_example)
    assert losses == others
    torch.testing.assert_close(losses, plain_losses(), rtol=1e-6, atol=0)  # the example's loss is taken in float32
    assert losses[-1] < losses[0]
    assert said[0].endswith("234,048 parameters over Mesh(replicate=1, shard=2)")
    assert said[1].startswith("each rank: 2.8 MB of weights and moments")
