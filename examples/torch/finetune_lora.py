"""Fine-tunes a causal model of transformers in bfloat16, by low-rank adapters (LoRA) of peft.

    torchrun --nproc-per-node 4 examples/torch/finetune_lora.py

Nothing is downloaded: the base is a small Llama in a folder like those of the hub. It learns English, the help texts of
Python. A frozen weight is gathered like any other, but no gradient of it is computed or sent, and the optimizer has no
state for it. Only the adapters are saved, as peft reads them. ``--quick`` is a tiny model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hpfunc as hp

sys.path.insert(0, str(Path(__file__).parents[1]))
import text

BATCH, CONTEXT = 4, 64
LORA = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
HALF = hp.Numerics(param_dtype="bfloat16", reduce_dtype="float32", cast_inputs=True)


def write_base(folder: Path, dim: int, layers: int) -> None:
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": dim, "intermediate_size": 4 * dim, "num_hidden_layers": layers, "vocab_size": 256}
    heads: Any = {"num_attention_heads": dim // 16, "num_key_value_heads": dim // 32}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder)


def load(folder: Path, dtype: torch.dtype) -> PeftModel:
    """Returns the base, frozen, with new adapters; of a base in bfloat16 they are float32."""
    torch.manual_seed(1)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), LORA)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32)), labels.flatten())


def batch(data: text.Text, step: int, part: int) -> list[Tensor]:
    return [torch.from_numpy(x) for x in data.batch(0, step, part, BATCH, CONTEXT)]


def train(
    model: PeftModel, mesh: hp.Mesh, data: text.Text, steps: int, optimizer: hp.optim.Optimizer, numerics: hp.Numerics
) -> tuple[Any, list[dict[str, float]], hp.ShardedStep]:
    """Returns all weights, what each step says, and the step."""
    apply, params = hp.from_module(model)  # weights without gradient become frozen arrays
    params = hp.shard(params, mesh, hp.P("shard"))

    def step_fn(params: Any, state: Any, inputs: Tensor, labels: Tensor) -> Any:
        def loss_fn(params: Any) -> Tensor:
            return loss_of(apply(params, input_ids=inputs, use_cache=False).logits, labels)

        loss, grads = hp.value_and_grad(loss_fn, numerics=numerics)(params)
        norm, by_kind = hp.global_norm(grads, groups=lambda path, leaf: "lora_A" if "lora_A" in path else "lora_B")
        updates, state = optimizer.update(hp.clip_with_norm(grads, 1.0, norm), state, params)
        return hp.apply_updates(params, updates), state, {"loss": loss, **by_kind}

    step, state, log = hp.sharded(step_fn, mesh, donate_argnums=(0, 1)), optimizer.init(params), []
    for number in range(steps):
        params, state, said = step(params, state, *batch(data, number, mesh.data_rank))
        log.append(hp.loop.reduce_metrics(said, mesh))
    return params, log, step


def evaluate(model: PeftModel, mesh: hp.Mesh, data: text.Text) -> float:
    """Returns the loss on text that no step has seen; every rank looks at its own part of it."""
    windows = data.held_out_windows(64, CONTEXT)
    inputs, labels = (torch.from_numpy(x)[mesh.data_rank :: mesh.num_data_ranks] for x in windows)
    with torch.inference_mode():
        return hp.loop.reduce_metrics(loss_of(model(input_ids=inputs, use_cache=False).logits, labels), mesh)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/finetune_lora"), help="where the models go")
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model and a few steps, to see that everything works"
    )
    args = parser.parse_args(arguments)
    dim, layers, steps = (32, 2, 10) if args.quick else (128, 4, 150)
    mesh = hp.make_mesh((-1,), ("shard",))
    say = print if mesh.is_main else lambda line: None
    if mesh.is_main:
        write_base(args.out / "base", dim, layers)
    hp.loop.barrier(mesh, "base")  # the others read what the first rank has written

    data, model = text.help_texts(), load(args.out / "base", torch.bfloat16)
    before = evaluate(model, mesh, data)
    params, log, step = train(model, mesh, data, steps, hp.optim.adamw(1e-2), HALF)
    say("\n".join(map(str, log[:: steps // 5])))
    sent = dict(step.last_counters.bytes_sent) if step.last_counters else {}
    gathers = sent.pop("all_gather", 0) / 1e3
    say(f"a rank sends {gathers:.0f} kB of weights and {sum(sent.values()) / 1e3:.0f} kB of gradients a step")
    trained, total = hp.num_parameters(params, hp.is_trainable), hp.num_parameters(params)
    flops = hp.loop.flops_per_token(total, num_frozen=total - trained, num_layers=layers, dim=dim, context=CONTEXT)
    say(f"{trained} of {total} weights train, by {flops:.2e} operations a token")
    hp.to_module(params, model)
    if mesh.is_main:
        model.save_pretrained(args.out / "adapters")
    hp.loop.barrier(mesh, "adapters")
    base = AutoModelForCausalLM.from_pretrained(args.out / "base", dtype=torch.bfloat16)
    after = evaluate(PeftModel.from_pretrained(base, args.out / "adapters"), mesh, data)
    say(f"held-out English: {before:.3f} without, {after:.3f} with the adapters that were saved")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
