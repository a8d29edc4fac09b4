"""`examples/torch/finetune_lora.py` in small: parity of the adapters, what is sent, what is saved."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

import hpfunc as hp
from tests.helpers.examples import example
from tests.helpers.ranks import Pool, mesh_of

pytestmark = pytest.mark.processes
ADAPTED = "self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj"


def said(rank: int, *arguments: str) -> str:
    """Returns what the example says; it ends well."""
    module, output = example("finetune_lora"), io.StringIO()
    with contextlib.redirect_stdout(output):
        assert module.main(["--quick", *arguments]) == 0, output.getvalue()
    return output.getvalue()


def curves(rank: int) -> tuple[list[float], list[float], dict[str, str]]:
    """Returns the losses in float64 and in bfloat16, and the dtypes of the latter's weights."""
    module, mesh = example("finetune_lora"), mesh_of((4,), ("shard",))
    model, data, optimizer = module.adapt(module.build(32, 2), 4), module.text.help_texts(), module.hp.optim.adamw(3e-2)
    _, _, exact, _ = module.train(model.double(), mesh, data, 12, optimizer, False)
    trained, frozen, half, _ = module.train(model.float(), mesh, data, 12, optimizer, True)
    whole = module.hp.combine(trained, frozen)
    return exact, half, {path: str(array.dtype) for path, array in whole.items()}


def test_it_trains_and_saves_the_adapters_alone(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    output, *_ = pool(4).run(said, "--out", str(tmp_path), deadline_s=200.0)  # each rank loads transformers first
    (weights, gradients), (adapted_weights, adapted_gradients) = (
        [int(number) for number in re.findall(r"(\d+) kB", line)] for line in output.splitlines() if "a rank" in line
    )
    assert adapted_weights == pytest.approx(weights, rel=0.1), output  # no second gather of the frozen embedding
    assert gradients > 10 * adapted_gradients > 0, output
    assert "held-out English: " in output

    file = tmp_path / "adapters.safetensors"
    hp.checkpoint.export_safetensors(tmp_path, file)
    layers = [f"adapters.model.layers.{i}.{path}.{part}" for i in (0, 1) for path in ADAPTED for part in ("up", "down")]
    assert sorted(load_file(file)) == sorted(layers)


def test_adapters_are_those_of_one_process(pool: Callable[[int], Pool]) -> None:
    output, *_ = pool(4).run(said, "--check", deadline_s=200.0)
    assert "weights differ by" in output


def test_losses_in_bfloat16_are_near_those_in_float64(pool: Callable[[int], Pool]) -> None:
    exact, half, dtypes = pool(4).run(curves, deadline_s=200.0)[0]
    assert exact[-1] < exact[0] - 0.05
    assert half == pytest.approx(exact, rel=2**-7)  # bfloat16 has 8 bits
    assert half != pytest.approx(exact, rel=2**-20)
    assert {dtype for path, dtype in dtypes.items() if path.endswith((".up", ".down"))} == {"torch.float32"}
    assert {dtype for path, dtype in dtypes.items() if not path.endswith((".up", ".down"))} == {"torch.bfloat16"}
