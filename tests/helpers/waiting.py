"""Waiting for what comes without an event."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
DEADLINE_S = 1.0


def settled(measure: Callable[[], T], is_settled: Callable[[T], bool]) -> T:
    """Returns what is measured as soon as it is settled; after the deadline whatever it is, for the test to judge.

    A thread of gloo holds the tensors of a finished work a little longer than whoever waited for it: for 2 ms, beside
    other work for longer, and nothing tells when it has let them go.
    """
    end = time.monotonic() + DEADLINE_S
    while not is_settled(found := measure()) and time.monotonic() < end:
        time.sleep(0.001)
    return found
