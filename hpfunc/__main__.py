"""``python -m hpfunc``: the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __version__
from ._commands import demo, port
from ._running.doctor.doctor import diagnose


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command, and returns its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command == "doctor":
        diagnosis = diagnose(tries_all=True)
        print(diagnosis.to_json() if options.json else diagnosis)
        return int(diagnosis.is_wrong)
    if options.command == "demo":
        return demo.start(options.ranks)
    if options.command == "port":
        return _port(options.script, options.json)
    parser.print_help()
    return 0


def _parser() -> argparse.ArgumentParser:
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
    tried = commands.add_parser(
        "demo",
        help="train a small model over several processes of this machine, and print the plan of its step",
        description="Trains a small model on the CPU over several processes, and prints the plan of its step.",
    )
    tried.add_argument("--ranks", type=int, default=2, help="how many processes (default 2)")
    ported = commands.add_parser(
        "port",
        help="what to write instead of the lines of a script of FSDP2, FSDP, DDP or accelerate",
        description="Reads a training script, and prints by line what to write instead, what has no counterpart, and "
        "the training loop anew. The script is not run. Exits with 1 if something has no counterpart or is not known, "
        "with 2 if the script cannot be read, and with 0 otherwise.",
    )
    ported.add_argument("script", type=Path, help="the script")
    ported.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser


def _port(script: Path, as_json: bool) -> int:
    try:
        report = port.port(script.read_text(encoding="utf-8"), str(script))
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        print(f"python -m hpfunc port: {script}: {error}", file=sys.stderr)
        return 2
    print(report.to_json() if as_json else report)
    return int(bool(report.missing))


if __name__ == "__main__":
    sys.exit(main())
