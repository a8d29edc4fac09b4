"""Many cases on pools of ranks: what they found, together over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tests.fuzz.cases import Case
from tests.fuzz.compare import Find
from tests.fuzz.rank import Outcome, run_cases
from tests.helpers.ranks import RankError, pool

BATCH = 50
START_S, PER_CASE_S = 90.0, 4.0


@dataclass(frozen=True)
class Result:
    """What came of one case.

    Attributes:
        finds: with the first rank that has each.
    """

    case: Case
    finds: tuple[tuple[int, Find], ...] = ()
    refused: frozenset[str] = frozenset()
    notes: frozenset[str] = frozenset()

    @property
    def keys(self) -> set[str]:
        """The kinds of its finds."""
        return {find.key for _, find in self.finds}


@dataclass
class Runner:
    """Runs cases.

    Attributes:
        prepare: is called on every rank with each batch, before its cases: to plant a fault.
    """

    prepare: Callable[[], object] | None = None
    _sizes: set[int] = field(default_factory=set)

    def run(self, cases: Sequence[Case]) -> Iterator[Result]:
        """Yields the results of cases, grouped by the number of ranks."""
        for size in sorted({case.num_ranks for case in cases}):
            same = [case for case in cases if case.num_ranks == size]
            for start in range(0, len(same), BATCH):
                yield from self._batch(size, same[start : start + BATCH])

    def _batch(self, size: int, cases: Sequence[Case]) -> Iterator[Result]:
        left = list(cases)
        while left:
            results = self._some(size, left)
            yield from results
            left = left[len(results) :]

    def _some(self, size: int, cases: Sequence[Case]) -> list[Result]:
        """Returns the results of the first few, at least of one."""
        ranks = pool(size)
        given, deadline_s = (_prepared, self.prepare, list(cases)), START_S + PER_CASE_S * len(cases)
        try:
            try:
                answers = ranks.run(*given, deadline_s=deadline_s)
            except OSError:  # they ended while nothing was asked of them: no case is at fault
                ranks.stop()
                answers = ranks.run(*given, deadline_s=deadline_s)
        except RankError as error:  # one of them hangs, or ends a process
            if len(cases) == 1:
                kind = "hang" if " hung\n" in str(error) else "a process ends" if " died\n" in str(error) else "harness"
                return [Result(cases[0], ((0, Find(kind, "", str(error)[-3000:])),))]
            return self._some(size, cases[: max(1, len(cases) // 4)])
        count = min(len(answer) for answer in answers)
        if count < len(cases):
            ranks.stop()
        return [_together(case, [answer[i] for answer in answers]) for i, case in enumerate(cases[:count])]


def _prepared(rank: int, prepare: Callable[[], object] | None, cases: Sequence[Case]) -> list[Outcome]:
    if prepare is not None:
        prepare()
    return run_cases(rank, cases)


def _together(case: Case, outcomes: Sequence[Outcome]) -> Result:
    finds: dict[str, tuple[int, Find]] = {}
    for rank, outcome in enumerate(outcomes):
        for find in outcome.finds:
            finds.setdefault(find.key, (rank, find))
    results = ("raw PeerError", "ranks end differently")
    followers = [key for key, (_, find) in finds.items() if find.kind.startswith(results)]
    if len(followers) < len(finds):  # what a rank hears of another one is no cause
        finds = {key: value for key, value in finds.items() if key not in followers}
    refused = frozenset(text for outcome in outcomes for text in outcome.refused)
    notes = frozenset(note for outcome in outcomes for note in outcome.notes)
    return Result(case, tuple(finds.values()), refused, notes)
