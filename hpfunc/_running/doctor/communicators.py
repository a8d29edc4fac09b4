"""The row of how many collectives may be in flight at one time, and what would allow more."""

from __future__ import annotations

from collections.abc import Iterator

from ...backends.versions import Version, dotted
from .devices import seen_devices
from .diagnosis import Row
from .facts import Facts
from .nccl import is_on

_SOURCE = (
    "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html"
    "#using-multiple-nccl-communicators-concurrently"
)
_ORDERED: Version = (2, 26)  # the first with _ORDER
_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"


def communicator_rows(facts: Facts) -> Iterator[Row]:
    """Yields the row: what `Policy(communicators=None)` means here."""
    value, source = _in_flight(facts)
    yield Row("communicators at a time", value, source=source)


def _in_flight(facts: Facts) -> tuple[str, str]:
    if seen_devices(facts) == []:
        return "any number, by gloo", ""
    if facts.accelerator != "cuda":
        library = "HCCL" if facts.accelerator == "npu" else "the library of this device"
        return f"1, because {library} promises nothing for more; Policy(communicators=3) where they have room", ""
    if facts.nccl is None:
        return "1", ""
    if facts.nccl < _ORDERED:
        return f"1, because NCCL before {dotted(_ORDERED)} does not order several", _SOURCE
    if not is_on(facts, _ORDER):
        return f"1; 2 by export {_ORDER}=1 on all ranks and Policy(communicators=2)", _SOURCE
    return f"1; 2 by Policy(communicators=2), which NCCL orders ({_ORDER}=1)", _SOURCE
