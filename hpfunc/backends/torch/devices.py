"""Which device a process computes on."""

from __future__ import annotations

import os

import torch

from ..._errors import MeshError, message

_NAME = "hpfunc.make_mesh"


def choose_device(wanted: str | None) -> str:
    """Returns the device of this process, with its index, and makes an accelerator the current device of torch.

    Args:
        wanted: ``"cpu"``, a kind (``"cuda"``), a device (``"cuda:1"``), or None for the accelerator if there is one.
            Without an index it is the current device if the caller has set one other than the first, else the device
            number ``LOCAL_RANK`` of the visible ones, counted round: launchers that show each process one device of
            its own give it number 0.

    Raises:
        MeshError: the process has no such device, or there are more processes on this machine than devices.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = wanted.partition(":")[0] if wanted else accelerator.type if accelerator else "cpu"
    if kind == "cpu":
        return "cpu"
    if accelerator is None or kind != accelerator.type:
        found = f"{accelerator.type!r} and 'cpu'" if accelerator else "'cpu'"
        raise MeshError(message(_NAME, f"the mesh asks for {wanted!r}, but this process has {found} only"))
    count = torch.accelerator.device_count()
    index = _index(wanted, kind, count) if wanted and ":" in wanted else _default_index(kind, count)
    torch.accelerator.set_device_index(index)
    return f"{kind}:{index}"


def _index(wanted: str, kind: str, count: int) -> int:
    text = wanted.partition(":")[2]
    if not text.isdecimal() or int(text) >= count:
        rule = f"the mesh asks for {wanted!r}, but the devices of this process are {kind}:0 to {kind}:{count - 1}"
        raise MeshError(message(_NAME, rule, hint="an index counts the visible devices"))
    return int(text)


def _default_index(kind: str, count: int) -> int:
    current = torch.accelerator.current_device_index()
    if current:
        return current
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if 1 < count < ranks:
        rule = f"{ranks} processes run on this machine, but it has {count} devices of kind {kind!r}"
        hint = "start as many processes as there are devices, or give make_mesh(device=...) in each of them"
        raise MeshError(message(_NAME, rule, hint=hint))
    return int(os.environ.get("LOCAL_RANK", "0")) % count
