"""Which works must come before which, and which of the others can tell in what order they came."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hpfunc.planning.ops import Communicator, Launch
from tests.judge.works import Life, Rank, Work
from tests.judge.world import World

# Note [What the judge leaves out]
# A work is two actions, its start and its end; in between it may read and write at any moment. An action has to be
# tried before and after another one only if both can come first and somebody could tell: they touch the same elements
# and one of them writes, or they are launches over one communicator of one rank. Everything else may be done at once
# as soon as it can be done: no state that matters is lost, and no deadlock either (a persistent set of one action,
# Godefroid 1996). `tests/judge/test_judge.py` compares this with the search that leaves nothing out.
#
# Memory that was given back may be anybody's next. A buffer may get that of any buffer of its pool that the host has
# given back before. Instead of trying every choice, all are made at once: whoever writes into one of the two destroys
# the other. The first that reads what is destroyed does so too in the world in which just these two share memory.


class Touch(NamedTuple):
    """A work's use of elements of a cell."""

    work: int
    start: int
    stop: int
    writes: bool


class Graph:
    """All works of all ranks. Action 2 w is the start of work w, action 2 w + 1 its end.

    Attributes:
        works: of one rank after another, each in the order of its host.
        ranks: the rank of each work.
        queues: the works of each stream of each rank.
        needs: for each action, the actions that must be done before, apart from those of other ranks.
        rivals: for each work, the actions of all works with which it races, as a mask.
        spoils: by cell, the cells that are destroyed when it is written.
        lists: the launches of each rank over each communicator, in the order of its host.
        cyclic: some works wait for each other.
    """

    def __init__(self, ranks: Sequence[Rank], world: World) -> None:
        self.world = world
        self.works: list[Work] = [work for rank in ranks for work in rank.works]
        self.ranks = [number for number, rank in enumerate(ranks) for _ in rank.works]
        self.first_work = _firsts(len(rank.works) for rank in ranks)
        self.first_cell = _firsts(len(rank.sizes) for rank in ranks)
        self.queues: list[list[int]] = []
        self.needs: list[list[int]] = [[] for _ in range(2 * len(self.works))]
        self._link(ranks)
        self.lists = self._launch_lists()
        alike = all(rank is ranks[0] for rank in ranks)
        self._before = self._closure(len(ranks[0].works) if alike else len(self.works))
        self.rivals = [0] * len(self.works)
        self.spoils: dict[int, set[int]] = defaultdict(set)
        if not self.cyclic:
            self._find_disorder()
            for number, rank in enumerate(ranks[:1] if alike else ranks):
                touches = self._touches(number, rank)
                self._find_conflicts(touches)
                self._find_reuse(number, rank, touches)
            if alike:
                self._repeat(len(ranks))

    @property
    def quiet(self) -> bool:
        """Whether nobody can tell any order from another."""
        return not any(self.rivals) and not self.spoils

    # --------------------------------------------------------------------------------------------------------- orders

    def _link(self, ranks: Sequence[Rank]) -> None:
        """Notes the order of streams, and waits."""
        for number, rank in enumerate(ranks):
            base, queues = self.first_work[number], defaultdict[str, list[int]](list)
            for index, work in enumerate(rank.works, base):
                start = self.needs[2 * index]
                if queue := queues[work.stream]:
                    start.append(2 * queue[-1] + 1)
                start += [2 * (base + other) + 1 for other in work.waits]
                self.needs[2 * index + 1].append(2 * index)
                queue.append(index)
            self.queues += queues.values()

    def _launch_lists(self) -> dict[tuple[int, Communicator], list[int]]:
        lists: dict[tuple[int, Communicator], list[int]] = defaultdict(list)
        for index, work in enumerate(self.works):
            if isinstance(work.op, Launch):
                lists[self.ranks[index], work.op.communicator].append(index)
        return lists

    def _partners(self) -> dict[int, list[int]]:
        """Returns for each launch those that it meets, itself included, as far as that is certain: on one stream."""
        partners: dict[int, list[int]] = {}
        certain = {key: len({self.works[w].stream for w in found}) == 1 for key, found in self.lists.items()}
        for (rank, communicator), found in self.lists.items():
            keys = [(other, communicator) for other in self.world.group(communicator.axes, rank)]
            if all(certain.get(key, False) for key in keys):
                for turn, work in enumerate(found):
                    partners[work] = [self.lists[key][turn] for key in keys if turn < len(self.lists[key])]
        return partners

    def _closure(self, num_works: int) -> dict[int, int]:
        """Returns for each action all that must be done before, as a mask; some are missing if there is a circle.

        Where all ranks issue the same, the first one is enough: what other ranks do before something that it waits for,
        it does itself before that, too.
        """
        followers: list[list[int]] = [[] for _ in range(2 * num_works)]
        left = [0] * (2 * num_works)
        all_needs: list[list[int]] = []
        partners = self._partners() if num_works == len(self.works) else {}
        for action, needs in enumerate(self.needs[: 2 * num_works]):
            others = needs if action % 2 == 0 else needs + [2 * w for w in partners.get(action // 2, ())]
            all_needs.append(others)
            left[action] = len(others)
            for other in others:
                followers[other].append(action)
        before: dict[int, int] = {}
        ready = [action for action, count in enumerate(left) if not count]
        while ready:
            action = ready.pop()
            mask = 0
            for other in all_needs[action]:
                mask |= before[other] | 1 << other
            before[action] = mask
            for other in followers[action]:
                left[other] -= 1
                if not left[other]:
                    ready.append(other)
        self.cyclic = len(before) < 2 * num_works
        return before

    def ordered(self, earlier: int, later: int) -> bool:
        """Returns whether a work is always complete before another starts."""
        return bool(self._before[2 * later] >> (2 * earlier + 1) & 1)

    # ------------------------------------------------------------------------------------------------------ conflicts

    def _touches(self, number: int, rank: Rank) -> dict[int, list[Touch]]:
        touches: dict[int, list[Touch]] = defaultdict(list)
        base, shift = self.first_work[number], self.first_cell[number]
        for index, work in enumerate(rank.works, base):
            for spans, writes in ((work.reads, False), (work.writes, True)):
                for cell, start, stop in spans:
                    touches[shift + cell].append(Touch(index, start, stop, writes))
                    if writes and cell in rank.twins:
                        touches[shift + rank.twins[cell]].append(Touch(index, start, stop, True))
            if work.scratch is not None:
                touches[shift + work.scratch].append(Touch(index, 0, 1, True))
        return touches

    def _find_conflicts(self, touches: dict[int, list[Touch]]) -> None:
        for uses in touches.values():
            for i, late in enumerate(uses):
                for early in uses[:i]:
                    overlap = early.start < late.stop and late.start < early.stop
                    if (early.writes or late.writes) and overlap and early.work != late.work:
                        self._race(early.work, late.work)

    def _race(self, one: int, two: int) -> None:
        if not self.ordered(one, two) and not self.ordered(two, one):
            self.rivals[one] |= 3 << 2 * two
            self.rivals[two] |= 3 << 2 * one

    def _find_reuse(self, number: int, rank: Rank, touches: dict[int, list[Touch]]) -> None:
        """Finds memory that may be another's while it is still in use."""
        shift, pools = self.first_cell[number], defaultdict[str, list[Life]](list)
        for life in rank.lives.values():
            if life.numel:
                pools[life.pool].append(life)
        for lives in pools.values():
            given = sorted((life.given, life.cell) for life in lives if life.given is not None)
            place, ends = 0, 0
            takers = sorted((life.taken, life.cell) for life in lives if life.taken is not None)
            for taken, new in takers:
                while place < len(given) and given[place][0] < taken:
                    for use in touches[shift + given[place][1]]:
                        ends |= 2 << 2 * use.work
                    place += 1
                uses, common = touches[shift + new], -1
                for use in uses:
                    common &= self._before[2 * use.work]
                if ends & ~common:
                    for _, old in given[:place]:
                        self._reuse(shift + old, touches[shift + old], shift + new, uses)

    def _reuse(self, old: int, olds: list[Touch], new: int, news: list[Touch]) -> None:
        for one in olds:
            for two in news:
                conflict = one.writes or two.writes
                if conflict and one.work != two.work and not self.ordered(one.work, two.work):
                    self.spoils[old].add(new)
                    self.spoils[new].add(old)
                    self._race(one.work, two.work)

    def _repeat(self, num_ranks: int) -> None:
        """Says of all ranks what is found of the first one."""
        num_works, num_cells = self.first_work[1], self.first_cell[1]
        found = list(self.spoils.items())
        for rank in range(1, num_ranks):
            for work in range(num_works):
                self.rivals[rank * num_works + work] = self.rivals[work] << 2 * rank * num_works
            for old, news in found:
                self.spoils[rank * num_cells + old] = {rank * num_cells + new for new in news}

    def _find_disorder(self) -> None:
        """Finds launches over one communicator that a rank may come to in another order."""
        for found in self.lists.values():
            known = 2 * found[-1] in self._before
            if known and len({self.works[w].stream for w in found}) > 1:
                for i, late in enumerate(found):
                    for early in found[:i]:
                        self._race(early, late)


def _firsts(sizes: Iterable[int]) -> list[int]:
    firsts = [0]
    for size in sizes:
        firsts.append(firsts[-1] + size)
    return firsts
