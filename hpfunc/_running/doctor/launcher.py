"""Rows of what the launcher has told this process."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from .diagnosis import Row
from .facts import Facts, shown

TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MINDSPORE = ("MS_ROLE", "MS_SCHED_HOST", "MS_SCHED_PORT", "MS_WORKER_NUM", "RANK_ID")
_LEAST = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 1}
_LEAST_MINDSPORE = {"MS_SCHED_PORT": 1, "MS_WORKER_NUM": 1, "RANK_ID": 0}
_COUNTS_OF_OTHERS = {
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE and OMPI_COMM_WORLD_LOCAL_RANK",
    "PMI_SIZE": "PMI_RANK and PMI_SIZE",
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID, SLURM_STEP_NUM_TASKS and SLURM_LOCALID",
}
_TORCHRUN = "start the processes with torchrun, which sets all of them"


def is_loopback(address: str) -> bool:
    """Returns whether other machines cannot reach an address: `localhost`, or one of 127.0.0.0/8 and ::1."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address.split(".", maxsplit=1)[0].lower() == "localhost"


def launcher_rows(facts: Facts) -> Iterator[Row]:
    """Yields a row for the launcher's variables, and one for each thing that does not fit."""
    yield Row("launcher", _told(facts, TORCH) or "none: this process is a world of its own")
    yield from _numbers(facts, _LEAST)
    yield from _half_set(facts)
    yield from _inconsistent(facts)
    yield from _addresses(facts)
    yield from _other_launchers(facts)
    yield from _restarts(facts)
    if any(name in facts.env for name in MINDSPORE if name.startswith("MS_")):
        yield Row("msrun", _told(facts, MINDSPORE))
        yield from _numbers(facts, _LEAST_MINDSPORE)
        yield from _msrun(facts)


def _told(facts: Facts, names: tuple[str, ...]) -> str:
    return " ".join(f"{name}={shown(facts.env[name])}" for name in names if name in facts.env)


def _numbers(facts: Facts, least: dict[str, int]) -> Iterator[Row]:
    for name, smallest in least.items():
        if name not in facts.env:
            continue
        number = facts.number(name)
        largest = (1 << 16) - 1 if name.endswith("PORT") else None
        if number is None or number < smallest or (largest is not None and number > largest):
            kind = "a port" if largest else f"a number from {smallest} on"
            yield Row(name, f"{shown(facts.env[name])} is not {kind}", "wrong", f"set {name} to {kind}; {_TORCHRUN}")


def _half_set(facts: Facts) -> Iterator[Row]:
    pair = [name for name in ("RANK", "WORLD_SIZE") if name in facts.env]
    if len(pair) == 1:
        missing = "WORLD_SIZE" if pair == ["RANK"] else "RANK"
        value = f"{pair[0]} without {missing}: each process makes a world of its own"
        yield Row("half set", value, "wrong", f"set {missing} too; {_TORCHRUN}")
    elif pair:
        if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not facts.env.get(name)]:
            value = f"RANK and WORLD_SIZE without {' and '.join(missing)}: processes cannot meet"
            yield Row("half set", value, "wrong", f"set {' and '.join(missing)}; {_TORCHRUN}")
    elif others := [name for name in TORCH if name in facts.env]:
        value = f"{', '.join(others)} without RANK and WORLD_SIZE: this process is a world of its own"
        yield Row("half set", value, "warn", f"set RANK and WORLD_SIZE, or unset the others; {_TORCHRUN}")


def _inconsistent(facts: Facts) -> Iterator[Row]:
    pairs = [("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("LOCAL_WORLD_SIZE", "WORLD_SIZE")]
    for small, large in pairs:
        a, b = facts.number(small), facts.number(large)
        if a is not None and b is not None and (a > b or (a == b and small != "LOCAL_WORLD_SIZE")):
            value = f"{small}={shown(facts.env[small])} does not fit {large}={shown(facts.env[large])}"
            yield Row("inconsistent", value, "wrong", f"{small} counts within {large}; {_TORCHRUN}")
            return
    rank, local_rank = facts.number("RANK"), facts.number("LOCAL_RANK")
    num_local = facts.number("LOCAL_WORLD_SIZE") or 0
    if None in (rank, local_rank) or num_local < 1 or facts.num_ranks % num_local:
        return
    if rank % num_local != local_rank:  # type: ignore[operator]
        value = (
            f"RANK={rank} and LOCAL_RANK={local_rank} with LOCAL_WORLD_SIZE={num_local}: neighbours are not together"
        )
        remedy = (
            "number the ranks machine by machine (srun --distribution=block): the last axis of a mesh is then local"
        )
        yield Row("order of ranks", value, "warn", remedy)


def _addresses(facts: Facts) -> Iterator[Row]:
    address = facts.env.get("MASTER_ADDR", "")
    if address and facts.spans_machines and is_loopback(address):
        value = f"{shown(address)} is this machine only, but the job has {facts.num_ranks} ranks on several"
        yield Row("MASTER_ADDR", value, "wrong", "set it to an address of the machine of rank 0 that the others reach")


def _other_launchers(facts: Facts) -> Iterator[Row]:
    if any(name in facts.env for name in ("RANK", "WORLD_SIZE", "MS_SCHED_HOST")):
        return
    for name, names in _COUNTS_OF_OTHERS.items():
        if (facts.number(name) or 0) > 1:
            value = f"{name}={facts.number(name)}, but no RANK: each process makes a world of its own"
            remedy = f"set RANK, WORLD_SIZE and LOCAL_RANK from {names}, and MASTER_ADDR and MASTER_PORT"
            yield Row("other launcher", value, "warn", remedy)
            return


def _restarts(facts: Facts) -> Iterator[Row]:
    name = "TORCHELASTIC_RESTART_COUNT"
    if name not in facts.env:
        return
    count = facts.number(name)
    if count is None:
        yield Row(name, f"{shown(facts.env[name])} is not a number", "warn", "let torchrun set it")
    elif count > 0:
        yield Row(
            name, f"{count}: processes of this job have failed before", "warn", "look for the first error in the log"
        )
    else:
        yield Row(name, "0")


def _msrun(facts: Facts) -> Iterator[Row]:
    needed = ("MS_SCHED_HOST", "MS_SCHED_PORT", "MS_WORKER_NUM", "RANK_ID")
    missing = [name for name in needed if not facts.env.get(name)]
    if facts.used != "mindspore":
        value = f"the variables of msrun are set, but the backend is {shown(facts.used)}, which does not read them"
        yield Row("msrun and backend", value, "warn", "set HPFUNC_BACKEND=mindspore, or start with torchrun")
    elif missing and "RANK" not in facts.env and facts.env.get("MS_ROLE") != "MS_SCHED":
        value = f"half set: {', '.join(missing)} missing: processes cannot meet"
        yield Row("msrun variables", value, "wrong", "start the processes with msrun, which sets all of them")
    if "MS_SCHED_HOST" in facts.env and "RANK" in facts.env:
        value = "RANK and MS_SCHED_HOST are both set: on a CPU the first counts, on Ascend the second"
        yield Row("two launchers", value, "warn", "start the processes with torchrun or with msrun, not with both")
    worker, count = facts.number("RANK_ID"), facts.number("MS_WORKER_NUM")
    if worker is not None and count is not None and worker >= count:
        yield Row("RANK_ID", f"{worker} of {count} workers", "wrong", "RANK_ID counts from 0 to MS_WORKER_NUM - 1")
