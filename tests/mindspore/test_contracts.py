"""What `hpfunc.backends.mindspore.ascend` relies on of MindSpore, as far as a machine without an Ascend can tell.

That each name exists and takes its arguments is a test of `test_ascend`. Here are methods of objects, what functions
return, and two lacks of MindSpore's groups that are told in docs/devices.md. Written with MindSpore 2.10;
2.9 passes, too.
"""

from __future__ import annotations

import ast
import inspect
import re
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest

from tests.backends.calls import method
from tests.helpers.frameworks import needs_mindspore
from tests.helpers.ranks import Pool

pytestmark = [pytest.mark.processes, needs_mindspore]

# Class, method, arguments without `self`, keywords.
METHODS: list[tuple[str, str, int, tuple[str, ...]]] = [
    ("runtime.Stream", "__init__", 0, ()),
    ("runtime.Stream", "wait_event", 1, ()),
    ("runtime.Event", "__init__", 0, ()),
    ("runtime.Event", "record", 1, ()),
    ("runtime.Event", "synchronize", 0, ()),
    ("runtime.StreamCtx", "__init__", 1, ()),
    ("runtime.StreamCtx", "__enter__", 0, ()),
    ("runtime.StreamCtx", "__exit__", 3, ()),
    ("distributed.TCPStore", "__init__", 5, ()),
    ("distributed.TCPStore", "set", 2, ()),
    ("distributed.TCPStore", "get", 1, ()),
    ("distributed.TCPStore", "add", 2, ()),
    ("distributed.P2POp", "__init__", 4, ()),
    ("distributed", "init_process_group", 0, ("init_method", "rank", "world_size", "timeout")),
]


def refused(rank: int, methods: list[tuple[str, str, int, tuple[str, ...]]]) -> list[str]:
    import mindspore
    from mindspore import runtime
    from mindspore.mint import distributed

    bad = []
    for path, name, count, keywords in methods:
        module, _, of = path.partition(".")
        owner = getattr({"runtime": runtime, "distributed": distributed}[module], of) if of else distributed
        try:
            inspect.signature(getattr(owner, name)).bind(*range(count + bool(of)), **dict.fromkeys(keywords))
        except (AttributeError, TypeError) as error:
            bad.append(
                f"MindSpore {mindspore.__version__}: {path}.{name} {error}; see hpfunc/backends/mindspore/ascend.py"
            )
    return bad


def test_objects_take_what_hpfunc_gives_them(pool: Callable[..., Pool]) -> None:
    invented = [("runtime.Stream", "no_such", 0, ()), ("runtime.Event", "record", 2, ())]
    gone, many = pool(4).run(refused, [*METHODS, *invented])[0]
    assert "runtime.Stream.no_such" in gone
    assert "runtime.Event.record too many positional arguments" in many


def of_store(rank: int) -> list[Any]:
    from mindspore.mint import distributed

    if rank:
        return []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = distributed.TCPStore("127.0.0.1", port, None, True, timedelta(seconds=20))
    store.set("key", "text")
    return [store.get("key"), store.add("key/written", 1), store.add("key/written", 0), store.add("other/written", 0)]


def test_the_store_gives_bytes_and_counts_without_a_wait(pool: Callable[..., Pool]) -> None:
    """`MindSporeAscend.read` asks ``add(key, 0)`` first, because `get` waits for a key that nobody has written."""
    assert pool(4).run(of_store)[0] == [b"text", 1, 1, 0]


def of_handles(rank: int) -> list[Any]:
    from mindspore import mint
    from mindspore.mint.distributed import P2POp, distributed

    handle = mock.Mock()
    deal = (
        getattr(distributed, "_deal_dist_comm_outputs", None) or distributed._deal_comm_outputs
    )  # since 2.10, and 2.9
    _, work = deal(("out", handle), True)
    work.wait()
    found = [handle.wait.call_count, deal(("out", handle), False)[1]]
    names = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "all_reduce", "broadcast")
    for name in names:
        source = inspect.getsource(getattr(distributed, name))
        found.append(re.search(rf"{deal.__name__}\((?:output|result), async_op\)", source) is not None)
    return [*found, [P2POp(kind, mint.zeros((2,)), 1, "group").op for kind in ("isend", "irecv")]]


def test_an_asynchronous_collective_returns_what_can_be_waited_for(pool: Callable[..., Pool]) -> None:
    assert pool(4).run(of_handles)[0] == [1, None, *[True] * 5, ["isend", "irecv"]]


def of_groups(rank: int) -> list[Any]:
    from mindspore.communication import _comm_helper
    from mindspore.mint.distributed import distributed

    made: list[Any] = []
    with mock.patch.object(distributed, "create_group", lambda *args: made.append(args)):
        names = [
            distributed.new_group(ranks, group_desc=purpose, use_local_synchronization=True)
            for ranks, purpose in (
                ([1, 0], "hpfunc gather"),
                ([0, 1], "hpfunc reduce_scatter"),
                ([0, 2], "hpfunc gather"),
            )
        ]
    end = method(ast.parse(inspect.getsource(_comm_helper)), "", "_destroy_group_helper")
    return [len(set(names)), made[0][1], end is not None and "del _ExistingGroup.ITEMS[group]" in ast.unparse(end)]


def test_a_group_is_its_sorted_ranks(pool: Callable[..., Pool]) -> None:
    """Known lacks, told in docs/devices.md.

    All purposes of the same ranks share one communicator, which can be destroyed once. And a mesh whose ranks are not
    in ascending order along an axis would be gathered in another order than its own.
    """
    numbers, ranks, once = pool(4).run(of_groups)[0]
    assert numbers == 2, "new_group distinguishes purposes: say so in docs/devices.md"
    assert ranks == [0, 1], "new_group keeps the order of ranks: say so in docs/devices.md"
    assert once, "a group can be destroyed twice: say so in docs/devices.md"
