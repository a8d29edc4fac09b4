"""Training without hpfunc, in one process: the judge of all numbers of the zoo."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.zoo.architecture import Architecture, Batch
from tests.zoo.verdict import Tensors, Trained, difference

NUM_STEPS, NUM_RANKS, RATE = 3, 2, 0.05


def seeded(rank: int, step: int) -> None:
    """Gives a rank's step its random numbers, of all kinds that models draw from."""
    seed = 1000 * rank + step
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def batch_of(architecture: Architecture, rank: int, step: int, dtype: torch.dtype) -> Batch:
    """Returns the data of a rank's step: each has its own."""
    batch = architecture.batch(100 + 10 * step + rank)
    is_real = {key: isinstance(x, torch.Tensor) and x.is_floating_point() for key, x in batch.items()}
    return {key: x.to(dtype) if is_real[key] else x for key, x in batch.items()}


def built(architecture: Architecture, dtype: torch.dtype) -> nn.Module:
    """Returns an architecture in training mode, without dropout."""
    module = architecture.build().to(dtype).train()
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
    return module


def train(architecture: Architecture, module: nn.Module, dtype: torch.dtype, rank: int = 0) -> Trained:
    """Trains a copy of a module on the data of all ranks, and returns its numbers, with the buffers of one rank."""
    module = copy.deepcopy(module)
    weights = dict(module.named_parameters())
    buffers, losses = [_copied(dict(module.named_buffers()))] * NUM_RANKS, []
    for step in range(NUM_STEPS):
        each_loss = []
        module.zero_grad(set_to_none=True)
        for each in range(NUM_RANKS):
            _set_buffers(module, buffers[each])
            batch = batch_of(architecture, each, step, dtype)
            seeded(each, step)
            loss = architecture.loss(module(**batch))
            loss.backward()
            each_loss.append(loss.detach())
            buffers[each] = _copied(dict(module.named_buffers()))
        losses.append(float(sum(each_loss) / NUM_RANKS))  # in the dtype of the loss, as the ranks do
        with torch.no_grad():
            for w in weights.values():
                if w.grad is not None:
                    w.sub_(RATE * (w.grad / NUM_RANKS))
    return Trained(tuple(losses), _copied(weights), buffers[rank])


def _copied(tensors: dict[str, Any]) -> Tensors:
    return {path: x.detach().clone() for path, x in tensors.items()}


def _set_buffers(module: nn.Module, values: Tensors) -> None:
    for path, value in values.items():
        parent, _, name = path.rpartition(".")
        module.get_submodule(parent)._buffers[name] = value.clone()


def rounding(architecture: Architecture, dtype: torch.dtype) -> float:
    """Returns how far torch's own rounding to float32 moves the numbers of an architecture.

    Some models compute in float32 whatever their weights are: then no numbers of theirs are more exact than this. It is
    the difference between runs in float32 and in float64; where a model does not run in float64, between two in float32
    whose weights differ at the start by one unit of the last place.
    """
    if dtype == torch.float64:
        less, more = built(architecture, torch.float32), built(architecture, torch.float64)
    else:
        less, more = built(architecture, dtype), built(architecture, dtype)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for w in less.parameters():
                w.mul_(1 + torch.finfo(dtype).eps * torch.randint(-1, 2, w.shape, generator=generator))
    start = _copied(dict(more.named_parameters()))
    return difference(train(architecture, less, torch.float32), train(architecture, more, dtype), start)[0]
