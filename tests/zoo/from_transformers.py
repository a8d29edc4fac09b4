"""Architectures of transformers, by the tasks that its Auto classes know."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.zoo.architecture import SAMPLES, Architecture, Batch, Tensor, images, loss_of, noise, words
from tests.zoo.shrink import small

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
IMAGE_TOKEN, VISION_START = 50, 53


def text(seed: int) -> Batch:
    tokens = words(seed)
    return {"input_ids": tokens, "labels": tokens.clone()}


def two_texts(seed: int) -> Batch:
    return {"input_ids": words(seed), "labels": words(seed + 1000)}


def pixels(seed: int, size: int = 32) -> Batch:
    return {"pixel_values": images(seed, size)}


def waves(seed: int) -> Batch:
    return {"input_values": noise(seed, 1600)}


def spectrum_and_text(seed: int) -> Batch:
    return {"input_features": noise(seed, 16, 64), "labels": words(seed)}


def image_and_text(seed: int) -> Batch:
    return {"input_ids": words(seed), "pixel_values": images(seed)}


def text_about_image(seed: int) -> Batch:
    return image_and_text(seed) | {"labels": words(seed)}


# A task: what its models are, the table of transformers that lists them, and a batch.
TASKS: dict[str, tuple[str, str, Callable[[int], Batch]]] = {
    "causal": ("text decoder", "CAUSAL_LM", text),
    "masked": ("text encoder", "MASKED_LM", text),
    "seq2seq": ("encoder-decoder", "SEQ_TO_SEQ_CAUSAL_LM", two_texts),
    "image": ("image classifier", "IMAGE_CLASSIFICATION", pixels),
    "detect": ("object detector", "OBJECT_DETECTION", partial(pixels, size=64)),
    "semseg": ("image segmenter", "SEMANTIC_SEGMENTATION", pixels),
    "universal": ("image segmenter", "UNIVERSAL_SEGMENTATION", partial(pixels, size=64)),
    "depth": ("depth estimator", "DEPTH_ESTIMATION", pixels),
    "video": ("video classifier", "VIDEO_CLASSIFICATION", lambda seed: {"pixel_values": noise(seed, 4, 3, 32, 32)}),
    "mim": ("image encoder", "MASKED_IMAGE_MODELING", pixels),
    "backbone": ("image backbone", "BACKBONE", pixels),
    "audiocls": ("audio classifier", "AUDIO_CLASSIFICATION", waves),
    "ctc": ("speech recogniser", "CTC", waves),
    "speech": ("speech to text", "SPEECH_SEQ_2_SEQ", spectrum_and_text),
    "zsimage": ("image and text", "ZERO_SHOT_IMAGE_CLASSIFICATION", image_and_text),
    "itt": ("image and text to text", "IMAGE_TEXT_TO_TEXT", text_about_image),
    "base": ("text encoder", "", lambda seed: {"input_ids": words(seed)}),
}


def _labels_after(num: int, seed: int) -> Tensor:
    return torch.cat([torch.full((SAMPLES, num), -100), words(seed)], 1)


def _after_image(num: int, seed: int) -> Batch:
    tokens = torch.cat([torch.full((SAMPLES, num), IMAGE_TOKEN), words(seed)], 1)
    return {"input_ids": tokens, "pixel_values": images(seed), "labels": _labels_after(num, seed)}


def _paligemma(seed: int) -> Batch:
    kinds = torch.cat([torch.zeros(SAMPLES, 16), torch.ones(SAMPLES, 8)], 1).long()
    return _after_image(16, seed) | {"token_type_ids": kinds}


def _qwen2_vl(seed: int) -> Batch:
    lead = torch.tensor([VISION_START] + [IMAGE_TOKEN] * 4).expand(SAMPLES, 5)
    kinds = torch.cat([torch.zeros(SAMPLES, 1), torch.ones(SAMPLES, 4), torch.zeros(SAMPLES, 8)], 1).long()
    return {
        "input_ids": torch.cat([lead, words(seed)], 1),
        "labels": _labels_after(5, seed),
        "pixel_values": noise(seed, 16, 3 * 2 * 4 * 4).flatten(0, 1),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * SAMPLES),
        "mm_token_type_ids": kinds,
    }


BATCHES: dict[str, Callable[[int], Batch]] = {
    "audiocls:audio-spectrogram-transformer": lambda seed: {"input_values": noise(seed, 64, 16)},
    "audiocls:wav2vec2-bert": lambda seed: {"input_features": noise(seed, 24, 16)},
    "ctc:wav2vec2-bert": lambda seed: {"input_features": noise(seed, 24, 16)},
    "itt:llava": partial(_after_image, 16),
    "itt:paligemma": _paligemma,
    "itt:qwen2_5_vl": _qwen2_vl,
    "itt:qwen2_vl": _qwen2_vl,
    "speech:moonshine": lambda seed: {"input_values": noise(seed, 3000), "labels": words(seed)},
    "speech:speech_to_text": lambda seed: {"input_features": noise(seed, 64, 16), "labels": words(seed)},
}


def _loss_of_towers(outputs: Any) -> Tensor:
    text_part, image_part = outputs.text_embeds, outputs.image_embeds
    return text_part.square().mean() + image_part[..., 0].mean() + (image_part.tanh() + text_part.tanh()).mean()


def table(task: str) -> dict[str, Any]:
    """Returns the classes of a task by the type of the model."""
    middle = f"FOR_{TASKS[task][1]}_" if TASKS[task][1] else ""
    return dict(getattr(modeling_auto, f"MODEL_{middle}MAPPING_NAMES"))


def architecture(task: str, model_type: str) -> Architecture:
    """Returns an architecture of transformers.

    Raises:
        KeyError: this version of transformers has none of this name.
    """
    kind, _, batch = TASKS[task]
    name = f"{task}:{model_type}"
    found = table(task)[model_type]
    model_class = getattr(transformers, found if isinstance(found, str) else found[0])
    config_class = model_class.config_class or CONFIG_MAPPING[model_type]

    def build(config: Any) -> Any:
        if task == "causal" and getattr(config, "is_decoder", None) is False:
            config.is_decoder = True
        torch.manual_seed(0)
        return model_class(config)

    return Architecture(
        name,
        kind,
        lambda: build(small(config_class)),
        BATCHES.get(name, batch),
        _loss_of_towers if task == "zsimage" else loss_of,
        lambda: build(config_class()),
    )
