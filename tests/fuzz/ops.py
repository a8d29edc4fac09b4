"""Every operator of units, by name."""

from __future__ import annotations

from tests.fuzz import layers, oddities  # they add theirs
from tests.fuzz.registry import KINDS, Kind, Need

__all__ = ["KINDS", "Kind", "Need", "layers", "oddities"]
