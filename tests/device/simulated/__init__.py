"""A simulated accelerator for torch: wrong if a wait is missing, and it says so.

To torch it is a device like CUDA, with streams, events, a caching allocator and a process group. Its operators are
those of the CPU, run by one thread for each stream. It needs no hardware, and shows what hardware hides:

- memory that nobody has written is NaN, and memory that is freed is given out again at once;
- two accesses to the same bytes that no wait orders are reported as a race, whatever the timing was;
- streams can be made slow one by one, and faults injected (`FAULTS`);
- each wait of the host for the device is counted, and can be made an error.

    from tests.device import simulated

    device = simulated.load(simulated.build())   # once in a process, before anything asks torch for an accelerator
    x = torch.ones(3, device=simulated.NAME)
    device.races()                               # []

A process that has loaded it has an accelerator for good, so tests load it in processes of their own: see
`tests.device.harness`.
"""

import os

from .build import Unavailable as Unavailable
from .build import build as build

# What torch calls the device. With ``SIM_NAME=npu`` all tests run under the name of Ascend's.
NAME = os.environ.get("SIM_NAME", "sim")

# What `device.set_fault(name, every)` can make wrong at every n-th occasion.
FAULTS = {
    "forgotten_event_wait": "a stream does not wait for an event",
    "forgotten_work_wait": "Work.wait() lets the current stream go on before the collective has ended",
    "ignored_record_stream": "memory is handed back though a stream named by record_stream still uses it",
    "early_reuse": "memory freed on one stream is given to another one, which does not wait",
    "early_collective": "a collective does not wait until the current stream has written its input",
    "unsynchronized_read": "item() and copies to the host do not wait for the device",
    "failed_communicator": "a communicator gives up, as after the failure of a link",
}


def load(library: object) -> object:
    """Registers the device with torch, by its `NAME`; see `tests.device.simulated.module.load`."""
    from .module import load

    return load(library, NAME)
