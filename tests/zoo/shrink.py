"""Configurations of transformers with small values in place of their defaults."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from tests.zoo import sizes
from tests.zoo.configs import BY_CONFIG


def small(config_class: Any, given: Mapping[str, Any] | None = None) -> Any:
    """Returns a small configuration of a class.

    Rules by names of fields come first (`sizes`), then configurations of parts, what is written down for the class
    (`configs`), and `given`.
    """
    defaults = _defaults(config_class)
    values = {}
    for name, default in defaults.items():
        values |= _number(name, default) | _list(name, default) | _token(name, default)
    heads, width = defaults.get("num_heads"), defaults.get("embed_dim")
    if isinstance(heads, list | tuple) and isinstance(width, int):  # Swin and others: heads of each stage
        values["embed_dim"] = 8 * min(heads)
    values |= _parts(config_class)
    for base in reversed(config_class.__mro__):
        values |= BY_CONFIG.get(base.__name__, {})
    return config_class(**values | dict(given or {}))


def _defaults(config_class: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(config_class):
        return {field.name: field.default for field in dataclasses.fields(config_class)}
    return {name: x.default for name, x in inspect.signature(config_class.__init__).parameters.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(name: str, default: Any) -> dict[str, Any]:
    if not _is_number(default):
        return {}
    if default > 0 and (name in sizes.CHANCE_NAMES or any(word in name for word in sizes.CHANCES)):
        return {name: 0.0}
    if isinstance(default, int) and default > sizes.AT_MOST.get(name, default):
        return {name: sizes.AT_MOST[name]}
    return {name: 2} if name == "max_window_layers" else {}


def _list(name: str, default: Any) -> dict[str, Any]:
    if not isinstance(default, list | tuple) or not default:
        return {}
    if "drop" in name and any(isinstance(x, float) for x in default):
        return {name: [0.0] * len(default)}
    if not all(_is_number(x) and isinstance(x, int) for x in default):
        return {}
    if name in sizes.STAGE_WIDTHS:
        ratio = max(min(default) / sizes.SMALLEST_WIDTH, 1)
        return {name: [max(8, int(x / ratio) // 8 * 8) for x in default]}
    if name in sizes.STAGE_DEPTHS:
        return {name: [min(x, 2) for x in default]}
    if name in sizes.ALL_WIDTHS:
        return {name: [32] * len(default)}
    return {name: [1]} if name in sizes.LAYERS_OF_KIND else {}


def _token(name: str, default: Any) -> dict[str, Any]:
    if name in sizes.MEDIA_TOKENS and isinstance(default, int):
        return {name: sizes.MEDIA_TOKENS[name]}
    is_set = default is not None and default is not dataclasses.MISSING
    fits = isinstance(default, int) and 0 <= default < sizes.AT_MOST["vocab_size"]
    return {name: sizes.TOKENS[name]} if name in sizes.TOKENS and is_set and not fits else {}


def _parts(config_class: Any) -> dict[str, Any]:
    """The configurations of a model's parts, such as its image tower."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found = {}
    for name, spec in (getattr(config_class, "sub_configs_defaults", None) or {}).items():
        part = spec.config_class
        if part.__name__ == "AutoConfig":
            if not getattr(spec, "model_type", None):
                continue
            part = CONFIG_MAPPING[spec.model_type]
        known = {field.name for field in dataclasses.fields(part)} if dataclasses.is_dataclass(part) else None
        given = {key: value for key, value in dict(spec.init_kwargs or {}).items() if _is_kept(key, value)}
        given = {key: sizes.AT_MOST.get(key, x) if _is_large(key, x) else x for key, x in given.items()}
        found[name] = small(part, {key: x for key, x in given.items() if known is None or key in known})
    return found


def _is_kept(key: str, value: Any) -> bool:
    return not isinstance(value, list | tuple | dict) or key in ("out_features", "out_indices")


def _is_large(key: str, value: Any) -> bool:
    return _is_number(value) and isinstance(value, int) and value > sizes.AT_MOST.get(key, value)
