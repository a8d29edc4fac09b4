"""Mutants of planned schedules, put to `check` and to the judge: how often they agree, and why they do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from time import monotonic

from hpfunc.planning.checking.checker import find_violations
from hpfunc.planning.planner import plan
from tests.judge.differences import Difference, explain
from tests.judge.explore import judge
from tests.judge.inputs import mutated, small_case
from tests.judge.works import Rules
from tests.judge.world import World

MUTANTS_PER_CASE = 8


@dataclass(slots=True)
class Find:
    """A verdict of `check` that is wrong, or that nobody can explain; `size` is the number of ops."""

    where: str
    text: str
    size: int


@dataclass(slots=True)
class Tally:
    """What has come of it.

    Attributes:
        planned: planned schedules, which both accept.
        agreed: mutants, by (mutation, whether they are right).
        explained: mutants that `check` rejects and the judge does not, by kind of difference.
        unknown: those that were too much for the judge, by mutation.
        missed: what `check` accepts and the judge shows wrong.
        unexplained: what `check` rejects and the judge does not, for no reason that is known.
    """

    planned: int = 0
    agreed: Counter[tuple[str, bool]] = field(default_factory=Counter)
    explained: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    missed: list[Find] = field(default_factory=list)
    unexplained: list[Find] = field(default_factory=list)

    @property
    def num_mutants(self) -> int:
        """How many mutants were judged."""
        listed = len(self.missed) + len(self.unexplained)
        return self.agreed.total() + self.explained.total() + self.unknown.total() + listed

    def __str__(self) -> str:
        lines = [f"{self.planned} planned schedules, {self.num_mutants} mutants"]
        names = sorted({name for name, _ in self.agreed})
        lines += [f"{'mutation':18}{'both reject':>12}{'both accept':>12}{'unknown':>9}"]
        for name in names:
            wrong, right = self.agreed[name, False], self.agreed[name, True]
            lines.append(f"{name:18}{wrong:12}{right:12}{self.unknown[name]:9}")
        lines.append(f"agreed on {self.agreed.total()} of {self.num_mutants - self.unknown.total()} mutants")
        lines += [f"rejected, but harmless ({count}): {kind}" for kind, count in self.explained.most_common()]
        for name, finds in (("MISSED", self.missed), ("UNEXPLAINED", self.unexplained)):
            lines.append(f"{name}: {len(finds)}")
            lines += [f"  {find.where}: {find.text}" for find in sorted(finds, key=lambda find: find.size)[:20]]
        return "\n".join(lines)


def compare(seeds: Iterable[int], count: int, rules: Rules, seconds: float = float("inf")) -> Tally:
    """Judges mutants of the cases of some seeds, until there are `count` of them or the time is over."""
    tally, end = Tally(), monotonic() + seconds
    for seed in seeds:
        if tally.num_mutants >= count or monotonic() > end:
            break
        _compare_case(seed, rules, tally)
    return tally


def _compare_case(seed: int, rules: Rules, tally: Tally) -> None:
    rng = Random(seed)
    case = small_case(rng)
    valid = plan(case.program, case.policy, case.traits)
    world = World(case.program, case.mesh_sizes)
    size = len(list(valid.ops))
    verdict = judge(valid, case.mesh_sizes, rules, world)
    violations = find_violations(valid)
    if verdict.is_right is None:
        tally.unknown["planned"] += 1
        return
    if not verdict.is_right or violations:
        text = f"judge: {verdict.reason or 'right'}; check: {'; '.join(map(str, violations)) or 'accepts'}"
        tally.missed.append(Find(f"seed {seed}, planned", text, size))
        return
    tally.planned += 1
    for number in range(MUTANTS_PER_CASE):
        if not (mutant := mutated(rng, valid)):
            continue
        name, schedule = mutant
        where = f"seed {seed}, mutant {number}, {name}, {size} ops"
        violations = find_violations(schedule)
        verdict = judge(schedule, case.mesh_sizes, rules, world)
        if verdict.is_right is None:
            tally.unknown[name] += 1
        elif verdict.is_right == (not violations):
            tally.agreed[name, verdict.is_right] += 1
        elif not violations:
            tally.missed.append(Find(where, verdict.reason, size))
        elif kind := explain(Difference(schedule, valid, world, rules)):
            tally.explained[kind] += 1
        else:
            tally.unexplained.append(Find(where, "; ".join(map(str, violations)), size))
