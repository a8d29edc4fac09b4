"""Rows of groups. Most run on two ranks."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from hpfunc.backends.torch import collectives
from tests.backends.private.rows import promise

GLOO = "torch.distributed.ProcessGroupGloo._Options"


@promise(
    "are the options of a gloo group, which take devices, threads and a timeout",
    *(GLOO, f"{GLOO}._devices", f"{GLOO}._threads", f"{GLOO}._timeout"),
)
def gloo_options() -> None:
    gloo = cast(Any, dist.ProcessGroupGloo)
    options, device = gloo._Options(), gloo.create_device(interface="lo")
    options._devices, options._threads, options._timeout = [device, device], 4, timedelta(seconds=3)
    assert (len(options._devices), options._threads, options._timeout) == (2, 4, timedelta(seconds=3))


def group() -> Any:
    """Returns a new group of this world, as hpfunc makes its groups."""
    options = collectives.host_options("contract", 20.0)
    ranks = list(range(dist.get_world_size()))
    return dist.new_group(ranks, backend=collectives.HOST, pg_options=options, use_local_synchronization=True)


@promise(
    "is the store at which the processes met", "torch.distributed.distributed_c10d._get_default_store", on_ranks=True
)
def default_store() -> None:
    store = dist.PrefixStore("hpfunc contract", dist.distributed_c10d._get_default_store())
    store.set(f"{dist.get_rank()}", "here")
    store.wait([f"{rank}" for rank in range(dist.get_world_size())])
    assert store.get("1") == b"here"
    assert [store.check([key]) for key in ("0", "nobody")] == [True, False]


@promise(
    "is the group of all ranks, whose device can be read, and set to none",
    "torch.distributed.distributed_c10d._get_default_group",
    on_ranks=True,
)
def default_group() -> None:
    default = cast(Any, dist.distributed_c10d._get_default_group())
    assert default.size() == dist.get_world_size()
    default.bound_device_id = torch.device("cpu", 0)
    assert default.bound_device_id == torch.device("cpu", 0)
    default.bound_device_id = None
    assert default.bound_device_id is None


@promise(
    "is the name that a group of these ranks would get now",
    "torch.distributed.distributed_c10d._hash_ranks_to_str",
    on_ranks=True,
)
def next_name() -> None:
    ranks = list(range(dist.get_world_size()))
    expected = dist.distributed_c10d._hash_ranks_to_str(ranks)
    made = dist.new_group(ranks, use_local_synchronization=True, sort_ranks=False)
    assert cast(Any, made).group_name == expected


@promise(
    "names each group, and an entry of ours keeps the name of a destroyed group from being given again",
    "torch.distributed.distributed_c10d._world",
    "torch.distributed.distributed_c10d._world.pg_names",
    on_ranks=True,
)
def group_names() -> None:
    names = cast(Any, dist.distributed_c10d._world.pg_names)
    first = group()
    name = names[first]
    assert name == first.group_name
    collectives.give_up(first)
    assert first not in names
    second = group()
    assert names[second] != name
    total = torch.ones(1)
    dist.all_reduce(total, group=second)
    assert total.item() == dist.get_world_size()


@promise(
    "starts the collectives of its block together, when the block ends",
    "torch.distributed._coalescing_manager",
    on_ranks=True,
)
def coalescing() -> None:
    inspect.signature(dist._coalescing_manager).bind(group=None, async_ops=True)
    ours, (rank, size) = group(), (dist.get_rank(), dist.get_world_size())
    send, receive = torch.full((2,), float(rank)), [torch.full((2 * size,), -1.0) for _ in range(2)]
    with dist._coalescing_manager(group=ours, async_ops=True) as grouped:
        started = [dist.all_gather_single(out, send, group=ours, async_op=False) for out in receive]
    grouped.wait()
    assert started == [None, None]
    want = torch.arange(float(size)).repeat_interleave(2)
    assert all(torch.equal(out, want) for out in receive)
