"""Which works must come before which, and which of the others can tell in what order they came."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hpfunc._schedule import Communicator, Launch
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
        cyclic: some works wait for each other.
    """

    def __init__(self, ranks: Sequence[Rank], world: World) -> None:
        self.world = world
        self.works: list[Work] = [work for rank in ranks for work in rank.works]
        self.ranks = [number for number, rank in enumerate(ranks) for _ in rank.works]
        self.first_work, self.first_cell = (
            _firsts(len(rank.works) for rank in ranks),
            _firsts(len(r.sizes) for r in ranks),
        )
        self.queues: list[list[int]] = []
        self.needs: list[list[int]] = [[] for _ in range(2 * len(self.works))]
        self._link(ranks)
        self.lists = self._launch_lists()
        self.partners = self._partners()
        self._before = self._closure()
        self.cyclic = len(self._before) < len(self.needs)
        self.rivals = [0] * len(self.works)
        self.spoils: dict[int, set[int]] = defaultdict(set)
        if not self.cyclic:
            for number, rank in enumerate(ranks):
                touches = self._touches(number, rank)
                self._find_conflicts(touches)
                self._find_reuse(number, rank, touches)
            self._find_disorder()

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

    def _closure(self) -> dict[int, int]:
        """Returns for each action all that must be done before, as a mask; some are missing if there is a circle."""
        followers: list[list[int]] = [[] for _ in self.needs]
        left = [0] * len(self.needs)
        all_needs: list[list[int]] = []
        for action, needs in enumerate(self.needs):
            others = needs if action % 2 == 0 else needs + [2 * w for w in self.partners.get(action // 2, ())]
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
        shift = self.first_cell[number]
        ends = {cell: sum(1 << 2 * w + 1 for w in {use.work for use in touches[shift + cell]}) for cell in rank.lives}
        for old, new in _successors(rank.lives.values()):
            uses = touches[shift + new]
            common = -1
            for use in uses:
                common &= self._before[2 * use.work]
            for life in old:
                if ends[life] & ~common:
                    self._reuse(shift + life, touches[shift + life], shift + new, uses)

    def _reuse(self, old: int, olds: list[Touch], new: int, news: list[Touch]) -> None:
        for one in olds:
            for two in news:
                conflict = one.writes or two.writes
                if conflict and one.work != two.work and not self.ordered(one.work, two.work):
                    self.spoils[old].add(new)
                    self.spoils[new].add(old)
                    self._race(one.work, two.work)

    def _find_disorder(self) -> None:
        """Finds launches over one communicator that a rank may come to in another order."""
        for found in self.lists.values():
            if len({self.works[w].stream for w in found}) > 1:
                for i, late in enumerate(found):
                    for early in found[:i]:
                        self._race(early, late)


def _firsts(sizes: Iterator[int]) -> list[int]:
    firsts = [0]
    for size in sizes:
        firsts.append(firsts[-1] + size)
    return firsts


def _successors(lives: Sequence[Life]) -> Iterator[tuple[list[int], int]]:
    """Yields each cell with all those whose memory it may have got."""
    pools: dict[str, list[Life]] = defaultdict(list)
    for life in lives:
        if life.numel:
            pools[life.pool].append(life)
    for members in pools.values():
        for new in members:
            yield [old.cell for old in members if old.given is not None and old.given < new.taken], new.cell
