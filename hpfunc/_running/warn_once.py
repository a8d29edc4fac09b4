"""`warn_once`: a warning that a process says once, and of all processes of a mesh the first."""

from __future__ import annotations

import warnings
from typing import Any

from .._errors import HpfuncWarning
from .._values.mesh import Mesh

_said: dict[Any, Any] = {}


def warn_once(text: str, mesh: Mesh) -> None:
    """Warns, on the first rank of a mesh, with a text that is true of all ranks.

    Python shows a warning once for each line that calls. This one has no line: it is shown once for its text.
    """
    if mesh.rank == mesh.ranks[0]:
        warnings.warn_explicit(text, HpfuncWarning, "hpfunc", 1, registry=_said)
