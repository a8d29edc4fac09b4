"""Fine-tunes a Llama-like model with low-rank adapters (LoRA) in bfloat16; the model is transformers' own.

    torchrun --nproc-per-node 4 examples/torch/finetune_lora.py

Nothing is downloaded: the base is a small Llama that first learns Python sources, all of its weights. Then these are
frozen, as bfloat16, and adapters of them learn English, the help texts of Python. A frozen weight is gathered like any
other, but no gradient of it is computed or sent, and no optimizer has state for it. Only the adapters are saved.
``--check`` compares with one process in float64, ``--quick`` is a tiny model.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import hpfunc as hp

sys.path.insert(0, str(Path(__file__).parents[1]))
import text

BATCH, CONTEXT = 4, 64
PROJECTIONS = ("q_proj", "v_proj", "up_proj", "down_proj")
HALF = hp.Numerics(param_dtype="bfloat16", reduce_dtype="float32", cast_inputs=True)
Say = Callable[[str], None]


class Adapted(nn.Module):
    """A linear layer that stays as it is, and a low-rank correction of it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        draw = torch.randn(rank, base.in_features, dtype=base.weight.dtype)
        self.down = nn.Parameter(draw / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, dtype=base.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Returns what the layer gives, corrected."""
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


def build(dim: int, layers: int) -> LlamaForCausalLM:
    """Returns a fresh model of bytes, in torch's default dtype."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=text.NUM_BYTES,
        max_position_embeddings=CONTEXT,
        hidden_size=dim,
        intermediate_size=4 * dim,
        num_hidden_layers=layers,
        num_attention_heads=dim // 16,
        num_key_value_heads=dim // 32,
    )
    return LlamaForCausalLM(config)


def adapt(model: LlamaForCausalLM, rank: int) -> LlamaForCausalLM:
    """Freezes a model and puts adapters around the projections of its blocks."""
    model.requires_grad_(False)
    for block in model.model.layers:
        for part in (block.self_attn, block.mlp):
            for name in PROJECTIONS:
                if (base := getattr(part, name, None)) is not None:
                    setattr(part, name, Adapted(base, rank))
    return model


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32)), labels.flatten())


def batch(data: text.Text, step: int, rank: int) -> list[Tensor]:
    return [torch.from_numpy(x) for x in data.batch(0, step, rank, BATCH, CONTEXT)]


def make_step(apply: Any, optimizer: hp.optim.Optimizer, mesh: hp.Mesh, numerics: hp.Numerics) -> hp.ShardedStep:
    """Returns a step that trains a part of the weights; of all of them the frozen part is empty."""

    def step_fn(trained: Any, state: Any, frozen: Any, inputs: Tensor, labels: Tensor) -> Any:
        def loss_fn(trained: Any) -> Tensor:
            return loss_of(apply(hp.combine(trained, frozen), input_ids=inputs, use_cache=False).logits, labels)

        loss, grads = hp.value_and_grad(loss_fn, numerics=numerics)(trained)
        updates, state = optimizer.update(grads, state, trained)
        return hp.apply_updates(trained, updates), state, hp.pmean(loss, mesh.data_axes)

    return hp.sharded(step_fn, mesh, donate_argnums=(0, 1))


def train(
    model: LlamaForCausalLM, mesh: hp.Mesh, data: text.Text, steps: int, optimizer: hp.optim.Optimizer, half: bool
) -> tuple[Any, Any, list[float], dict[str, int]]:
    """Trains what requires a gradient: ``(trained, frozen, losses, bytes that a rank sent in the last step)``."""
    apply, params = hp.from_module(model)
    trained, frozen = hp.partition(params, lambda path, weight: weight.requires_grad)
    if half:  # the weights that are trained stay in float32, and are gathered as bfloat16
        frozen = {path: None if weight is None else weight.bfloat16() for path, weight in frozen.items()}
    trained, frozen = (hp.shard(part, mesh, hp.P("shard")) for part in (trained, frozen))
    step, state, losses = (
        make_step(apply, optimizer, mesh, HALF if half else hp.Numerics()),
        optimizer.init(trained),
        [],
    )
    for number in range(steps):
        trained, state, loss = step(trained, state, frozen, *batch(data, number, mesh.rank))
        losses.append(float(loss))
    assert step.last_counters is not None
    return trained, frozen, losses, dict(step.last_counters.bytes_sent)


