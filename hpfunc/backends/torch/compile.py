"""What `torch.compile` must leave alone.

# Note [Compiled callers]
A graph cannot hold what hpfunc does on the host: it waits for collectives, counts uses, and hands gradients over.
If it were traced, ranks would reach different places and wait for each other. So a compiled function that calls a
function of hpfunc has a graph break there: the call, and all that it calls, runs uncompiled, up to a function that is
compiled itself (the block inside of a unit). ``torch.compiler.disable`` does the same, but takes seconds to import,
even if nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import private

_REASON = "hpfunc communicates there; compile the function of a unit: hpfunc.unit(torch.compile(block_fn))"


def leave_alone(fn: Callable[..., Any]) -> None:
    """Lets `fn` run uncompiled wherever it is called."""
    private.run_uncompiled(fn, _REASON)
