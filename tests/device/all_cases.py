"""All programs of `tests.device.cases` and of the modules that add to them."""

from __future__ import annotations

from tests.device import optimizer_cases, parallel_cases, step_cases  # noqa: F401 - they add to CASES
from tests.device.cases import CASES, DELAYS, SLOW

__all__ = ["CASES", "DELAYS", "SLOW"]
