"""``python -m hpfunc demo``: a small training over several processes of this machine, and the plan of its step."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import hpfunc as hp

_STEPS = 20
_WIDTH = 120
_ABOUT_THE_PLAN = """
From the plan of a step, which print(step.last_schedule) shows whole. While the backward of block 1 computes, the
weights of block 0 are gathered and the gradients of block 2 are reduced:
"""


def start(num_ranks: int) -> int:
    """Starts the demo by torchrun, and returns its exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # the processes share the cores
    return subprocess.run([*command, "-m", __name__], env=environment, check=False).returncode


def main() -> None:
    """Trains, on each rank of a launcher or alone; the first rank prints."""
    import torch

    mesh = hp.make_mesh((-1,), ("shard",), device="cpu")
    torch.manual_seed(0)
    params = hp.init(lambda: [{"w": torch.randn(64, 64) / 8} for _ in range(4)], mesh, hp.P("shard"))
    block = hp.unit(lambda layer, x: x + torch.tanh(x @ layer["w"]), name="block")
    optimizer = hp.optim.adamw(1e-2)

    def loss_fn(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in params:
            x = block(layer, x)
        return (x - y).square().mean()

    @hp.sharded(mesh=mesh, donate_argnums=(0, 1))
    def step(params: Any, opt_state: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[Any, Any, torch.Tensor]:
        loss, grads = hp.value_and_grad(loss_fn)(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return hp.apply_updates(params, updates), opt_state, hp.pmean(loss, mesh.data_axes)

    say = print if mesh.rank == 0 else lambda _: None
    say(f"{mesh.size} ranks on {mesh.device}, {hp.num_parameters(params)} parameters, each weight {params[0]['w']}")
    generator = torch.Generator().manual_seed(mesh.rank)
    opt_state, began = optimizer.init(params), time.perf_counter()
    for number in range(_STEPS):
        x = torch.randn(16, 64, generator=generator)  # each rank's own
        params, opt_state, loss = step(params, opt_state, x, x.flip(1))
        if number % 5 == 0 or number == _STEPS - 1:
            say(f"step {number:>2}  loss {loss:.4f}")
    say(f"{(time.perf_counter() - began) / _STEPS * 1e3:.1f} ms a step")
    say(_ABOUT_THE_PLAN)
    say(_around(str(step.last_schedule), "backward block.1"))


def _around(schedule: str, event: str) -> str:
    """The paragraphs of a schedule before an event and the one after it."""
    paragraphs = schedule.split("\n\n")
    first = next(i for i, paragraph in enumerate(paragraphs) if paragraph.startswith(f"before {event}"))
    lines = "\n\n".join(paragraphs[first - 1 : first + 1]).splitlines()
    return "\n".join(line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}..." for line in lines)


if __name__ == "__main__":
    main()
