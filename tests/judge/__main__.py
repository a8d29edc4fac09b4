"""Compares `check` with the judge: ``python -m tests.judge --count 100000``."""

from __future__ import annotations

import argparse
import sys
from itertools import count

from tests.judge.tally import compare
from tests.judge.works import Rules


def main() -> int:
    """Prints the comparison; returns whether there is a verdict of `check` that is wrong, or not explained."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="number of mutants to judge")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--states", type=int, default=Rules().max_states, help="give up on a mutant after so many")
    arguments = parser.parse_args()
    rules = Rules(max_states=arguments.states)
    tally = compare(count(arguments.seed), arguments.count, rules, arguments.seconds)
    print(tally)
    return bool(tally.missed or tally.unexplained)


if __name__ == "__main__":
    sys.exit(main())
