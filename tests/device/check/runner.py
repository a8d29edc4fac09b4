"""Runs each row in a process of its own, within its limit and that of all rows together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .found import Answer, Line, Row

LIMIT_S = 480.0  # for all rows, unless the caller says otherwise
LEAST_S = 15.0  # less is not enough to start the ranks of a row
ROOT = Path(__file__).parents[3]


def run_all(
    rows: Sequence[Row], device: str, *, is_planted: bool, limit_s: float, tell: Callable[[Line], None] = lambda _: None
) -> list[Line]:
    """Returns the lines of all rows. `tell` hears of each when it is there.

    Limits of rows grow with `limit_s`, the limit of all: who gives more time has a slow machine.
    """
    end, lines = time.monotonic() + limit_s, []
    for row in rows:
        left_s, begin = end - time.monotonic(), time.monotonic()
        if left_s < LEAST_S:
            answer = Answer("skipped", f"out of time: the limit of {limit_s:g} s is for all rows together")
        else:
            answer = run_one(row, device, is_planted=is_planted, limit_s=min(row.limit_s * limit_s / LIMIT_S, left_s))
        lines.append(Line(row, answer, time.monotonic() - begin))
        tell(lines[-1])
    return lines


def run_one(row: Row, device: str, *, is_planted: bool, limit_s: float) -> Answer:
    """Returns what a row finds, in a new process. A process that does not answer in time is ended, with its ranks."""
    with tempfile.TemporaryDirectory(prefix="hpfunc-check-") as folder:
        notes, log = Path(folder, "notes"), Path(folder, "log")
        options = {"run": row.run, "device": device, "is_planted": is_planted, "limit_s": limit_s, "notes": str(notes)}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.device.check.row", json.dumps(options)],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # its ranks are in it, too
            )
            in_time = True
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                in_time = False
            finally:
                _end(process)
        return _answer(_read(notes), log, process.returncode, None if in_time else limit_s)


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):  # all of them have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(notes: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []


def _answer(notes: list[dict[str, Any]], log: Path, code: int, limit_s: float | None) -> Answer:
    if notes and "state" in notes[-1]:
        return Answer(**notes[-1])
    last = f"; the last was: {notes[-1]['note']}" if notes else ""
    figures = {"log": log.read_text(errors="replace")[-4000:]}
    if limit_s is not None:
        return Answer("wrong", f"no answer within {limit_s:.0f} s{last}", figures)
    return Answer("wrong", f"ended with code {code} and no answer{last}", figures)
