"""torch's process groups of hpfunc: how they are made, named and given up."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..._errors import MeshError, message
from ..protocol import Purpose
from . import private

# Note [Small messages travel apart]
# gloo gives the ranks of a group one connection for each pair of them. A message of a few kilobytes that shares it with
# messages of megabytes waits behind their bytes before both sides have agreed to send it, and delays all later ones:
# on a link of 1 Gbit/s by 6 to 8 ms each, the time of a megabyte. In a group of its own it costs nothing.
# NCCL and HCCL send the messages of one launch together, so they need no second group.
SMALL_BYTES = 1 << 16

# Note [One device for each purpose]
# By default torch gives each gloo group a network device, with a thread that polls a hundred times a second as long as
# the process lives, even if the group was given up after a failure. So here all groups of a purpose share a device.
# torch passes options to registered backends only.
HOST = "hpfunc_gloo"

# Note [Names of groups]
# Ranks find each other by the name of their group. torch makes one of how many groups a process knows, which is not the
# same on all ranks of a group where the caller has groups, or meshes, that only some of them are in. So hpfunc names
# its groups: by their purpose, their ranks, and how many groups of these ranks and this purpose there were. All of its
# ranks know that, and no name comes again, so that a group does not meet the keys of one that was given up.

_DEVICE_TIMEOUT = 3
"""torch ends the process when a collective of a device takes longer than its timeout; `Watch` is to find it first."""
_SCHEDULED: tuple[Purpose, ...] = ("gather", "reduce_scatter", "all_reduce")

_gloo: Any = dist.ProcessGroupGloo  # whose type stubs lack some of its attributes
_devices: dict[str, list[Any]] = {}


class Groups:
    """The groups of this process. Each is made on first use, by its own ranks alone; all of them use it then."""

    def __init__(self) -> None:
        self._world: Any = None  # the default group for which these groups were made
        self._made: dict[tuple[object, ...], Any] = {}
        self._for_small: dict[Any, Any] = {}  # by group; see Note [Small messages travel apart]
        self._numbers = Counter[tuple[str, tuple[int, ...]]]()  # see Note [Names of groups]
        self._lock = threading.RLock()  # groups are made, or given up: `Watch` does the latter in its own thread

    def get(self, ranks: tuple[int, ...], purpose: Purpose, device: str, timeout_s: float) -> Any:
        """See `Backend.group`."""
        if not dist.is_initialized():
            raise MeshError(message("hpfunc", f"no process group is initialized, but ranks {ranks} must talk"))
        on_host = device == "cpu" or purpose == "control"
        key = (ranks, purpose, on_host, timeout_s)  # meshes over the same ranks may wait for different times
        with self._lock:
            self._forget_another_world()
            if key not in self._made:
                make = self._on_host if on_host else self._on_device
                self._made[key] = make(ranks, purpose, device, timeout_s)
            return self._made[key]

    def for_message(self, group: Any, nbytes: int) -> Any:
        """Returns the group by which a message of a group travels. See Note [Small messages travel apart]."""
        return self._for_small.get(group, group) if nbytes < SMALL_BYTES else group

    def abort(self) -> None:
        """Gives all groups up, whatever they are doing. They are made again on next use."""
        with self._lock:
            self._forget_another_world()
            groups = [*self._made.values(), *self._for_small.values()]
            self._made, self._for_small = {}, {}
            with private.aborting([library for group in groups for library in private.libraries_of(group)]):
                for group in groups:
                    group.abort()
            for group in groups:  # the threads of a group on the host end only when torch forgets it
                if private.knows_group(group) and dist.get_backend(group) == HOST:  # else the caller has ended it
                    dist.destroy_process_group(group)

    def failed(self) -> Exception | None:
        """Returns an error if the library of a device says that a group has lost a rank."""
        for group in [*self._made.values()]:
            for library in private.libraries_of(group):
                with suppress(AttributeError, RuntimeError):  # gloo and HCCL do not say
                    if (error := library.get_error().name) != "SUCCESS":
                        return RuntimeError(f"{error} of {group.group_desc}")
        return None

    def _forget_another_world(self) -> None:
        if self._world is not dist.group.WORLD:  # the caller has destroyed that one, and all groups with it
            self._world = dist.group.WORLD
            self._made, self._for_small = {}, {}
            self._numbers.clear()

    def _on_device(self, ranks: tuple[int, ...], purpose: str, device: str, timeout_s: float) -> Any:
        backend = dist.get_default_backend_for_device(device)
        group = self._new(ranks, purpose, backend, _DEVICE_TIMEOUT * timeout_s)
        # A library that connects the ranks in their first collective needs all of them there.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        return group

    def _on_host(self, ranks: tuple[int, ...], purpose: Purpose, device: str, timeout_s: float) -> Any:
        group = self._new(ranks, purpose, HOST, timeout_s, host_options(purpose, timeout_s))
        if purpose in _SCHEDULED:
            small = f"{purpose} small"
            self._for_small[group] = self._new(ranks, small, HOST, timeout_s, host_options(small, timeout_s))
        return group

    def _new(self, ranks: tuple[int, ...], purpose: str, backend: str, timeout_s: float, options: Any = None) -> Any:
        number = self._numbers[purpose, ranks]
        self._numbers[purpose, ranks] += 1
        return new_group(ranks, group_name(ranks, purpose, number), purpose, backend, timeout_s, options)


def group_name(ranks: Sequence[int], purpose: str, number: int) -> str:
    """Returns the name of a group: the same on all of its ranks. See Note [Names of groups]."""
    of_ranks = hashlib.sha256(" ".join(map(str, ranks)).encode()).hexdigest()[:16]
    return f"hpfunc/{'-'.join(purpose.split())}/{of_ranks}/{number}"


def new_group(
    ranks: Sequence[int], name: str, purpose: str, backend: str, timeout_s: float, options: Any = None
) -> Any:
    """Returns a new group of these ranks, which alone make it, under a name that they all give.

    As `torch.distributed.new_group` with ``use_local_synchronization=True, sort_ranks=False``, which takes no name.
    """
    ranks = list(ranks)
    place, timeout = ranks.index(dist.get_rank()), timedelta(seconds=timeout_s)
    with _unsplit():
        return private.new_group(ranks, place, name, f"hpfunc {purpose}", dist.Backend(backend), timeout, options)


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


dist.Backend.register_backend(HOST, _host_group, extended_api=True, devices=["cpu"])
