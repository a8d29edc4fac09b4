"""`examine`: from what was found to rows with verdicts."""

from __future__ import annotations

from .communicators import communicator_rows
from .devices import device_rows
from .diagnosis import Row
from .facts import Facts
from .host import host_rows
from .launcher import launcher_rows
from .nccl import nccl_rows, wait_rows
from .software import backend_rows, version_rows

_PARTS = (version_rows, backend_rows, device_rows, launcher_rows, nccl_rows, communicator_rows, wait_rows, host_rows)


def examine(facts: Facts) -> tuple[Row, ...]:
    """Returns a row for everything that was looked at. A function of its argument alone, which takes any facts.

    >>> facts = Facts(versions={"Python": "3.10.4", "optree": "0.20.0"})
    >>> next(row.remedy for row in examine(facts) if row.name == "Python")
    'use Python 3.11 or newer'
    """
    return tuple(row for part in _PARTS for row in part(facts))
