"""The judge: tries every interleaving of the works of all ranks that anybody could tell from another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hpfunc.planning.ops import Launch
from hpfunc.planning.schedule import Schedule
from tests.judge.graph import Graph
from tests.judge.host import unrunnable
from tests.judge.machine import Machine, State, WrongError
from tests.judge.works import Rank, Rules
from tests.judge.world import World


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the judge has found.

    Attributes:
        is_right: None if it has given up.
        reason: what is wrong, for people.
        num_states: in which more than one action was tried.
    """

    is_right: bool | None
    reason: str = ""
    num_states: int = 0
    kind: Literal["", "host", "timing", "deadlock"] = ""


def judge(
    schedule: Schedule | Sequence[Schedule],
    mesh_sizes: Mapping[str, int],
    rules: Rules,
    world: World | None = None,
) -> Verdict:
    """Runs some steps of a schedule in every interleaving.

    Args:
        schedule: that of all ranks, or one for each.
        mesh_sizes: number of ranks along each data axis, in mesh order.
        rules: see `Rules`.
        world: that of the schedule's program, if it is at hand.
    """
    first = schedule if isinstance(schedule, Schedule) else schedule[0]
    world = world or World(first.program, mesh_sizes)
    schedules = [first] * world.num_ranks if isinstance(schedule, Schedule) else list(schedule)
    built: list[tuple[Schedule, Rank]] = []
    ranks: list[Rank] = []
    for mine in schedules:
        found = next((rank for other, rank in built if other is mine), None)
        if found is None:
            for text in unrunnable(mine, world, borrowed=rules.borrowed):
                return Verdict(False, text, kind="host")
            built.append((mine, found := Rank(mine, world, rules)))
        ranks.append(found)
    graph = Graph(ranks, world)
    if graph.cyclic:
        return Verdict(False, "works wait for each other in a circle", kind="deadlock")
    return _Search(Machine(graph, ranks, world), graph, rules).run()


class _Search:
    """A depth first search."""

    def __init__(self, machine: Machine, graph: Graph, rules: Rules) -> None:
        self._machine, self._graph, self._rules = machine, graph, rules
        self._firsts = [2 * graph.first_work[rank] for rank in graph.ranks]
        # Where nobody can tell any order from another, every step does the same, on other numbers.
        self._queues = _of_one_step(graph) if graph.quiet and not rules.all_of else graph.queues
        self._num_actions = 2 * sum(map(len, self._queues))

    def run(self) -> Verdict:
        stack, seen, num_states = [self._machine.start()], set[object](), 0
        while stack:
            state = stack.pop()
            try:
                choices = self._advance(state)
            except WrongError as wrong:
                return Verdict(False, str(wrong), num_states, "timing")
            if not choices:
                if state.done.bit_count() < self._num_actions:
                    return Verdict(False, "no stream can go on", num_states, "deadlock")
                continue
            if (key := state.key()) in seen:
                continue
            seen.add(key)
            num_states += 1
            if num_states > self._rules.max_states:
                return Verdict(None, "too many states", num_states)
            # What was issued last is tried first: it is most likely to come too early.
            for queue in sorted(choices, key=self._lateness):
                following = state.copy()
                try:
                    self._step(following, queue)
                except WrongError as wrong:
                    return Verdict(False, str(wrong), num_states, "timing")
                stack.append(following)
        return Verdict(True, num_states=num_states)

    def _lateness(self, choice: tuple[int, int]) -> int:
        action = choice[1]
        return action - self._firsts[action // 2]

    def _step(self, state: State, choice: tuple[int, int]) -> None:
        queue, action = choice
        self._machine.act(state, action)
        state.places[queue] += 1

    def _advance(self, state: State) -> list[tuple[int, int]]:
        """Does what can be done at once, and returns what is to be tried then."""
        moved = True
        while moved:
            moved = False
            for queue in range(len(self._queues)):
                while (action := self._front(state, queue)) is not None and self._is_free(state, action):
                    self._step(state, (queue, action))
                    moved = True
        choices = [(q, a) for q in range(len(self._queues)) if (a := self._front(state, q)) is not None]
        return self._persistent(state, choices) if not self._rules.all_of and len(choices) > 1 else choices

    def _front(self, state: State, queue: int) -> int | None:
        """Returns the action that a stream can do next, if it can do any."""
        place, works = state.places[queue], self._queues[queue]
        if place == 2 * len(works):
            return None
        work = works[place // 2]
        action = 2 * work + place % 2
        if place % 2:
            blocked = isinstance(self._graph.works[work].op, Launch) and not self._machine.has_met(state, work)
            return None if blocked else action
        done = state.done
        return action if all(done >> need & 1 for need in self._graph.needs[action]) else None

    def _is_free(self, state: State, action: int) -> bool:
        tried = self._graph.ranks[action // 2] in self._rules.all_of
        return not tried and not self._graph.rivals[action // 2] & ~state.done

    def _persistent(self, state: State, choices: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Returns the fewest choices such that nobody can tell in what order they and all others are made."""
        enabled = {action for _, action in choices}
        best = choices
        for _, seed in choices:
            closed = self._closed(state, seed, enabled)
            found = [choice for choice in choices if choice[1] in closed]
            if len(found) < len(best):
                best = found
        return best

    def _closed(self, state: State, seed: int, enabled: set[int]) -> set[int]:
        closed, todo = {seed}, [seed]
        while todo:
            action = todo.pop()
            more = self._rivals(state, action) if action in enabled else self._missing(state, action)
            todo += more - closed
            closed |= more
        return closed

    def _rivals(self, state: State, action: int) -> set[int]:
        """Returns what is still to be done and must be tried before this action as well."""
        mask, found = self._graph.rivals[action // 2] & ~state.done, set[int]()
        while mask:
            found.add((mask & -mask).bit_length() - 1)
            mask &= mask - 1
        return found

    def _missing(self, state: State, action: int) -> set[int]:
        """Returns actions without one of which this one cannot be done."""
        for need in self._graph.needs[action]:
            if not state.done >> need & 1:
                return {need}
        key = state.meets[action // 2]
        rank = next(rank for rank in key[1] if rank not in state.arrived[key])
        return {2 * work for work in self._graph.lists.get((rank, key[0]), ()) if not state.done >> 2 * work & 1}


def _of_one_step(graph: Graph) -> list[list[int]]:
    """Returns the queues up to what the caller does after the first step."""
    steps = [work.step - (work.kind == "update") for work in graph.works]
    return [[work for work in queue if steps[work] < 1] for queue in graph.queues]
