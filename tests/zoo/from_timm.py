"""Architectures of timm, in their usual sizes where these are small."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from tests.zoo.architecture import Architecture, images

# Arguments that make them small, and the size of images.
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "convnext_atto": ({}, 32),
    "cspresnet50": ({}, 32),
    "densenet121": ({}, 32),
    "edgenext_xx_small": ({}, 64),
    "efficientnet_b0": ({}, 32),
    "levit_128s": ({"img_size": 64}, 64),
    "mixer_s32_224": ({"img_size": 32}, 32),
    "mobilenetv3_small_050": ({}, 32),
    "mobilevitv2_050": ({}, 64),
    "poolformer_s12": ({}, 32),
    "pvt_v2_b0": ({}, 32),
    "regnetx_002": ({}, 32),
    "repvgg_a0": ({}, 32),
    "resnet18": ({}, 32),
    "resnet50": ({"layers": (1, 1, 1, 1)}, 32),
    "seresnet18": ({}, 32),
    "swin_tiny_patch4_window7_224": ({"img_size": 56, "embed_dim": 24, "depths": (2, 2, 2, 2)}, 56),
    "vit_tiny_patch16_224": ({"img_size": 32, "depth": 3}, 32),
}


def architecture(model: str) -> Architecture:
    """Returns an architecture of timm."""
    timm = import_module("timm")

    options, size = MODELS[model]

    def build(**options: Any) -> torch.nn.Module:
        torch.manual_seed(0)
        return timm.create_model(model, pretrained=False, num_classes=7, **options)

    return Architecture(
        f"timm:{model}",
        "image classifier",
        lambda: build(**options),
        lambda seed: {"x": images(seed, size)},
        full=build,
    )
