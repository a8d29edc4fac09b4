"""What hpfunc asks of a framework: one small typed protocol, implemented once per framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Tensor = Any
Group = Any
Collective = Literal["all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast", "permute"]
Purpose = Literal["gather", "reduce_scatter", "all_reduce", "user", "control"]


@dataclass(slots=True)
class Counters:
    """What this process has sent, copied and waited for.

    Attributes:
        bytes_sent: per kind of collective, bytes that leave this rank when each message goes out once.
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
        return Counters(
            {kind: n - earlier.bytes_sent.get(kind, 0) for kind, n in self.bytes_sent.items()},
            {kind: n - earlier.collectives.get(kind, 0) for kind, n in self.collectives.items()},
            self.bytes_copied - earlier.bytes_copied,
            self.wait_s - earlier.wait_s,
        )

    def count(self, collective: str, num_bytes: int) -> None:
        """Counts one collective that sends this many bytes."""
        self.bytes_sent[collective] = self.bytes_sent.get(collective, 0) + num_bytes
        self.collectives[collective] = self.collectives.get(collective, 0) + 1


@dataclass(frozen=True, slots=True)
class World:
    """The processes that were started together."""

    rank: int
    size: int
    device: str


class Pending(Protocol):
    """Work that was issued: on a CPU a collective in flight, on a device an event on a stream."""

    label: str


class UnitUse(Protocol):
    """One call of a unit, as the framework's VJP nodes see it."""

    trainable: tuple[bool, ...]
    needs_backward: bool

    def before_forward(self) -> list[Tensor]:
        """Returns the whole weights."""
        ...

    def wholes(self) -> list[Tensor]:
        """Returns the whole weights again, in backward."""
        ...

    def before_backward(self) -> None:
        """Called before the backward of the unit's own operations."""
        ...

    def after_backward(self, gradients: Sequence[Tensor | None]) -> None:
        """Called after it, with the gradient of every weight (None: no path to the loss)."""
        ...


class Tape(Protocol):
    """What one differentiation needs of the framework: the anchor, the gates' tokens and the leaves."""

    def leaf(self, local: Tensor) -> Tensor:
        """Returns an alias of `local` whose uses are differentiated."""
        ...

    def use_unit(self, fn: Callable[..., Any], use: UnitUse, *args: Any, **kwargs: Any) -> Any:
        """Calls ``fn(whole weights, ...)`` so that its backward reports to `use`."""
        ...

    def backward(self, loss: Tensor) -> list[Tensor | None]:
        """Runs the backward and returns the gradient of each leaf, in the order of `leaf` calls."""
        ...


class Backend(Protocol):
    """A framework. Tensors are opaque outside of it, but for `shape`, `reshape`, `permute` and slicing."""

    name: str
    counters: Counters

    # --- processes -------------------------------------------------------------------------------------------------
    def join(self, timeout_s: float) -> World:
        """Returns the world that exists, else starts it from the launcher's environment, else a world of one."""
        ...

    def group(self, ranks: tuple[int, ...], purpose: Purpose, timeout_s: float) -> Group:
        """Returns the communicator of these ranks for this purpose; made on first use."""
        ...

    def abort(self) -> None:
        """Gives up every communicator; the next `group` makes new ones."""
        ...

    def post(self, key: str, text: str) -> None:
        """Writes a note on the status board that all processes see."""
        ...

    def read(self, keys: Sequence[str]) -> dict[str, str]:
        """Returns those notes that exist."""
        ...

    # --- tensors ---------------------------------------------------------------------------------------------------
    def is_tensor(self, value: Any) -> bool:
        """Returns whether a value is a tensor of this framework."""
        ...

    def device_of(self, tensor: Tensor) -> str:
        """Returns the device name of a tensor."""
        ...

    def dtype_name(self, tensor: Tensor) -> str:
        """Returns ``"float32"`` and the like."""
        ...

    def item_bytes(self, dtype: str) -> int:
        """Returns the bytes of one element."""
        ...

    def is_floating(self, dtype: str) -> bool:
        """Returns whether a dtype is a real floating one."""
        ...

    def empty(self, shape: Sequence[int], dtype: str, device: str, *, zero: bool = False) -> Tensor:
        """Returns a new tensor."""
        ...

    def detach(self, tensor: Tensor) -> Tensor:
        """Returns the same memory without its history."""
        ...

    def contiguous(self, tensor: Tensor) -> Tensor:
        """Returns the tensor, or a counted copy of it that is contiguous."""
        ...

    def copy(self, target: Tensor, source: Tensor, divisor: int = 1) -> None:
        """Writes ``source / divisor`` into `target`, cast; counts the bytes."""
        ...

    def sum_parts(self, target: Tensor, parts: Sequence[Tensor]) -> None:
        """Writes the sum of `parts`, added in that order, into `target`."""
        ...

    def add(self, left: Tensor, right: Tensor) -> Tensor:
        """Returns a new sum."""
        ...

    def divide(self, tensor: Tensor, divisor: int) -> None:
        """Divides in place."""
        ...

    # --- communication ---------------------------------------------------------------------------------------------
    def ordered_sums(self, device: str) -> bool:
        """Returns whether reductions on this device are sums in rank order that hpfunc does itself."""
        ...

    def issue(self, label: str, stream: str, waits: Iterable[Pending], work: Callable[[], Any], poll: Any) -> Pending:
        """Runs `work` on a stream after `waits`. `poll` is called while the host is blocked, and may raise."""
        ...

    def wait(self, pending: Pending, poll: Any) -> None:
        """Makes the caller's own computation wait for `pending`."""
        ...

    def launch(self, collective: Collective, group: Group, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> Any:
        """Starts collectives into given, contiguous outputs; what it returns goes through `issue`."""
        ...

    def permute(self, group: Group, send: Tensor, receive: Tensor, target: int | None, source: int | None) -> Any:
        """Starts a send to and a receive from places of the group (None: nothing)."""
        ...

    # --- differentiation -------------------------------------------------------------------------------------------
    def tape(self) -> Tape:
        """Returns what one differentiation needs."""
        ...

    def linear(self, forward: Callable[[Tensor], Tensor], transpose: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Returns ``forward(x)``, a linear map with this transpose, differentiable any number of times."""
        ...

    def is_transformed(self, tensors: Iterable[Tensor]) -> bool:
        """Returns whether an outer transform differentiates or maps these tensors (leaf form is needed)."""
        ...

    def use_plain(self, fn: Callable[..., Any], wholes: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        """Calls ``fn(wholes, ...)``, which is not differentiated, and refuses escapes and writes into the weights."""
        ...

    def abstract(self) -> AbstractContextManager[Callable[[Any], Any]]:
        """Returns a context in which operators only compute shapes; it yields the map from tensors to abstract ones."""
        ...

    def deferred(self, init_fn: Callable[[], Any], keep: Callable[[int, Tensor], Any]) -> Any:
        """Returns ``init_fn()`` with ``keep(index, leaf)`` for each leaf, with one leaf whole at a time."""
        ...
