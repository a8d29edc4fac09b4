"""`make device-check`: the device that it chooses, its table, its limits, and rows that hang, crash or are wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.device import cuda, simulated
from tests.device.all_cases import CASES
from tests.device.check import __main__ as command
from tests.device.check import found, numbers, programs, rows, runner
from tests.device.check.found import Answer, Line, Row, Task
from tests.device.check.row import answer_of, short
from tests.device.harness import assert_same_bits, observe, on_host
from tests.device.stand_in_rows import crashes, hangs, raises, says_done, says_wrong, skips
from tests.helpers.ranks import RankError


def row(run: Callable[..., Any], limit_s: float = 60.0) -> Row:
    return Row(run.__name__, "a row of the tests", limit_s, f"{run.__module__}:{run.__name__}")


def line(state: found.State, text: str = "") -> Line:
    return Line(rows.ROWS[0], Answer(state, text), 1.0)


# --- rows that the runner meets --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fn", "state", "text"),
    [
        (says_done, "done", "on sim, planted: True"),
        (says_wrong, "wrong", "one bit"),
        (skips, "skipped", "no such thing here"),
        (raises, "wrong", "RuntimeError: first line"),
    ],
)
def test_what_a_row_raises_is_its_answer(fn: Callable[[Task], Answer], state: str, text: str) -> None:
    answer = answer_of(fn, Task("sim", is_planted=True))
    assert (answer.state, answer.text) == (state, text)


@pytest.mark.processes
def test_a_row_that_hangs_or_crashes_is_wrong_and_the_others_run() -> None:
    lines = runner.run_all(
        [row(hangs, 6.0), row(crashes), row(says_done)], "sim", is_planted=False, limit_s=runner.LIMIT_S
    )
    assert [each.answer.state for each in lines] == ["wrong", "wrong", "done"]
    hung, crashed, done = (each.answer for each in lines)
    assert hung.text == "no answer within 6 s; the last was: what it hangs in"
    assert crashed.text == "ended with code -6 and no answer; the last was: what it crashes in"
    assert done.figures == {"count": 3}
    assert lines[0].time_s < 12


def test_rows_that_do_not_fit_any_more_are_skipped() -> None:
    (only,) = runner.run_all([row(says_done)], "sim", is_planted=False, limit_s=1.0)
    assert only.answer == Answer("skipped", "out of time: the limit of 1 s is for all rows together")


def test_the_error_of_a_rank_is_told_in_one_line() -> None:
    text = (
        "f on 2 ranks\n--- rank 0 raised\nTraceback (most recent call last):\n  File 'x'\nhp.PeerError: rank 1 failed\n"
    )
    assert short(RuntimeError(text)) == "RuntimeError: hp.PeerError: rank 1 failed"
    assert short(RuntimeError()) == "RuntimeError: "


# --- the command -----------------------------------------------------------------------------------------------------
@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Answer]]:
    """What rows answer, one after another, without processes and devices."""
    given: list[Answer] = []
    monkeypatch.setattr(runner, "run_one", lambda *args, **options: given.pop(0))
    monkeypatch.setattr(command.simulated, "build", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    yield given
    assert not given


def test_the_table_and_the_exit_code(answers: list[Answer], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers += [Answer("done", "same bits", {"n": 2}), Answer("skipped", "no graphs")]
    assert command.main(["--rows", "ix,i", "--json", str(tmp_path / "found.json")]) == 0
    table, _ = capsys.readouterr()
    assert table.splitlines()[0] == f"simulated device, simulated, torch {torch.__version__}"
    assert [text.split()[0] for text in table.splitlines()[2:]] == ["row", "i", "ix"]
    assert table.splitlines()[3].endswith("done     0  same bits")
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["is_simulated"] is True
    assert [(each["row"], each["state"]) for each in written["rows"]] == [("i", "done"), ("ix", "skipped")]
    assert written["rows"][0]["figures"] == {"n": 2}

    answers += [Answer("done", ""), Answer("wrong", "one bit")]
    assert command.main(["--rows", "i,ii"]) == 1
    answers += [Answer("wrong", "one bit"), Answer("skipped", "")]
    assert command.main(["--rows", "i,ii", "--plant"]) == 0
    answers += [Answer("wrong", "one bit"), Answer("done", "")]
    assert command.main(["--rows", "i,ii", "--plant"]) == 1
    assert "(faults planted)" in capsys.readouterr().out


def test_a_terminal_gets_the_table_of_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich", reason="rich draws the table")
    monkeypatch.setattr(found.sys.stdout, "isatty", lambda: True, raising=False)
    found.print_table("head", [line("wrong", "tensors [1, 2] differ [bold]")])
    printed = capsys.readouterr().out
    assert "tensors [1, 2] differ [bold]" in printed
    assert "┃" in printed


def test_the_device_is_a_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.simulated, "build", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (command.choose(None), command.choose("sim"), command.choose("cuda")) == ("cuda", "sim", "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.choose(None) == "sim"
    with pytest.raises(command.NoDevice, match="sees no GPU: --device sim"):
        command.choose("cuda")


def test_without_a_gpu_and_a_compiler_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build() -> None:
        raise simulated.Unavailable("the simulated device needs a C++20 compiler")

    monkeypatch.setattr(command.simulated, "build", build)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 2
    assert capsys.readouterr().err == "device-check: no GPU, and the simulated device needs a C++20 compiler\n"


def test_a_row_of_no_such_name_is_refused() -> None:
    with pytest.raises(SystemExit, match="no row is named x: there are i, v, ii"):
        command.chosen("i,x")


# --- comparisons -----------------------------------------------------------------------------------------------------
def test_distances() -> None:
    one = torch.ones(3)
    assert programs.distance([one], [one.clone()]) == 0
    assert programs.distance([one * 1.5], [one]) == pytest.approx(0.5)
    for wrong in ([one * float("nan")], [one.double()], [one, one], []):
        assert programs.distance(wrong, [one]) == float("inf")
    assert programs.distance([], []) == float("inf")


def test_a_planted_fault_is_far_above_the_bounds() -> None:
    for name in ("plain", "hybrid"):
        assert programs.bound(Task("cuda"), name) < programs.PLANTED / 100
        assert programs.bound(Task("sim"), name) == 0


# --- what is used on a GPU, as far as it needs none ------------------------------------------------------------------
class Streams:
    """Stands for hpfunc's streams."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def issue(self, label: str, stream: str, waits: Any, work: Callable[[], Any], poll: Any, **options: Any) -> str:
        self.log.append(f"issue {label}")
        work()
        return label

    def wait(self, pending: Any, poll: Any) -> None:
        self.log.append(f"wait {pending}")


