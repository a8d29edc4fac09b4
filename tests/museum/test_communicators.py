"""Collectives of several communicators: where they meet, and where they keep each other out."""

from __future__ import annotations

from hpfunc.planning.checking.checker import check
from hpfunc.planning.ops import Launch
from hpfunc.planning.planner import plan
from hpfunc.planning.policy import Policy
from tests.museum.pieces import HSDP, judge
from tests.museum.residency import Device, can_hang
from tests.planning.edits import changed, moved, named
from tests.planning.programs import layers

THREE = plan(layers(3, HSDP, 64), Policy())
PAIR = {"shard": 2}
ON_PAIR = plan(layers(3, PAIR, 64), Policy())


def test_a_communicator_is_used_from_two_streams() -> None:
    """nccl 195, 217, 574: two collectives of one communicator are on two streams, and no event orders them.

    The order in which they run need not be the one in which they were submitted, so one rank may be in the first and
    another one in the second. Here one gather is on the stream of all-reduces. Each communicator has one stream: the
    checker's rule; in the machine ranks meet in different collectives.
    """
    broken = changed(THREE, "gather layer1", stream="all_reduce")
    judge(THREE, broken, HSDP, "*uses gather@shard on stream *, which is used on stream * before", shows="torn")


def test_two_kinds_of_collectives_share_a_communicator() -> None:
    """pytorch 64803, torchtitan 4064: gathers and reduce-scatters went over one group.

    On one stream they wait for each other; on two they meet in another order on each rank, and hang. Here the
    reduce-scatters use the communicator of the gathers. A communicator's purpose is a part of its name, and the
    checker sees it on a second stream.
    """
    gathers = named(THREE, "gather layer0").communicator
    broken = changed(THREE, "reduce_scatter layer2", communicator=gathers)
    judge(THREE, broken, HSDP, "reduce_scatter layer2: uses gather@shard on stream *", shows="torn")


def test_a_stream_waits_for_what_is_queued_behind_it() -> None:
    """nccl 592, 1174 (from the list): two streams, each waiting for what the other one has not begun.

    Here the gather of a layer waits for a backward that needs what stands behind that gather on the same stream. In
    issue order this is a wait for something that is not issued yet, which an event of a device would not even notice:
    it would not wait at all. So the checker refuses it as such.
    """
    broken = changed(THREE, "gather layer1", waits=("backward layer2",))
    judge(THREE, broken, HSDP, "gather layer1: waits for 'backward layer2'*it would wait forever", shows="stuck")


def test_one_rank_issues_two_communicators_in_another_order() -> None:
    """nccl 195, 783, rccl 1600, trl 6798, vllm-ascend 15500: each communicator's order is the same on all ranks.

    Yet with room for one collective at a time, a rank that starts the gather first and one that starts the
    reduce-scatter first wait for each other. Here both orders are safe for themselves, the mixture is not: that all
    ranks have one schedule cannot be seen in it, so ranks compare fingerprints, and these differ.
    """
    later, first = "gather layer0#2", "reduce_scatter layer2"
    order = [op.name for op in ON_PAIR.ops if isinstance(op, Launch)]
    assert order.index(later) + 1 == order.index(first)
    other = moved(ON_PAIR, later, after=first, waits=True)
    check(ON_PAIR)
    check(other)
    one_at_a_time = Device(room=1, in_order=True)
    assert not can_hang([ON_PAIR, ON_PAIR], one_at_a_time)
    assert not can_hang([other, other], one_at_a_time)
    assert can_hang([ON_PAIR, other], one_at_a_time)
    assert ON_PAIR.fingerprint != other.fingerprint


def test_collectives_that_do_not_fit_on_a_device_together() -> None:
    """rccl 2191, nccl 217, marin 7344: the order is right on every rank, and all hang, without a word.

    Kernels of two communicators were ready at a time, the device had no room for both, and took them as it liked:
    a fault below the schedule, which its order alone does not show. Here the planned order hangs on a device that has
    room for one and chooses freely; it does not if it keeps the order of issue, or has room for each stream.
    """
    assert can_hang([ON_PAIR, ON_PAIR], Device(room=1, in_order=False))
    assert not can_hang([ON_PAIR, ON_PAIR], Device(room=1, in_order=True))
    assert not can_hang([ON_PAIR, ON_PAIR], Device(room=2, in_order=False))
    serial = plan(layers(3, PAIR, 64), Policy(prefetch=0))
    assert can_hang([serial, serial], Device(room=1, in_order=False))  # to gather later is not a remedy
