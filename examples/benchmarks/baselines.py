"""What a user of torch would pick instead: FSDP2 as it comes, FSDP2 tuned in the ways that its users know, and DDP.

FSDP2 on a CPU waits for each collective where it is issued. The tuned variants take that away as far as FSDP2 allows:
gathers are asynchronous and asked for ahead, explicitly; the reduce-scatter is one of the caller's own, which is waited
for before the optimizer; gathers and reduce-scatters have a process group each. ``set_custom_reduce_scatter`` hands out
a gradient before it has arrived, which is valid as long as nobody reads it: on one dim of the mesh, in a step of one
micro-batch. Elsewhere the reduce-scatter stays as it is.
"""

from __future__ import annotations

import itertools
from collections import deque
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from variants import LEARNING_RATE, WEIGHT_DECAY, Task, Variant

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Block(nn.Module):
    """The function of a block as a module."""

    def __init__(self, task: Task, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.function = task.model.block
        for name, weight in weights.items():
            self.register_parameter(name, nn.Parameter(weight.clone()))

    def forward(self, x: Tensor) -> Tensor:
        """See `Model.block`."""
        return self.function(dict(self.named_parameters()), x)


def network(task: Task) -> nn.Sequential:
    """Returns the model as a module."""
    return nn.Sequential(*(Block(task, weights) for weights in task.model.weights()))


class AsyncReduceScatter:
    """A reduce-scatter for FSDP2 that does not block the backward.

    Args:
        minimal: as an all-to-all, and a mean of what has arrived when it is waited for: half of what gloo's own sends.
        max_pending: wait for the oldest where more are under way; None: wait before the optimizer only.
    """

    def __init__(self, *, minimal: bool, max_pending: int | None) -> None:
        self.minimal, self.max_pending = minimal, max_pending
        self._pending: deque[tuple[dist.Work, Tensor, Tensor | None, Tensor]] = deque()

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See torch's `ReduceScatter`."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """See torch's `ReduceScatter`."""
        received = torch.empty_like(input_tensor) if self.minimal else None
        if received is None:
            work = reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=True)
        else:
            work = dist.all_to_all_single(received, input_tensor, group=group, async_op=True)
        assert work is not None
        self._pending.append((work, output_tensor, received, input_tensor))
        while self.max_pending is not None and len(self._pending) > self.max_pending:
            self._finish_one()

    def finish(self) -> None:
        """Waits for everything, and writes the outputs."""
        while self._pending:
            self._finish_one()

    def _finish_one(self) -> None:
        work, output, received, _ = self._pending.popleft()
        work.wait()
        if received is not None:
            parts = received.numel() // output.numel()
            torch.mean(received.view(parts, -1), 0, out=output.view(-1))


def train_fsdp2(task: Task, *, tuned: bool, scatter: AsyncReduceScatter | None = None) -> Variant:
    """Trains with FSDP2.

    Args:
        task: see `Task`.
        tuned: asynchronous gathers, explicit prefetch, reduce-scatters in a group of their own.
        scatter: replaces the reduce-scatter.
    """
    mesh = init_device_mesh("cpu", task.mesh, mesh_dim_names=("replicate", "shard")[-len(task.mesh) :])
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if task.bf16 else MixedPrecisionPolicy()
    net = network(task)
    blocks: list[Any] = [fully_shard(block, mesh=mesh, mp_policy=precision) for block in net]
    root: Any = fully_shard(net, mesh=mesh, mp_policy=precision)
    if tuned:
        root._set_unshard_async_op(True)
        for block, following in itertools.pairwise(blocks):
            block.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([block])
        root.set_separate_reduce_scatter_group()
    if scatter is not None:
        for block in blocks:
            block.set_custom_reduce_scatter(scatter)
    return _training(task, net, scatter)


def train_ddp(task: Task) -> Variant:
    """Trains with DDP: whole weights everywhere, one all-reduce."""
    net = network(task)
    return _training(task, DistributedDataParallel(net), None)


def _training(task: Task, net: nn.Module, scatter: AsyncReduceScatter | None) -> Variant:
    optimizer = torch.optim.AdamW(net.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    batches, last = task.batches(), task.micro_batches - 1

    def step() -> None:
        for index, batch in enumerate(batches):
            collects = isinstance(net, DistributedDataParallel) and index != last  # as torch documents it
            with cast(DistributedDataParallel, net).no_sync() if collects else nullcontext():
                loss = net(batch).float().pow(2).mean(-1).sum() / len(batches)
                loss.backward()
        if scatter is not None:
            scatter.finish()
        optimizer.step()
        optimizer.zero_grad()

    def weights() -> list[Tensor]:
        whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters())
        return [p.detach() for p in whole]

    return Variant(step, weights)


def make(name: str, task: Task) -> Variant:
    """Returns a baseline by its name."""
    match name:
        case "FSDP2":
            return train_fsdp2(task, tuned=False)
        case "FSDP2 tuned":
            return train_fsdp2(task, tuned=True)
        case "FSDP2 tuned, asynchronous reduce-scatter":
            return train_fsdp2(task, tuned=True, scatter=AsyncReduceScatter(minimal=False, max_pending=None))
        case "FSDP2 tuned, two reduce-scatters":
            return train_fsdp2(task, tuned=True, scatter=AsyncReduceScatter(minimal=False, max_pending=2))
        case "FSDP2 tuned, minimal reduce-scatter":
            return train_fsdp2(task, tuned=True, scatter=AsyncReduceScatter(minimal=True, max_pending=None))
        case "DDP":
            return train_ddp(task)
    raise ValueError(name)
