"""What ranks compare: their versions, variables, devices, clocks and problems."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from ...backends.versions import dotted
from .devices import own_device
from .diagnosis import Row, Verdict
from .facts import Facts, shown

_COMMUNICATORS = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html"
_PREFIXES = ("ASCEND_", "GLOO_", "HCCL_", "HPFUNC_", "NCCL_", "PYTORCH_", "TORCH_NCCL_")
_NAMES = {
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MS_SCHED_HOST",
    "MS_SCHED_PORT",
    "MS_WORKER_NUM",
    "OMP_NUM_THREADS",
    "WORLD_SIZE",
}
_MAY_DIFFER = {
    "ASCEND_DEVICE_ID",
    "ASCEND_RT_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "HCCL_IF_IP",
    "HCCL_SOCKET_IFNAME",
    "NCCL_DEBUG_FILE",
    "NCCL_HOSTID",
    "NCCL_IB_HCA",
    "NCCL_SOCKET_IFNAME",
    "NCCL_TOPO_FILE",
}
_MUST_BE_EQUAL = {"NCCL", "WORLD_SIZE", "hpfunc", "mindspore", "torch", "torch_npu"}
_CLOCKS_S = 1.0


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank tells the others.

    Attributes:
        compared: versions and variables, which should be equal on all ranks.
        device: the UUID of the device that it uses; "" if it is not known.
        time_s: seconds since 1970, read by all ranks at about the same moment.
        problems: its rows that are not ok.
    """

    compared: Mapping[str, str]
    device: str
    time_s: float
    problems: tuple[Row, ...]

    def to_json(self) -> str:
        """Returns the report as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Returns the report of a text."""
        fields = json.loads(text)
        return cls(**fields | {"problems": tuple(Row(**row) for row in fields["problems"])})


def report(facts: Facts, rows: Iterable[Row], time_s: float) -> Report:
    """Returns the report of a rank."""
    watched = {
        name: shown(value)
        for name, value in facts.env.items()
        if (name in _NAMES or name.startswith(_PREFIXES)) and name not in _MAY_DIFFER
    }
    nccl = {"NCCL": dotted(facts.nccl)} if facts.nccl else {}
    device = own_device(facts)
    problems = tuple(row for row in rows if row.verdict != "ok")
    return Report({**facts.versions, **nccl, **watched}, device.uuid if device else "", time_s, problems)


def compare(reports: Mapping[int, Report], rank: int) -> Iterator[Row]:
    """Yields what differs between ranks, and the problems of others that rank `rank` does not have itself."""
    differences = [*_differences(reports), *_shared_devices(reports), *_clocks(reports)]
    yield from differences
    if not differences:
        yield Row("ranks", f"{len(reports)} ranks have the same versions and variables")
    others: dict[Row, list[int]] = {}
    for other, told in reports.items():
        for row in told.problems:
            if row not in reports[rank].problems:
                others.setdefault(row, []).append(other)
    for row, ranks in others.items():
        yield Row(f"{row.name} ({on_ranks(ranks)})", row.value, row.verdict, row.remedy, row.source)


def _differences(reports: Mapping[int, Report]) -> Iterator[Row]:
    for name in sorted({name for told in reports.values() for name in told.compared}):
        values: dict[str, list[int]] = {}
        for rank, told in reports.items():
            values.setdefault(told.compared.get(name, "not set"), []).append(rank)
        if len(values) > 1:
            verdict: Verdict = "wrong" if name in _MUST_BE_EQUAL else "warn"
            value = "; ".join(f"{value} on {on_ranks(ranks)}" for value, ranks in values.items())
            yield Row(f"{name} differs", value, verdict, "give all ranks the same")


def _shared_devices(reports: Mapping[int, Report]) -> Iterator[Row]:
    users: dict[str, list[int]] = {}
    for rank, told in reports.items():
        users.setdefault(told.device, []).append(rank)
    for device, ranks in users.items():
        if device and len(ranks) > 1:
            value = f"{on_ranks(ranks)} use {device}"
            remedy = "set LOCAL_RANK to the number of the process on its machine, as torchrun does"
            yield Row("one device, several ranks", value, "wrong", remedy, _COMMUNICATORS)


def _clocks(reports: Mapping[int, Report]) -> Iterator[Row]:
    times = {rank: told.time_s for rank, told in reports.items()}
    first, last = min(times, key=times.__getitem__), max(times, key=times.__getitem__)
    apart_s = times[last] - times[first]
    if apart_s > _CLOCKS_S:
        value = f"{apart_s:.1f} s between ranks {first} and {last}"
        yield Row("clocks", value, "warn", "synchronize the machines (NTP): logs of ranks cannot be put in order")


def on_ranks(ranks: Sequence[int]) -> str:
    """Returns ranks in words.

    >>> on_ranks([3]), on_ranks([0, 1, 2, 5])
    ('rank 3', 'ranks 0-2, 5')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"
