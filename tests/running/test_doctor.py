"""The doctor: every verdict from drawn facts, the table, JSON, the command line, and ranks that differ."""

from __future__ import annotations

import ast
import json
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import hpfunc as hp
from hpfunc import backends
from hpfunc._running.doctor import nccl
from hpfunc._running.doctor.comparison import Report, compare, on_ranks, report
from hpfunc._running.doctor.devices import visible
from hpfunc._running.doctor.diagnosis import Row
from hpfunc._running.doctor.examine import examine
from hpfunc._running.doctor.facts import UNLIMITED, Device, Facts, Loading, shown
from hpfunc.backends.versions import TESTED, asked, version_of

ROOT = Path(__file__).parents[2]
TORCHRUN = {
    "RANK": "9",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "OMP_NUM_THREADS": "8",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
LOADED = {"mindspore": Loading("absent"), "torch": Loading("loads"), "torch_npu": Loading("absent")}
CPU = Facts(
    versions={"hpfunc": "0.1.0", "Python": "3.11.7", "optree": "0.20.0", "numpy": "1.26.4", "torch": "2.13.0+cpu"},
    where="/site-packages/hpfunc",
    backends=LOADED,
    machine="x86_64",
    num_cores=64,
    num_threads=32,
    shm_bytes=(64 << 30, 60 << 30),
    open_files=65536,
    locked_bytes=UNLIMITED,
    stack_bytes=8 << 20,
    memory_bytes=(512 << 30, 400 << 30),
    interfaces=("lo", "eth0"),
    host_name="node1",
    addresses=("10.0.0.2",),
    time_s=1.8e9,
    tick_s=1e-9,
)
CUDA = replace(
    CPU,
    env={**TORCHRUN, "NCCL_LAUNCH_ORDER_IMPLICIT": "1"},
    accelerator="cuda",
    gpus=tuple(Device("H200", f"GPU-{place:02}") for place in range(8)),
    driver_cuda=(13, 0),
    nccl=(2, 29, 7),
    infiniband=("mlx5_0",),
)
NPU = replace(
    CPU,
    versions={**CPU.versions, "torch_npu": "2.13.0"},
    env={**TORCHRUN, "HPFUNC_BACKEND": "torch_npu"},
    backends=LOADED | {"torch_npu": Loading("loads")},
    used="torch_npu",
    accelerator="npu",
    npus=(Device("Ascend"),) * 8,
)
MINDSPORE = replace(
    CPU,
    versions={**CPU.versions, "mindspore": "2.10.0"},
    env={
        "MS_SCHED_HOST": "node0",
        "MS_SCHED_PORT": "8118",
        "MS_WORKER_NUM": "4",
        "RANK_ID": "1",
        "MS_ROLE": "MS_WORKER",
    },
    backends=LOADED | {"mindspore": Loading("loads")},
    used="mindspore",
)


def with_env(facts: Facts, **env: str | None) -> Facts:
    """The facts with variables set, or unset (None)."""
    merged = {**facts.env, **env}
    return replace(facts, env={name: value for name, value in merged.items() if value is not None})


def with_version(facts: Facts, name: str, version: str | None) -> Facts:
    versions = {**facts.versions, name: version}
    return replace(facts, versions={name: value for name, value in versions.items() if value is not None})


def problems(facts: Facts) -> list[tuple[str, str]]:
    return [(row.name, row.verdict) for row in examine(facts) if row.verdict != "ok"]


@pytest.mark.parametrize("facts", [CPU, CUDA, NPU, MINDSPORE], ids=["cpu", "cuda", "npu", "mindspore"])
def test_a_good_machine_has_no_problem(facts: Facts) -> None:
    assert problems(facts) == []
    assert str(hp.Diagnosis(examine(facts))).endswith("\n\nNothing to change.")


# --- each verdict ---------------------------------------------------------------------------------------------------
OLD_NCCL = replace(CUDA, nccl=(2, 25, 1))
CASES = {
    # software
    "old Python": (with_version(CPU, "Python", "3.10.9"), "Python", "wrong"),
    "old torch": (with_version(CPU, "torch", "2.12.1+cu126"), "torch", "wrong"),
    "new torch": (with_version(CPU, "torch", "2.15.0"), "torch", "warn"),
    "strange torch": (with_version(CPU, "torch", "nightly"), "torch", "wrong"),
    "old optree": (with_version(CPU, "optree", "0.19.1"), "optree", "wrong"),
    "old numpy": (with_version(CPU, "numpy", "1.25.0"), "numpy", "warn"),
    "no numpy": (with_version(CPU, "numpy", None), "numpy", "warn"),
    "numpy 2": (with_version(MINDSPORE, "numpy", "2.1.0"), "numpy", "wrong"),
    "numpy 2 beside": (with_version(replace(MINDSPORE, used="torch", env={}), "numpy", "2.1.0"), "numpy", "warn"),
    "unused MindSpore": (with_version(CPU, "mindspore", "2.8.0"), "mindspore", "warn"),
    "unused backend": (
        replace(CPU, backends=LOADED | {"mindspore": Loading("fails", "x")}),
        "backend mindspore",
        "warn",
    ),
    "no torch": (replace(CPU, backends=LOADED | {"torch": Loading("absent")}), "backend", "wrong"),
    "unknown backend": (replace(with_env(CPU, HPFUNC_BACKEND="jax"), used="jax"), "backend", "wrong"),
    # devices
    "CPU build": (replace(CPU, gpus=(Device("H200"),)), "GPUs", "warn"),
    "idle NPUs": (replace(CPU, npus=(Device("Ascend"),)), "NPUs", "warn"),
    "other accelerator": (replace(CPU, accelerator="xpu"), "device", "warn"),
    "no NVML": (replace(CUDA, gpus=None, driver_cuda=None), "device", "warn"),
    "GPU that does not exist": (
        with_env(CUDA, CUDA_VISIBLE_DEVICES="0,1,2,3,4,5,6,7,8"),
        "CUDA_VISIBLE_DEVICES",
        "warn",
    ),
    "NPUs out of order": (
        with_env(NPU, ASCEND_RT_VISIBLE_DEVICES="0,1,2,3,4,5,6,7,3"),
        "ASCEND_RT_VISIBLE_DEVICES",
        "warn",
    ),
    "more ranks than GPUs": (with_env(CUDA, CUDA_VISIBLE_DEVICES="0,1,2,3"), "ranks and devices", "wrong"),
    "no LOCAL_RANK": (with_env(CUDA, LOCAL_RANK=None), "LOCAL_RANK", "warn"),
    # launcher
    "RANK alone": (with_env(CPU, RANK="0"), "half set", "wrong"),
    "WORLD_SIZE alone": (with_env(CPU, WORLD_SIZE="2"), "half set", "wrong"),
    "no address": (with_env(CUDA, MASTER_ADDR=None), "half set", "wrong"),
    "empty port": (with_env(CPU, RANK="0", WORLD_SIZE="2", MASTER_ADDR="a", MASTER_PORT=None), "half set", "wrong"),
    "address alone": (with_env(CPU, MASTER_ADDR="node0"), "half set", "warn"),
    "RANK is text": (with_env(CUDA, RANK="first"), "RANK", "wrong"),
    "negative": (with_env(CUDA, RANK="-1", LOCAL_RANK="7"), "RANK", "wrong"),
    "port": (with_env(CUDA, MASTER_PORT="65536"), "MASTER_PORT", "wrong"),
    "RANK too large": (with_env(CUDA, RANK="16"), "inconsistent", "wrong"),
    "more here than all": (with_env(CUDA, WORLD_SIZE="4", RANK="1"), "inconsistent", "wrong"),
    "cyclic": (with_env(CUDA, RANK="3"), "order of ranks", "warn"),
    "loopback": (with_env(CUDA, MASTER_ADDR="127.0.1.1"), "MASTER_ADDR", "wrong"),
    "localhost": (with_env(CUDA, MASTER_ADDR="localhost"), "MASTER_ADDR", "wrong"),
    "srun": (with_env(CPU, SLURM_STEP_NUM_TASKS="8"), "other launcher", "warn"),
    "mpirun": (with_env(CPU, OMPI_COMM_WORLD_SIZE="8"), "other launcher", "warn"),
    "restarted": (with_env(CUDA, TORCHELASTIC_RESTART_COUNT="2"), "TORCHELASTIC_RESTART_COUNT", "warn"),
    "restart is text": (with_env(CUDA, TORCHELASTIC_RESTART_COUNT="no"), "TORCHELASTIC_RESTART_COUNT", "warn"),
    "msrun half": (with_env(MINDSPORE, MS_SCHED_PORT=None), "msrun variables", "wrong"),
    "msrun port": (with_env(MINDSPORE, MS_SCHED_PORT="0"), "MS_SCHED_PORT", "wrong"),
    "msrun for torch": (replace(CPU, env=MINDSPORE.env), "msrun and backend", "warn"),
    "msrun beside torchrun": (with_env(MINDSPORE, **TORCHRUN), "two launchers", "warn"),
    "msrun rank": (with_env(MINDSPORE, RANK_ID="4"), "RANK_ID", "wrong"),
    # NCCL
    "no NCCL": (replace(CUDA, nccl=None), "NCCL", "wrong"),
    "no NCCL, one rank": (replace(CUDA, nccl=None, env={}), "NCCL", "warn"),
    "ARM": (replace(CUDA, machine="aarch64", nccl=(2, 28, 9)), "NCCL 2.28.9", "wrong"),
    "2.29.2": (replace(CUDA, nccl=(2, 29, 2)), "NCCL 2.29.2", "wrong"),
    "2.28.7": (replace(CUDA, nccl=(2, 28, 7)), "NCCL 2.28.7", "warn"),
    "2.26.1": (replace(CUDA, nccl=(2, 26, 1)), "NCCL 2.26.1", "warn"),
    "old driver": (replace(CUDA, driver_cuda=(12, 2)), "driver", "warn"),
    "P2P": (with_env(CUDA, NCCL_P2P_DISABLE="1"), "NCCL_P2P_DISABLE", "warn"),
    "IB": (with_env(CUDA, NCCL_IB_DISABLE="1"), "NCCL_IB_DISABLE", "warn"),
    "algorithm": (with_env(CUDA, NCCL_ALGO="Ring"), "NCCL_ALGO", "warn"),
    "non-blocking": (
        with_env(replace(CUDA, nccl=(2, 26, 5)), TORCH_NCCL_USE_COMM_NONBLOCKING="1"),
        "TORCH_NCCL_USE_COMM_NONBLOCKING",
        "wrong",
    ),
    "stack": (replace(CUDA, nccl=(2, 27, 5), stack_bytes=UNLIMITED), "stack", "warn"),
    "locked": (replace(CUDA, locked_bytes=8 << 20), "locked memory", "warn"),
    "one connection": (with_env(CUDA, CUDA_DEVICE_MAX_CONNECTIONS="1"), "CUDA_DEVICE_MAX_CONNECTIONS", "warn"),
    "blocking launches": (with_env(CUDA, CUDA_LAUNCH_BLOCKING="1"), "CUDA_LAUNCH_BLOCKING", "warn"),
    "blocking waits": (with_env(CUDA, TORCH_NCCL_BLOCKING_WAIT="1"), "TORCH_NCCL_BLOCKING_WAIT", "warn"),
    "blocking on NPUs": (with_env(NPU, ASCEND_LAUNCH_BLOCKING="1"), "ASCEND_LAUNCH_BLOCKING", "warn"),
    # the machine
    "no shared memory": (replace(CPU, shm_bytes=None), "/dev/shm", "warn"),
    "container": (replace(CPU, shm_bytes=(64 << 20, 64 << 20)), "/dev/shm", "warn"),
    "small for NCCL": (replace(CUDA, shm_bytes=(512 << 20, 500 << 20)), "/dev/shm", "warn"),
    "full": (replace(CUDA, shm_bytes=(64 << 30, 1 << 20), driver_cuda=(12, 4)), "/dev/shm", "wrong"),
    "full, spared": (replace(CUDA, shm_bytes=(64 << 30, 1 << 20)), "/dev/shm", "warn"),
    "files": (replace(CUDA, open_files=256), "open files", "warn"),
    "files at scale": (with_env(replace(CUDA, open_files=1024), WORLD_SIZE="1024"), "open files", "warn"),
    "threads": (with_env(CUDA, OMP_NUM_THREADS="16"), "threads", "warn"),
    "threads by default": (with_env(CUDA, OMP_NUM_THREADS=None), "threads", "warn"),
    "threads are text": (with_env(CUDA, OMP_NUM_THREADS="many"), "OMP_NUM_THREADS", "warn"),
    "memory": (replace(CUDA, memory_bytes=(512 << 30, 3 << 30)), "memory", "warn"),
    "no such interface": (with_env(CPU, GLOO_SOCKET_IFNAME="eth1"), "gloo", "wrong"),
    "loopback for gloo": (with_env(CUDA, GLOO_SOCKET_IFNAME="lo"), "gloo", "wrong"),
    "host name is loopback": (replace(CUDA, addresses=("127.0.1.1",)), "gloo", "wrong"),
    "host name is unknown": (replace(CUDA, addresses=()), "gloo", "wrong"),
    "slow resolver": (replace(CPU, addresses=None), "gloo", "warn"),
    "no interface for NCCL": (with_env(CUDA, NCCL_SOCKET_IFNAME="ib,en"), "NCCL_SOCKET_IFNAME", "wrong"),
    "all excluded": (with_env(CUDA, NCCL_SOCKET_IFNAME="^lo,eth"), "NCCL_SOCKET_IFNAME", "wrong"),
    "clock": (replace(CPU, time_s=0.0), "clock", "warn"),
    "coarse clock": (replace(CPU, tick_s=1e-3), "clock", "warn"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_problem_is_named_and_nothing_else_is(case: str) -> None:
    facts, name, verdict = CASES[case]
    assert problems(facts) == [(name, verdict)]


@pytest.mark.parametrize(
    ("num_cores", "remedy"), [(16, "export OMP_NUM_THREADS=2"), (8, "export OMP_NUM_THREADS=1"), (4, "start at most 4")]
)
def test_threads_are_shared_out_and_processes_if_there_is_not_one_core_for_each(num_cores: int, remedy: str) -> None:
    rows = examine(replace(CUDA, num_cores=num_cores))
    assert [row.remedy.startswith(remedy) for row in rows if row.name == "threads"] == [True]


def test_a_backend_in_use_that_fails_is_wrong_with_its_reason() -> None:
    facts = replace(CPU, backends=LOADED | {"torch": Loading("fails", "OSError: libcuda.so.1")})
    assert problems(facts) == [("backend torch", "wrong"), ("backend", "wrong")]
    assert "OSError: libcuda.so.1" in str(hp.Diagnosis(examine(facts)))


def test_a_local_rank_without_a_device_is_wrong_twice() -> None:
    facts = with_env(CUDA, CUDA_VISIBLE_DEVICES="3")  # as some launchers do: one device for each process
    assert problems(facts) == [("device", "wrong"), ("ranks and devices", "wrong")]
    one = with_env(facts, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", RANK="9")
    assert problems(one) == []


@pytest.mark.parametrize(
    "facts",
    [
        replace(CUDA, env=TORCHRUN | {"CUDA_VISIBLE_DEVICES": ""}),  # no device: gloo on the CPU
        replace(CUDA, gpus=(), env=TORCHRUN, nccl=(2, 20, 5)),
        replace(CPU, env={}, nccl=(2, 20, 5)),
        with_env(CUDA, CUDA_VISIBLE_DEVICES="MIG-a,MIG-b"),
        with_env(CUDA, CUDA_VISIBLE_DEVICES="GPU-03,GPU-04,0,1,2,5,6,7,-1"),
        with_env(CUDA, NCCL_P2P_DISABLE="0", NCCL_SOCKET_IFNAME="=eth0"),
        with_env(CPU, GLOO_SOCKET_IFNAME="lo,eth0", CUDA_LAUNCH_BLOCKING="1"),
        with_env(CPU, OMP_NUM_THREADS="4,2", SLURM_STEP_NUM_TASKS="1"),
        replace(CPU, addresses=("127.0.1.1", "::1")),  # all ranks are on this machine
        replace(CUDA, env={"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}),
        replace(CUDA, env={}, gpus=CUDA.gpus and CUDA.gpus[:1]),  # one rank has nobody to talk to
        replace(CPU, open_files=None, num_threads=None, memory_bytes=None, interfaces=None),
    ],
)
def test_what_is_right_or_not_used_is_no_problem(facts: Facts) -> None:
    assert problems(facts) == []


def test_old_versions_of_nccl_have_all_their_faults() -> None:
    assert problems(OLD_NCCL) == [("NCCL 2.25.1", "warn")]
    assert problems(replace(OLD_NCCL, machine="aarch64"))[0] == ("NCCL 2.25.1", "wrong")


@pytest.mark.parametrize(
    ("facts", "value"),
    [
        (CPU, "any number"),
        (replace(CUDA, gpus=()), "any number"),
        (with_env(CUDA, CUDA_VISIBLE_DEVICES=""), "any number"),
        (NPU, "1, because HCCL promises"),
        (replace(CUDA, accelerator="xpu"), "1, because the library of this device"),
        (replace(CUDA, nccl=None), "1"),
        (replace(CUDA, nccl=(2, 24, 3)), "1, because NCCL before 2.26"),
        (with_env(CUDA, NCCL_LAUNCH_ORDER_IMPLICIT=None), "1; 2 by export NCCL_LAUNCH_ORDER_IMPLICIT=1"),
        (with_env(CUDA, NCCL_LAUNCH_ORDER_IMPLICIT="0"), "1; 2 by export NCCL_LAUNCH_ORDER_IMPLICIT=1"),
        (CUDA, "1; 2 by Policy(communicators=2)"),
    ],
)
def test_the_number_of_communicators_at_a_time_is_that_of_the_default_policy(facts: Facts, value: str) -> None:
    [row] = [row for row in examine(facts) if row.name == "communicators at a time"]
    assert row.value.startswith(value)
    assert row.verdict == "ok"


def test_every_known_fault_of_nccl_has_a_page() -> None:
    assert all(known.source.startswith("https://") and known.first < known.fixed for known in nccl.KNOWN)
    rows = [row for facts, *_ in CASES.values() for row in examine(facts) if row.name.startswith("NCCL ")]
    assert rows
    assert all(row.source for row in rows if row.verdict != "ok")


def test_the_package_asks_for_the_first_tested_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["torch"], *extras["npu"], *extras["mindspore"]]
    wanted.append(f"Python{project['requires-python']}")
    assert {asked(name, None) for name in TESTED} <= set(wanted)
    assert "numpy>=1.26,!=2.*" in wanted  # MindSpore fails with numpy 2
    assert not [each for each in wanted if "<" in each], "only lower bounds, and versions that are known to be bad"


def test_every_backend_has_its_versions() -> None:
    assert set(backends.names()) == set(LOADED)
    assert set(LOADED) <= set(TESTED)


# --- any facts ------------------------------------------------------------------------------------------------------
VARIABLES = sorted({name for facts, *_ in CASES.values() for name in facts.env} | set(CUDA.env) | {"ASCEND_DEVICE_ID"})
VALUES = st.one_of(
    st.sampled_from(
        ["", "0", "1", "-1", "3", "65536", "lo", "eth0,lo", "^=eth0", "GPU-03", "MIG-a", "torch", "localhost"]
    ),
    st.integers(-(10**30), 10**30).map(str),
    st.text(st.characters(codec=None), max_size=12),  # with lone surrogates, as Python reads bytes that are no UTF-8
    st.sampled_from(["9" * 5000, "\n\t", "1_0", " 2 ", "\u0663"]),
)
VERSIONS = st.one_of(st.none(), st.lists(st.integers(0, 40), max_size=4).map(tuple))
SIZES = st.integers(0, 1 << 62)
FACTS = st.builds(
    Facts,
    env=st.dictionaries(st.sampled_from(VARIABLES), VALUES),
    versions=st.dictionaries(st.sampled_from(["hpfunc", *TESTED]), st.one_of(st.text(max_size=6), st.just("2.13.0"))),
    backends=st.dictionaries(
        st.sampled_from(sorted(LOADED)),
        st.builds(Loading, st.sampled_from(["loads", "absent", "fails", "untried"]), st.text(max_size=9)),
    ),
    used=st.sampled_from([*LOADED, "jax", ""]),
    accelerator=st.sampled_from(["", "cuda", "npu", "xpu"]),
    gpus=st.one_of(st.none(), st.lists(st.builds(Device, st.text(max_size=4), st.text(max_size=4))).map(tuple)),
    npus=st.lists(st.just(Device("Ascend")), max_size=3).map(tuple),
    driver_cuda=VERSIONS,
    nccl=VERSIONS,
    machine=st.sampled_from(["", "aarch64", "x86_64"]),
    num_cores=st.integers(1, 512),
    num_threads=st.one_of(st.none(), st.integers(1, 512)),
    shm_bytes=st.one_of(st.none(), st.tuples(SIZES, SIZES)),
    open_files=st.one_of(st.none(), SIZES),
    locked_bytes=st.one_of(st.none(), SIZES),
    stack_bytes=st.one_of(st.none(), SIZES),
    memory_bytes=st.one_of(st.none(), st.tuples(SIZES, SIZES)),
    interfaces=st.one_of(st.none(), st.lists(st.text(max_size=4)).map(tuple)),
    infiniband=st.lists(st.text(max_size=4)).map(tuple),
    host_name=st.text(max_size=4),
    addresses=st.one_of(st.none(), st.lists(st.sampled_from(["127.0.0.1", "::1", "10.0.0.1", "?"])).map(tuple)),
    time_s=st.floats(allow_nan=False, allow_infinity=False),
    tick_s=st.floats(0, 1),
)


@given(FACTS)
@example(CUDA)
@example(Facts())
def test_any_facts_give_a_table(facts: Facts) -> None:
    diagnosis = hp.Diagnosis(examine(facts))
    lines = str(diagnosis).split("\n")
    num_rows = len(diagnosis.rows)
    assert str(diagnosis).isascii()
    assert len(lines) == num_rows + 2 + len(diagnosis.problems) + sum(bool(row.source) for row in diagnosis.problems)
    assert [line.split()[0] for line in lines[:num_rows]] == [row.verdict for row in diagnosis.rows]
    assert lines[num_rows] == ""
    assert {row for row in diagnosis.rows if row.verdict != "ok"} == set(diagnosis.problems)
    assert diagnosis.is_wrong == any(row.verdict == "wrong" for row in diagnosis.problems)


@given(FACTS)
def test_json_gives_the_rows_back(facts: Facts) -> None:
    diagnosis = hp.Diagnosis(examine(facts))
    read = json.loads(diagnosis.to_json())
    assert read == diagnosis.as_dict()
    assert hp.Diagnosis(tuple(Row(**row) for row in read["rows"])) == diagnosis


def test_the_columns_of_a_table_are_aligned() -> None:
    rows = (
        Row("a", "one"),
        Row("long name", "two\nlines", "wrong", "do it", "https://a.b"),
        Row("b", "x", "warn", "wait"),
    )
    assert str(hp.Diagnosis(rows)).split("\n") == [
        "ok     a          one",
        "wrong  long name  two lines",
        "warn   b          x",
        "",
        "What to change (1 wrong, 1 warning):",
        "  wrong  long name: do it",
        "         see https://a.b",
        "  warn  b: wait",
    ]


@pytest.mark.parametrize("row", [("a", "b", "bad", "c"), ("a", "b", "wrong", ""), ("a", "b", "ok", "c")])
def test_a_row_has_a_remedy_if_and_only_if_it_is_a_problem(row: tuple[Any, ...]) -> None:
    with pytest.raises(AssertionError):
        Row(*row)


@given(st.text())
def test_a_value_is_shown_on_one_line_of_letters(value: str) -> None:
    assert shown(value).isascii()
    assert shown(value).isprintable()
    assert shown(value) == value or ast.literal_eval(shown(value)) == value[:60]


@given(st.lists(st.integers(0, 7), unique=True), st.booleans())
def test_devices_are_seen_in_the_order_of_the_variable(places: list[int], ascending: bool) -> None:
    places = sorted(places) if ascending else places
    devices = [Device(f"d{place}", f"GPU-{place}") for place in range(8)]
    assert visible(",".join(map(str, places)), devices, ascending=ascending) == (places, "")
    assert visible(",".join(f"GPU-{place}" for place in places), devices) == (places, "")
    assert visible(None, devices)[0] == list(range(8))


@pytest.mark.parametrize(
    ("value", "ascending", "expected"),
    [
        ("1,8,2", False, ([1], "8,2")),
        ("1, 2", False, ([1, 2], "")),
        ("1, 2", True, ([1], " 2")),
        ("2,1", True, ([2], "1")),
        ("2,1", False, ([2, 1], "")),
        ("1,1", False, ([1], "1")),
        ("-1,0", False, ([], "-1,0")),
        ("", False, ([], "")),
        ("GPU-", False, ([], "GPU-")),  # it begins the name of several
        ("a", False, ([], "a")),
    ],
)
def test_the_list_of_devices_is_read_up_to_what_is_no_device(
    value: str, ascending: bool, expected: tuple[list[int], str]
) -> None:
    assert visible(value, [Device("d", f"GPU-{place}") for place in range(8)], ascending=ascending) == expected


@given(st.lists(st.integers(0, 999), max_size=4), st.sampled_from(["", "+cu126", "a0", ".dev1", "rc1"]))
def test_a_version_is_its_leading_numbers(numbers: list[int], suffix: str) -> None:
    assert version_of(".".join(map(str, numbers)) + suffix) == tuple(numbers)


# --- ranks ----------------------------------------------------------------------------------------------------------
def reports_of(*facts: Facts, times: tuple[float, ...] = ()) -> dict[int, Report]:
    told = [report(each, examine(each), times[rank] if times else 5.0) for rank, each in enumerate(facts)]
    return {rank: Report.from_json(each.to_json()) for rank, each in enumerate(told)}


@given(FACTS, FACTS)
def test_any_reports_can_be_compared(first: Facts, second: Facts) -> None:
    reports = reports_of(first, second)
    assert reports[0] == report(first, examine(first), 5.0)
    rows = list(compare(reports, 1))
    assert str(hp.Diagnosis(tuple(rows)))
    if first == second:
        assert all(row.verdict == "ok" for row in rows if row.name != "one device, several ranks")


@given(st.sets(st.integers(0, 99), min_size=1))
def test_ranks_in_words_are_these_ranks(ranks: set[int]) -> None:
    found: set[int] = set()
    for run_of_ranks in on_ranks([*ranks]).split(" ", 1)[1].split(", "):
        first, _, last = run_of_ranks.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    assert found == ranks


def ranks_of(*changes: Callable[[Facts], Facts]) -> list[Facts]:
    """Ranks of one machine of `CUDA`, each on its own device, and changed."""
    return [change(with_env(CUDA, RANK=str(place), LOCAL_RANK=str(place))) for place, change in enumerate(changes)]


def same(facts: Facts) -> Facts:
    return facts


@pytest.mark.parametrize(
    ("change", "name", "value", "verdict"),
    [
        (
            lambda f: with_version(f, "torch", "2.13.1"),
            "torch differs",
            "2.13.0+cpu on ranks 0, 2; 2.13.1 on rank 1",
            "wrong",
        ),
        (lambda f: replace(f, nccl=(2, 30, 7)), "NCCL differs", "2.29.7 on ranks 0, 2; 2.30.7 on rank 1", "wrong"),
        (lambda f: with_env(f, HCCL_ALGO="x"), "HCCL_ALGO differs", "not set on ranks 0, 2; x on rank 1", "warn"),
        (lambda f: with_env(f, LOCAL_RANK="0"), "one device, several ranks", "ranks 0-1 use GPU-00", "wrong"),
    ],
)
def test_a_rank_that_differs_is_named(change: Any, name: str, value: str, verdict: str) -> None:
    rows = list(compare(reports_of(*ranks_of(same, change, same)), 0))
    found = [(row.name, row.value, row.verdict) for row in rows if "order of ranks" not in row.name]
    assert found == [(name, value, verdict)]


def test_equal_ranks_have_nothing_to_change() -> None:
    rows = list(compare(reports_of(*ranks_of(same, same)), 0))
    assert [(row.name, row.verdict) for row in rows] == [("ranks", "ok")]


def test_clocks_that_differ_are_named() -> None:
    rows = list(compare(reports_of(*ranks_of(same, same, same), times=(7.0, 3.5, 5.0)), 0))
    assert [(row.name, row.value) for row in rows] == [("clocks", "3.5 s between ranks 1 and 0")]


def test_a_problem_of_other_ranks_is_told_with_their_numbers() -> None:
    full = ranks_of(same, *[lambda f: replace(f, memory_bytes=(8 << 30, 1 << 30))] * 2)
    reports = reports_of(*full)
    assert [row.name for row in compare(reports, 0) if row.verdict == "warn"] == ["memory (ranks 1-2)"]
    assert [row.name for row in compare(reports, 1) if row.verdict == "warn"] == []
