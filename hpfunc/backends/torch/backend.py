"""torch: processes, tensors and collectives, on CPU (gloo), CUDA (NCCL) and whatever other accelerator torch knows.

Where its work runs, on a CPU or on streams of an accelerator, is in `streams`.
"""

from __future__ import annotations

import atexit
import math
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..foreach import Foreach
from ..protocol import Collective, Counters, Job, Poll, Purpose
from ..streams import DeviceStreams
from . import collectives, modes, private
from .abstract import abstract, deferred, is_abstract, random_states, set_random_state
from .autograd import TorchTape, use_plain
from .bytes import to_bytes
from .compile import leave_alone
from .devices import choose_device
from .digest import digest
from .foreach import TorchForeach
from .groups import Groups
from .linear import is_transformed, linear
from .optimizer_steps import look_before_steps
from .streams import HostPending, HostStreams, device_streams

# Note [One collective at a time]
# A collective of NCCL is a kernel that waits for its peers on the device. NCCL's guide ("Using multiple NCCL
# communicators concurrently") promises progress for operations of several communicators only if all devices run them in
# one order, each after the other; HCCL's documents promise nothing. gloo runs each collective by sockets of its own.


class TorchBackend:
    """See `Backend`."""

    name = "torch"
    foreach: Foreach = TorchForeach()

    def __init__(self) -> None:
        look_before_steps()
        self.counters = Counters()
        self._groups = Groups()
        self._streams: dict[str, HostStreams | DeviceStreams] = {}

    # --- processes -------------------------------------------------------------------------------------------------
    def join(self, timeout_s: float, device: str | None = None) -> Job:
        device = choose_device(device)
        if dist.is_initialized():
            return Job(dist.get_rank(), dist.get_world_size(), device)
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return Job(0, 1, device)
        dist.init_process_group("gloo" if device == "cpu" else None, timeout=timedelta(seconds=timeout_s))
        atexit.register(_leave)
        return Job(dist.get_rank(), dist.get_world_size(), device)

    def group(self, ranks: tuple[int, ...], purpose: Purpose, device: str, timeout_s: float) -> Any:
        return self._groups.get(ranks, purpose, device, timeout_s)

    def fail(self) -> None:
        for streams in self._streams.values():
            if isinstance(streams, DeviceStreams):
                streams.watch.fail()

    def abort(self) -> None:
        self._groups.abort()

    def post(self, key: str, text: str) -> None:
        if dist.is_initialized():
            _store().set(key, text)

    def read(self, keys: Sequence[str]) -> dict[str, str]:
        if not dist.is_initialized():
            return {}
        store = _store()
        return {key: store.get(key).decode() for key in keys if store.check([key])}

    def exchange(self, group: Any, numbers: Sequence[int], label: str, poll: Poll) -> list[list[int]]:
        send = torch.tensor(numbers, dtype=torch.int64)
        receive = torch.empty(group.size() * len(numbers), dtype=torch.int64)
        work = dist.all_gather_single(receive, send, group=group, async_op=True)
        self.streams("cpu").wait(HostPending(label, [work]), poll)
        return receive.view(group.size(), -1).tolist()

    def exchange_text(self, group: Any, text: str) -> list[str]:
        texts: list[Any] = [None] * group.size()
        dist.all_gather_object(texts, text, group=group)
        return texts

    # --- tensors ---------------------------------------------------------------------------------------------------
    is_abstract = staticmethod(is_abstract)
    digest = staticmethod(digest)
    to_bytes = staticmethod(to_bytes)

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    def trains(self, tensor: torch.Tensor) -> bool | None:
        return True if tensor.requires_grad else False if isinstance(tensor, torch.nn.Parameter) else None

    def device_of(self, tensor: torch.Tensor) -> str:
        return str(tensor.device)

    def dtype_name(self, tensor: torch.Tensor) -> str:
        return str(tensor.dtype).removeprefix("torch.")

    def is_floating(self, dtype: str) -> bool:
        return getattr(torch, dtype).is_floating_point

    def empty(self, shape: Sequence[int], dtype: str, device: str, *, zero: bool = False) -> torch.Tensor:
        make = modes.zeros if zero else modes.empty
        return make(tuple(shape), dtype=getattr(torch, dtype), device=device)

    def detach(self, tensor: torch.Tensor) -> torch.Tensor:
        return (modes.ordinary(tensor) if tensor.is_inference() else tensor).detach()

    def give(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def contiguous(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            return tensor
        self.counters.bytes_copied += tensor.nbytes
        return tensor.resolve_conj().resolve_neg().contiguous()

    def adopt(self, gradient: torch.Tensor) -> torch.Tensor | None:
        whole = gradient.is_contiguous() and gradient.untyped_storage().nbytes() == gradient.nbytes
        return gradient.view(-1) if whole else None  # nobody else holds it: see `borrowed`

    def num_writes(self, tensor: torch.Tensor) -> int | None:
        try:  # all parts of a larger tensor share one counter
            return private.version_of(tensor) if tensor.untyped_storage().nbytes() == tensor.nbytes else None
        except RuntimeError:  # made in inference mode, or a wrapper of torch.func
            return None

    def copy(self, target: torch.Tensor, source: torch.Tensor, divisor: int = 1) -> None:
        with torch.no_grad():
            if divisor == 1:
                target.copy_(source)
            elif source.dtype == target.dtype:
                torch.div(source, divisor, out=target)
            else:
                target.copy_(source / divisor)
        self.counters.bytes_copied += target.nbytes

    def copy_all(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        with torch.no_grad():
            private.foreach_copy_([target for target, _ in copies], [source for _, source in copies])
        self.counters.bytes_copied += sum(target.nbytes for target, _ in copies)

    def fill(self, target: torch.Tensor, value: float) -> None:
        if math.isnan(value) and not (target.is_floating_point() or target.is_complex()):
            value = 1 if target.dtype == torch.bool else torch.iinfo(target.dtype).min  # an integer has no NaN
        with torch.no_grad():
            target.fill_(value) if value else target.zero_()  # float8_e8m0fnu has no zero to be filled with

    def sum_parts(self, target: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        target, *parts = map(collectives.as_added, (target, *parts))
        with torch.no_grad():
            if len(parts) == 1:
                target.copy_(parts[0])
            else:
                torch.add(parts[0], parts[1], out=target)
                for part in parts[2:]:
                    target.add_(part)
        self.counters.bytes_copied += target.nbytes

    def add(self, left: torch.Tensor, right: torch.Tensor, dtype: str) -> torch.Tensor:
        left, right = (tensor.detach().to(getattr(torch, dtype)) for tensor in (left, right))
        return torch.add(left, right, out=torch.empty(left.shape, dtype=left.dtype, device=left.device))

    def accumulate(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.no_grad():
            target.add_(source.detach().to(target.dtype))

    def cast(self, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
        return tensor.to(getattr(torch, dtype))

    def divide(self, tensor: torch.Tensor, divisor: int) -> None:
        with torch.no_grad():
            tensor.div_(divisor)

    def from_bytes(self, data: np.ndarray, shape: Sequence[int], dtype: str, device: str) -> torch.Tensor:
        return torch.from_numpy(data).view(getattr(torch, dtype)).reshape(tuple(shape)).to(device)

    def as_tensor(self, value: Any) -> torch.Tensor:
        return value.detach() if isinstance(value, torch.Tensor) else torch.from_dlpack(value)

    def as_numpy(self, tensor: torch.Tensor) -> np.ndarray:
        return tensor.detach().numpy()

    # --- communication ---------------------------------------------------------------------------------------------
    def ordered_sums(self, device: str) -> bool:
        return device == "cpu"

    def communicators(self, device: str) -> int | None:
        return None if device == "cpu" else 1  # see Note [One collective at a time]

    def streams(self, device: str) -> HostStreams | DeviceStreams:
        if device not in self._streams:
            on_host = device in ("cpu", "meta")
            self._streams[device] = (
                HostStreams(self.counters)
                if on_host
                else device_streams(torch.device(device), self.abort, failed=self._groups.failed)
            )
        return self._streams[device]

    def launch(
        self, collective: Collective, group: Any, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]
    ) -> list[Any]:
        pairs = [(s.view(-1), r.view(-1)) for s, r in zip(sends, receives, strict=True) if s.numel()]
        for send, _ in pairs:
            self.counters.count_launch(collective, send.nbytes, group.size())
        if pairs and pairs[0][0].device.type != "cpu":
            collectives.start_on_stream(collective, group, pairs)
            return []
        group_for = self._groups.for_message
        return [
            collectives.start(collective, group_for(group, send.nbytes), send, receive, async_op=True)
            for send, receive in pairs
        ]

    def broadcast(self, group: Any, tensor: torch.Tensor, source: int) -> list[Any]:
        self.counters.count("broadcast", tensor.nbytes)
        on_host = tensor.device.type == "cpu"
        work = dist.broadcast(collectives.as_carried(tensor), group=group, group_src=source, async_op=on_host)
        return [work] if on_host else []

    def permute(
        self, group: Any, send: torch.Tensor, receive: torch.Tensor, target: int | None, source: int | None
    ) -> list[Any]:
        self.counters.count("permute", 0 if target is None else send.nbytes)
        return collectives.permute(group, send, receive, target, source)

    # --- differentiation -------------------------------------------------------------------------------------------
    tape = TorchTape
    linear = staticmethod(linear)
    is_transformed = staticmethod(is_transformed)
    use_plain = staticmethod(use_plain)
    ordinary = staticmethod(modes.ordinary_mode)
    leave_alone = staticmethod(leave_alone)
    abstract = staticmethod(abstract)
    deferred = staticmethod(deferred)
    random_states = staticmethod(random_states)
    set_random_state = staticmethod(set_random_state)

    def register(self, array_type: type, flatten: Callable[..., Any], unflatten: Callable[..., Any]) -> None:
        if array_type not in private.SUPPORTED_NODES:
            private.register_pytree_node(
                array_type,
                lambda array: (list(flatten(array)[0]), flatten(array)[1]),
                lambda children, metadata: unflatten(metadata, children),
            )


def _store() -> dist.Store:
    return dist.PrefixStore("hpfunc", private.default_store())


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


BACKEND = TorchBackend()
