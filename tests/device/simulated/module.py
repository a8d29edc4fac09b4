"""Registers the device with torch: ``torch.sim``, with the functions that ``torch.cuda`` has, and a process group."""

from __future__ import annotations

import importlib.util
import types
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .build import MODULE

GROUP_BACKEND = "simulated"


def load(library: Path, name: str) -> Any:
    """Registers the device, and returns the compiled module, which has its settings and its findings.

    Args:
        library: the path that `build` returns.
        name: of the device.
    """
    torch.utils.rename_privateuse1_backend(name)
    spec = importlib.util.spec_from_file_location(MODULE, library)
    assert spec is not None
    assert spec.loader is not None
    device = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(device)
    torch._register_device_module(name, _device_module(name, device))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=False)
    dist.Backend.register_backend(GROUP_BACKEND, _group_on(device), extended_api=True, devices=[name])
    compiled: Any = torch._C
    if not hasattr(compiled._distributed_c10d.Backend, "get_error"):  # before 2.14 NCCL's own class has it

        def get_error(library: Any) -> Any:
            return device.get_error(library)

        compiled._distributed_c10d.Backend.get_error = get_error
    return device


def _group_on(device: Any) -> Any:
    def group(given: Any, options: Any) -> Any:
        transport = dist.ProcessGroupGloo(given.store, given.group_rank, given.group_size, given.timeout)
        return device.communicator(transport, given.group_rank, given.group_size)

    return group


def _device_module(name: str, device: Any) -> types.ModuleType:
    """Returns what ``torch.cuda`` is for CUDA: a module of functions, most of them torch's own for any accelerator."""
    accelerator, module = torch.accelerator, types.ModuleType(f"torch.{name}")
    attributes = {
        "Stream": _stream_class(name),
        "Event": partial(_event, name),
        "stream": _UseStream,
        "StreamContext": _UseStream,
        "device": _device_class(name),
        "current_stream": lambda device=None: accelerator.current_stream(device),
        "default_stream": lambda device=None: _default_stream(torch.device(device or name)),
        "set_stream": accelerator.set_stream,
        "synchronize": lambda device=None: accelerator.synchronize(device),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "device_count": device.num_devices,  # torch.accelerator asks this function
        "_initialized": True,  # checkpointing asks it before it restores random numbers
        "current_device": accelerator.current_device_index,
        "set_device": lambda device: accelerator.set_device_index(_index_of(device)),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "manual_seed": device.set_random_seed,
        "manual_seed_all": device.set_random_seed,
        "get_rng_state": lambda _=None: torch.frombuffer(bytearray(device.random_state()), dtype=torch.uint8),
        "set_rng_state": lambda state, _=None: device.set_random_state(bytes(state.cpu().numpy())),
    }
    for key, value in attributes.items():
        setattr(module, key, value)
    return module


def _index_of(device: Any) -> int:
    return device if isinstance(device, int) else torch.device(device).index or 0


def _default_stream(device: torch.device) -> torch.Stream:
    kind = torch.accelerator.current_stream(device).device_type
    return torch.Stream(stream_id=0, device_index=device.index or 0, device_type=kind)


def _stream_class(name: str) -> type[torch.Stream]:
    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Any:
            if "stream_id" in kwargs:  # a stream that exists
                return super().__new__(cls, **kwargs)
            return super().__new__(cls, device=torch.device(name if device is None else device), priority=priority)

    return Stream


def _event(name: str, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
    # No subclass: `elapsed_time` takes none.
    return torch.Event(name, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


class _UseStream:
    """Makes a stream the current one of its device."""

    def __init__(self, stream: torch.Stream) -> None:
        self.stream = stream

    def __enter__(self) -> torch.Stream:
        self.before = torch.accelerator.current_stream(self.stream.device)
        torch.accelerator.set_stream(self.stream)
        return self.stream

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_stream(self.before)


def _device_class(name: str) -> type:
    class UseDevice:
        """Makes a device the current one."""

        def __init__(self, device: Any) -> None:
            self.index = _index_of(device)

        def __enter__(self) -> None:
            self.before = torch.accelerator.current_device_index()
            torch.accelerator.set_device_index(self.index)

        def __exit__(self, *_: object) -> None:
            torch.accelerator.set_device_index(self.before)

    return UseDevice
