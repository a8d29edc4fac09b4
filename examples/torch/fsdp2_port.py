"""A program of FSDP2, and beside it its port. Module, optimizer, scheduler, data and clipping stay torch's own.

    torchrun --nproc-per-node 2 examples/torch/fsdp2_port.py --fsdp2
    torchrun --nproc-per-node 2 examples/torch/fsdp2_port.py

Both print the same numbers. On two ranks weights and losses are equal bit for bit until gradients are clipped: the norm
is the same but for the order of its sum.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from tqdm import tqdm

import hpfunc as hp

sys.path.insert(0, str(Path(__file__).parents[1]))
import text

CONTEXT, DIM, BATCH, STEPS, MAX_NORM = 32, 64, 4, 40, 1.0


class Windows(Dataset[Tensor]):
    """Windows of a text: each one byte longer than what the model sees."""

    def __init__(self) -> None:
        self.bytes = torch.tensor(text.standard_library().train[: 1 << 16], dtype=torch.long)

    def __len__(self) -> int:
        return len(self.bytes) // (CONTEXT + 1)

    def __getitem__(self, index: int) -> Tensor:
        return self.bytes[index * (CONTEXT + 1) :][: CONTEXT + 1]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(DIM, 4, 4 * DIM, dropout=0.0, batch_first=True) for _ in range(2)]
    head = nn.Linear(DIM, text.NUM_BYTES), nn.LogSoftmax(-1)
    return nn.Sequential(nn.Embedding(text.NUM_BYTES, DIM), *blocks, *head)


def loss_of(log_probs: Tensor, tokens: Tensor) -> Tensor:
    return F.nll_loss(log_probs.flatten(0, 1), tokens[:, 1:].flatten())


def loader(num_parts: int, part: int) -> DataLoader[Tensor]:
    sampler = DistributedSampler(Windows(), num_parts, part, shuffle=True, seed=0)
    return DataLoader(sampler.dataset, BATCH, sampler=sampler, drop_last=True)


def train_with_fsdp2(steps: int, max_norm: float) -> tuple[list[float], dict[str, Tensor]]:
    """Returns the losses, and the weights after the last step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = build()
    for module in (*list(model)[1:3], model):
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for _, tokens in zip(tqdm(range(steps), disable=rank != 0), loader(size, rank), strict=False):
        loss = loss_of(model(tokens[:, :-1]), tokens)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        scheduler.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean.item() / size)
    return losses, {name: weight.full_tensor() for name, weight in model.state_dict().items()}


def train(steps: int, max_norm: float) -> tuple[list[float], dict[str, Tensor]]:
    """The port."""
    mesh = hp.make_mesh((-1,), ("shard",))
    apply, params = hp.from_module(build())
    bound = hp.optim.bind(hp.shard(params, mesh, hp.P("shard")))
    grad_fn = hp.value_and_grad(lambda params, tokens: loss_of(apply(params, tokens[:, :-1]), tokens))
    grad_fn = hp.sharded(grad_fn, mesh)
    optimizer = torch.optim.AdamW(bound.parameters, lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    data = loader(mesh.num_data_ranks, mesh.data_rank)
    for _, tokens in zip(tqdm(range(steps), disable=not mesh.is_main), data, strict=False):
        loss, grads = grad_fn(bound.params, tokens)
        bound.set_grads(hp.clip_with_norm(grads, max_norm, hp.global_norm(grads)))
        optimizer.step()
        scheduler.step()
        losses.append(hp.loop.reduce_metrics(loss, mesh))
    return losses, hp.unshard(bound.params)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fsdp2", action="store_true", help="the program as it was")
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    dist.init_process_group()
    losses, weights = (train_with_fsdp2 if args.fsdp2 else train)(args.steps, MAX_NORM)
    if dist.get_rank() == 0:
        print(*(f"{loss:.4f}" for loss in losses[:: max(1, args.steps // 8)]))
        print("sum of all weights", sum(float(weight.double().sum()) for weight in weights.values()))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
