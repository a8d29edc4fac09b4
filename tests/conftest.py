"""Fixtures and settings that all tests share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

# Before torch is imported anywhere: one thread in this process and in all that it starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import pytest
from hypothesis import HealthCheck, settings

from tests.helpers import ranks

# An example talks to other processes: how long that takes says nothing about the code.
settings.register_profile(
    "hpfunc", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.register_profile(
    "thorough", deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "hpfunc"))


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[..., ranks.Pool]]:
    """``pool(n).run(fn, *args)`` calls ``fn(rank, *args)`` on n real processes; see `tests.helpers.ranks`."""
    yield ranks.pool
    ranks.stop_all()
