"""The doctor of a process: what it finds, its command line, and ranks that compare."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hpfunc as hp
from hpfunc import __main__ as command
from hpfunc import backends
from hpfunc._running.doctor import machine, survey
from hpfunc._running.doctor.diagnosis import Row
from hpfunc._running.doctor.facts import Device, Loading
from tests.helpers.ranks import Pool, mesh_of, outcome
from tests.running.test_doctor import ROOT, VARIABLES


# --- this process ---------------------------------------------------------------------------------------------------
def value_of(diagnosis: hp.Diagnosis, name: str) -> str:
    return next(row.value for row in diagnosis.rows if row.name == name)


def test_the_doctor_sees_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPFUNC_BACKEND", "torch")  # whatever other tests have imported
    monkeypatch.setenv("RANK", "nonsense")
    diagnosis = hp.doctor()
    assert diagnosis.is_wrong
    assert "nonsense is not a number" in value_of(diagnosis, "RANK")
    assert value_of(diagnosis, "backend torch") == "loads"
    assert value_of(diagnosis, "Python") == sys.version.split()[0]
    assert "hpfunc.doctor(mesh)" in value_of(diagnosis, "links")


def test_one_rank_has_no_link() -> None:
    diagnosis = hp.doctor(hp.make_mesh((1,), ("shard",)))
    assert value_of(diagnosis, "links") == "one rank, none to measure"


def test_no_device_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each of these may start CUDA, after which the process must not fork.
    calls: list[str] = []
    starters = [(torch.cuda, "is_available"), (torch.cuda, "device_count"), (torch.cuda, "_lazy_init")]
    for owner, name in [*starters, (torch.accelerator, "is_available"), (torch.accelerator, "device_count")]:
        monkeypatch.setattr(owner, name, lambda *_, name=name: calls.append(name))
    assert torch.cuda.is_available() is None
    assert calls.pop() == "is_available"
    diagnosis = hp.doctor()
    assert calls == []
    assert value_of(diagnosis, "torch") == torch.__version__


def raises(*_: Any, **__: Any) -> Any:
    raise RuntimeError("broken")


def test_nothing_that_is_broken_keeps_the_doctor_from_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPFUNC_BACKEND", "torch")
    for name in [
        name for name, value in vars(machine).items() if callable(value) and value.__module__ == machine.__name__
    ]:
        monkeypatch.setattr(machine, name, raises)
    for owner, name in [
        (backends, "get"),
        (backends, "installed"),
        (survey.socket, "gethostname"),
        (survey.metadata, "version"),
    ]:
        monkeypatch.setattr(owner, name, raises)
    diagnosis = hp.doctor()
    assert value_of(diagnosis, "backend torch") == "does not load: RuntimeError: broken"
    assert diagnosis.is_wrong


def test_a_folder_without_code_is_no_framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lonely_framework").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not survey.is_installed("lonely_framework")
    (tmp_path / "lonely_framework/__init__.py").touch()
    assert survey.is_installed("lonely_framework")
    assert not survey.is_installed("a_framework.that_is_not_there")


class Nvml:
    """A stand-in for NVIDIA's library: two GPUs, and a driver for CUDA 13.0."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.is_open = code, False

    def nvmlInit_v2(self) -> int:
        self.is_open = self.code == 0
        return self.code

    def nvmlShutdown(self) -> int:
        self.is_open = False
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlSystemGetCudaDriverVersion_v2(self, version: Any) -> int:
        version._obj.value = 13000
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, place: int, handle: Any) -> int:
        handle._obj.value = 100 + place
        return 0

    def nvmlDeviceGetName(self, handle: Any, text: Any, size: int) -> int:
        text.value = b"NVIDIA H200"
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, text: Any, size: int) -> int:
        text.value = f"GPU-{handle.value}".encode()
        return 0


def test_gpus_are_counted_by_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Nvml()
    monkeypatch.setattr(machine.ctypes, "CDLL", {"libnvidia-ml.so.1": library}.__getitem__)
    found = (Device("NVIDIA H200", "GPU-100"), Device("NVIDIA H200", "GPU-101"))
    assert machine.gpus() == (found, (13, 0))
    assert not library.is_open


def missing(*names: str, nvml: Nvml | None = None) -> Callable[[str], Any]:
    def load(name: str) -> Any:
        if name in names:
            raise OSError(name)
        return nvml

    return load


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (missing("libnvidia-ml.so.1", "libcuda.so.1"), ((), ())),
        (missing("libnvidia-ml.so.1"), None),
        (missing("libcuda.so.1", nvml=Nvml(code=9)), ((), ())),
    ],
)
def test_without_nvml_there_are_no_gpus_or_they_are_not_known(
    load: Callable[[str], Any], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.ctypes, "CDLL", load)
    assert machine.gpus() == expected


