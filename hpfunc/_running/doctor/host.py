"""Rows of the machine: memory, files, threads, network and clock."""

from __future__ import annotations

import time
from collections.abc import Iterator

from .devices import seen_devices
from .diagnosis import Row, Verdict
from .facts import UNLIMITED, Facts, shown, size
from .launcher import is_loopback

_RUNTIME = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/runtime_and_mpi_issues.html"
_GLOO = "https://github.com/pytorch/pytorch/issues/68726"
_SOCKETS = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_SEGMENT = 4_194_660  # bytes of a segment of NCCL in /dev/shm, as in its error message
_DOCKER = 64 << 20  # what a container gets if nobody says how much
_RECOMMENDED = 1 << 30
_PROCESS = 512 << 20  # what a process with torch and a small model takes
_FILES_OF_A_PROCESS, _FILES_FOR_A_PEER = 256, 16  # 49 files were open on each of 4 ranks after a step with gloo
_COARSE_S = 1e-6
_BEFORE_S = 1_700_000_000  # in 2023: older than hpfunc


def host_rows(facts: Facts) -> Iterator[Row]:
    """Yields rows of what the machine and its limits allow."""
    yield from _shared_memory(facts)
    yield from _open_files(facts)
    yield from _threads(facts)
    yield from _memory(facts)
    yield from _gloo(facts)
    yield from _nccl_interface(facts)
    yield _clock(facts)


def _uses_nccl(facts: Facts) -> bool:
    return facts.accelerator == "cuda" and seen_devices(facts) != []


def _shared_memory(facts: Facts) -> Iterator[Row]:
    title, remedy = "/dev/shm", "docker run --shm-size=1g; on Kubernetes a volume of medium Memory at /dev/shm"
    if facts.shm_bytes is None:
        yield Row(
            title, "there is none: data loaders with workers, and NCCL, may fail", "warn", "mount a tmpfs on /dev/shm"
        )
        return
    total, free = facts.shm_bytes
    value = f"{size(total)}, {size(free)} free"
    if _uses_nccl(facts) and free < _SEGMENT * facts.num_local_ranks:
        # With a driver for CUDA 12.6 NCCL 2.24 and later can do without.
        spared = (facts.nccl or ()) >= (2, 24) and (facts.driver_cuda or ()) >= (12, 6)
        verdict: Verdict = "warn" if spared else "wrong"
        yield Row(title, f"{value}: NCCL needs 4 MiB and more for each rank", verdict, remedy, _RUNTIME)
    elif _uses_nccl(facts) and total < _RECOMMENDED and facts.num_local_ranks > 1:
        yield Row(title, f"{value}: NCCL asks for 1 GiB", "warn", remedy, _RUNTIME)
    elif total <= _DOCKER:
        yield Row(title, f"{value}: workers of data loaders hand batches over in it", "warn", remedy)
    else:
        yield Row(title, value)


def _open_files(facts: Facts) -> Iterator[Row]:
    if facts.open_files is None:
        return
    needed = _FILES_OF_A_PROCESS + _FILES_FOR_A_PEER * facts.num_ranks
    value = size_of_limit(facts.open_files)
    if facts.open_files < needed:
        value += f"; {facts.num_ranks} ranks may need {needed}"
        yield Row("open files", value, "warn", f"ulimit -n {max(65536, needed)} before the job starts", _RUNTIME)
    else:
        yield Row("open files", value)


def size_of_limit(limit: int) -> str:
    """Returns a limit as a table shows it."""
    return "unlimited" if limit >= UNLIMITED else str(limit)


def _threads(facts: Facts) -> Iterator[Row]:
    name, num_local = "OMP_NUM_THREADS", facts.num_local_ranks
    given = facts.env.get(name)
    if given is not None and not _is_list_of_numbers(given):
        yield Row(name, f"{shown(given)} is not a number", "warn", f"set it to {max(1, facts.num_cores // num_local)}")
        return
    first = int(given.split(",")[0]) if given else facts.num_threads
    told = f"{name}={shown(given)}" if given else f"{name} is not set"
    if first is None:
        yield Row("threads", f"{told}, {facts.num_cores} cores")
        return
    value = f"{first} for each of {num_local} ranks on {facts.num_cores} cores ({told})"
    if num_local > 1 and first * num_local > facts.num_cores:
        fair = facts.num_cores // num_local
        change = f"export {name}={fair}" if fair else f"start at most {facts.num_cores} processes on this machine"
        yield Row("threads", value, "warn", f"{change}: ranks that fight for cores are slower than any network")
    else:
        yield Row("threads", value)


