"""Memory, and what each action does to it. Whatever nobody may see raises `WrongError` as soon as it is seen."""

from __future__ import annotations

import numpy as np

from hpfunc.planning.ops import Communicator, Compute, Deliver, Launch, Local
from tests.judge.graph import Graph
from tests.judge.locals import LOCALS, Inputs
from tests.judge.terms import ABSENT, CALLERS, NOTHING, Terms
from tests.judge.works import Rank, Span, Work
from tests.judge.world import World

Meeting = tuple[Communicator, tuple[int, ...], int]


class WrongError(Exception):
    """Something that must not be, in one interleaving."""


class State:
    """How far all streams have come, and what memory holds. Arrays are never changed, so that copies are cheap.

    Attributes:
        done: the actions that are done, as a mask.
        places: how many actions of each queue are done.
        memory: what each cell holds.
        samples: what works under way have read when they started.
        arrived: the launches that have met so far.
        turns: how many launches each rank has brought to each communicator.
        meets: the meeting of each launch under way.
    """

    __slots__ = ("arrived", "done", "meets", "memory", "places", "samples", "turns")

    def __init__(self, num_queues: int, memory: list[Terms]) -> None:
        self.done = 0
        self.places = [0] * num_queues
        self.memory = memory
        self.samples: dict[int, list[Terms]] = {}
        self.arrived: dict[Meeting, dict[int, int]] = {}
        self.turns: dict[tuple[int, Communicator], int] = {}
        self.meets: dict[int, Meeting] = {}

    def copy(self) -> State:
        """Returns a state that goes its own way."""
        other = State(0, self.memory.copy())
        other.done, other.places = self.done, self.places.copy()
        other.samples, other.arrived = self.samples.copy(), {key: found.copy() for key, found in self.arrived.items()}
        other.turns, other.meets = self.turns.copy(), self.meets.copy()
        return other

    def key(self) -> tuple[int, int, int]:
        """Returns what tells states apart: what is done, and what memory holds."""
        held = tuple(map(_digest, self.memory))
        brought = tuple((work, tuple(map(_digest, found))) for work, found in sorted(self.samples.items()))
        return self.done, hash(held), hash(brought)


def _digest(terms: Terms) -> int:
    return hash(terms.tobytes())


