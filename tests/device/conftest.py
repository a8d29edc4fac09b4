"""Tests on the simulated device need a C++ compiler; without one they are skipped."""

from __future__ import annotations

import pytest

from tests.device import simulated


@pytest.fixture(scope="session", autouse=True)
def simulated_device() -> None:
    """Builds the device once, before any rank needs it. This process never loads it."""
    try:
        simulated.build()
    except simulated.Unavailable as reason:
        pytest.skip(str(reason))
