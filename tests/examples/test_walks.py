"""The four walks of a new user: an own loop, a port of FSDP2, a model of the hub with LoRA, the style of JAX.

Each has a test of its own, which runs it on two ranks and judges its numbers. Here: they are short, and together they
use all that a loop needs.
"""

from __future__ import annotations

import pytest

import hpfunc as hp
from tests.helpers.examples import FOLDER

WALKS = "training_script", "fsdp2_port", "finetune_lora", "jax_style"
SOURCES = {name: (FOLDER / f"{name}.py").read_text() for name in WALKS}
NORMS = ["hp.global_norm(", "hp.clip_with_norm(", "hp.clip_by_global_norm(", "torch.inf, groups=", "error_if_nonfinite"]
MESH = ["mesh.is_main", "mesh.data_rank", "mesh.num_data_ranks"]
OTHERS = ["SummaryWriter(", "rich.progress", "tqdm(", "torch.profiler.profile(", "torch.manual_seed(", 'log["MFU"]']


@pytest.mark.parametrize("name", WALKS)
def test_a_walk_is_short(name: str) -> None:
    assert len(SOURCES[name].splitlines()) <= 120


@pytest.mark.parametrize("used", [*(f"hp.loop.{name}(" for name in hp.loop.__all__), *NORMS, *MESH, *OTHERS])
def test_all_that_a_loop_needs_is_used(used: str) -> None:
    assert any(used in source for source in SOURCES.values())
