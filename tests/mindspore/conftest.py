"""Here ``pool(n)`` is one of MindSpore, so that a test of torch runs on it where it is imported."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.helpers.ranks import Pool


@pytest.fixture(scope="session")
def pool(pool: Callable[..., Pool]) -> Callable[..., Pool]:
    """``pool(n)`` gives ranks that compute with MindSpore, ``pool(n, "torch")`` the others."""
    return lambda size, framework="mindspore": pool(size, framework)
