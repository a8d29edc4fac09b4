"""What hpfunc asks of a framework: one small typed protocol, implemented once per framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from .foreach import Foreach
from .unit_use import Tape, UnitUse

Tensor = Any
Group = Any
Collective = Literal["all_gather", "reduce_scatter", "all_to_all", "all_reduce"]
Purpose = Literal["gather", "reduce_scatter", "all_reduce", "user", "control"]


@dataclass(slots=True)
class Counters:
    """What this process has sent, copied and waited for.

    Attributes:
        bytes_sent: per kind of collective, bytes that leave this rank if each message is sent once.
        collectives: per kind, how many were launched.
        bytes_copied: bytes that the runtime copied on this rank (packing, casts, sums of received parts).
        wait_s: seconds in which the host was blocked in a wait (CPU) or issued waits (devices).
    """

    bytes_sent: dict[str, int] = field(default_factory=dict)
    collectives: dict[str, int] = field(default_factory=dict)
    bytes_copied: int = 0
    wait_s: float = 0.0

    def copy(self) -> Counters:
        """Returns a snapshot."""
        return Counters(dict(self.bytes_sent), dict(self.collectives), self.bytes_copied, self.wait_s)

    def since(self, earlier: Counters) -> Counters:
        """Returns what was counted after `earlier` was taken."""
        kinds = [kind for kind, n in self.collectives.items() if n > earlier.collectives.get(kind, 0)]
        return Counters(
            {kind: self.bytes_sent[kind] - earlier.bytes_sent.get(kind, 0) for kind in kinds},
            {kind: self.collectives[kind] - earlier.collectives.get(kind, 0) for kind in kinds},
            self.bytes_copied - earlier.bytes_copied,
            self.wait_s - earlier.wait_s,
        )

    def count_launch(self, collective: Collective, num_bytes: int, size: int) -> None:
        """Counts one collective of a group of this size, to which each rank gives this many bytes."""
        share = {"all_gather": size - 1, "all_reduce": 2 * (size - 1) / size}.get(collective, (size - 1) / size)
        self.count(collective, int(num_bytes * share))

    def count(self, collective: str, num_bytes: int) -> None:
        """Counts one collective that sends this many bytes."""
        self.bytes_sent[collective] = self.bytes_sent.get(collective, 0) + num_bytes
        self.collectives[collective] = self.collectives.get(collective, 0) + 1


@dataclass(frozen=True, slots=True)
class Job:
    """The processes that were started together."""

    rank: int
    size: int
    device: str


Poll = Callable[[str, float | Exception], None]
"""Called while the host waits, with a label of the wait and its seconds so far, or the error of the framework that has
ended it. May raise to end the wait."""


class Mark(Protocol):
    """A moment: the beginning or the end of some work."""

    def seconds_after(self, earlier: Any) -> float:
        """Waits on the host until the moment has come, and returns the seconds since an earlier mark."""
        ...


class Pending(Protocol):
    """Issued work: on a CPU a collective in flight, on a device a point on a stream."""

    label: str

    @property
    def begun(self) -> Mark:
        """The beginning of timed work; of a collective on a CPU, its launch."""
        ...

    @property
    def completed(self) -> Mark:
        """The end of timed work."""
        ...


class Streams(Protocol):
    """Where work runs: four streams by name. ``"compute"`` is the caller's own stream."""

    def issue(
        self,
        label: str,
        stream: str,
        waits: Iterable[Any],
        work: Callable[[], Sequence[Any] | None],
        poll: Poll,
        *,
        is_awaited: bool = True,
        is_timed: bool = False,
    ) -> Pending:
        """Runs `work` on a stream, after `waits`. If it launches collectives, it returns those to wait for, else None.

        `is_awaited` says whether later work waits for it. With `is_timed` the result has times.
        """
        ...

    def mark(self) -> Mark:
        """Returns the present moment of the compute stream."""
        ...

    def wait(self, pending: Any, poll: Poll) -> None:
        """Makes the compute stream wait."""
        ...

    def runs_at_once(self) -> bool:
        """Returns whether local work is complete when its call returns, so that `issue` is not needed for it."""
        ...

    def memory(self, stream: str) -> AbstractContextManager[Any]:
        """Returns a context in which tensors are allocated out of the memory of a stream."""
        ...


