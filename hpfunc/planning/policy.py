"""`Policy`: the scheduling choices of the caller. They do not change a bit of the result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from .._errors import PolicyError, message

Release = Literal["forward", "backward", "never"]
PACK_BELOW_BYTES = 65536
"""What `plan` takes for ``pack_below_bytes=None``: about latency times bandwidth of a fast Ethernet."""
_NAME = "hpfunc.Policy"


@dataclass(frozen=True, slots=True, repr=False)
class Policy:
    """How a step is scheduled. It never changes what the step computes.

    Attributes:
        prefetch: number of units whose weights are gathered ahead of the unit that computes. 0 gathers a unit only when
            it is needed.
        release: when the whole weights of a unit are dropped: after its ``"forward"`` and again after its
            backward (ZeRO-3), after its ``"backward"`` only (ZeRO-2), or ``"never"`` before the step ends (ZeRO-1).
        pack_below_bytes: whole weights smaller than this many bytes share one message, which costs one copy before and
            one after; larger ones are sent alone without a copy. 0 packs nothing, ``math.inf`` packs everything. With
            None `sharded` measures the network (`probe`), and `plan` by itself uses 65536.
        prefetch_backward: as `prefetch`, during backward; None means the value of `prefetch`.
        gather_budget_bytes: most bytes at one time in whole weights and in the messages that they are unpacked from. A
            unit that would exceed it is gathered later than `prefetch` says.
        release_overrides: `release` of single units: pairs (pattern, release), or a mapping. A pattern is a glob for
            the name of a unit (``"head.*"``) or for the path of one of its weights (``"layers.0.*"``, with or without
            the name of the argument); the first matching pattern wins.
        reduce_bucket_bytes: consecutive units of a backward share a reduce buffer, and so one all-reduce, until it
            holds this many bytes. With 0 each unit has its own, with ``math.inf`` all units share one.
        communicators: most collectives that are in flight at one time, the caller's own (`psum`) included. With fewer
            than there are streams for them, launches wait for one another in one order. None means what the backend
            promises: any number on gloo, 1 on NCCL and HCCL.

    Raises:
        PolicyError: a field has a value outside of its range.

    >>> Policy(prefetch=2)
    Policy(prefetch=2, release='forward', pack_below_bytes=None)
    >>> Policy.zero2(release_overrides={"head.*": "never"})
    Policy(prefetch=1, release='backward', pack_below_bytes=None, release_overrides=(('head.*', 'never'),))
    """

    prefetch: int = 1
    release: Release = "forward"
    pack_below_bytes: float | None = None
    prefetch_backward: int | None = None
    gather_budget_bytes: float = math.inf
    release_overrides: Sequence[tuple[str, Release]] | Mapping[str, Release] = ()
    reduce_bucket_bytes: float = 0
    communicators: int | None = None

    @classmethod
    def zero1(cls, **fields: Any) -> Policy:
        """Returns the policy of ZeRO-1: weights are gathered once, and stay whole until the end of the step."""
        return cls(release="never", **fields)

    @classmethod
    def zero2(cls, **fields: Any) -> Policy:
        """Returns the policy of ZeRO-2: weights are gathered once, and stay whole until their backward."""
        return cls(release="backward", **fields)

    @classmethod
    def zero3(cls, **fields: Any) -> Policy:
        """Returns the policy of ZeRO-3, the default: weights are gathered twice, and whole only while they are used."""
        return cls(release="forward", **fields)

    def depth(self, kind: str) -> int:
        """Returns the number of units to gather ahead of an event of this kind."""
        return self.prefetch if kind == "forward" or self.prefetch_backward is None else self.prefetch_backward

    def __post_init__(self) -> None:
        _check_integer("prefetch", self.prefetch)
        if self.prefetch_backward is not None:
            _check_integer("prefetch_backward", self.prefetch_backward)
        if self.communicators is not None:
            _check_integer("communicators", self.communicators, least=1)
        _check_release("release", self.release)
        for field, hint in _BYTES.items():
            if (value := getattr(self, field)) is not None or field != "pack_below_bytes":
                object.__setattr__(self, field, _number(field, value, hint))
        object.__setattr__(self, "release_overrides", _pairs(self.release_overrides))

    def __repr__(self) -> str:
        shown = [f for f in fields(self) if f.name in _ALWAYS_SHOWN or getattr(self, f.name) != f.default]
        return f"Policy({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"


_ALWAYS_SHOWN = ("prefetch", "release", "pack_below_bytes")
_BYTES = {
    "pack_below_bytes": "use 0 to pack nothing, math.inf to pack everything, None to let the network decide",
    "gather_budget_bytes": "use math.inf for no bound",
    "reduce_bucket_bytes": "use 0 for a buffer for each unit",
}
"""Fields that are numbers of bytes, and the remedy for a wrong one."""


def _check_integer(field: str, value: Any, least: int = 0) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PolicyError(message(_NAME, f"{field} must be an integer >= {least}, got {value!r}"))


def _check_release(field: str, value: Any) -> None:
    if value in get_args(Release):
        return
    hint = None
    if isinstance(value, (int, bool)):
        hint = (
            "a release to a smaller group of ranks is not supported: use a mesh of ('replicate', 'shard'), whose "
            "gathers stay in the smaller group, or release='backward', which gathers once"
        )
    raise PolicyError(message(_NAME, f"{field} must be 'forward', 'backward' or 'never', got {value!r}", hint=hint))


def _number(field: str, value: Any, hint: str) -> float:
    """Returns a number of bytes. A float of numpy becomes a plain one, whose text `Schedule.parse` reads."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or math.isnan(value) or value < 0:
        raise PolicyError(message(_NAME, f"{field} must be a number >= 0, got {value!r}", hint=hint))
    return float(value) if isinstance(value, float) else value


def _pairs(overrides: Any) -> tuple[tuple[str, Release], ...]:
    pairs = tuple(overrides.items() if isinstance(overrides, Mapping) else overrides)
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
            rule = f"release_overrides has pairs of a pattern and a release, got {pair!r}"
            raise PolicyError(message(_NAME, rule, hint="release_overrides={'head.*': 'never'}"))
        _check_release(f"release_overrides[{pair[0]!r}]", pair[1])
    return tuple((pattern, release) for pattern, release in pairs)
