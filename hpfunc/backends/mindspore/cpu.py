"""MindSpore on CPU: the caller's tensors are MindSpore's, the runtime's own are torch's, and both see the same memory.

MindSpore's operators on a CPU cannot write into a tensor, and its CPU collectives have no reduce-scatter, never overlap
and cannot write into views. So the runtime's buffers are torch tensors, gloo moves them, and all work on host memory is
done by the code of the torch backend. Buffers go to the caller (`give`), and the caller's tensors go to the runtime
(`detach`), through numpy and without a copy.

# Note [Queued operators]
MindSpore dispatches operators to a queue. The runtime may read the result of an operator, or write into its inputs,
only after the queue is drained. ``asnumpy()`` drains it, so a tensor from `detach` is complete. The tape drains it
before whole weights are released, and `fill` before it poisons a freed buffer. Dropping a buffer that queued operators
read is safe: they hold it.

# Note [Threads that poll]
MindSpore 2.10 has threads that poll without a pause. If ranks share cores, they take time from the computation:

- Each of its queues has one as long as the process lives, and a thread that drains a queue polls it, too. With
  ``MS_DEV_HOST_BLOCKING_RUN=1`` the caller runs each operator itself, and these threads do not start. The variable is
  read at the first operator.
- An operator has the threads of a pool: as many as torch has, where ``OMP_NUM_THREADS`` says how many.
- At least two of the pool remain. One of them polls 300,000 times after each operator, until a graph has run: the end
  of a graph sets that to 1.

None of this changes a result. A setting of the program, ``MS_DEV_HOST_BLOCKING_RUN=0`` or
`mindspore.device_context.cpu.op_tuning.threads_num`, stays.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import mindspore
import numpy as np
import torch
import torch.distributed as dist
from mindspore import ops
from mindspore.common.np_dtype import bfloat16 as numpy_bfloat16
from mindspore.device_context.cpu import op_tuning

from ..._errors import MeshError, message
from ..foreach import Foreach
from ..protocol import Job
from ..torch.backend import TorchBackend
from .common import MindSporeDifferentiation
from .foreach import HostForeach
from .private import executor
from .units import Bridge, dtype_of

Tensor = Any


def hold(tensor: Tensor) -> torch.Tensor:
    """Returns a MindSpore tensor as a tensor of the runtime, once it is computed. A strided one is copied."""
    if isinstance(tensor, torch.Tensor):
        return tensor
    array = tensor.asnumpy()
    if array.dtype == numpy_bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def give(tensor: Tensor) -> mindspore.Tensor:
    """Returns a tensor of the runtime as a MindSpore tensor. A strided one, which MindSpore cannot take, is copied."""
    if isinstance(tensor, mindspore.Tensor):
        return tensor
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        return mindspore.Tensor.from_numpy(tensor.view(torch.int16).numpy().view(numpy_bfloat16))
    return mindspore.Tensor.from_numpy(tensor.numpy())


class MindSporeHost(MindSporeDifferentiation, TorchBackend):
    """See `Backend`."""

    name = "mindspore"

    def __init__(self) -> None:
        super().__init__()
        with suppress(RuntimeError):  # too late: an operator has run, and it was on the CPU
            mindspore.set_device("CPU")  # the first operator would choose another device
        _stop_polling()
        self.bridge = Bridge(hold, self.give, executor.sync)
        self.foreach = cast(Foreach, HostForeach(self, TorchBackend.foreach))

    # --- processes -------------------------------------------------------------------------------------------------
    def join(self, timeout_s: float, device: str | None = None) -> Job:
        if device not in (None, "cpu"):
            rule = f"MindSpore runs on the CPU in this process, but the mesh asks for {device!r}"
            hint = "install MindSpore for that device; its name is chosen with mindspore.set_device"
            raise MeshError(message("hpfunc.make_mesh", rule, hint=hint))
        if "MS_SCHED_HOST" in os.environ and "RANK" not in os.environ and not dist.is_initialized():
            _meet_as_msrun(timeout_s)
        return super().join(timeout_s, "cpu")

    # --- tensors ---------------------------------------------------------------------------------------------------
    def device_of(self, tensor: Tensor) -> str:
        return "cpu"

    def dtype_name(self, tensor: Tensor) -> str:
        if isinstance(tensor, torch.Tensor):
            return super().dtype_name(tensor)
        return str(tensor.dtype).lower()

    def detach(self, tensor: Tensor) -> torch.Tensor:
        return hold(tensor)

    def give(self, tensor: Tensor) -> mindspore.Tensor:
        if not tensor.is_contiguous():
            self.counters.bytes_copied += tensor.nbytes
        return give(tensor)

    def contiguous(self, tensor: Tensor) -> torch.Tensor:
        return super().contiguous(hold(tensor))

    def digest(self, tensor: Tensor) -> int:
        return super().digest(hold(tensor))

    def copy(self, target: torch.Tensor, source: Tensor, divisor: int = 1) -> None:
        super().copy(target, hold(source), divisor)

    def copy_all(self, copies: Sequence[tuple[torch.Tensor, Tensor]]) -> None:
        super().copy_all([(target, hold(source)) for target, source in copies])

    def fill(self, target: torch.Tensor, value: float) -> None:
        executor.sync()  # see Note [Queued operators]
        super().fill(target, value)

    def add(self, left: Tensor, right: Tensor, dtype: str) -> torch.Tensor:
        return super().add(hold(left), hold(right), dtype)

    def accumulate(self, target: torch.Tensor, source: Tensor) -> None:
        super().accumulate(target, hold(source))

    def cast(self, tensor: Tensor, dtype: str) -> Tensor:
        if isinstance(tensor, torch.Tensor):
            return super().cast(tensor, dtype)
        return tensor if self.dtype_name(tensor) == dtype else tensor.astype(dtype_of(dtype))

    def as_tensor(self, value: Any) -> mindspore.Tensor:
        if isinstance(value, mindspore.Tensor):
            return ops.stop_gradient(value)
        # MindSpore's own function for DLPack ends the process on some capsules that numpy makes, so torch reads them.
        held = super().as_tensor(value)
        if not held.is_contiguous():
            raise BufferError("it is strided, and MindSpore takes no such memory")
        return self.give(held)

    def as_numpy(self, tensor: mindspore.Tensor) -> np.ndarray:
        if tensor.dtype == mindspore.bfloat16:
            raise TypeError("numpy does not know it")
        return tensor.asnumpy()


def _stop_polling() -> None:
    """Stops threads that poll. See Note [Threads that poll]."""
    os.environ.setdefault("MS_DEV_HOST_BLOCKING_RUN", "1")
    if "OMP_NUM_THREADS" in os.environ:
        with suppress(RuntimeError):  # the program has set it
            op_tuning.threads_num(torch.get_num_threads())
    _graph(mindspore.Tensor([0.0], mindspore.float32))


@mindspore.jit
def _graph(x: Tensor) -> Tensor:
    return x + x


def _meet_as_msrun(timeout_s: float) -> None:
    """Starts the gloo world of processes that `msrun` has started."""
    # msrun runs the program once more, as a scheduler for MindSpore's own collectives. It is not needed here: it ends,
    # and the rendezvous uses its port.
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        raise SystemExit(0)
    rank, size = int(os.environ["RANK_ID"]), int(os.environ["MS_WORKER_NUM"])
    method = f"tcp://{os.environ['MS_SCHED_HOST']}:{os.environ['MS_SCHED_PORT']}"
    dist.init_process_group(
        "gloo", init_method=method, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