# --- the command line -----------------------------------------------------------------------------------------------
def run(*arguments: str, code: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Runs the command line in a process of its own; `code` runs before it."""
    script = f"{code}\nimport sys\nfrom hpfunc.__main__ import main\nsys.exit(main(sys.argv[1:]))"
    start = ["-c", script] if code else ["-m", "hpfunc"]
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES and name != "HPFUNC_BACKEND"}
    environment = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
    command = [sys.executable, *start, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.processes
def test_the_command_line_prints_json_and_fails_if_something_is_wrong() -> None:
    done = run("doctor", "--json", RANK="0")
    read = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    assert read["is_wrong"]
    assert [row["name"] for row in read["rows"] if row["verdict"] == "wrong"] == ["half set"]


@pytest.mark.processes
def test_the_command_line_says_what_it_knows() -> None:
    helped, told = run(), run("--version")
    assert (helped.returncode, told.returncode) == (0, 0), helped.stderr + told.stderr
    assert "doctor" in helped.stdout
    assert told.stdout == f"hpfunc {hp.__version__}\n"


WITHOUT_FRAMEWORKS = """
import sys

class Hidden:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torch_npu", "mindspore", "numpy"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Hidden)
"""


@pytest.mark.processes
def test_it_works_without_any_framework() -> None:
    done = run("doctor", code=WITHOUT_FRAMEWORKS)
    assert done.returncode == 1, done.stderr
    assert not done.stderr
    assert "wrong  backend: pip install 'hpfunc[torch]'" in done.stdout


BROKEN = """
import sys, types, importlib.machinery
broken = types.ModuleType("torch")
broken.__spec__ = importlib.machinery.ModuleSpec("torch", None, origin="torch/__init__.py")
sys.modules["torch"] = broken
"""


@pytest.mark.processes
def test_a_framework_that_is_broken_is_a_row() -> None:
    done = run("doctor", code=BROKEN)
    assert done.returncode == 1, done.stderr
    assert "wrong  backend torch" in done.stdout
    assert "does not load: " in done.stdout


@pytest.mark.parametrize(("wrong", "code"), [(True, 1), (False, 0)])
def test_warnings_do_not_fail(
    wrong: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [Row("a", "b", "warn", "c"), *([Row("d", "e", "wrong", "f")] if wrong else [])]
    monkeypatch.setattr(command, "diagnose", lambda **_: hp.Diagnosis(tuple(rows)))
    assert command.main(["doctor"]) == code
    assert capsys.readouterr().out == f"{hp.Diagnosis(tuple(rows))}\n"


@pytest.mark.parametrize("arguments", [["surgeon"], ["doctor", "--xml"]])
def test_the_command_line_refuses_what_it_does_not_know(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        command.main(arguments)
    assert exit_info.value.code == 2
    assert "usage: python -m hpfunc" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import hpfunc", Loading("loads")),
        ("raise OSError('libhccl.so: not found')", Loading("fails", "OSError: libhccl.so: not found")),
        ("import os; os.abort()", Loading("fails", "its import ends with SIGABRT")),
        ("sys.exit(7)", Loading("fails", "exit code 7")),
    ],
)
def test_another_backend_is_tried_in_a_process_of_its_own(
    code: str, expected: Loading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(survey, "_TRY", survey._TRY.replace("backends.get(sys.argv[1])", f"exec({code!r})"))
    assert survey._try_apart("mindspore") == expected


# --- ranks ----------------------------------------------------------------------------------------------------------
def diagnose_with_ranks(rank: int, env: dict[int, dict[str, str]]) -> tuple[dict[str, Any], float]:
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    mine = env.get(rank, {})
    os.environ.update(mine)
    try:
        start = time.perf_counter()
        diagnosis = hp.doctor(mesh)
        return diagnosis.as_dict(), time.perf_counter() - start
    finally:
        for name in mine:
            del os.environ[name]


@pytest.mark.processes
def test_ranks_compare_what_they_have_found(pool: Callable[..., Pool]) -> None:
    answers = pool(4).run(diagnose_with_ranks, {2: {"NCCL_PROTO": "LL", "LOCAL_RANK": "x"}})
    tables = [{row["name"]: row for row in told["rows"]} for told, _ in answers]
    for table in tables:
        assert table["NCCL_PROTO differs"]["value"] == "not set on ranks 0-1, 3; LL on rank 2"
        assert "GB/s" in table["link along shard"]["value"]
        assert "GB/s" in table["link along replicate"]["value"]
    assert tables[0]["LOCAL_RANK (rank 2)"]["verdict"] == "wrong"
    assert "LOCAL_RANK (rank 2)" not in tables[2]
    assert tables[2]["LOCAL_RANK"]["verdict"] == "wrong"
    assert len({table["link along shard"]["value"] for table in tables}) == 1  # all ranks get the same numbers


@pytest.mark.processes
def test_equal_ranks_agree(pool: Callable[..., Pool]) -> None:
    for told, _ in pool(4).run(diagnose_with_ranks, {}):
        row = next(row for row in told["rows"] if row["name"] == "ranks")
        assert row["value"] == "4 ranks have the same versions and variables"
        assert not told["is_wrong"]


def diagnose_in_a_step(rank: int) -> tuple[str, str]:
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    params = hp.shard({"w": torch.ones(4)}, mesh, hp.P("shard"))
    texts: list[str] = []

    def step(params: Any) -> Any:
        texts.extend([outcome(hp.doctor, mesh), outcome(hp.doctor)])
        return params

    hp.sharded(step, mesh)(params)
    return texts[0], texts[1]


@pytest.mark.processes
def test_a_step_is_no_place_for_ranks_to_compare(pool: Callable[..., Pool]) -> None:
    for with_mesh, alone in pool(4).run(diagnose_in_a_step):
        assert with_mesh.startswith("UsageError: hpfunc.doctor: it is called inside of a step")
        assert alone == "returned"
