"""`examples/torch/finetune_lora.py` in small: parity of the adapters, what is sent, what is saved."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hpfunc as hp
from tests.helpers.examples import example
from tests.helpers.ranks import Pool, mesh_of

pytestmark = pytest.mark.processes
ADAPTED = "self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj"
STEPS, RATE = 5, 0.5


def said(rank: int, folder: Path) -> str:
    """Returns what the example says."""
    module, output = example("finetune_lora"), io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(output):
        warnings.simplefilter("default")  # of transformers and peft
        module.main(["--quick", "--out", str(folder)])
    return output.getvalue()


def test_it_trains_and_saves_the_adapters_alone(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    output, *others = pool(2).run(said, tmp_path, deadline_s=200.0)  # each rank loads transformers first
    assert others == [""]
    weights, gradients = map(int, re.findall(r"(\d+) kB", output))
    # Adapters are a fourth of the weights, gathered as bfloat16 twice, and reduced in float32 once.
    assert weights > 2 * gradients > 0, output
    before, after = map(float, re.findall(r"(\d\.\d+) with", output))
    assert after < before - 0.1, output
    trained, total = map(int, re.findall(r"(\d+) of (\d+) weights", output)[0])
    saved = load_file(tmp_path / "adapters/adapter_model.safetensors")
    layers = [f"model.layers.{i}.{path}.lora_{part}" for i in (0, 1) for path in ADAPTED for part in ("A", "B")]
    assert sorted(saved) == sorted(f"base_model.model.{layer}.weight" for layer in layers)
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert sum(tensor.numel() for tensor in saved.values()) == trained < total


def trained(rank: int, folder: Path) -> Any:
    """Returns weights and losses after some steps in float64, and the losses in bfloat16."""
    module, mesh = example("finetune_lora"), mesh_of((2,), ("shard",))
    data, sgd = module.text.help_texts(), hp.optim.sgd(RATE)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        if mesh.is_main:
            module.write_base(folder, 32, 2)
        hp.loop.barrier(mesh)
        start = {
            path: weight.detach().clone() for path, weight in module.load(folder, torch.float64).named_parameters()
        }
        exact, log, _ = module.train(module.load(folder, torch.float64), mesh, data, STEPS, sgd, hp.Numerics())
        half, half_log, _ = module.train(module.load(folder, torch.bfloat16), mesh, data, STEPS, sgd, module.HALF)
    dtypes = {path: str(array.dtype) for path, array in half.items()}
    return start, hp.unshard(exact), log, [said["loss"] for said in half_log], dtypes


def alone(folder: Path) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """Returns weights, losses and norms of one process, without hpfunc, on the batches of both ranks."""
    module = example("finetune_lora")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = module.load(folder, torch.float64)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer, data, losses, norms = torch.optim.SGD(weights, RATE), module.text.help_texts(), [], []
    for number in range(STEPS):
        optimizer.zero_grad()
        batches = [module.batch(data, number, part) for part in (0, 1)]
        each = [module.loss_of(model(input_ids=x, use_cache=False).logits, y) for x, y in batches]
        loss = torch.stack(each).mean()
        loss.backward()
        grads = [weight.grad for weight in weights if weight.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        torch.nn.utils.clip_grads_with_norm_(weights, 1.0, norm - 1e-6)
        optimizer.step()
        losses.append(float(loss.detach()))
        norms.append(float(norm))
    return {path: weight.detach() for path, weight in model.named_parameters()}, losses, norms


def test_adapters_are_those_of_one_process(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    results = pool(2).run(trained, tmp_path, deadline_s=200.0)
    want, losses, norms = alone(tmp_path)
    for start, whole, log, half, dtypes in results:
        assert [said["loss"] for said in log] == pytest.approx(losses, rel=1e-12)
        assert [(said["lora_A"] ** 2 + said["lora_B"] ** 2) ** 0.5 for said in log] == pytest.approx(norms, rel=1e-9)
        for path, weight in want.items():
            assert (whole[path] - weight).norm() <= 1e-10 * weight.norm(), path
            assert torch.equal(whole[path], start[path]) != ("lora_" in path), (
                f"{path} is trained, or frozen, by mistake"
            )
        assert half == pytest.approx(losses, rel=2**-7)  # bfloat16 has 8 bits
        assert half != pytest.approx(losses, rel=2**-20)
        assert {dtype for path, dtype in dtypes.items() if "lora_" in path} == {"torch.float32"}
        assert {dtype for path, dtype in dtypes.items() if "lora_" not in path} == {"torch.bfloat16"}
