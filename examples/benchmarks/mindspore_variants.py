"""The transformer of `models` on MindSpore, trained by hpfunc: eagerly, and scheduled."""

# Where MindSpore is not installed, its name finds a directory of examples.
# pyright: reportMissingImports=warning, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import Any

import mindspore
import mindspore.mint.nn.functional as F
import numpy as np
import torch
from mindspore import mint, ops
from models import NUM_HEADS
from variants import POLICIES, Task, Variant, training

import hpfunc as hp

Tensor = Any


def block_fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """The block of `models`; weights go into `linear` as they are, since a view of one would be saved as a copy."""
    batch, length, d = x.shape
    heads = F.linear(_norm(x, p["norm1"]), p["qkv"]).reshape(batch, length, 3, NUM_HEADS, d // NUM_HEADS)
    q, k, v = heads.permute(2, 0, 3, 1, 4)
    scores = mint.matmul(q, k.permute(0, 1, 3, 2)) * (d // NUM_HEADS) ** -0.5
    future = mindspore.Tensor.from_numpy(np.triu(np.ones((length, length), bool), 1))
    seen = mint.matmul(ops.softmax(ops.masked_fill(scores, future, -1e9), -1), v)
    x = x + F.linear(seen.permute(0, 2, 1, 3).reshape(batch, length, d), p["out"])
    return x + F.linear(ops.gelu(F.linear(_norm(x, p["norm2"]), p["up"]), "none"), p["down"])


def _norm(x: Tensor, scale: Tensor) -> Tensor:
    shift = mindspore.Tensor.from_numpy(np.zeros(scale.shape, np.float32))
    return ops.LayerNorm(-1, -1, 1e-5)(x, scale, shift)[0]


def make(name: str, task: Task) -> Variant:
    """Returns a variant by its name: ``"hpfunc eager"`` or one of `POLICIES`."""
    policy = POLICIES.get(name)
    mesh = hp.make_mesh(task.mesh, ("replicate", "shard")[-len(task.mesh) :])
    whole = [{n: mindspore.Tensor.from_numpy(w.numpy()) for n, w in block.items()} for block in task.model.weights()]
    params = hp.shard(whole, mesh, hp.P("shard"))
    block = hp.unit(block_fn, name="block")
    batch = mindspore.Tensor.from_numpy(task.batches()[0].numpy())

    def loss_fn(params: list[Any], x: Tensor) -> Tensor:
        for weights in params:
            x = block(weights, x)
        return (x * x).mean(-1).sum()

    def finish(loss: Tensor) -> None:
        loss.asnumpy()  # operators run later than they are called

    def to_torch(weight: Tensor) -> torch.Tensor:
        return torch.from_numpy(weight.asnumpy())

    return training(policy, params, hp.value_and_grad(loss_fn), batch, finish, to_torch)
