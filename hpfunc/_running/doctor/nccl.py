"""Rows of NCCL: versions and settings that are known to do harm, each with the page that says so.

What is not written down by those who make or ship NCCL has no place here. To add a version: a line in `KNOWN`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...backends.versions import Version, dotted
from .devices import seen_devices
from .diagnosis import Row, Verdict
from .facts import UNLIMITED, Facts, shown

_GUIDE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/"
_SETTINGS = _GUIDE + "env.html"
_RUNTIME = _GUIDE + "troubleshooting/runtime_and_mpi_issues.html"
_OVERLAPS: Version = (12, 3)  # the first CUDA with which the order costs no overlap
_DEBUGGING = {
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_CHECKS_DISABLE",
    "NCCL_CHECK_POINTERS",
    "NCCL_IB_DISABLE",
    "NCCL_LAUNCH_MODE",
    "NCCL_LL_THRESHOLD",
    "NCCL_MAX_CTAS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NTHREADS",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_PROTO",
    "NCCL_SHM_DISABLE",
    "NCCL_TREE_THRESHOLD",
}
"""Some of the variables that the guide lists under "Debugging": not for production."""
_SWITCHED_OFF = {
    "NCCL_P2P_DISABLE": "GPUs do not copy to each other",
    "NCCL_SHM_DISABLE": "GPUs of a machine that cannot copy to each other talk over the network",
    "NCCL_IB_DISABLE": "machines talk over IP sockets, not over InfiniBand or RoCE",
}


@dataclass(frozen=True, slots=True)
class Known:
    """A fault of some versions of NCCL: from `first` on, before `fixed`, on one kind of processor or on all."""

    fixed: Version
    harm: str
    source: str
    verdict: Verdict = "warn"
    first: Version = ()
    machine: str = ""

    def holds(self, version: Version, machine: str) -> bool:
        """Returns whether a version on a processor has the fault."""
        return self.first <= version < self.fixed and self.machine in ("", machine)


KNOWN = (
    Known(
        (2, 29, 3),
        "on ARM a job can hang without a message, because places in a queue get lost",
        "https://github.com/NVIDIA/nccl/issues/2353",
        verdict="wrong",
        machine="aarch64",
    ),
    Known(
        (2, 29, 3),
        "2.29.2 hangs where earlier versions do not; torch skipped it",
        "https://github.com/pytorch/pytorch/pull/174338",
        verdict="wrong",
        first=(2, 29, 2),
    ),
    Known(
        (2, 28, 9),
        "two threads of NCCL can put operations in different orders, and large jobs hang",
        "https://github.com/NVIDIA/nccl/releases/tag/v2.28.9-1",
        first=(2, 28),
    ),
    Known(
        (2, 26, 2),
        "giving up a communicator after a failure can hang, and hpfunc does that when a rank fails",
        "https://github.com/pytorch/pytorch/issues/149153",
        first=(2, 25),
    ),
)


def nccl_rows(facts: Facts) -> Iterator[Row]:
    """Yields rows for a process that would use NCCL; none for any other."""
    if facts.accelerator != "cuda" or seen_devices(facts) == []:
        return
    if facts.nccl is None:
        verdict: Verdict = "wrong" if facts.num_ranks > 1 else "warn"
        yield Row("NCCL", "this build of torch has none", verdict, "install a build of torch with NCCL")
        return
    yield Row("NCCL", dotted(facts.nccl))
    for known in KNOWN:
        if known.holds(facts.nccl, facts.machine):
            remedy = f"use NCCL {dotted(known.fixed)} or newer: a newer torch, or the nvidia-nccl package of its CUDA"
            yield Row(f"NCCL {dotted(facts.nccl)}", known.harm, known.verdict, remedy, known.source)
    yield from _driver(facts)
    yield from _settings(facts)
    yield from _stack(facts)
    yield from _locked(facts)


def is_on(facts: Facts, name: str) -> bool:
    """Returns whether a variable of the kind 0 or 1 is set to anything but 0."""
    return facts.env.get(name, "").strip().lower() not in ("", "0", "false", "no", "n", "off")


def _driver(facts: Facts) -> Iterator[Row]:
    if facts.driver_cuda is None:
        return
    value = f"CUDA {dotted(facts.driver_cuda)}"
    if facts.driver_cuda < _OVERLAPS and is_on(facts, "NCCL_LAUNCH_ORDER_IMPLICIT"):
        value += ": NCCL runs the operations of different communicators one after the other"
        yield Row(
            "driver", value, "warn", f"a driver for CUDA {dotted(_OVERLAPS)} or newer lets them overlap", _SETTINGS
        )
    else:
        yield Row("driver", value)


def _settings(facts: Facts) -> Iterator[Row]:
    for name in sorted(_DEBUGGING & set(facts.env)):
        if name in _SWITCHED_OFF and not is_on(facts, name):
            continue
        harm = _SWITCHED_OFF.get(name, "NCCL cannot choose the best by itself")
        remedy = f"unset {name}, unless it works around a fault: it is a setting for debugging"
        yield Row(name, f"{shown(facts.env[name])}: {harm}", "warn", remedy, _SETTINGS)
    if is_on(facts, "TORCH_NCCL_USE_COMM_NONBLOCKING") and facts.nccl and (2, 26) <= facts.nccl < (2, 27):
        value = f"{shown(facts.env['TORCH_NCCL_USE_COMM_NONBLOCKING'])}: NCCL 2.26 hangs at random in this mode"
        source = "https://github.com/pytorch/pytorch/pull/154055"
        yield Row("TORCH_NCCL_USE_COMM_NONBLOCKING", value, "wrong", "unset it", source)


def _stack(facts: Facts) -> Iterator[Row]:
    if facts.stack_bytes is not None and facts.stack_bytes >= UNLIMITED and facts.nccl and facts.nccl < (2, 28):
        value = "unlimited: threads of NCCL then get 2 MiB, and may crash"
        yield Row("stack", value, "warn", "ulimit -s 8192 before the job starts, on all machines", _RUNTIME)


def _locked(facts: Facts) -> Iterator[Row]:
    if facts.infiniband and facts.locked_bytes is not None and facts.locked_bytes < UNLIMITED:
        value = f"{facts.locked_bytes >> 10} KiB, but {', '.join(facts.infiniband)} needs memory that is locked"
        yield Row("locked memory", value, "warn", "ulimit -l unlimited; docker run --ulimit memlock=-1", _RUNTIME)


def wait_rows(facts: Facts) -> Iterator[Row]:
    """Yields rows for settings with which nothing on an accelerator overlaps."""
    if not facts.accelerator:
        return
    if facts.accelerator == "cuda":
        yield from _waits_on_cuda(facts)
    if facts.accelerator == "npu" and is_on(facts, "ASCEND_LAUNCH_BLOCKING"):
        source = "https://www.hiascend.com/document/detail/zh/Pytorch/720/comref/Envvariables/Envir_006.html"
        yield Row(
            "ASCEND_LAUNCH_BLOCKING", "1: every operator is awaited, and nothing overlaps", "warn", "unset it", source
        )


def _waits_on_cuda(facts: Facts) -> Iterator[Row]:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if facts.number(name) == 1:
        value = "1: kernels start in the order of their launch, so that gathers and reductions wait for compute"
        source = "https://github.com/pytorch/torchtitan/issues/1147"
        yield Row(name, value, "warn", "unset it, or set it to 16 or 32", source)
    if is_on(facts, "CUDA_LAUNCH_BLOCKING"):
        value = "1: every kernel is awaited, and nothing overlaps"
        source = "https://discuss.pytorch.org/t/cuda-launch-blocking-1-reduces-the-training-speed/160924"
        yield Row("CUDA_LAUNCH_BLOCKING", value, "warn", "unset it", source)
    if is_on(facts, "TORCH_NCCL_BLOCKING_WAIT"):
        value = f"{shown(facts.env['TORCH_NCCL_BLOCKING_WAIT'])}: the host stops at every wait for a collective"
        source = "https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html"
        yield Row("TORCH_NCCL_BLOCKING_WAIT", value, "warn", "unset it", source)