def evaluate(model: LlamaForCausalLM, params: Any, mesh: hp.Mesh, data: text.Text) -> float:
    """Returns the loss in bfloat16 on text that no step has seen; every rank looks at its own part of it."""
    apply, _ = hp.from_module(model)
    params = optree.tree_map(Tensor.bfloat16, params)  # adapters: a unit computes in the dtype of the shards

    @hp.sharded(mesh=mesh)
    def step(params: Any, inputs: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            logits = apply(params, input_ids=inputs, use_cache=False).logits
            return hp.pmean(loss_of(logits, labels), mesh.data_axes)

    windows = data.held_out_windows(16 * mesh.size, CONTEXT)
    return float(step(params, *(torch.from_numpy(x)[mesh.rank :: mesh.size] for x in windows)))


def finetune(args: argparse.Namespace, mesh: hp.Mesh, say: Say) -> int:
    """Trains the base, then its adapters, and saves these."""
    model, english = build(args.dim, args.layers), text.help_texts()
    base, _, losses, sent = train(model, mesh, text.standard_library(), args.base_steps, hp.optim.adamw(3e-3), True)
    say(f"base: loss {losses[0]:.3f} to {losses[-1]:.3f} on Python; a rank sends {_kilobytes(sent)} a step")
    before = evaluate(model, base, mesh, english)

    model = adapt(hp.to_module(base, model), args.rank)
    trained, frozen, losses, sent = train(model, mesh, english, args.steps, hp.optim.adamw(1e-2), True)
    say(f"adapters: loss {losses[0]:.3f} to {losses[-1]:.3f} on English; a rank sends {_kilobytes(sent)} a step")
    hp.checkpoint.save(args.out, {"adapters": trained}, keep=1)
    sizes = [sum(math.prod(x.shape) for x in part.values() if x is not None) for part in (trained, frozen)]
    say(f"saved {sizes[0]} weights of adapters in float32; the {sizes[1]} frozen ones in bfloat16 are as they were")

    loaded = hp.checkpoint.load(args.out, like={"adapters": trained})["adapters"]
    after = evaluate(model, hp.combine(loaded, frozen), mesh, english)
    say(f"held-out English: {before:.3f} without, {after:.3f} with the adapters that were saved")
    return 0


def _kilobytes(sent: dict[str, int]) -> str:
    gathers = sent.pop("all_gather", 0)
    return f"{gathers / 1e3:.0f} kB of weights and {sum(sent.values()) / 1e3:.0f} kB of gradients"


def alone(model: LlamaForCausalLM, num_ranks: int, data: text.Text, steps: int, rate: float) -> LlamaForCausalLM:
    """Trains with SGD in this process, without hpfunc."""
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], rate)
    for number in range(steps):
        optimizer.zero_grad()
        batches = [batch(data, number, rank) for rank in range(num_ranks)]
        losses = [loss_of(model(input_ids=x, use_cache=False).logits, y) for x, y in batches]
        torch.stack(losses).mean().backward()
        optimizer.step()
    return model


def check(args: argparse.Namespace, mesh: hp.Mesh, say: Say) -> int:
    """Compares some steps in float64 with one process."""
    model, data = adapt(build(args.dim, args.layers).double(), args.rank), text.help_texts()
    start = {path: weight.detach().clone() for path, weight in model.named_parameters()}
    trained, frozen, _, _ = train(model, mesh, data, 5, hp.optim.sgd(0.5), False)
    wholes = hp.unshard(hp.combine(trained, frozen))
    worst = 0.0
    for path, want in alone(model, mesh.size, data, 5, 0.5).named_parameters():
        worst = max(worst, float((wholes[path] - want.detach()).norm() / want.detach().norm()))
        assert torch.equal(wholes[path], start[path]) != want.requires_grad, f"{path} is trained, or frozen, by mistake"
    say(f"float64 with SGD: after 5 steps weights differ by {worst:.1e} of their norm or less")
    return int(not worst <= 1e-12)


def main(arguments: list[str] | None = None) -> int:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dim", type=int, default=128)
    add("--layers", type=int, default=4)
    add("--rank", type=int, default=8, help="of the adapters")
    add("--base-steps", type=int, default=150)
    add("--steps", type=int, default=100)
    add("--out", type=Path, default=Path("build/finetune_lora"), help="where the adapters go")
    add("--quick", action="store_true", help="a tiny model and a few steps, to see that everything works")
    add("--check", action="store_true", help="compare with one process in float64")
    args = parser.parse_args(arguments)
    if args.quick:
        args.dim, args.layers, args.rank, args.base_steps, args.steps = 32, 2, 4, 6, 6
    mesh = hp.make_mesh((-1,), ("shard",))
    return (check if args.check else finetune)(args, mesh, lambda line: print(line) if mesh.rank == 0 else None)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
