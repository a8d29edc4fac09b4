"""MindSpore on Ascend: HCCL by `mindspore.mint.distributed`, streams and events by `mindspore.runtime`.

It needs an Ascend and has not run on the machines that test this project. Tests check that every name it calls exists
in MindSpore 2.10 with these arguments, and which stream each op goes to. There the runtime's tensors are
MindSpore's own: in-place operators write, and slices, `reshape`, `view` and `permute` are views.

# Note [Send buffers]
A gather sends either from a buffer of its own, or from the sender's slice of the output. Weights that travel alone send
from the shard itself. Packed weights were put into a message first, and the message goes into this rank's slice of
the output, so that HCCL works in place: a bare gather passes with either, but with fused messages, prefetch and freed
buffers together a separate send buffer was reported to fail (error 2). `MindSporeAscend.packed_sends_from` chooses.
"""

from __future__ import annotations

import hashlib
import os
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

from mindspore import mint, ops, runtime
from mindspore.mint import distributed

from ..._errors import MeshError, message
from ..protocol import Collective, Counters, Job, Poll, Purpose
from ..streams import DeviceStreams
from ..watch import Watch
from .common import MindSporeDifferentiation
from .foreach import DeviceForeach
from .units import Bridge, dtype_of

Tensor = Any
STORE_PORT_OFFSET = 1  # the status board, beside the port at which the processes meet


