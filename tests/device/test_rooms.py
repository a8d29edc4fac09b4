"""What `check` accepts for so many collectives at a time does not hang on a device that has room for so many."""

from __future__ import annotations

import pytest

import hpfunc as hp
from tests.device.rooms import Drawn, Tally, tally
from tests.helpers.models import Layout, Model, P

pytestmark = pytest.mark.processes


def test_what_check_accepts_does_not_hang() -> None:
    total = tally(10, start=0)
    assert not total.faults, "\n".join(total.faults)
    assert total.accepted > 15
    assert total.refused > 3


def test_what_check_refuses_may_hang() -> None:
    """The device has no more room than it says: three collectives at a time end in a deadlock, for some timing."""
    layout, total = Layout((2, 2), ("replicate", "shard"), P("shard"), P("shard")), Tally()
    for timing in range(20):
        total.add(Drawn(Model(), layout, hp.Policy(pack_below_bytes=0, communicators=3), True, timing))
        if total.hung:
            break
    assert total.hung
    assert not total.faults, "\n".join(total.faults)
