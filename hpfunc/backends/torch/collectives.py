"""torch's collectives: how they are called, and how they are waited for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from . import private
from .bytes import as_bytes

# Neither gloo nor NCCL knows all of torch's dtypes. Tensors of others are sent as bytes, if they are not added up.
KNOWN = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
}

# Note [One device for each purpose]
# By default torch gives each gloo group a network device, with a thread that polls a hundred times a second as long as
# the process lives, even if the group was given up after a failure. So here all groups of a purpose share a device.
# `new_group` passes options to registered backends only.
HOST = "hpfunc_gloo"
_gloo: Any = dist.ProcessGroupGloo
_devices: dict[str, list[Any]] = {}


def host_options(purpose: str, timeout_s: float) -> Any:
    """Returns the options of a group on the host: the network device of its purpose, and how long it waits."""
    if purpose not in _devices:
        interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        found = [_gloo.create_device(interface=name) for name in interfaces]
        _devices[purpose] = found or [_gloo.create_default_device()]
    threads = 2 * len(_devices[purpose])  # as torch has it
    return private.gloo_options(_devices[purpose], threads, timedelta(seconds=timeout_s))


def _host_group(given: Any, options: Any) -> Any:
    options.global_ranks_in_group = given.global_ranks_in_group
    options.group_name = given.group_id
    return _gloo(given.store, given.group_rank, given.group_size, options)


# Note [Names of groups]
# torch names a group by its ranks and by the number of names that it knows. So a name comes again when a group is
# destroyed: the group of that name may still live, which is an error, or the rendezvous would meet its old keys.
# Groups of ours that were given up keep their names, and where the caller has destroyed a group, the count is raised.
class _GivenUp:
    """Stands for a group in torch's table of names. See Note [Names of groups]."""

    def abort(self) -> None:
        """It was."""

    def shutdown(self) -> None:
        """It was."""


def new_group(ranks: Sequence[int], **options: Any) -> Any:
    """Returns a new group of these ranks, which alone make it. See Note [Names of groups]."""
    names = private.group_names()
    while private.next_group_name(list(ranks)) in names.values():
        names[_GivenUp()] = f"hpfunc {len(names)}"
    with _unsplit():
        return dist.new_group(list(ranks), use_local_synchronization=True, sort_ranks=False, **options)


@contextmanager
def _unsplit() -> Iterator[None]:
    """Within it a group is made by its own ranks alone, even if the caller has bound the default group to a device.

    torch would split it from that group, for which all ranks of the world have to make a group at this moment.
    """
    default: Any = private.default_group()
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = bound


def connect(group: Any, device: str) -> None:
    """Connects the ranks of a new group. A library that does it in the first collective needs all of them there."""
    dist.all_reduce(torch.zeros(1, device=device), group=group)


def give_up(group: Any) -> None:
    """Ends whatever a group is doing. A group of the host has threads, which end only when torch forgets it."""
    group.abort()
    names = private.group_names()
    if (name := names.get(group)) is not None and dist.get_backend(group) == HOST:  # else the caller has ended it
        dist.destroy_process_group(group)
        names[_GivenUp()] = name


dist.Backend.register_backend(HOST, _host_group, extended_api=True, devices=["cpu"])


def as_carried(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor over the same memory in a dtype that the libraries can send."""
    return tensor if tensor.dtype in KNOWN else as_bytes(tensor)


def as_added(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same memory in a dtype that torch can add: signed sums have the bits of unsigned ones."""
    signed = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
    return tensor.view(signed[tensor.dtype]) if tensor.dtype in signed else tensor


def start(collective: str, group: Any, send: torch.Tensor, receive: torch.Tensor, *, async_op: bool) -> Any:
    """Starts one collective into a given output; an all-reduce is in place. Both are flat."""
    if collective in ("all_gather", "all_to_all"):
        send, receive = as_carried(send), as_carried(receive)
    if collective == "all_gather":
        return dist.all_gather_single(receive, send, group=group, async_op=async_op)
    if collective == "reduce_scatter":
        return dist.reduce_scatter_single(receive, send, group=group, async_op=async_op)
    if collective == "all_to_all":
        return dist.all_to_all_single(receive, send, group=group, async_op=async_op)
    assert send.data_ptr() == receive.data_ptr(), f"{collective} is in place"
    return dist.all_reduce(send, group=group, async_op=async_op)


def start_on_stream(collective: str, group: Any, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Starts collectives of one kind on the current stream of a device; each pair is what is sent and received.

    The library takes several gathers, or several reduce-scatters, in one launch.
    """
    together = len(pairs) > 1 and collective in ("all_gather", "reduce_scatter")
    with private.coalescing(group=group) if together else nullcontext():
        for send, receive in pairs:
            start(collective, group, send, receive, async_op=False)


def permute(group: Any, send: torch.Tensor, receive: torch.Tensor, target: int | None, source: int | None) -> list[Any]:
    """Starts a send to and a receive from indices in the group; all ranks of the group call this."""
    if send.device.type == "cpu":
        return _permute_on_host(group, send, receive, target, source)
    ranks, send, receive = dist.get_process_group_ranks(group), as_carried(send), as_carried(receive)
    sends = [dist.P2POp(dist.isend, send, ranks[target], group)] if target is not None else []
    receives = [dist.P2POp(dist.irecv, receive, ranks[source], group)] if source is not None else []
    return dist.batch_isend_irecv(sends + receives) if sends or receives else []


def _permute_on_host(
    group: Any, send: torch.Tensor, receive: torch.Tensor, target: int | None, source: int | None
) -> list[Any]:
    # As an all-to-all in which most parts are empty: the host waits in slices, and gloo takes the end of a slice of a
    # single send or receive for the end of the connection.
    out, into = as_bytes(send), as_bytes(receive)
    if not out.numel():
        return []
    places = range(group.size())
    sizes_out, sizes_in = ([out.numel() * (place == peer) for place in places] for peer in (target, source))
    parts = into[: sum(sizes_in)], out[: sum(sizes_out)]
    return [dist.all_to_all_single(*parts, sizes_in, sizes_out, group=group, async_op=True)]
