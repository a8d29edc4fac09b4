"""Dtypes of any framework, by their names."""

from __future__ import annotations

from typing import Any


def is_floating_dtype(dtype: Any) -> bool:
    """Returns whether a dtype of any framework is one of floating numbers."""
    return str(dtype).rsplit(".", maxsplit=1)[-1].lower().startswith(("float", "bfloat"))