class Machine:
    """All ranks with their memory."""

    def __init__(self, graph: Graph, ranks: list[Rank], world: World) -> None:
        self.graph, self.world, self.ranks = graph, world, ranks
        self.dtypes = [_dtypes(rank) for rank in ranks]
        self._blank = [NOTHING + np.zeros(size, np.int64) for rank in ranks for size in rank.sizes]
        shared = set(graph.spoils)
        self._exposed = [
            bool(rivals) or bool(shared and not shared.isdisjoint(self._cells(w)))
            for w, rivals in enumerate(graph.rivals)
        ]

    def _cells(self, index: int) -> list[int]:
        work, shift = self.graph.works[index], self.graph.first_cell[self.graph.ranks[index]]
        scratch = [] if work.scratch is None else [work.scratch]
        return [shift + cell for cell in (*(span.cell for span in (*work.reads, *work.writes)), *scratch)]

    def start(self) -> State:
        """Returns the state before anything."""
        return State(len(self.graph.queues), self._blank.copy())

    # --------------------------------------------------------------------------------------------------------- actions

    def act(self, state: State, action: int) -> None:
        """Does one action.

        Raises:
            WrongError: it sees, or does, what must not be.
        """
        index = action // 2
        (self._end if action % 2 else self._begin)(state, index, self.graph.works[index])
        state.done |= 1 << action

    def _begin(self, state: State, index: int, work: Work) -> None:
        exposed = self._exposed[index]
        launch = isinstance(work.op, Launch)
        if exposed or launch:
            state.samples[index] = self._read(state, index, work)
        if launch:
            self._arrive(state, index, work)
        if exposed:
            busy = CALLERS - 1 - index
            for span in work.writes:
                self._write(
                    state, index, span, np.full(span.stop - span.start, busy), own=not isinstance(work.op, Deliver)
                )
            if work.scratch is not None:
                self._write(state, index, Span(work.scratch, 0, 1), np.ones(1, np.int64))

    def _end(self, state: State, index: int, work: Work) -> None:
        exposed = self._exposed[index]
        reads = self._reread(state, index, work) if exposed else self._read(state, index, work)
        if exposed and work.scratch is not None:
            cell = self.graph.first_cell[self.graph.ranks[index]] + work.scratch
            if state.memory[cell][0] != 1:
                raise WrongError(f"{work.name}: memory that it took for itself is another's still")
            self._write(state, index, Span(work.scratch, 0, 1), np.ones(1, np.int64))
        results = self._results(state, index, work, reads)
        if len(results) != len(work.writes):
            raise WrongError(f"{work.name} has {len(results)} results for {len(work.writes)} places")
        for span, value in zip(work.writes, results, strict=True):
            if value.size != span.stop - span.start:
                raise WrongError(f"{work.name} writes {value.size} elements into {span.stop - span.start}")
            self._write(state, index, span, value, own=not isinstance(work.op, Deliver))
        if isinstance(work.op, Launch):
            self._part(state, index)
        else:
            state.samples.pop(index, None)

    # ---------------------------------------------------------------------------------------------------------- memory

    def _read(self, state: State, index: int, work: Work) -> list[Terms]:
        shift = self.graph.first_cell[self.graph.ranks[index]]
        found: list[Terms] = []
        tolerant = isinstance(work.op, Local) and bool(work.op.weights)  # these know of padding
        for cell, start, stop in work.reads:
            value = state.memory[shift + cell][start:stop]
            if value.size and value.min() < 0:
                bad = value[value < 0]
                if not tolerant or (bad != ABSENT).any():
                    raise WrongError(f"{work.name} reads what nobody, or somebody else, has written")
            found.append(value)
        return found

    def _reread(self, state: State, index: int, work: Work) -> list[Terms]:
        """Returns what a work has read when it started. It must be there still, where it has not written itself."""
        shift, first = self.graph.first_cell[self.graph.ranks[index]], state.samples[index]
        for span, value in zip(work.reads, first, strict=True):
            if span not in work.writes and not np.array_equal(
                state.memory[shift + span.cell][span.start : span.stop], value
            ):
                raise WrongError(f"{work.name} reads what changes meanwhile")
        return first

    def _write(self, state: State, index: int, span: Span, value: Terms, *, own: bool = True) -> None:
        number = self.graph.ranks[index]
        shift = self.graph.first_cell[number]
        twin = self.ranks[number].twins.get(span.cell)
        for cell in (span.cell,) if twin is None or not own else (span.cell, twin):
            if value.size != self.ranks[number].sizes[cell]:
                changed = state.memory[shift + cell].copy()
                changed[span.start : span.stop] = value
                state.memory[shift + cell] = changed
            else:
                state.memory[shift + cell] = value
        for cell in self.graph.spoils.get(shift + span.cell, ()) if value.size else ():
            state.memory[cell] = np.full_like(state.memory[cell], CALLERS)

    # --------------------------------------------------------------------------------------------------------- meetings

    def _arrive(self, state: State, index: int, work: Work) -> None:
        assert isinstance(work.op, Launch)
        rank, communicator = self.graph.ranks[index], work.op.communicator
        group = self.world.group(communicator.axes, rank)
        turn = state.turns.get((rank, communicator), 0)
        state.turns[rank, communicator] = turn + 1
        key = state.meets[index] = (communicator, group, turn)
        found = state.arrived.setdefault(key, {})
        if any(self._form(other) != self._form(index) for other in found.values()):
            raise WrongError(f"ranks meet in {work.name} and in something else")
        found[rank] = index

    def _form(self, index: int) -> object:
        work = self.graph.works[index]
        assert isinstance(work.op, Launch)
        dtypes = self.dtypes[self.graph.ranks[index]]
        return work.op.collective, [(span.stop - span.start, dtypes[span.cell]) for span in (*work.reads, *work.writes)]

    def has_met(self, state: State, index: int) -> bool:
        """Returns whether all ranks have come to the collective of a launch that has started."""
        key = state.meets[index]
        return len(state.arrived[key]) == len(key[1])

    def _part(self, state: State, index: int) -> None:
        """Forgets a meeting whose launches are all complete, or about to be."""
        key = state.meets[index]
        launches = state.arrived[key].values()
        if all(launch == index or state.done >> 2 * launch + 1 & 1 for launch in launches):
            for launch in launches:
                del state.samples[launch], state.meets[launch]
            del state.arrived[key]

    # ---------------------------------------------------------------------------------------------------------- results

    def _results(self, state: State, index: int, work: Work, reads: list[Terms]) -> list[Terms]:
        rank = self.graph.ranks[index]
        match work.op:
            case Compute():
                return self._compute(rank, work, work.op, reads)
            case Launch():
                return self._receive(state, index, work.op, rank, work)
            case Local():
                return self._local(rank, work, work.op, reads)
            case Deliver():
                self._handed(rank, work, reads, work.step)
                return [np.full(span.stop - span.start, CALLERS) for span in work.writes]
            case _:
                return self._caller(rank, work, reads)

    def _caller(self, rank: int, work: Work, reads: list[Terms]) -> list[Terms]:
        """Writes shards: of the next step where they are the step's arguments."""
        shards = {cell: buffer for buffer, cell in self.ranks[rank].shards.items()}
        if work.kind == "update":
            self._handed(rank, work, reads, work.step - 1)
        written: list[Terms] = []
        for span in work.writes:
            buffer = shards[span.cell]
            weight = self.ranks[rank].schedule.buffers[buffer].weight
            absent = work.kind == "update" and self.ranks[rank].beginnings and buffer in self.ranks[rank].made
            if absent or weight is None:
                written.append(np.full(span.stop - span.start, CALLERS))
            else:
                written.append(self.world.shard(weight, rank, work.step)[: span.stop])
        return written

    def _handed(self, rank: int, work: Work, reads: list[Terms], step: int) -> None:
        for (_, segment, weight), value in zip(work.kept, reads, strict=True):
            wanted = self.world.expected(step).get((segment, weight))
            if wanted is None or not np.array_equal(wanted[rank], value):
                raise WrongError(f"{work.name}: weight {weight} gets what is not its gradient")

    def _compute(self, rank: int, work: Work, op: Compute, reads: list[Terms]) -> list[Terms]:
        program = self.world.program
        event = program.events[op.event]
        members = program.unit_of(event).weights
        trainable = [position for position, weight in enumerate(members) if program.weights[weight].trainable]
        dtypes = self.dtypes[rank]
        found = [dtypes[span.cell] for span in work.reads]
        if found != [program.weights[weight].dtype for weight in members]:
            raise WrongError(f"{work.name} gets {found}")
        for weight, value in zip(members, reads, strict=True):
            if not np.array_equal(value, self.world.whole(weight, work.step)):
                raise WrongError(f"{work.name} sees what is not weight {weight}")
        positions = trainable if event.kind == "backward" else []
        due = [(dtypes[s.cell], s.start, s.stop) for s in work.writes]
        weights = [program.weights[members[position]] for position in positions]
        if due != [(w.dtype, 0, w.whole_numel) for w in weights]:
            raise WrongError(f"{work.name} writes other gradients than those of its weights")
        return [self.world.gradient(rank, work.step, op.event, position) for position in positions]

    def _receive(self, state: State, index: int, op: Launch, rank: int, work: Work) -> list[Terms]:
        key = state.meets[index]
        group = key[1]
        dtypes = self.dtypes[rank]
        launches = [state.arrived[key][other] for other in group]
        results: list[Terms] = []
        if len(work.reads) != len(work.writes):
            raise WrongError(f"{work.name} sends and receives different numbers of messages")
        for pair, (read, write) in enumerate(zip(work.reads, work.writes, strict=True)):
            if dtypes[read.cell] != dtypes[write.cell]:
                raise WrongError(f"{work.name} sends one dtype and receives another")
            messages = [state.samples[launch][pair] for launch in launches]
            results.append(self._received(op, messages, group.index(rank), dtypes[read.cell]))
        return results

    def _received(self, op: Launch, messages: list[Terms], mine: int, dtype: str) -> Terms:
        if op.collective == "all_gather":
            return np.concatenate(messages)
        if op.collective == "all_reduce":
            return self.world.total(messages, dtype)
        if messages[0].size % len(messages):
            raise WrongError(f"{op.name}: a message cannot be parted")
        parts = [sent.reshape(len(messages), -1)[mine] if sent.size else sent for sent in messages]
        return np.concatenate(parts) if op.collective == "all_to_all" else self.world.total(parts, dtype)

    def _local(self, rank: int, work: Work, op: Local, reads: list[Terms]) -> list[Terms]:
        dtypes = self.dtypes[rank]
        weights = [self.world.program.weights[w] for w in op.weights]
        sources, targets = [dtypes[s.cell] for s in work.reads], [dtypes[s.cell] for s in work.writes]
        try:
            return LOCALS[op.kind](Inputs(op, weights, reads, sources, targets, self.world))
        except (ValueError, IndexError, ZeroDivisionError) as error:
            raise WrongError(f"{work.name}: sizes do not fit") from error


def _dtypes(rank: Rank) -> dict[int, str]:
    return {cell: rank.schedule.buffers[buffer].dtype for cell, buffer in rank.buffers.items()}
