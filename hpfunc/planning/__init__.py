"""Planning: from a recorded program and a policy to a schedule, and its proof. Plain Python, no framework.

`plan` makes a `Schedule` for a `Program`. `check` proves that it is safe and correct, and counts its costs. `interpret`
(needs numpy) runs it for all ranks in one process; `reference` is the result that the program defines.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .checking.checker import Report as Report
from .checking.checker import check as check
from .planner import Traits as Traits
from .planner import plan as plan
from .policy import Policy as Policy
from .program import Event as Event
from .program import Program as Program
from .program import Unit as Unit
from .program import Weight as Weight
from .schedule import Schedule as Schedule

if TYPE_CHECKING:
    from .checking.interpreter import interpret as interpret
    from .checking.reference import World as World
    from .checking.reference import reference as reference


_NEED_NUMPY = {"World": "reference", "interpret": "interpreter", "reference": "reference"}


def __getattr__(name: str) -> Any:
    """Imports names that need numpy on first access."""
    if name in _NEED_NUMPY:
        return getattr(import_module(f".checking.{_NEED_NUMPY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