def test_streams_are_made_late() -> None:
    streams = Streams()
    log = streams.log

    def sleep(delay_us: int) -> None:
        log.append(f"sleep {delay_us}")

    with cuda.late(streams, {"gather": 7, "compute": 9}, sleep):
        assert streams.issue("a", "gather", (), lambda: log.append("work"), None, is_timed=True) == "a"
        streams.issue("b", "reduce", (), lambda: log.append("work"), None)
        streams.wait("a", None)
    streams.wait("b", None)
    assert log == ["issue a", "sleep 7", "work", "issue b", "work", "wait a", "sleep 9", "wait b"]


def late_steps(rank: int) -> tuple[list[torch.Tensor], dict[str, int]]:
    """Returns what a program gives while hpfunc's streams are wrapped, and how often each was late."""
    from hpfunc.backends import get

    slept = {"1": 0, "2": 0}

    def sleep(delay_us: int) -> None:
        slept[str(delay_us)] += 1

    with cuda.late(get("torch").streams("sim:0"), {"compute": 1, "gather": 2}, sleep):
        return CASES["plain"][0](rank), slept


@pytest.mark.processes
def test_streams_of_hpfunc_are_made_late() -> None:
    """On the simulated device, where nothing sleeps: the wrapped streams are those that a step uses."""
    observed = [each.result for each in observe(late_steps)]
    assert_same_bits([result for result, _ in observed], on_host(CASES["plain"][0]))
    for _, slept in observed:
        assert slept["1"] >= 6, "each step waits for three units, in forward and in backward"
        assert slept["2"] >= 6


def test_waits_are_forgotten_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    stream: Any = torch.cuda.Stream
    monkeypatch.setattr(stream, "wait_event", lambda self, event: waited.append(event))
    before = stream.wait_event
    with cuda.forgetting(3):
        for event in range(6):
            stream.wait_event(None, event)
    assert waited == [0, 1, 3, 4]
    assert stream.wait_event is before


def test_what_the_sanitizer_raises_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.cuda import _sanitizer

    class Enabled:
        enabled = True

    monkeypatch.setattr(_sanitizer, "cuda_sanitizer", Enabled())
    races: list[str] = []
    with cuda.sanitizer(races):
        raise _sanitizer.CUDASanitizerErrors(["one is not ordered after another"])
    assert races == ["one is not ordered after another"]
    with pytest.raises(ValueError, match="of the program"), cuda.sanitizer(races):
        raise ValueError("of the program")


