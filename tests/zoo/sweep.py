"""The ranks run the architectures of the zoo one after another; what is found is kept, so that a sweep can go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from tests.helpers.ranks import Pool, RankError
from tests.zoo.runner import examine
from tests.zoo.verdict import VERDICTS, Found

DEADLINE_S = 180.0


def sweep(
    names: Sequence[str],
    ranks: Pool,
    deadline_s: float = DEADLINE_S,
    examine: Callable[[int, str], Found] = examine,
) -> Iterator[Found]:
    """Yields what the ranks find out about each architecture.

    A rank that hangs or dies costs this one architecture: the next has new processes. So has the one after an error,
    which may have reached one rank alone.
    """
    for name in names:
        try:
            found = worst(ranks.run(examine, name, deadline_s=deadline_s))
        except RankError as error:
            found = Found(name, "", "hangs", str(error))
        if found.verdict not in ("works", "not built"):
            ranks.stop()
        yield found


def worst(found: Sequence[Found]) -> Found:
    """Returns what the first rank found, or another one if that was worse."""
    return max(found, key=lambda each: VERDICTS.index(each.verdict))


def read(path: Path) -> dict[str, Found]:
    """Returns what an earlier sweep wrote, by name; a later line counts."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = [Found(**each) for each in map(json.loads, lines)]
    return {each.name: each for each in found}


def write(path: Path, found: Found) -> None:
    """Adds a line for one architecture."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(found)) + "\n")
