"""`make device-check`: one table that says what hpfunc does on the device of this machine.

    python -m tests.device.check                        # all rows: on a GPU, or where there is none on the simulation
    python -m tests.device.check --rows i,iii --json found.json
    python -m tests.device.check --plant                # with a fault in each row: each must say "wrong"

Each row is a process of its own with a limit of time (`runner`), so that a hang or a crash is a line of the table.
`rows` lists them; the other modules compute them, by programs that ranks run (`tests.device.harness`).
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.device import cuda, simulated

from .found import Line, Row, exit_code, print_table, to_json
from .rows import ROWS
from .runner import LIMIT_S, run_all


class NoDevice(Exception):
    """There is nothing to check on; the text says what to install."""


def choose(wanted: str | None) -> str:
    """Returns ``"cuda"`` or ``"sim"``: what is wanted, or a GPU if there is one.

    Raises:
        NoDevice: it is not there.
    """
    import torch

    if wanted == "cuda" and not torch.cuda.is_available():
        raise NoDevice(f"torch {torch.__version__} sees no GPU: --device sim runs the rows on the simulated device")
    if wanted == "cuda" or (wanted is None and torch.cuda.is_available()):
        return "cuda"
    try:
        simulated.build()
    except simulated.Unavailable as reason:
        raise NoDevice(f"no GPU, and {reason}") from None
    return "sim"


def facts(device: str) -> dict[str, Any]:
    """Returns where the table was made."""
    import torch

    name, library = "simulated device", "simulated"
    if device == "cuda":
        name = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
        library = "NCCL " + ".".join(map(str, cuda.nccl_version()))
    return {
        "device": name,
        "library": library,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "is_simulated": device == "sim",
    }


def chosen(numbers: str | None) -> Sequence[Row]:
    """Returns the rows of these numbers, in the order of the table."""
    if numbers is None:
        return ROWS
    wanted = [number.strip() for number in numbers.split(",")]
    if unknown := set(wanted) - {row.number for row in ROWS}:
        raise SystemExit(f"no row is named {', '.join(sorted(unknown))}: there are {', '.join(r.number for r in ROWS)}")
    return [row for row in ROWS if row.number in wanted]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if no row is wrong, 1 if one is, 2 if there is no device. For ``--plant`` see `exit_code`."""
    parser = argparse.ArgumentParser(prog="python -m tests.device.check", description=__doc__)
    parser.add_argument("--rows", help="such as i,iii; by default all")
    parser.add_argument("--json", type=Path, help="write the table to this file, too")
    parser.add_argument("--device", choices=["cuda", "sim"], help="by default a GPU if there is one")
    parser.add_argument("--time-limit-s", type=float, default=LIMIT_S, help="for all rows together; 480 by default")
    parser.add_argument("--plant", action="store_true", help="put a fault into each row: each must be wrong")
    options = parser.parse_args(arguments)
    rows = chosen(options.rows)
    try:
        device = choose(options.device)
    except NoDevice as reason:
        print(f"device-check: {reason}", file=sys.stderr)
        return 2
    about = facts(device)
    lines = run_all(rows, device, is_planted=options.plant, limit_s=options.time_limit_s, tell=_tell)
    head = f"{about['device']}, {about['library']}, torch {about['torch']}" + " (faults planted)" * options.plant
    print_table(head, lines)
    if options.json:
        options.json.write_text(to_json(about | {"is_planted": options.plant}, lines))
    return exit_code(lines, is_planted=options.plant)


def _tell(line: Line) -> None:
    print(f"  {line.row.number}: {line.answer.state} after {line.time_s:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
