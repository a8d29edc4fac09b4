"""What a unit may not do with its whole weights, in words that are the same for every framework."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .._errors import UsageError, message


def is_called_by(qualname: str) -> bool:
    """Returns whether a function whose qualified name begins with `qualname` is on the stack."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_qualname.startswith(qualname):
            return True
        frame = frame.f_back
    return False


@contextmanager
def refusing_writes(wholes: Sequence[Any], names: Sequence[str]) -> Iterator[None]:
    """Raises UsageError naming each of `wholes` that the body writes into."""
    versions = [whole._version for whole in wholes]
    try:
        yield
    finally:
        written = [name for name, whole, v in zip(names, wholes, versions, strict=True) if whole._version != v]
        if written:
            rule = "the unit writes in place into gathered weights"
            hint = "whole weights are read-only; write `w = w + ...`, or keep state out of the weights"
            raise UsageError(message("hpfunc.unit", rule, written, hint=hint))