class MindSporeAscend(MindSporeDifferentiation):
    """See `Backend`.

    Attributes:
        packed_sends_from: the source of a message of several weights: this rank's slice of the output, or the
            message itself. See Note [Send buffers].
    """

    name = "mindspore"
    packed_sends_from: Literal["slice", "message"] = "slice"

    def __init__(self) -> None:
        self.counters = Counters()
        self.foreach = DeviceForeach()
        self.bridge = Bridge(self.detach, self.give, lambda: None)  # a stream keeps the order
        self._groups: dict[tuple[object, ...], str] = {}
        watch = Watch(self.abort)
        self._streams = DeviceStreams(runtime.current_stream, runtime.Stream, runtime.Event, runtime.StreamCtx, watch)
        self._store: Any = None
        self._messages: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    # --- processes -------------------------------------------------------------------------------------------------
    def join(self, timeout_s: float, device: str | None = None) -> Job:
        if device is not None and not device.startswith("npu"):
            hint = "call mindspore.set_device('CPU') before anything else"
            raise MeshError(message("hpfunc.make_mesh", f"MindSpore runs on Ascend, not on {device!r}", hint=hint))
        place = _place(timeout_s)
        if place is not None and not distributed.is_initialized():
            distributed.init_process_group(**place)
        device = device or f"npu:{os.environ.get('LOCAL_RANK', os.environ.get('DEVICE_ID', '0'))}"
        if not distributed.is_initialized():
            return Job(0, 1, device)
        rank, size = distributed.get_rank(), distributed.get_world_size()
        if self._store is None:
            host, port = _address()
            timeout = timedelta(seconds=timeout_s)
            self._store = distributed.TCPStore(host, port + STORE_PORT_OFFSET, None, rank == 0, timeout)
        return Job(rank, size, device)

    def group(self, ranks: tuple[int, ...], purpose: Purpose, device: str, timeout_s: float) -> str:
        if not distributed.is_initialized():
            raise MeshError(message("hpfunc", f"no process group is initialized, but ranks {ranks} must talk"))
        if list(ranks) != sorted(ranks):
            rule = f"MindSpore sorts the ranks of a group, but ranks {ranks} are to talk in this order"
            raise MeshError(message("hpfunc", rule, hint="name axes in the order of the mesh"))
        key = ranks, purpose
        if key not in self._groups:
            made = distributed.new_group(list(ranks), group_desc=f"hpfunc {purpose}", use_local_synchronization=True)
            self._groups[key] = made
        return self._groups[key]

    def fail(self) -> None:
        self._streams.watch.fail()

    def abort(self) -> None:
        groups, self._groups = set(self._groups.values()), {}
        for group in groups:  # purposes with the same ranks share one, whatever its description
            distributed.destroy_process_group(group)

    def post(self, key: str, text: str) -> None:
        if self._store is not None:
            self._store.set(key, text)
            self._store.add(f"{key}/written", 1)

    def read(self, keys: Sequence[str]) -> dict[str, str]:
        if self._store is None:
            return {}
        written = [key for key in keys if self._store.add(f"{key}/written", 0)]  # `get` would wait for the others
        return {key: self._store.get(key).decode() for key in written}

    def exchange(self, group: str, numbers: Sequence[int], label: str, poll: Poll) -> list[list[int]]:
        start = time.perf_counter()
        found = _gathered(group, list(numbers))
        poll(label, time.perf_counter() - start)
        return found

    def exchange_text(self, group: str, text: str) -> list[str]:
        return _gathered(group, text)

    # --- tensors ---------------------------------------------------------------------------------------------------
    def device_of(self, tensor: Tensor) -> str:
        return "npu"

    def dtype_name(self, tensor: Tensor) -> str:
        return str(tensor.dtype).lower()

    def is_floating(self, dtype: str) -> bool:
        return "float" in dtype

    def empty(self, shape: Sequence[int], dtype: str, device: str, *, zero: bool = False) -> Tensor:
        made = (mint.zeros if zero else mint.empty)(tuple(shape), dtype=dtype_of(dtype))
        self._messages[id(made)] = made
        return made

    def detach(self, tensor: Tensor) -> Tensor:
        return ops.stop_gradient(tensor)

    def give(self, tensor: Tensor) -> Tensor:
        self._messages.pop(id(tensor), None)  # a shard from now on
        return tensor

    def contiguous(self, tensor: Tensor) -> Tensor:
        if tensor.is_contiguous():
            return tensor
        self.counters.bytes_copied += tensor.nbytes
        return tensor.contiguous()

    def digest(self, tensor: Tensor) -> int:
        return int.from_bytes(hashlib.blake2b(tensor.asnumpy().tobytes(), digest_size=7).digest(), "big")

    def copy(self, target: Tensor, source: Tensor, divisor: int = 1) -> None:
        target.copy_(source if divisor == 1 else mint.div(source, divisor))
        self.counters.bytes_copied += target.nbytes

    def copy_all(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        for target, source in copies:
            self.copy(target, source)

    def fill(self, target: Tensor, value: float) -> None:
        floating = self.is_floating(self.dtype_name(target))
        target.fill_(value if floating or value == value else 0)  # noqa: PLR0124 - an integer has no NaN

    def sum_parts(self, target: Tensor, parts: Sequence[Tensor]) -> None:
        target.copy_(parts[0])
        for part in parts[1:]:
            target.add_(part)
        self.counters.bytes_copied += target.nbytes

    def add(self, left: Tensor, right: Tensor, dtype: str) -> Tensor:
        return mint.add(self.cast(self.detach(left), dtype), self.cast(self.detach(right), dtype)).contiguous()

    def accumulate(self, target: Tensor, source: Tensor) -> None:
        target.add_(self.cast(self.detach(source), self.dtype_name(target)))

    def cast(self, tensor: Tensor, dtype: str) -> Tensor:
        return tensor if self.dtype_name(tensor) == dtype else tensor.to(dtype_of(dtype))

    def divide(self, tensor: Tensor, divisor: int) -> None:
        tensor.div_(divisor)

    def as_tensor(self, value: Any) -> Tensor:
        if not self.is_tensor(value):
            raise TypeError("on a device MindSpore takes its own tensors only")
        return ops.stop_gradient(value)

    def as_numpy(self, tensor: Tensor) -> Any:
        raise TypeError("it lies on a device")

    # --- communication ---------------------------------------------------------------------------------------------
    def ordered_sums(self, device: str) -> bool:
        return False

    def communicators(self, device: str) -> int | None:
        return 1  # HCCL does not promise more, and purposes with the same ranks share one

    def streams(self, device: str) -> DeviceStreams:
        return self._streams

    def launch(
        self, collective: Collective, group: str, sends: Sequence[Tensor], receives: Sequence[Tensor]
    ) -> list[Any]:
        size, handles = distributed.get_world_size(group), []
        for send, receive in zip(sends, receives, strict=True):
            if send.size:
                self.counters.count_launch(collective, send.nbytes, size)
                source = self._send_buffer(group, send, receive) if collective == "all_gather" else send
                handles.append(_start(collective, group, source.view(-1), receive.view(-1)))
        return handles

    def _send_buffer(self, group: str, send: Tensor, receive: Tensor) -> Tensor:
        """Returns the send buffer. No other code decides it. See Note [Send buffers]."""
        if self.packed_sends_from == "message" or id(send) not in self._messages:
            return send
        place = distributed.get_process_group_ranks(group).index(distributed.get_rank())
        own = receive[place * send.size : (place + 1) * send.size]
        own.copy_(send)
        return own

    def broadcast(self, group: str, tensor: Tensor, source: int) -> list[Any]:
        self.counters.count("broadcast", tensor.nbytes)
        rank = distributed.get_process_group_ranks(group)[source]
        return [distributed.broadcast(tensor, rank, group=group, async_op=True)]

    def permute(
        self, group: str, send: Tensor, receive: Tensor, target: int | None, source: int | None
    ) -> Sequence[Any]:
        ranks, work = distributed.get_process_group_ranks(group), []
        if target is not None:
            work.append(distributed.P2POp("isend", send, ranks[target], group))
            self.counters.count("permute", send.nbytes)
        if source is not None:
            work.append(distributed.P2POp("irecv", receive, ranks[source], group))
        return distributed.batch_isend_irecv(work) if work else []


def _gathered(group: str, value: Any) -> list[Any]:
    found: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(found, value, group)
    return found


def _start(collective: Collective, group: str, send: Tensor, receive: Tensor) -> Any:
    if collective == "all_gather":
        return distributed.all_gather_into_tensor(receive, send, group=group, async_op=True)
    if collective == "reduce_scatter":
        return distributed.reduce_scatter_tensor(receive, send, group=group, async_op=True)
    if collective == "all_to_all":
        return distributed.all_to_all_single(receive, send, group=group, async_op=True)
    return distributed.all_reduce(send, group=group, async_op=True)


def _address() -> tuple[str, int]:
    host = os.environ.get("MASTER_ADDR", os.environ.get("MS_SCHED_HOST", "127.0.0.1"))
    return host, int(os.environ.get("MASTER_PORT", os.environ.get("MS_SCHED_PORT", "8118")))


def _place(timeout_s: float) -> dict[str, Any] | None:
    """Returns how this process joins the others: by torchrun's variables, by msrun's own network, or not at all."""
    if "MS_SCHED_HOST" in os.environ:
        return {}
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    host, port = _address()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=timeout_s)
    return {"init_method": f"tcp://{host}:{port}", "rank": rank, "world_size": size, "timeout": timeout}