def _is_list_of_numbers(text: str) -> bool:
    parts = [part.strip() for part in text.split(",")]
    return all(part.isascii() and part.isdigit() and len(part) < 7 and int(part) > 0 for part in parts)


def _memory(facts: Facts) -> Iterator[Row]:
    if facts.memory_bytes is None:
        return
    total, free = facts.memory_bytes
    value = f"{size(total)}, {size(free)} free"
    if free < _PROCESS * facts.num_local_ranks:
        value += f" for {facts.num_local_ranks} processes"
        yield Row("memory", value, "warn", "a process with torch takes 0.5 GiB: start fewer, or free some")
    else:
        yield Row("memory", value)


def _gloo(facts: Facts) -> Iterator[Row]:
    title, name = "gloo", "GLOO_SOCKET_IFNAME"
    verdict: Verdict = "wrong" if facts.spans_machines else "ok"
    if given := facts.env.get(name):
        names = [each for each in given.split(",") if each]
        missing = [each for each in names if facts.interfaces is not None and each not in facts.interfaces]
        if missing:
            value = f"{name}={shown(given)}, but the interfaces are {', '.join(facts.interfaces or ())}"
            yield Row(title, value, "wrong", f"set {name} to one of them, or unset it")
        elif facts.spans_machines and names == ["lo"]:
            value = f"{name}=lo, but the job has ranks on several machines"
            yield Row(title, value, "wrong", f"set {name} to the interface that the machines share")
        else:
            yield Row(title, f"{name}={shown(given)}")
        return
    choice = ", ".join(facts.interfaces or ()) or "see ip address"
    remedy = f"export {name} with the interface that the machines share ({choice})"
    if facts.addresses is None:
        value = f"it takes over a second to look up the host name {shown(facts.host_name)}: each group does that"
        yield Row(title, value, "warn", remedy.replace("the machines share", "ranks use"))
        return
    told = f"{shown(facts.host_name)} is {', '.join(facts.addresses) or 'not known to the resolver'}"
    if all(map(is_loopback, facts.addresses)):
        yield Row(
            title, f"{told}: only ranks of this machine can meet", verdict, remedy if verdict != "ok" else "", _GLOO
        )
    else:
        yield Row(title, told)


def _nccl_interface(facts: Facts) -> Iterator[Row]:
    name = "NCCL_SOCKET_IFNAME"
    given = facts.env.get(name)
    if not given or facts.interfaces is None or not _uses_nccl(facts):
        return
    if any(_is_chosen(given, interface) for interface in facts.interfaces):
        yield Row(name, shown(given))
    else:
        value = f"{shown(given)} chooses none of {', '.join(facts.interfaces)}"
        yield Row(
            name, value, "wrong", "write prefixes of interfaces (eth), names after = (=eth0), or ^ to exclude", _SOCKETS
        )


def _is_chosen(rule: str, interface: str) -> bool:
    """Returns whether a value of NCCL_SOCKET_IFNAME chooses an interface.

    >>> _is_chosen("eth", "eth0"), _is_chosen("=eth", "eth0"), _is_chosen("^docker,lo", "eth0")
    (True, False, True)
    """
    excludes = rule.startswith("^")
    rule = rule.removeprefix("^")
    exact = rule.startswith("=")
    parts = [part for part in rule.removeprefix("=").split(",") if part]
    return any(interface == part if exact else interface.startswith(part) for part in parts) != excludes


def _clock(facts: Facts) -> Row:
    whole = min(max(int(facts.time_s), 0), 1 << 40)
    value = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(whole))} UTC"
    if facts.time_s < _BEFORE_S:
        return Row("clock", value, "warn", "set the clock: logs and certificates depend on it")
    if facts.tick_s > _COARSE_S:
        value += f", resolution {facts.tick_s:.1g} s"
        return Row(
            "clock", value, "warn", "links are measured badly: give hpfunc.Policy(pack_below_bytes=...) a number"
        )
    return Row("clock", value)
