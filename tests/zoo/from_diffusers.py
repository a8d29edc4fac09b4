"""Architectures of diffusers, in small."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from tests.zoo.architecture import SAMPLES, Architecture, Batch, images, noise

TIMES = torch.tensor([1, 5])
UNET = {"sample_size": 8, "in_channels": 4, "out_channels": 4, "block_out_channels": (16, 32), "norm_num_groups": 8}
CODER = {
    "block_out_channels": (16, 32),
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "norm_num_groups": 8,
}
DIT = {"sample_size": 8, "num_layers": 2, "patch_size": 2, "attention_head_dim": 8, "num_attention_heads": 2}


def latents(seed: int, channels: int = 4) -> torch.Tensor:
    return images(seed, 8, channels)


def prompt(seed: int) -> torch.Tensor:
    return noise(seed + 1000, 6, 16)


def _noisy(seed: int) -> Batch:
    return {"sample": latents(seed), "timestep": TIMES}


def _hidden(seed: int) -> Batch:
    return {"hidden_states": latents(seed), "timestep": TIMES}


def _prompted(seed: int) -> Batch:
    return {"encoder_hidden_states": prompt(seed)}


def _flux(seed: int) -> Batch:
    return _prompted(seed) | {
        "hidden_states": noise(seed, 16, 4),
        "pooled_projections": noise(seed + 2000, 16),
        "timestep": TIMES / 10,
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(6, 3),
        "guidance": None,
    }


def _prior(seed: int) -> Batch:
    return _prompted(seed) | {
        "hidden_states": noise(seed, 16),
        "timestep": TIMES,
        "proj_embedding": noise(seed + 2000, 16),
    }


MODELS: dict[str, tuple[dict[str, Any], Callable[[int], Batch]]] = {
    "AutoencoderKL": (CODER | {"latent_channels": 4}, lambda seed: {"sample": images(seed)}),
    "ControlNetModel": (
        {
            "block_out_channels": (16, 32),
            "layers_per_block": 1,
            "in_channels": 4,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "cross_attention_dim": 16,
            "norm_num_groups": 8,
            "attention_head_dim": 4,
            "conditioning_embedding_out_channels": (16, 32),
        },
        lambda seed: _noisy(seed) | _prompted(seed) | {"controlnet_cond": images(seed, 16)},
    ),
    "DiTTransformer2DModel": (
        DIT | {"in_channels": 4, "out_channels": 8, "num_embeds_ada_norm": 16},
        lambda seed: _hidden(seed) | {"class_labels": TIMES % 3},
    ),
    "FluxTransformer2DModel": (
        {
            "patch_size": 1,
            "in_channels": 4,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "pooled_projection_dim": 16,
            "axes_dims_rope": (4, 4, 8),
        },
        _flux,
    ),
    "PixArtTransformer2DModel": (
        DIT
        | {"in_channels": 4, "out_channels": 8, "cross_attention_dim": 16, "caption_channels": 16}
        | {"use_additional_conditions": False},
        lambda seed: _hidden(seed) | _prompted(seed),
    ),
    "PriorTransformer": (
        {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "embedding_dim": 16}
        | {"num_embeddings": 6, "additional_embeddings": 4},
        _prior,
    ),
    "SD3Transformer2DModel": (
        DIT
        | {"in_channels": 4, "out_channels": 4, "joint_attention_dim": 16, "caption_projection_dim": 16}
        | {"pooled_projection_dim": 16, "pos_embed_max_size": 8},
        lambda seed: _hidden(seed) | _prompted(seed) | {"pooled_projections": noise(seed + 2000, 16)},
    ),
    "Transformer2DModel": (
        {"sample_size": 8, "in_channels": 16, "num_attention_heads": 2, "attention_head_dim": 8}
        | {"norm_num_groups": 8, "cross_attention_dim": 16},
        lambda seed: {"hidden_states": latents(seed, 16)} | _prompted(seed),
    ),
    "UNet2DConditionModel": (
        UNET
        | {
            "layers_per_block": 2,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "cross_attention_dim": 16,
            "attention_head_dim": 4,
        },
        lambda seed: _noisy(seed) | _prompted(seed),
    ),
    "UNet2DModel": (
        UNET
        | {
            "layers_per_block": 1,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": 8,
        },
        _noisy,
    ),
    "VQModel": (CODER | {"latent_channels": 3}, lambda seed: {"sample": images(seed)}),
}
assert len(TIMES) == SAMPLES


def architecture(model: str) -> Architecture:
    """Returns an architecture of diffusers."""
    model_class = getattr(import_module("diffusers"), model)
    options, batch = MODELS[model]

    def build(**options: Any) -> torch.nn.Module:
        torch.manual_seed(0)
        return model_class(**options)

    return Architecture(f"diffusers:{model}", "diffusion", lambda: build(**options), batch, full=build)
