"""Rows of groups. Most run on two ranks."""

from __future__ import annotations

import inspect
import itertools
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from hpfunc.backends.torch import groups
from tests.backends.private.rows import promise

_numbers = itertools.count()  # all ranks check the same rows
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
    return named(list(range(dist.get_world_size())), f"contract/{next(_numbers)}")


def named(ranks: list[int], name: str) -> Any:
    return groups.new_group(ranks, name, "contract", groups.HOST, 20.0, groups.host_options("contract", 20.0))


def _torch() -> Any:
    return dist.distributed_c10d._world


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
    "makes a group of its own ranks, in their order, under the name that it is given",
    "torch.distributed.distributed_c10d._new_process_group_helper",
    on_ranks=True,
)
def named_groups() -> None:
    ranks = list(range(dist.get_world_size()))[::-1]
    name = f"contract/{next(_numbers)}"
    made = named(ranks, name)
    assert made.group_name == name
    assert made.rank() == ranks.index(dist.get_rank())
    total = torch.ones(1)
    dist.all_reduce(total, group=made)
    assert total.item() == dist.get_world_size()


@promise(
    "has the groups that are alive, with their stores and ranks",
    "torch.distributed.distributed_c10d._world",
    "torch.distributed.distributed_c10d._world.pg_map",
    "torch.distributed.distributed_c10d._world.pg_group_ranks",
    on_ranks=True,
)
def tables() -> None:
    first = group()
    assert isinstance(_torch().pg_map[first][1], dist.Store)
    assert dist.get_process_group_ranks(first) == list(_torch().pg_group_ranks[first])
    dist.all_reduce(torch.ones(1), group=first)  # all have it
    first.abort()
    dist.destroy_process_group(first)
    assert first not in _torch().pg_map


@promise(
    "are the kinds of devices of a group, and the library that serves each; NCCL's can be aborted together",
    "torch.distributed.ProcessGroup._device_types",
    "torch.distributed.ProcessGroup._get_backend",
    "*._group_start",
    "*._group_end",
    on_ranks=True,
)
def libraries() -> None:
    made = cast(Any, group())
    assert [device.type for device in made._device_types] == ["cpu"]
    assert isinstance(made._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
    nccl = getattr(cast(Any, torch._C)._distributed_c10d, "ProcessGroupNCCL", None)
    assert nccl is None or all(hasattr(nccl, name) for name in ("_group_start", "_group_end"))


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
