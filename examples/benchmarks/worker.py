"""One rank of a case: checks that all variants train alike, times them in turns, and writes what it found as JSON.

``launch.sh 2 1gbit worker.py --case a`` prints the table of case (a). `bench.py` starts it for every case.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import warnings
from pathlib import Path
from typing import Any

import baselines
import ideal
import measure
import report
import torch
import variants as ours
from cases import CASES, Case
from torch import Tensor
from variants import Variant


def make(name: str, case: Case) -> Variant:
    """Returns a variant by its name."""
    if case.task.framework == "mindspore":
        return importlib.import_module("mindspore_variants").make(name, case.task)
    return (ours if name.startswith("hpfunc") else baselines).make(name, case.task)


def check_weights(case: Case, variants: dict[str, Variant]) -> dict[str, float]:
    """Takes two steps of every variant and compares the weights.

    Returns:
        How far each is from the first, as a share of how far it has moved from the initial weights.

    Raises:
        SystemExit: two variants of hpfunc differ at all, or another by more than the case allows.
    """
    initial = [weight for block in case.task.model.weights() for weight in block.values()]
    apart: dict[str, float] = {}
    first: list[Tensor] | None = None
    ours: list[Tensor] | None = None
    for name, variant in variants.items():
        for _ in range(2):
            variant.step()
        weights = variant.weights()
        first = first or weights
        apart[name] = _distance(weights, first) / _distance(weights, initial)
        if apart[name] > case.tolerance:
            raise SystemExit(f"{name}: after two steps {apart[name]:.1e} from {next(iter(apart))}")
        if name.startswith("hpfunc"):
            ours = ours or weights
            if not all(torch.equal(a, b) for a, b in zip(weights, ours, strict=True)):
                raise SystemExit(f"{name}: other bits than another variant of hpfunc")
    return apart


def _distance(left: list[Tensor], right: list[Tensor]) -> float:
    return sum((a - b).square().sum().item() for a, b in zip(left, right, strict=True)) ** 0.5


def time_case(case: Case, names: list[str], options: measure.Options) -> dict[str, Any]:
    """Returns everything about a case as plain values."""
    variants = {name: make(name, case) for name in names}
    agreement = check_weights(case, variants)
    link = ideal.probe_link()
    results = measure.measure({name: variant.step for name, variant in variants.items()}, options)
    found: dict[str, Any] = {"title": case.title, "agreement": agreement, **results.record(), "link": link}
    found["counters"] = {
        name: {"bytes_sent": counters.bytes_sent, "bytes_copied": counters.bytes_copied, "wait_s": counters.wait_s}
        for name, variant in variants.items()
        if (counters := variant.counters()) is not None
    }
    schedules = {name: schedule for name, variant in variants.items() if (schedule := variant.schedule()) is not None}
    found["sent"] = {name: ideal.sent_bytes(schedule) for name, schedule in schedules.items()}
    found["schedules"] = {name: ideal.summary(schedule) for name, schedule in schedules.items()}
    return found


def main() -> None:
    """Measures; rank 0 prints a table, or writes a file."""
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--case", required=True, choices=CASES)
    add("--variants", help="some of the case's, with semicolons between them")
    add("--repetitions", type=int, help="rounds over all variants")
    add("--max-foreign", type=float, default=0.06, help="share of the machine that others may use in a repetition")
    add("--attempts", type=int, default=3, help="times that a disturbed repetition is taken")
    add("--memory", action="store_true", help="measure the peak memory of one variant instead")
    add("--compute", action="store_true", help="measure what a rank computes in a step instead; for one process")
    add("--json", type=Path, help="write to this file")
    args = parser.parse_args()
    measure.start()
    case = CASES[args.case]
    os.environ["HPFUNC_BACKEND"] = case.task.framework
    names = args.variants.split(";") if args.variants else list(case.variants)
    if args.memory:
        found = {names[0]: measure.peak_bytes(make(names[0], case).step)}
    elif args.compute:
        found = ideal.compute_times(case.task)
    else:
        options = measure.Options(args.repetitions or case.repetitions, 1, args.max_foreign, args.attempts)
        found = time_case(case, names, options)

    def text() -> str:
        if args.memory or args.compute:
            return json.dumps(found, indent=1)
        return f"{case.title}\n\n{report.table_of(case, found)}"

    measure.finish(found, args.json, text)


if __name__ == "__main__":
    main()