class Processes(Protocol):
    """Processes and their groups."""

    def join(self, timeout_s: float, device: str | None = None) -> Job:
        """Returns the world that exists, else starts it from the launcher's environment, else a world of one."""
        ...

    def group(self, ranks: tuple[int, ...], purpose: Purpose, device: str, timeout_s: float) -> Group:
        """Returns the communicator of these ranks for this purpose; made on first use."""
        ...

    def abort(self) -> None:
        """Gives up every communicator; the next `group` makes new ones."""
        ...

    def fail(self) -> None:
        """A step of this process has failed. A device that waits for a peer gives up, because no host waits for it."""
        ...

    def post(self, key: str, text: str) -> None:
        """Writes a note on the status board that all processes see."""
        ...

    def read(self, keys: Sequence[str]) -> dict[str, str]:
        """Returns those notes that exist."""
        ...

    def exchange(self, group: Group, numbers: Sequence[int], label: str, poll: Poll) -> list[list[int]]:
        """Returns the numbers of every rank of a control group."""
        ...

    def exchange_text(self, group: Group, text: str) -> list[str]:
        """Returns the text of every rank of a control group."""
        ...


class Memory(Protocol):
    """Tensors. They are opaque outside of a backend, but for `shape`, `reshape`, `permute`, slicing and arithmetic.

    The caller's tensors and the runtime's own may be of two types: where a framework cannot write into a part of a
    tensor, the runtime's buffers have another type. `detach`, `contiguous` and `empty` return the runtime's type,
    `give` returns the caller's, `is_tensor` is True for the caller's. All other methods take both.
    """

    def is_tensor(self, value: Any) -> bool:
        """Returns whether a value is a tensor of this framework."""
        ...

    def is_abstract(self, value: Any) -> bool:
        """Returns whether a tensor has a shape only (see `abstract`)."""
        ...

    def trains(self, tensor: Tensor) -> bool | None:
        """Returns whether the caller wants a tensor to be trained; None if the tensor does not tell.

        True for a tensor that requires a gradient, False for a parameter that does not, None for any other tensor.
        """
        ...

    def device_of(self, tensor: Tensor) -> str:
        """Returns the device name of a tensor."""
        ...

    def dtype_name(self, tensor: Tensor) -> str:
        """Returns ``"float32"`` and the like."""
        ...

    def is_floating(self, dtype: str) -> bool:
        """Returns whether a dtype is a real floating-point dtype."""
        ...

    def empty(self, shape: Sequence[int], dtype: str, device: str, *, zero: bool = False) -> Tensor:
        """Returns a new tensor."""
        ...

    def detach(self, tensor: Tensor) -> Tensor:
        """Returns a tensor of the runtime's type in the same memory, without autograd history."""
        ...

    def give(self, tensor: Tensor) -> Tensor:
        """Returns a tensor of the caller's type in the same memory."""
        ...

    def contiguous(self, tensor: Tensor) -> Tensor:
        """Returns the tensor, or a contiguous copy, whose bytes are counted."""
        ...

    def adopt(self, gradient: Tensor) -> Tensor | None:
        """Returns a gradient from `UnitUse.after_backward` as flat, writable memory; None: it has to be copied."""
        ...

    def digest(self, tensor: Tensor) -> int:
        """Returns a number of 56 bits that depends on all bits of the elements, in order, and on nothing else."""
        ...

    def num_writes(self, tensor: Tensor) -> int | None:
        """Returns how often the memory of a caller's tensor was written to; None if the framework does not count it."""
        ...

    def copy(self, target: Tensor, source: Tensor, divisor: int = 1) -> None:
        """Writes ``source / divisor`` into `target`, cast; counts the bytes."""
        ...

    def copy_all(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Writes the second tensor of each pair into the first, cast, in few operators; counts the bytes."""
        ...

    def fill(self, target: Tensor, value: float) -> None:
        """Writes one value everywhere."""
        ...

    def sum_parts(self, target: Tensor, parts: Sequence[Tensor]) -> None:
        """Writes the sum of `parts`, added in that order, into `target`."""
        ...

    def add(self, left: Tensor, right: Tensor, dtype: str) -> Tensor:
        """Returns a new, contiguous sum. Both tensors are cast to `dtype` first."""
        ...

    def accumulate(self, target: Tensor, source: Tensor) -> None:
        """Adds `source` to `target` in place. It is cast to the dtype of `target` first."""
        ...

    def cast(self, tensor: Tensor, dtype: str) -> Tensor:
        """Returns the tensor in another dtype, differentiably; the tensor itself if it has that dtype."""
        ...

    def divide(self, tensor: Tensor, divisor: int) -> None:
        """Divides in place."""
        ...

    def to_bytes(self, tensor: Tensor, *, copy: bool) -> Any:
        """Returns the elements in row-major order, a flat numpy array of bytes.

        Without `copy` they may share the memory of the tensor.
        """
        ...

    def from_bytes(self, data: Any, shape: Sequence[int], dtype: str, device: str) -> Tensor:
        """Returns a tensor with the elements in a numpy array of bytes; on a CPU it may keep their memory."""
        ...

    def as_tensor(self, value: Any) -> Tensor:
        """Returns a tensor in the memory of a value, which is a tensor or supports DLPack.

        Raises:
            AttributeError, BufferError, RuntimeError, TypeError: its memory cannot be shared.
        """
        ...

    def as_numpy(self, tensor: Tensor) -> Any:
        """Returns a numpy array in the memory of a tensor.

        Raises:
            TypeError: numpy does not know the dtype, or the tensor lies on a device.
        """
        ...


class Communication(Protocol):
    """Collectives."""

    def ordered_sums(self, device: str) -> bool:
        """Returns whether hpfunc itself computes reductions on this device, as sums in rank order."""
        ...

    def communicators(self, device: str) -> int | None:
        """Returns how many collectives of different groups may be in flight at one time; None for any number."""
        ...

    def streams(self, device: str) -> Streams:
        """Returns the streams of a device."""
        ...

    def launch(
        self, collective: Collective, group: Group, sends: Sequence[Tensor], receives: Sequence[Tensor]
    ) -> Sequence[Any]:
        """Starts collectives into given, contiguous outputs; see `Launch` in the schedule for shapes."""
        ...

    def broadcast(self, group: Group, tensor: Tensor, source: int) -> Sequence[Any]:
        """Starts a broadcast in place; the source is an index in the group."""
        ...

    def permute(
        self, group: Group, send: Tensor, receive: Tensor, target: int | None, source: int | None
    ) -> Sequence[Any]:
        """Starts a send to and a receive from indices in the group (None: nothing). All its ranks call this."""
        ...


class Differentiation(Protocol):
    """Everything that differs between the frameworks' autograd systems."""

    def register(self, array_type: type, flatten: Callable[..., Any], unflatten: Callable[..., Any]) -> None:
        """Makes a type known to the framework's own pytrees, so that its transforms accept it."""
        ...

    def tape(self, device: str) -> Tape:
        """Returns a tape for one differentiation."""
        ...

    def linear(
        self, forward: Callable[[Tensor], Tensor], transpose: Callable[[Tensor], Tensor] | None, x: Tensor
    ) -> Tensor:
        """Returns ``forward(x)``, a linear map with this transpose, differentiable any number of times.

        If `transpose` is None, the map may not be differentiated.
        """
        ...

    def is_transformed(self, tensors: Iterable[Tensor]) -> bool:
        """Returns whether an outer transform differentiates or maps these tensors (leaf form is needed)."""
        ...

    def use_plain(
        self, fn: Callable[..., Any], wholes: Sequence[Tensor], use: UnitUse, *args: Any, **kwargs: Any
    ) -> Any:
        """Calls ``fn(wholes, ...)`` without differentiation. Refuses escapes of, and writes into, the weights."""
        ...

    def ordinary(self) -> AbstractContextManager[Callable[[Any], Any] | None]:
        """Returns a context in which new tensors may be differentiated later, whatever mode the caller has set.

        It yields the map from the caller's leaves to such tensors in the same memory; None if no leaf needs it.
        """
        ...

    def leave_alone(self, fn: Callable[..., Any]) -> None:
        """Makes the framework's compiler call a function, and everything that it calls, uncompiled."""
        ...

    def abstract(self) -> AbstractContextManager[Callable[[Any], Any]]:
        """Returns a context in which operators only compute shapes; it yields the map from tensors to abstract ones."""
        ...

    def deferred(self, init_fn: Callable[[], Any], prepare: Callable[[Any], Callable[[int, Tensor], Any]]) -> Any:
        """Returns ``init_fn()`` with ``keep(index, leaf)`` for each leaf, one leaf whole at a time.

        ``keep = prepare(tree)`` is made from the tree without data.
        """
        ...


class Randomness(Protocol):
    """The framework's global random generators."""

    def random_states(self, device: str) -> list[bytes]:
        """Returns the states of the host's and the device's generators; empty if they cannot be read."""
        ...

    def set_random_state(self, device: str, place: int, state: bytes) -> None:
        """Sets the state at a place of that list."""
        ...


class Backend(Processes, Memory, Communication, Differentiation, Randomness, Protocol):
    """A framework."""

    name: str
    counters: Counters

    @property
    def foreach(self) -> Foreach:
        """Arithmetic on lists of tensors, for optimizers."""
        ...
