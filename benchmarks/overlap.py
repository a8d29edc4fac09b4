"""How much of the communication hides behind compute: hpfunc against torch FSDP2, on a network of limited speed.

``benchmarks/launch.sh 2 1gbit benchmarks/overlap.py`` trains 8 blocks of d_model 512 on 256 tokens a rank. Every
variant trains the same model on the same data with AdamW; after two steps their weights must agree, else their times
mean nothing. ``--help`` lists the rest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

import hpfunc as hp
from hpfunc.backends import Counters

LEARNING_RATE = 1e-3
NUM_HEADS = 8
TOLERANCE = 1e-6  # of the greatest weight: AdamW in another order of operations rounds differently


@dataclass(frozen=True, slots=True)
class Model:
    """Pre-norm transformer blocks without embedding and head."""

    num_blocks: int
    d_model: int
    num_tokens: int

    def weights(self) -> list[dict[str, Tensor]]:
        """Returns the weights of each block, equal on all ranks."""
        d, generator = self.d_model, torch.Generator().manual_seed(0)
        shapes = {"qkv": (3 * d, d), "out": (d, d), "up": (4 * d, d), "down": (d, 4 * d)}
        blocks = []
        for _ in range(self.num_blocks):
            block = {name: 0.02 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
            blocks.append(block | {"norm1": torch.ones(d), "norm2": torch.ones(d)})
        return blocks

    def batch(self, rank: int) -> Tensor:
        """Returns the input of a rank: two sequences."""
        shape = (2, self.num_tokens // 2, self.d_model)
        return torch.randn(shape, generator=torch.Generator().manual_seed(1 + rank))


def block_fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Causal self-attention and a feed-forward layer."""
    d = x.shape[-1]
    heads = linear(layer_norm(x, (d,), p["norm1"]), p["qkv"]).unflatten(-1, (3, NUM_HEADS, d // NUM_HEADS))
    q, k, v = heads.permute(2, 0, 3, 1, 4)
    x = x + linear(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2), p["out"])
    return x + linear(gelu(linear(layer_norm(x, (d,), p["norm2"]), p["up"])), p["down"])


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to train.

    Attributes:
        step: one step of training.
        weights: returns all weights, whole.
        counters: returns what hpfunc counted in the last step, if it did.
    """

    step: measure.Step
    weights: Callable[[], list[Tensor]] = list
    counters: Callable[[], Counters | None] = lambda: None


# ------------------------------------------------------------------------------------------------------------- hpfunc


def train_hpfunc(model: Model, policy: hp.Policy | None) -> Variant:
    """Trains with hpfunc, eagerly if there is no policy."""
    mesh = hp.make_mesh((dist.get_world_size(),), ("shard",))
    params = hp.shard(model.weights(), mesh, hp.P("shard"))
    optimizer = hp.optim.adamw(LEARNING_RATE, weight_decay=0.01)
    state, batch, block = optimizer.init(params), model.batch(dist.get_rank()), hp.unit(block_fn)

    def loss_fn(params: list[Any], x: Tensor) -> Tensor:
        for weights in params:
            x = block(weights, x)
        return x.pow(2).mean()

    def step_fn(params: list[Any], state: Any, x: Tensor) -> tuple[list[Any], Any, Tensor]:
        loss, grads = hp.value_and_grad(loss_fn)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return hp.apply_updates(params, updates), state, loss

    train = hp.sharded(step_fn, mesh, policy=policy, donate_argnums=(0, 1)) if policy is not None else step_fn

    def step() -> None:
        nonlocal params, state
        params, state, _ = train(params, state, batch)

    def weights() -> list[Tensor]:
        return [weight for block in hp.unshard(params) for weight in block.values()]

    return Variant(step, weights, lambda: getattr(train, "last_counters", None))


# -------------------------------------------------------------------------------------------------------------- FSDP2


class Block(nn.Module):
    """`block_fn` as a module."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        for name, weight in weights.items():
            self.register_parameter(name, nn.Parameter(weight.clone()))

    def forward(self, x: Tensor) -> Tensor:
        """See `block_fn`."""
        return block_fn(dict(self.named_parameters()), x)


class AsyncReduceScatter:
    """A reduce-scatter for FSDP2 that does not block the backward, and sends half of what gloo's own sends.

    It is written as an all-to-all and a mean of what has arrived, formed when `finish` waits: before the optimizer.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[dist.Work, Tensor, Tensor, Tensor]] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See torch's `ReduceScatter`."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """See torch's `ReduceScatter`."""
        received = torch.empty_like(input_tensor)
        work = dist.all_to_all_single(received, input_tensor, group=group, async_op=True)
        assert work is not None
        self._pending.append((work, output_tensor, received, input_tensor))

    def finish(self) -> None:
        """Waits for everything, and writes the outputs."""
        for work, output, received, _ in self._pending:
            work.wait()
            torch.mean(received.view(dist.get_world_size(), -1), 0, out=output.view(-1))
        self._pending.clear()


def train_fsdp2(model: Model, *, tuned: bool) -> Variant:
    """Trains with FSDP2 as it comes, or tuned: asynchronous gathers, explicit prefetch, asynchronous reduce-scatter."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = nn.Sequential(*(Block(weights) for weights in model.weights()))
    blocks: list[Any] = [fully_shard(block, mesh=mesh) for block in net]
    root: Any = fully_shard(net, mesh=mesh)
    batch, scatter = model.batch(dist.get_rank()), AsyncReduceScatter()
    if tuned:
        root._set_unshard_async_op(True)
        for block, following in itertools.pairwise(blocks):
            block.set_modules_to_forward_prefetch([following])
        for block in blocks:
            block.set_custom_reduce_scatter(scatter)
    optimizer = torch.optim.AdamW(net.parameters(), LEARNING_RATE, weight_decay=0.01)

    def step() -> None:
        net(batch).pow(2).mean().backward()
        scatter.finish()
        optimizer.step()
        optimizer.zero_grad()

    return Variant(step, lambda: [p.full_tensor() for p in net.parameters()])  # type: ignore[attr-defined]


# --------------------------------------------------------------------------------------------------------- the limits


def only_compute(model: Model) -> Variant:
    """Forward and backward of whole weights, and AdamW on this rank's share of them; nothing is sent."""
    net = nn.Sequential(*(Block(weights) for weights in model.weights()))
    numel = sum(p.numel() for p in net.parameters()) // dist.get_world_size()
    share = nn.Parameter(torch.zeros(numel))
    share.grad = torch.zeros(numel)
    optimizer, batch = torch.optim.AdamW([share], LEARNING_RATE), model.batch(dist.get_rank())

    def step() -> None:
        net(batch).pow(2).mean().backward()
        net.zero_grad()
        optimizer.step()

    return Variant(step)


def only_wire(model: Model) -> Variant:
    """Two gathers and one exchange of each block's gradients in one message each; nothing is computed or copied."""
    size = dist.get_world_size()
    numel = sum(weight.numel() for weight in model.weights()[0].values())
    shard, whole, received = torch.zeros(numel // size), torch.zeros(numel), torch.zeros(numel)

    def step() -> None:
        for i in range(3 * model.num_blocks):
            if i % 3:
                dist.all_gather_into_tensor(whole, shard)
            else:
                dist.all_to_all_single(received, whole)

    return Variant(step)


# ------------------------------------------------------------------------------------------------------------ running

POLICIES = {
    "hpfunc": hp.Policy(),
    "hpfunc prefetch 2": hp.Policy(prefetch=2),
    "hpfunc packs nothing": hp.Policy(pack_below_bytes=0),
    "hpfunc packs all": hp.Policy(pack_below_bytes=math.inf),
    "hpfunc ZeRO-2": hp.Policy(release="backward"),
}
VARIANTS: dict[str, Callable[[Model], Variant]] = {
    "compute": only_compute,
    "wire": only_wire,
    "FSDP2": lambda model: train_fsdp2(model, tuned=False),
    "FSDP2 tuned": lambda model: train_fsdp2(model, tuned=True),
    "hpfunc eager": lambda model: train_hpfunc(model, None),
    **{name: lambda model, policy=policy: train_hpfunc(model, policy) for name, policy in POLICIES.items()},
}
TARGETS = (("hpfunc eager", "FSDP2", 1.05), ("hpfunc", "hpfunc eager", 0.8), ("hpfunc", "FSDP2 tuned", 0.9))


def check_weights(model: Model, variants: dict[str, Variant]) -> str:
    """Takes two steps of every variant and compares the weights.

    Raises:
        SystemExit: two variants of hpfunc differ at all, or two others by more than rounding.
    """
    initial = [weight for block in model.weights() for weight in block.values()]
    found: dict[str, list[Tensor]] = {}
    lines = []
    for name, variant in variants.items():
        for _ in range(2):
            variant.step()
        weights = variant.weights()
        if not weights:
            continue
        reference = next((n for n in found if n.split()[0] == name.split()[0]), next(iter(found), name))
        found[name] = weights
        exact = name.split()[0] == reference.split()[0]
        apart = _distance(weights, found[reference])
        lines.append(f"{name}: at most {apart:.1e} from {reference}, moved by {_distance(weights, initial):.1e}")
        if apart > (0 if exact else TOLERANCE * max(w.abs().max().item() for w in weights)):
            raise SystemExit("weights after two steps disagree\n" + "\n".join(lines))
    return "\n".join(lines)


def _distance(left: list[Tensor], right: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(left, right, strict=True))


def report(variants: dict[str, Variant], results: measure.Results) -> str:
    """Returns the tables."""
    compute_s, wire_s = (results.median(n, "time_s") if n in variants else math.nan for n in ("compute", "wire"))
    bytes_per_s = results.median("wire", "sent_bytes") / wire_s if "wire" in variants else math.nan
    head = [
        "variant",
        "quiet",
        "step ms: min median max",
        "CPU ms",
        "MB sent",
        "link %",
        "hidden %",
        "blocked ms",
        "foreign %",
    ]
    rows = []
    for name, variant in variants.items():
        quiet, counters = results.quiet(name), variant.counters()
        times_ms, sent = [1e3 * r.time_s for r in quiet], results.median(name, "sent_bytes")
        median_s, link_s = results.median(name, "time_s"), sent / bytes_per_s
        hidden = (compute_s + link_s - median_s) / min(compute_s, link_s) if link_s else math.nan
        rows.append([
            name,
            f"{0 if results.is_disturbed(name) else len(quiet)}/{len(results.repetitions[name])}",
            measure.spread(times_ms, 0),
            f"{1e3 * results.median(name, 'cpu_s'):.0f}",
            f"{sent / 1e6:.1f}",
            f"{100 * link_s / median_s:.0f}",
            "" if name in ("compute", "wire") else f"{100 * hidden:.0f}",
            "" if counters is None else f"{1e3 * counters.wait_s:.0f}",
            f"{100 * results.median(name, 'foreign'):.0f}",
        ])  # fmt: skip
    parts = [measure.table(head, rows)]
    pairs = [
        [f"{name} / {base}", measure.spread(results.ratios(name, base)), f"{most}"]
        for name, base, most in TARGETS
        if name in variants and base in variants
    ]
    if pairs:
        parts.append(measure.table(["paired ratio", "min median max", "target"], pairs))
    return "\n\n".join(parts)


def options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--variants", default=",".join(VARIANTS), help="names, with commas between them")
    add("--repetitions", type=int, default=7, help="rounds over all variants")
    add("--max-foreign", type=float, default=0.06, help="share of the machine that others may use in a repetition")
    add("--attempts", type=int, default=3, help="times that a disturbed repetition is taken")
    add("--blocks", type=int, default=8)
    add("--d-model", type=int, default=512)
    add("--tokens", type=int, default=256, help="tokens a rank")
    add("--json", type=Path, help="append all figures to this file, a line each run")
    return parser.parse_args()


def main() -> None:
    """Measures, and prints on rank 0."""
    warnings.filterwarnings("ignore")
    args = options()
    rank, size = measure.start()
    model = Model(args.blocks, args.d_model, args.tokens)
    names = args.variants.split(",")
    variants = {name: VARIANTS[name](model) for name in names}
    agreement = check_weights(model, variants)
    how = measure.Options(args.repetitions, max_foreign=args.max_foreign, attempts=args.attempts)
    results = measure.measure({name: variant.step for name, variant in variants.items()}, how)
    link = hp.probe(hp.make_mesh((size,), ("shard",)), "shard")  # which the steps have measured
    if rank == 0:
        rate = os.environ.get("BENCH_RATE", "?")
        title = f"{size} ranks, {rate}, {args.blocks} blocks of d_model {args.d_model}, {args.tokens} tokens a rank"
        print(f"{title}\n{link}, so weights below {link.pack_below_bytes} bytes are packed")
        print(f"\n{agreement}\n\n{report(variants, results)}", flush=True)
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps({"title": title, **results.record()}) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
