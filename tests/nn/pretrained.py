"""Models of transformers from small configurations, as they are."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

os.environ["HF_HUB_OFFLINE"] = "1"
HALVES: dict[str, Any] = {
    f"{half}_{name}": number
    for half in ("encoder", "decoder")
    for name, number in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 24))
}

SMALL = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}

LAYERS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0}
        | {"eos_token_id": 1},
        "2 GPT2Block (transformer.h.0 to transformer.h.1)",
    ),
    "llama": (
        "LlamaConfig",
        "LlamaForCausalLM",
        SMALL | {"num_key_value_heads": 1, "max_position_embeddings": 16},
        "2 LlamaDecoderLayer (model.layers.0 to model.layers.1)",
    ),
    "bert": (
        "BertConfig",
        "BertForMaskedLM",
        SMALL | {"max_position_embeddings": 16},
        "2 BertLayer (bert.encoder.layer.0 to bert.encoder.layer.1)",
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
        | {"decoder_start_token_id": 0},
        "2 T5Block (decoder.block.0 to decoder.block.1)",
    ),
    "vit": (
        "ViTConfig",
        "ViTForImageClassification",
        SMALL | {"image_size": 8, "patch_size": 4, "num_labels": 3},
        "2 ViTLayer (vit.layers.0 to vit.layers.1)",
    ),
    "whisper": (
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        HALVES
        | {"vocab_size": 32, "d_model": 16, "num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 8}
        | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        "2 WhisperEncoderLayer (model.encoder.layers.0 to model.encoder.layers.1)",
    ),
    "marian": (
        "MarianConfig",
        "MarianMTModel",
        HALVES
        | {"vocab_size": 32, "d_model": 16, "max_position_embeddings": 16}
        | {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1},
        "2 MarianEncoderLayer (model.encoder.layers.0 to model.encoder.layers.1)",
    ),
}

HYBRID = SMALL | {"num_key_value_heads": 1, "max_position_embeddings": 16, "num_hidden_layers": 4}
# Models whose blocks fill a cache in training, in other ways: by a window, with a state, with experts, for each other.
CACHING: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", HYBRID | {"head_dim": 8, "sliding_window": 4}, ""),
    "gemma3n": (
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        HYBRID
        | {"head_dim": 8, "vocab_size_per_layer_input": 32, "hidden_size_per_layer_input": 4, "laurel_rank": 4}
        | {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"intermediate_size": [24] * 4, "activation_sparsity_pattern": [0.0] * 4, "altup_num_inputs": 2},
        "",
    ),
    "jamba": (
        "JambaConfig",
        "JambaForCausalLM",
        HYBRID
        | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 2, "num_experts": 1}
        | {"num_experts_per_tok": 1},
        "",
    ),
    "bloom": (
        "BloomConfig",
        "BloomForCausalLM",
        {"vocab_size": 32, "hidden_size": 16, "n_layer": 2, "n_head": 2},
        "",
    ),
}


@dataclass(frozen=True)
class Pretrained:
    """See `tests.nn.zoo.Case`."""

    name: str
    units: Any = None
    remat: bool = False

    def module(self) -> Any:
        return self.built().double().train()

    def built(self) -> Any:
        import transformers

        transformers.logging.set_verbosity_error()
        config, kind, fields, _ = (LAYERS | CACHING)[self.name]
        torch.manual_seed(0)
        return getattr(transformers, kind)(getattr(transformers, config)(**fields))

    def call(self, rank: int, step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        torch.manual_seed(1000 * rank + step)  # draws the dropout of the models too
        if self.name == "vit":
            pixels = torch.randn(2, 3, 8, 8, dtype=torch.float64)
            return (), {"pixel_values": pixels, "labels": torch.randint(0, 3, (2,))}
        if self.name == "whisper":
            features = torch.randn(2, 4, 16, dtype=torch.float64)
            return (), {"input_features": features, "labels": torch.randint(3, 32, (2, 6))}
        ids = torch.randint(0, 32, (2, 6))
        return (), {"input_ids": ids, "labels": torch.randint(0, 32, (2, 6))}

    def loss(self, outputs: Any) -> torch.Tensor:
        return outputs.loss
