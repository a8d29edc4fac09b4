"""The process of one row: writes notes and then the answer, a line of JSON each."""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .found import Answer, Skip, Task, Wrong


def answer_of(run: Callable[[Task], Answer], task: Task) -> Answer:
    """Returns what a row finds; an error that it did not expect is wrong, too."""
    try:
        return run(task)
    except Wrong as wrong:
        return Answer("wrong", str(wrong))
    except Skip as reason:
        return Answer("skipped", str(reason))
    except Exception as error:
        return Answer("wrong", short(error), {"traceback": traceback.format_exc()[-6000:]})


def short(error: BaseException) -> str:
    """Returns an error in one line: the last one of what ranks said, if it comes from them."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    said = [line for line in lines if "Error" in line.partition(":")[0] and " " not in line.partition(":")[0]]
    text = said[-1] if said else lines[0]
    return f"{type(error).__name__}: {text}"[:300]


def main(options: dict[str, Any]) -> None:
    """Runs the row that the options name."""
    with Path(options["notes"]).open("a", buffering=1) as notes:

        def write(what: dict[str, Any]) -> None:
            notes.write(json.dumps(what) + "\n")

        task = Task(
            options["device"], options["is_planted"], options["limit_s"], note=lambda text: write({"note": text})
        )
        module, _, name = options["run"].partition(":")
        write(asdict(answer_of(getattr(importlib.import_module(module), name), task)))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
