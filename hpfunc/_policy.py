"""What the caller may choose about scheduling: a value that changes no bit of the result."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ._errors import PolicyError, message

Release = Literal["forward", "backward", "never"]


@dataclass(frozen=True, slots=True)
class Policy:
    """How a step is scheduled. It never changes what the step computes.

    Attributes:
        prefetch: number of units whose weights are gathered ahead of the one that computes, forward and
            backward. 0 gathers a unit only when it is needed.
        release: when the whole weights of a unit are dropped: after its ``"forward"`` and again after its
            backward (ZeRO-3), after its ``"backward"`` only (ZeRO-2), or ``"never"`` before the step ends (ZeRO-1).
        pack_below_bytes: whole weights smaller than this many bytes share one message, at the price of one copy each
            way; larger ones travel alone and uncopied. 0 packs nothing, ``math.inf`` packs everything.

    Raises:
        PolicyError: a field has a value outside of its range.

    >>> Policy(prefetch=2)
    Policy(prefetch=2, release='forward', pack_below_bytes=65536)
    """

    prefetch: int = 1
    release: Release = "forward"
    pack_below_bytes: float = 65536

    def __post_init__(self) -> None:
        if isinstance(self.prefetch, bool) or not isinstance(self.prefetch, int) or self.prefetch < 0:
            raise PolicyError(message("hpfunc.Policy", f"prefetch must be an integer >= 0, got {self.prefetch!r}"))
        if self.release not in ("forward", "backward", "never"):
            rule = f"release must be 'forward', 'backward' or 'never', got {self.release!r}"
            raise PolicyError(message("hpfunc.Policy", rule))
        number = isinstance(self.pack_below_bytes, (int, float)) and not isinstance(self.pack_below_bytes, bool)
        if not number or math.isnan(self.pack_below_bytes) or self.pack_below_bytes < 0:
            rule = f"pack_below_bytes must be a number >= 0, got {self.pack_below_bytes!r}"
            raise PolicyError(message("hpfunc.Policy", rule, hint="use 0 to pack nothing, math.inf to pack everything"))
