"""Rows for the tests of `make device-check`. They import no torch, so that a process of theirs starts at once."""

from __future__ import annotations

import os
import time

from tests.device.check.found import Answer, Skip, Task, Wrong


def says_done(task: Task) -> Answer:
    return Answer("done", f"on {task.device}, planted: {task.is_planted}", {"count": 3})


def says_wrong(task: Task) -> Answer:
    raise Wrong("one bit")


def skips(task: Task) -> Answer:
    raise Skip("no such thing here")


def raises(task: Task) -> Answer:
    raise RuntimeError("first line\nsecond line")


def hangs(task: Task) -> Answer:
    task.note("what it hangs in")
    time.sleep(600)
    raise AssertionError


def crashes(task: Task) -> Answer:
    task.note("what it crashes in")
    os.abort()
