"""Pretrains a Llama of any size from nothing: 7B on 8 GPUs, or a small one anywhere.

    torchrun --standalone --nproc-per-node 8 examples/torch/pretrain_llama.py --size 7b
    torchrun --standalone --nproc-per-node 2 examples/torch/pretrain_llama.py --size tiny

No process ever holds the whole model: each weight is made once, and only this process's part of it is kept, in float32.
Units compute in bfloat16 and are recomputed in backward. Before the first step it prints what a step needs of memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import hpfunc as hp

sys.path.insert(0, str(Path(__file__).parents[1]))
import text

SIZES = {  # dim, dim of the MLP, layers, heads
    "tiny": (64, 176, 4, 4),
    "1b": (2048, 5632, 22, 16),
    "7b": (4096, 11008, 32, 32),
}
HALF = hp.Numerics(param_dtype="bfloat16", reduce_dtype="float32", cast_inputs=True)


def build(size: str, context: int) -> LlamaForCausalLM:
    """Returns a fresh model of bytes."""
    dim, inner, layers, heads = SIZES[size]
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=text.NUM_BYTES,
            max_position_embeddings=context,
            hidden_size=dim,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            use_cache=False,
        )
    )


def make_step(
    apply: hp.ModuleFunction, mesh: hp.Mesh, rate: float, steps: int
) -> tuple[hp.optim.Optimizer, hp.ShardedStep]:
    """Returns the optimizer and the training step."""
    schedule = hp.optim.warmup_cosine(rate, max(steps // 10, 1), steps)
    optimizer = hp.optim.chain(hp.optim.clip_by_global_norm(1.0), hp.optim.adamw(schedule, b2=0.95, weight_decay=0.1))

    def loss_fn(params: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
        logits = apply(params, inputs).logits
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    def step_fn(params: Any, opt_state: Any, inputs: Tensor, labels: Tensor) -> tuple[Any, Any, Tensor]:
        loss, grads = hp.value_and_grad(loss_fn, numerics=HALF)(params, inputs, labels)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return hp.apply_updates(params, updates), opt_state, hp.pmean(loss, mesh.data_axes)

    return optimizer, hp.sharded(step_fn, mesh, donate_argnums=(0, 1))


def megabytes(step: hp.ShardedStep, *arguments: Any) -> str:
    """What a step needs of one rank beside activations, by its plan."""
    report = hp.check(step.lower(*arguments).schedule)
    leaves = [leaf for tree in arguments[:2] for leaf in optree.tree_leaves(tree)]
    shards = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
    return f"{shards / 1e6:.1f} MB of weights and moments, {report.peak_bytes / 1e6:.1f} MB of buffers at most"


def train(args: argparse.Namespace, mesh: hp.Mesh, say: Callable[[str], None]) -> list[float]:
    """Trains, and returns the losses."""
    torch.manual_seed(0)
    apply, params = hp.init_module(lambda: build(args.size, args.context), mesh, hp.P("shard"), remat=True)
    optimizer, step = make_step(apply, mesh, args.rate, args.steps)
    opt_state, data, losses = optimizer.init(params), text.standard_library(), []
    say(f"{apply}\n{hp.num_parameters(params):,} parameters over {mesh}")
    for number in range(args.steps):
        batch = data.batch(0, number, mesh.rank, args.batch, args.context)
        inputs, labels = (torch.from_numpy(part).to(mesh.device) for part in batch)
        if number == 0:
            say(f"each rank: {megabytes(step, params, opt_state, inputs, labels)}")
        params, opt_state, loss = step(params, opt_state, inputs, labels)
        losses.append(loss.item())
        if number % 5 == 0 or number == args.steps - 1:
            say(f"step {number:>4}  loss {losses[-1]:.4f}")
    return losses


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--mesh", default="1,-1", help="ranks as REPLICATE,SHARD (default 1,-1: FSDP over all)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2, help="sequences a rank and step")
    parser.add_argument("--context", type=int, default=64, help="bytes a sequence")
    parser.add_argument("--rate", type=float, default=3e-3, help="the highest learning rate")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    args = options()
    mesh = hp.make_mesh([int(size) for size in args.mesh.split(",")], ("replicate", "shard"))
    train(args, mesh, print if mesh.rank == 0 else lambda _: None)
