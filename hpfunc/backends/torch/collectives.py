"""torch's collectives: how they are called, and how they are waited for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
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
