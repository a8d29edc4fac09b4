"""``python -m hpfunc``: the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import __version__
from ._running.doctor.doctor import diagnose


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command, and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m hpfunc", description="Functional sharded data parallelism.")
    parser.add_argument("--version", action="version", version=f"hpfunc {__version__}")
    commands = parser.add_subparsers(dest="command")
    doctor = commands.add_parser(
        "doctor",
        help="what this installation and this job can do, and what to change",
        description="Looks at versions, backends, devices, the launcher, NCCL, limits and the network, and says what "
        "to change. Exits with 1 if something is wrong, and with 0 if there are only warnings.",
    )
    doctor.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    diagnosis = diagnose(tries_all=True)
    print(diagnosis.to_json() if options.json else diagnosis)
    return int(diagnosis.is_wrong)


if __name__ == "__main__":
    sys.exit(main())
