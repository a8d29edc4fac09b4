"""Collectives over named axes, one at a time and awaited, for eager code and the named-axis functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

from .. import backends
from .._values.layout import Gather
from .._values.mesh import Mesh
from .._values.numerics import check_sums
from ..backends.protocol import Collective, Pending, Purpose
from ..planning.program import sums_overflow
from .agreement import control
from .blocks import block_numel, gradient_copy, local_view, shard_copy, whole_copies, whole_view

Tensor = Any
_SUMMED_BY_LIBRARIES = {
    *("float16", "bfloat16", "float32", "float64"),
    *("int8", "int32", "int64"),
}


class Comm:
    """Awaited collectives among the ranks of `mesh` along `axes`, in the order of `axes`.

    Sums are in rank order if the backend leaves them to hpfunc (`ordered_sums`), so their bits do not depend on the
    position of an element in a message. With one rank nothing is sent, but results are still new tensors.
    """

    def __init__(self, mesh: Mesh, axes: tuple[str, ...], purpose: Purpose) -> None:
        self.mesh, self.axes = mesh, axes
        self.purpose: Purpose = purpose
        self.size = mesh.axis_size(axes)
        self.index = mesh.axis_index(axes)
        self.backend = backends.get(mesh.framework)
        self.label = f"{purpose}@{'*'.join(axes)}"

    @cached_property
    def is_ordered(self) -> bool:
        """Whether hpfunc computes the sums itself."""
        return self.backend.ordered_sums(self.mesh.device)

    def group(self) -> Any:
        """Returns the communicator; made on first use."""
        return self.backend.group(self.mesh.group(self.axes), self.purpose, self.mesh.device, self.mesh.timeout_s)

    def awaited(self, what: str, work: Callable[[], Any], *, is_timed: bool = False) -> Pending:
        """Issues `work` on the compute stream, and awaits it. Returns it as the backend's streams do."""
        streams, poll = self.backend.streams(self.mesh.device), control(self.mesh).poll
        pending = streams.issue(f"{what} {self.label}", "compute", (), work, poll, is_timed=is_timed)
        streams.wait(pending, poll)
        return pending

    def _sends(self, tensor: Tensor) -> bool:
        return self.size > 1 and not self.backend.is_abstract(tensor)

    def _receive(self, collective: Collective, send: Tensor, receive: Tensor) -> Tensor:
        if self.size == 1 and receive is not send:
            self.backend.copy(receive, send)
        if self._sends(send):
            self.awaited(collective, lambda: self.backend.launch(collective, self.group(), [send], [receive]))
        return receive

    def _like(self, tensor: Tensor, numel: int) -> Tensor:
        return self.backend.empty((numel,), self.backend.dtype_name(tensor), self.backend.device_of(tensor))

    def _flat(self, tensor: Tensor) -> Tensor:
        return self.backend.contiguous(self.backend.detach(tensor)).reshape(-1)

    def _flat_copy(self, tensor: Tensor) -> Tensor:
        flat = self._flat(tensor)
        copy = self._like(flat, flat.shape[0])
        self.backend.copy(copy, flat)
        return copy

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Returns (ranks, *shape)."""
        send = self._flat(tensor)
        receive = self._receive("all_gather", send, self._like(send, self.size * send.shape[0]))
        return receive.reshape((self.size, *tensor.shape))

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Returns the rows that the ranks have for this rank, in rank order. Shape: (ranks, ...) to (ranks, ...)."""
        send = self._flat(tensor)
        return self._receive("all_to_all", send, self._like(send, send.shape[0])).reshape(tuple(tensor.shape))

    def _sums_here(self, tensor: Tensor) -> bool:
        """Returns whether hpfunc computes the sums of this tensor itself. Raises for a dtype without addition."""
        check_sums(f"hpfunc: a sum over {self.axes}", [tensor], lambda: ["a tensor"])
        return self.is_ordered or self.backend.dtype_name(tensor) not in _SUMMED_BY_LIBRARIES

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Returns the sum over ranks of this rank's row. Shape: (ranks, ...) to (...)."""
        rest = tuple(tensor.shape[1:])
        if self._sums_here(tensor) or self.size == 1:
            parts = self.all_to_all(tensor).reshape((self.size, -1))
            total = self._like(parts, parts.shape[1])
            self.backend.sum_parts(total, [parts[i] for i in range(self.size)])
            return total.reshape(rest)
        send = self._flat(tensor)
        return self._receive("reduce_scatter", send, self._like(send, send.shape[0] // self.size)).reshape(rest)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Returns the sum over ranks, same shape."""
        flat = self._flat(tensor)
        if self._sums_here(flat) and (self.size > 2 or self.backend.dtype_name(flat) not in _SUMMED_BY_LIBRARIES):
            part = -(-flat.shape[0] // self.size)
            padded = self.backend.empty(
                (part * self.size,), self.backend.dtype_name(flat), self.backend.device_of(flat), zero=True
            )
            self.backend.copy(padded[: flat.shape[0]], flat)
            total = self.all_gather(self.reduce_scatter(padded.reshape((self.size, part)))).reshape(-1)
            return total[: flat.shape[0]].reshape(tuple(tensor.shape))
        total = self._flat_copy(tensor)
        return self._receive("all_reduce", total, total).reshape(tuple(tensor.shape))

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Returns the tensor of the rank at place `source`."""
        total = self._flat_copy(tensor)
        if self._sends(total):
            self.awaited("broadcast", lambda: self.backend.broadcast(self.group(), total, source))
        return total.reshape(tuple(tensor.shape))

    def permute(self, tensor: Tensor, pairs: tuple[tuple[int, int], ...]) -> Tensor:
        """Returns the tensor of the rank that sends to this one, zeros if none does."""
        send = self._flat(tensor)
        target = next((t for s, t in pairs if s == self.index), None)
        source = next((s for s, t in pairs if t == self.index), None)
        if source is None:
            dtype, device = self.backend.dtype_name(send), self.backend.device_of(send)
            receive = self.backend.empty((send.shape[0],), dtype, device, zero=True)
        else:
            receive = self._like(send, send.shape[0])
        if source == self.index and target == self.index:
            self.backend.copy(receive, send)
            target = source = None
        if self._sends(send):
            self.awaited("permute", lambda: self.backend.permute(self.group(), send, receive, target, source))
        return receive.reshape(tuple(tensor.shape))


@cache
def comm(mesh: Mesh, axes: tuple[str, ...], purpose: Purpose) -> Comm:
    """Returns the `Comm` of these arguments."""
    return Comm(mesh, axes, purpose)


def gather_whole(local: Tensor, gather: Gather, purpose: Purpose, dtype: str | None = None) -> Tensor:
    """Returns the whole of the shards along ``gather.axes``, cast to `dtype` before they are sent. A new tensor.

    Communication: one all-gather.
    """
    mesh = gather.layout.mesh
    channel = comm(mesh, gather.axes, purpose)
    backend, device = channel.backend, channel.backend.device_of(local)
    held = backend.dtype_name(local)
    block = local
    if channel.size == 1:
        whole = backend.empty(tuple(local.shape), dtype or held, device)
        backend.copy(whole, local)
        return whole
    if not gather.layout.is_even or dtype not in (None, held):
        block = backend.empty((block_numel(gather),), dtype or held, device)
        backend.copy(*shard_copy(backend, block, local, gather))
    blocks = channel.all_gather(block).reshape((channel.size, -1))
    if gather.is_direct:
        return whole_view(blocks.reshape(-1), gather, mesh.coordinate)
    padded = backend.empty((gather.padded_numel,), dtype or held, device)
    backend.copy_all(whole_copies(padded, blocks, gather, mesh.coordinate))
    return whole_view(padded, gather, mesh.coordinate)


def scatter_whole(whole: Tensor, gather: Gather, purpose: Purpose, dtype: str, divisor: int = 1) -> Tensor:
    """Returns this rank's block of the sum of all `whole` over ``gather.axes``. A new flat tensor. See Note [Scale].

    Communication: a reduce-scatter.
    """
    channel = comm(gather.layout.mesh, gather.axes, purpose)
    backend = channel.backend
    part = backend.empty((channel.size, block_numel(gather)), dtype, backend.device_of(whole))
    early = divisor if sums_overflow(dtype) else 1
    backend.copy(*gradient_copy(backend, part, backend.detach(whole), gather, early))
    return channel.reduce_scatter(part) if channel.size > 1 else part.reshape(-1)


def finish_block(
    block: Tensor, gather: Gather, axes: tuple[str, ...], purpose: Purpose, reduce_dtype: str, divisor: int, dtype: str
) -> Tensor:
    """Returns this rank's part of the sum over `axes` of a block of `scatter_whole`, divided. May divide `block`.

    Communication: an all-reduce.
    """
    mesh = gather.layout.mesh
    channel = comm(mesh, axes, purpose)
    if channel.size > 1:
        block = channel.all_reduce(channel.backend.cast(block, reduce_dtype))
    if divisor != 1 and not sums_overflow(reduce_dtype):
        channel.backend.divide(block, divisor)
    return local_view(channel.backend.cast(block, dtype), gather, mesh.coordinate)


def reduce_whole(whole: Tensor, gather: Gather, reduce_axes: tuple[str, ...]) -> Tensor:
    """Returns this rank's part of the sum of all `whole`. A new tensor.

    Communication: a reduce-scatter over ``gather.axes``, an all-reduce over `reduce_axes`.
    """
    dtype = comm(gather.layout.mesh, gather.axes, "user").backend.dtype_name(whole)
    block = scatter_whole(whole, gather, "user", dtype)
    return finish_block(block, gather, reduce_axes, "user", dtype, 1, dtype)


# Note [Scale]
# The mean is a sum and one explicit division, never the library's own average. In float16 a sum over many ranks
# overflows, so the division comes before the sum, when gradients are packed. In every other dtype it comes after the
# sum, where it costs one pass over 1/n of the elements.
