"""Draws steps at random, and compares hpfunc with plain torch: ``python -m tests.fuzz --count 1000``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

# Before torch is imported anywhere: one thread in this process and in all that it starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tqdm import tqdm

from tests.fuzz.cases import Case
from tests.fuzz.draw import Limits, draw
from tests.fuzz.drive import Result, Runner
from tests.fuzz.features import features
from tests.fuzz.report import Report
from tests.fuzz.shrink import shrink
from tests.helpers.ranks import stop_all

CHUNK = 200


def ranks_of(seed: int) -> int:
    """Returns on how many ranks a seed runs if nobody says it: one in five on four."""
    return 4 if seed % 5 == 4 else 2


def run(cases: Iterator[Case], count: int, seconds: float, report: Report) -> Iterator[Result]:
    """Yields the results of up to `count` cases, with a progress bar."""
    end, runner = time.monotonic() + seconds, Runner()
    with tqdm(total=count, unit="case", mininterval=2.0, smoothing=0.05) as bar:
        while time.monotonic() < end and (some := list(islice(cases, min(CHUNK, count - bar.n)))):
            for result in runner.run(some):
                report.add(result)
                bar.update()
                bar.set_postfix(finds=len(report.failures), kinds=len(report.kinds))
                yield result


def main(given: Sequence[str] | None = None) -> int:
    """Runs it; returns 1 if something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=None, help="how many cases (1000; 1 if a seed is given)")
    parser.add_argument("--seed", type=int, default=None, help="the first seed (0)")
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=None, help="default: one case in five on 4")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--shrink", action="store_true", help="make one case of each kind of find smaller")
    parser.add_argument("--shrink-seconds", type=float, default=60.0, help="for each kind")
    parser.add_argument("--units", type=int, default=Limits().units, help="most units of a case")
    parser.add_argument("--ops", type=int, default=Limits().ops, help="most operators of a unit")
    parser.add_argument("--without", action="append", default=[], help="leave out cases with this feature")
    parser.add_argument("--only", action="append", default=[], help="cases with this feature alone")
    parser.add_argument("--failures", type=Path, default=None, help="file for the failures, as JSON lines")
    args = parser.parse_args(given)
    count = args.count or (1000 if args.seed is None else 1)
    limits = Limits(args.units, args.ops)
    first = args.seed or 0
    drawn = (draw(seed, args.ranks or ranks_of(seed), limits) for seed in range(first, first + 1000 * count))
    cases = (
        case
        for case in drawn
        if not any(name in features(case) for name in args.without) and set(args.only) <= features(case)
    )
    if args.failures is not None:
        args.failures.write_text("")
    report, begin = Report(args.failures), time.monotonic()
    for _ in run(cases, count, args.seconds, report):
        pass
    print(report.summary(with_features=count > 1))
    print(f"{report.num_cases / (time.monotonic() - begin):.2f} cases in a second")
    if args.shrink:
        for key, (case, _) in report.smallest.items():
            small = shrink(case, key, Runner().run, args.shrink_seconds)
            print(f"\nSMALLER: {key}\n{small}", flush=True)
    if count == 1 and not report.failures:
        print(draw(first, args.ranks or ranks_of(first), limits))
    return int(bool(report.failures))


if __name__ == "__main__":
    code = main()
    stop_all()
    sys.exit(code)