def test_conditions_of_a_run_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch is told, in which order, and that it is told the opposite at the end."""
    log: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"allocated_bytes.all.peak": 7})
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", log.append)
    monkeypatch.setattr(torch.cuda, "_sleep", log.append)
    streams = Streams()
    monkeypatch.setattr(cuda, "hpfunc_streams", lambda: streams)

    def run() -> str:
        streams.wait("a", None)
        return "result"

    result, races, errors, *_, memory = cuda.observe(
        run, delays={"compute": 2}, forgets_waits=0, raises_on_sync=True, finds_races=False
    )
    assert (result, races, errors) == ("result", [], [])
    assert log == ["synchronize", "error", 2 * cuda.CYCLES_PER_US, 0, "synchronize"]
    assert memory == {"in use": 0, "peak": 7, "reserved": 0}


@pytest.mark.parametrize(
    ("num_gpus", "version", "world", "library"),
    [(1, (2, 30, 7), 4, "nccl"), (1, (2, 28, 9), 2, "gloo"), (1, (2, 28, 9), 1, "nccl"), (4, (2, 28, 9), 4, "nccl")],
)
def test_the_library_of_ranks_that_share_a_gpu(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, version: tuple[int, ...], world: int, library: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(cuda, "nccl_version", lambda: version)
    assert cuda.library(world) == library


def test_all_groups_of_a_rank_are_of_the_library_that_can_share(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(cuda, "nccl_version", lambda: (2, 28, 9))
    monkeypatch.setitem(dist.Backend.default_device_backend_map, "cuda", "nccl")
    monkeypatch.setattr(os, "environ", {})
    assert cuda.start(1, 2) == "cpu:gloo,cuda:gloo"
    assert dist.get_default_backend_for_device("cuda:0") == "gloo"
    assert chosen == [0]
    assert os.environ["LOCAL_RANK"] == "1"
    assert os.environ.items() >= cuda.SHARING.items()


# --- rows on the simulated device ------------------------------------------------------------------------------------
@pytest.mark.processes
def test_a_row_is_right_here_and_finds_its_planted_fault() -> None:
    """The others: ``python -m tests.device.check --device sim --plant``."""
    from tests.device.check.steady import memory, waits

    for run in (waits, memory):
        assert answer_of(run, Task("sim", limit_s=200.0)).state == "done"
        assert answer_of(run, Task("sim", is_planted=True, limit_s=200.0)).state == "wrong"


class OfGpu(Task):
    """The rows of a GPU, whose ranks have the simulated device: for what they do beside CUDA."""

    @property
    def framework(self) -> Any:
        return "simulated"


@pytest.mark.processes
def test_rows_of_a_gpu_compare_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "library", lambda world: "nccl")
    monkeypatch.setattr(cuda, "nccl_version", lambda: (2, 30, 7))
    monkeypatch.setattr(numbers, "CASES", {name: CASES[name] for name in ("plain", "hybrid")})
    right = answer_of(numbers.several_ranks, OfGpu("cuda", limit_s=200.0))
    assert (right.state, right.text) == ("done", "2 programs by NCCL, in float64 at most 0.0e+00 off")
    wrong = answer_of(numbers.several_ranks, OfGpu("cuda", is_planted=True, limit_s=200.0))
    assert wrong.state == "wrong"
    assert wrong.text.startswith("2 of 2 programs: hybrid is ")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("library", "state", "text"),
    [
        ("gloo", "skipped", "2 ranks need NCCL 2.30 to share a GPU, here is 2.28.9; gloo: RankError: ValueError: no"),
        ("nccl", "wrong", "2 ranks by NCCL 2.28.9: RankError: ValueError: no"),
    ],
)
def test_ranks_that_cannot_share_a_gpu_are_a_reason_to_skip(
    monkeypatch: pytest.MonkeyPatch, library: str, state: str, text: str
) -> None:
    def fails(*_: object) -> None:
        raise RankError("program on 2 ranks\nValueError: no")

    monkeypatch.setattr(cuda, "library", lambda world: library)
    monkeypatch.setattr(cuda, "nccl_version", lambda: (2, 28, 9))
    monkeypatch.setattr(programs, "on_ranks", fails)
    answer = answer_of(lambda task: Answer("done", programs.group_of(task, 2)), OfGpu("cuda"))
    assert (answer.state, answer.text) == (state, text)
