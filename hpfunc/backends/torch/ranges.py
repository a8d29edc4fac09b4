"""Names of our work in profiles, while a profiler records.

`torch.profiler` shows them as they are, ``torch.autograd.profiler.emit_nvtx`` makes NVTX ranges of them. Ranges must
nest with those of autograd's operators. So the backward of a unit is not one range: it lies between two, which have
the names of the slots in a schedule.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.profiler import record_function

from ..unit_use import UnitUse
from . import private

_NOT_PROFILED = nullcontext()


def span(label: str) -> AbstractContextManager[Any]:
    """Returns a context whose work has a name while a profiler records."""
    return record_function(f"hpfunc::{label}") if private.is_profiling() else _NOT_PROFILED


def of_unit(kind: str, use: UnitUse) -> AbstractContextManager[Any]:
    """Returns a context that has the name of a use of a unit and of what happens to it."""
    return span(f"{kind} {use.label}") if private.is_profiling() else _NOT_PROFILED
