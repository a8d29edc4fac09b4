"""A whole training script: a small language model of lines of Python, with all that a loop needs around its step.

torchrun --nproc-per-node 2 examples/torch/training_script.py; docs/howto/training-script.md explains it part by part.
"""

import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter

import hpfunc as hp

FOLDER = Path("build/training_script")
SEED, EPOCHS, BATCH, CONTEXT, DIM, LAYERS = 0, 2, 16, 64, 64, 2
PEAK_FLOPS, IGNORED = 1e11, -100  # of one device, here a guess at a core; the label of what is not a token
mesh = hp.make_mesh((-1,), ("shard",))
torch.manual_seed(SEED + mesh.data_rank)  # dropout and noise: other ones where the data are others


def read_lines(pattern, count):
    files = sorted(Path(sysconfig.get_path("stdlib")).glob(pattern))
    lines = [line for file in files for line in file.read_bytes().splitlines() if len(line) > 1]
    tokens = [torch.tensor(list(line[: CONTEXT + 1])) for line in lines[:count]]
    return pad_sequence(tokens, batch_first=True, padding_value=IGNORED)  # (count, CONTEXT + 1)


def batches(lines, epoch=None):
    order = torch.arange(len(lines))
    if epoch is not None:  # the same on all ranks: they cut one order
        order = order[torch.randperm(len(lines), generator=torch.Generator().manual_seed(SEED + epoch))]
    loader = DataLoader(lines, BATCH, sampler=order[mesh.data_rank :: mesh.num_data_ranks].tolist())
    return hp.loop.even_batches(loader, mesh, fill=torch.full((1, CONTEXT + 1), IGNORED))


train_lines, held_out = read_lines("[a-d]*.py", 500), read_lines("e*.py", 101)


class Block(nn.TransformerEncoderLayer):
    """Sees what came before."""

    def forward(self, src, *_, **__):
        """(batch, length, DIM) to the same shape."""
        mask = nn.Transformer.generate_square_subsequent_mask(src.shape[1])
        return super().forward(src, mask, is_causal=True)


def build():
    blocks = [Block(DIM, 4, 4 * DIM, dropout=0.0, batch_first=True) for _ in range(LAYERS)]
    return nn.Sequential(nn.Embedding(256, DIM), *blocks, nn.Linear(DIM, 256))


apply, params = hp.init_module(build, mesh, hp.P("shard"))
optimizer = hp.optim.adamw(hp.optim.warmup_cosine(3e-3, 5, 40))


def sum_of_losses(params, lines):
    logits = apply(params, lines[:, :-1].clamp(min=0))
    return F.cross_entropy(logits.flatten(0, 1), lines[:, 1:].flatten(), reduction="sum", ignore_index=IGNORED)


def train_step(params, opt_state, lines):
    num_tokens = hp.psum((lines[:, 1:] != IGNORED).sum(), mesh.data_axes)  # of all ranks
    grad_fn = hp.value_and_grad(lambda p: sum_of_losses(p, lines) / num_tokens, numerics=hp.Numerics(reduce_op="sum"))
    loss, grads = grad_fn(params)
    norm = hp.global_norm(grads, error_if_nonfinite=True)
    updates, opt_state = optimizer.update(hp.clip_with_norm(grads, 1.0, norm), opt_state, params)
    log = {"loss": hp.psum(loss, mesh.data_axes), "norm": norm, "tokens": num_tokens}
    return hp.apply_updates(params, updates), opt_state, log


train, evaluate = hp.sharded(train_step, mesh, donate_argnums=(0, 1)), hp.sharded(sum_of_losses, mesh)


def held_out_loss(params):
    sums = torch.zeros(2, dtype=torch.float64)
    for lines in batches(held_out):
        with torch.inference_mode():
            sums += torch.stack([evaluate(params, lines), (lines[:, 1:] != IGNORED).sum()])
    loss, num_tokens = hp.loop.reduce_metrics(sums.tolist(), mesh, "sum")
    return loss / num_tokens


state = {"params": params, "opt_state": optimizer.init(params), "epoch": 0, "step": 0}
if hp.checkpoint.latest(FOLDER / "checkpoints") is not None:
    state = hp.checkpoint.load(FOLDER / "checkpoints", like=state)
params, opt_state, step = state["params"], state["opt_state"], state["step"]
writer = SummaryWriter(str(FOLDER / "tensorboard")) if mesh.is_main else None
hp.loop.barrier(mesh)  # from here on every rank finds the folder, and can write its profile into it
few_steps = torch.profiler.schedule(wait=2, warmup=1, active=2, repeat=1)
to_folder = torch.profiler.tensorboard_trace_handler(str(FOLDER / "tensorboard"), f"rank{mesh.rank}")
matrices = hp.num_parameters(params, lambda path, leaf: path != "0.weight")  # a table is not multiplied by
flops = hp.loop.flops_per_token(matrices, num_layers=LAYERS, dim=DIM, context=CONTEXT)
num_steps = -(-len(train_lines) // (BATCH * mesh.num_data_ranks))  # in an epoch
with torch.profiler.profile(schedule=few_steps, on_trace_ready=to_folder) as profiler:
    for epoch in range(state["epoch"], EPOCHS):
        begin = time.perf_counter()
        for lines in track(batches(train_lines, epoch), f"epoch {epoch}", num_steps, disable=not mesh.is_main):
            params, opt_state, log = train(params, opt_state, lines)
            log = {name: x.item() for name, x in log.items()}
            log["tokens/s"] = log["tokens"] / (time.perf_counter() - begin)
            log["MFU"] = log["tokens/s"] * flops / (mesh.size * PEAK_FLOPS)
            if writer:
                for name, x in log.items():
                    writer.add_scalar(name, x, step)
            profiler.step()
            step, begin = step + 1, time.perf_counter()
        state = {"params": params, "opt_state": opt_state, "epoch": epoch + 1, "step": step}
        hp.checkpoint.save(FOLDER / "checkpoints", state, step=epoch + 1, keep=2)
        loss = held_out_loss(params)
        if writer:
            writer.add_scalar("held out", loss, step)
            writer.flush()
            print(f"epoch {epoch}: {loss:.3f} nats a byte, held out")
