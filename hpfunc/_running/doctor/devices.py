"""Rows of accelerators: which there are, which this process may see, and which one it would use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from .diagnosis import Row
from .facts import Device, Facts, shown

_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
_VISIBLE_NPUS = "https://www.hiascend.com/document/detail/en/canncommercial/800/apiref/envvar/envref_07_0028.html"


def visible(value: str | None, devices: Sequence[Device], *, ascending: bool = False) -> tuple[list[int], str]:
    """Returns which devices a process sees, and what of the variable is not read.

    Both libraries read the list up to the first entry that they do not know.

    Args:
        value: the variable's value; None: it is not set, and all devices are seen.
        devices: those of the machine.
        ascending: whether the library wants numbers in ascending order, and no letter or space between them.

    >>> visible("1,7,0", [Device("A"), Device("A")])
    ([1], '7,0')
    """
    if value is None:
        return list(range(len(devices))), ""
    found: list[int] = []
    entries = value.split(",") if value.strip() else []
    for place, entry in enumerate(entries):
        number = _place(entry if ascending else entry.strip(), devices)
        if number is None or number in found or (ascending and found and number < found[-1]):
            return found, ",".join(entries[place:])
        found.append(number)
    return found, ""


def _place(entry: str, devices: Sequence[Device]) -> int | None:
    if entry.isascii() and entry.isdigit() and len(entry) < 6:
        return int(entry) if int(entry) < len(devices) else None
    matches = [
        place for place, device in enumerate(devices) if entry.startswith("GPU-") and device.uuid.startswith(entry)
    ]
    return matches[0] if len(matches) == 1 else None


def seen_devices(facts: Facts) -> list[Device] | None:
    """Returns the devices that this process sees, in the order in which it counts them; None if that is not known."""
    if not facts.accelerator:
        return []
    devices = {"cuda": facts.gpus, "npu": facts.npus}.get(facts.accelerator)
    if devices is None:
        return None
    value = facts.env.get(_VISIBLE[facts.accelerator])
    if facts.accelerator == "cuda" and value and "MIG-" in value:
        return None  # parts of a GPU: only CUDA itself can count them
    return [devices[place] for place in visible(value, devices, ascending=facts.accelerator == "npu")[0]]


def own_device(facts: Facts) -> Device | None:
    """Returns the device that this process would use, if it is known."""
    seen, place = seen_devices(facts), facts.number("LOCAL_RANK") or 0
    return seen[place] if seen and 0 <= place < len(seen) else None


def device_rows(facts: Facts) -> Iterator[Row]:
    """Yields the devices of the machine, what is wrong with how they are made visible, and this process's own."""
    yield from _unused(facts)
    if not facts.accelerator:
        yield Row("device", "cpu")
        return
    if facts.accelerator not in _VISIBLE:
        value = f"{facts.accelerator}:{facts.number('LOCAL_RANK') or 0}"
        remedy = "compare results with a CPU first: make_mesh(..., device='cpu')"
        yield Row("device", f"{value}; hpfunc is written for cuda and npu", "warn", remedy)
        return
    seen = seen_devices(facts)
    yield from _visibility(facts)
    if seen is None:
        yield from _uncounted(facts)
    elif not seen:
        yield Row("device", "cpu: no device is visible to this process")
    else:
        yield Row("devices", _counted(seen))
        yield from _own(facts, seen)


def _counted(devices: Sequence[Device]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in Counter(device.name for device in devices).items())


def _unused(facts: Facts) -> Iterator[Row]:
    loads = facts.used in facts.backends and facts.backends[facts.used].state == "loads"
    if facts.gpus and loads and facts.used == "torch" and not facts.accelerator:
        value = f"{_counted(facts.gpus)}, but this build of torch knows no CUDA"
        remedy = "install a build of torch for CUDA: see https://pytorch.org/get-started"
        yield Row("GPUs", value, "warn", remedy)
    if facts.npus and loads and facts.accelerator != "npu":
        value = f"{_counted(facts.npus)}, but the backend {facts.used} does not use them"
        remedy = "set HPFUNC_BACKEND=torch_npu or mindspore; pip install 'hpfunc[npu]' or 'hpfunc[mindspore]'"
        yield Row("NPUs", value, "warn", remedy)


def _visibility(facts: Facts) -> Iterator[Row]:
    name = _VISIBLE[facts.accelerator]
    if name not in facts.env:
        return
    devices, on_npu = facts.gpus if facts.accelerator == "cuda" else facts.npus, facts.accelerator == "npu"
    value = facts.env[name]
    _, rest = visible(value, devices, ascending=on_npu) if devices is not None and "MIG-" not in value else ([], "")
    if rest and rest != "-1":
        order = "ascending numbers with nothing but commas between them" if on_npu else "numbers of devices that exist"
        remedy = f"list {order}, or unset it"
        value = f"{shown(value)}: {shown(rest)} is not read"
        yield Row(name, value, "warn", remedy, _VISIBLE_NPUS if on_npu else "")
    else:
        yield Row(name, shown(value))


def _uncounted(facts: Facts) -> Iterator[Row]:
    place = facts.number("LOCAL_RANK") or 0
    if facts.gpus is None:
        value = f"cuda:{place}; there is no NVML, so that devices cannot be counted before CUDA starts"
        remedy = "give the container NVIDIA_DRIVER_CAPABILITIES=compute,utility; look at torch.cuda.device_count()"
        yield Row("device", value, "warn", remedy)
    else:
        yield Row("device", f"cuda:{place}; it is a part of a GPU, which only CUDA counts")


def _own(facts: Facts, seen: Sequence[Device]) -> Iterator[Row]:
    kind, place, count = facts.accelerator, facts.number("LOCAL_RANK"), len(seen)
    if place is not None and not 0 <= place < count:
        value = f"LOCAL_RANK={place}, but {count} {kind} device{'s are' if count > 1 else ' is'} visible"
        remedy = f"let each process see all devices of its machine, or start {count} per machine"
        yield Row("device", value, "wrong", remedy)
    else:
        yield Row("device", f"{kind}:{place or 0}, {seen[place or 0].name}")
    if facts.num_local_ranks > count:
        value = f"{facts.num_local_ranks} ranks on this machine, {count} visible"
        yield Row(
            "ranks and devices", value, "wrong", f"start {count} processes on it: torchrun --nproc-per-node {count}"
        )
    if place is None and facts.num_ranks > 1 and count > 1:
        value = f"LOCAL_RANK is not set: every process of this machine uses {kind}:0"
        yield Row("LOCAL_RANK", value, "warn", "set it to the number of the process on its machine, as torchrun does")
