"""Where `check` rejects what the judge finds right: each kind of difference, why there is one, and how one is told.

Nothing is explained by the text of a violation alone. Either the judge itself shows what the schedule depends on, in a
world that is a little harsher and in which planned schedules are right all the same; or only the form is mended, and
`check` accepts what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal

from hpfunc.planning.checking.checker import find_violations
from hpfunc.planning.ops import Buffer, Caller, Communicator, Compute, Deliver, Free, Launch, Local, Op, Region, Slot
from hpfunc.planning.schedule import Schedule
from tests.judge.explore import Rules, judge
from tests.judge.world import World

Purpose = Literal["gather", "reduce_scatter", "all_reduce"]


@dataclass(frozen=True, slots=True)
class Difference:
    """A mutant that `check` rejects and the judge does not, and the planned schedule of which it was made."""

    mutant: Schedule
    valid: Schedule
    world: World
    rules: Rules

    @property
    def begin(self) -> Op:
        """The first op of the planned schedule: the caller's."""
        return next(self.valid.ops)


@dataclass(frozen=True, slots=True)
class Kind:
    """One reason for differences.

    Attributes:
        shows: whether a difference is of this kind.
        mended: the mutant without this fault of form.
    """

    name: str
    reason: str
    shows: Callable[[Difference], bool] | None = None
    mended: Callable[[Difference], Schedule] | None = None


def explain(difference: Difference) -> str | None:
    """Returns the name of the kind of a difference; None if it has none."""
    if not find_violations(difference.mutant):
        return None  # it is not a difference
    if name := _shown(difference):
        return name
    forms = [kind for kind in KINDS if kind.mended is not None]
    for kind in forms:
        if (name := _mended(difference, [kind])) is not None:
            return name
    return _mended(difference, forms)


def _shown(difference: Difference) -> str | None:
    return next((kind.name for kind in KINDS if kind.shows is not None and kind.shows(difference)), None)


def _mended(difference: Difference, kinds: Iterable[Kind]) -> str | None:
    """Returns the names of the kinds that are to be mended, and of what shows in the rest, if that explains it all."""
    names: list[str] = []
    for kind in kinds:
        assert kind.mended is not None, kind
        mended = kind.mended(difference)
        if mended != difference.mutant:
            names.append(kind.name)
            difference = replace(difference, mutant=mended)
    if not names:
        return None
    if find_violations(difference.mutant):
        rest = _shown(difference)
        return " and ".join([*names, rest]) if rest else None
    return " and ".join(names)


# ------------------------------------------------------------------------------------------------ what the judge shows


def _needs_idle_memory(difference: Difference) -> bool:
    rules = replace(difference.rules, pressure=True)
    return judge(difference.mutant, difference.world.mesh_sizes, rules, difference.world).is_right is False


def _needs_zeros(difference: Difference) -> bool:
    world = World(difference.world.program, difference.world.mesh_sizes, neutral=False)
    return judge(difference.mutant, world.mesh_sizes, difference.rules, world).is_right is False


def _is_of_nothing(difference: Difference) -> bool:
    buffers = difference.mutant.buffers
    empty = [buffer.name for buffer in buffers if not buffer.numel]
    # An op that touches no elements counts as one of them.
    empty += [op.name for op in difference.mutant.ops if not any(_elements(buffers, op))]
    violations = find_violations(difference.mutant)
    return bool(violations) and all(any(name in str(violation) for name in empty) for violation in violations)


def _elements(buffers: Sequence[Buffer], op: Op) -> list[int]:
    """Returns how many elements an op touches, for each of its regions."""
    if isinstance(op, Free):
        return [buffers[op.buffer].numel]
    return [region.numel for region in (*op.reads, *op.writes)]


def _is_of_streams(difference: Difference) -> bool:
    """Whether `check` sees a communicator on two streams and nothing else. The judge has tried other orders."""
    violations = find_violations(difference.mutant)
    return bool(violations) and all("which is used on stream" in violation.text for violation in violations)


# ------------------------------------------------------------------------------------------------- what is mere form


def _changed(schedule: Schedule, change: Callable[[Op], Op]) -> Schedule:
    slots = tuple(Slot(slot.event, slot.when, tuple(map(change, slot.ops))) for slot in schedule.slots)
    return replace(schedule, slots=slots)


def _with_frees_at_home(difference: Difference) -> Schedule:
    buffers = difference.mutant.buffers
    return _changed(
        difference.mutant, lambda op: replace(op, stream=buffers[op.buffer].stream) if isinstance(op, Free) else op
    )


def _with_labels_of_shards(difference: Difference) -> Schedule:
    pairs = zip(difference.mutant.buffers, difference.valid.buffers, strict=True)
    buffers = tuple(replace(new, stream=old.stream) if new.kind == "shard" else new for new, old in pairs)
    return replace(difference.mutant, buffers=buffers)


def _with_own_communicators(difference: Difference) -> Schedule:
    """Names communicators after the streams of their launches, and their axes as the planned schedule does."""
    planned = {op.name: op for op in difference.valid.ops}
    sizes = difference.world.mesh_sizes

    def wide(communicator: Communicator) -> list[str]:
        return [axis for axis in communicator.axes if sizes[axis] > 1]

    def change(op: Op) -> Op:
        due = planned.get(op.name)
        if not isinstance(op, Launch) or not isinstance(due, Launch):
            return op
        known = due.communicator if wide(due.communicator) == wide(op.communicator) else op.communicator
        purpose = op.stream if op.stream != "compute" else next(iter(_free_purposes(difference.mutant)), due.stream)
        return replace(op, communicator=Communicator(purpose, known.axes))

    return _changed(difference.mutant, change)


def _free_purposes(schedule: Schedule) -> list[Purpose]:
    """Returns the purposes for which no stream but compute launches anything."""
    taken = {op.stream for op in schedule.ops if isinstance(op, Launch)}
    purposes: tuple[Purpose, ...] = ("gather", "reduce_scatter", "all_reduce")
    return [purpose for purpose in purposes if purpose not in taken]


def _with_plain_layouts(difference: Difference) -> Schedule:
    """Says of weights with blocks of one element that they are block after block, however they are cut."""
    program = difference.mutant.program
    weights = tuple(replace(w, direct=True) if w.block_numel == 1 else w for w in program.weights)
    return replace(difference.mutant, program=replace(program, weights=weights))


def _with_weights_as_planned(difference: Difference) -> Schedule:
    """Names the weights that a planned op names, where those that the mutant names lie alike."""
    planned = {op.name: op for op in difference.valid.ops}
    weights = difference.world.program.weights

    def layouts(op: Local) -> list[tuple[object, ...]]:
        found = [weights[w] for w in op.weights]
        return [(w.block_numel, w.num_shards, w.direct) for w in found]

    def change(op: Op) -> Op:
        due = planned.get(op.name)
        if not isinstance(op, Local) or not isinstance(due, Local) or layouts(op) != layouts(due):
            return op
        return replace(op, weights=due.weights)

    return _changed(difference.mutant, change)


def _with_sums_in_order(difference: Difference) -> Schedule:
    """Turns the two terms of a sum round where the planned schedule has them so."""
    planned = {op.name: op for op in difference.valid.ops}

    def change(op: Op) -> Op:
        due = planned.get(op.name)
        if not isinstance(op, Local) or not isinstance(due, Local) or op.kind != "accumulate":
            return op
        pairs = [frozenset(op.reads[i : i + 2]) for i in range(0, len(op.reads), 2)]
        same = pairs == [frozenset(due.reads[i : i + 2]) for i in range(0, len(due.reads), 2)]
        return replace(op, reads=due.reads) if same else op

    return _changed(difference.mutant, change)


def _without_idle_buffers(difference: Difference) -> Schedule:
    mutant = difference.mutant
    used = {buffer for op in mutant.ops for buffer in _buffers(op)}
    kept = [index for index, buffer in enumerate(mutant.buffers) if index in used or buffer.kind == "shard"]
    places = {index: place for place, index in enumerate(kept)}

    def moved(region: Region) -> Region:
        return region._replace(buffer=places.get(region.buffer, region.buffer))

    def change(op: Op) -> Op:
        if isinstance(op, Free):
            return replace(op, buffer=places.get(op.buffer, op.buffer))
        if isinstance(op, Deliver):
            return replace(op, region=moved(op.region))
        if isinstance(op, Caller):
            return replace(op, writes=tuple(map(moved, op.writes)))
        return replace(op, reads=tuple(map(moved, op.reads)), writes=tuple(map(moved, op.writes)))

    if len(kept) == len(mutant.buffers):
        return mutant
    return replace(_changed(mutant, change), buffers=tuple(mutant.buffers[index] for index in kept))


def _buffers(op: Op) -> set[int]:
    return {region.buffer for region in (*op.reads, *op.writes)}


def _with_nothing_as_planned(difference: Difference) -> Schedule:
    """Lets an op read and write no elements where it does so in the planned schedule."""
    planned = {op.name: op for op in difference.valid.ops}

    def put_back(found: tuple[Region, ...], due: tuple[Region, ...]) -> tuple[Region, ...]:
        if len(found) != len(due):
            return found
        return tuple(b if a.numel == b.numel == 0 else a for a, b in zip(found, due, strict=True))

    def change(op: Op) -> Op:
        due = planned.get(op.name)
        if isinstance(op, Deliver) and isinstance(due, Deliver):
            return replace(op, region=put_back((op.region,), (due.region,))[0])
        if isinstance(op, (Compute, Launch, Local)) and isinstance(due, (Compute, Launch, Local)):
            return replace(op, reads=put_back(op.reads, due.reads), writes=put_back(op.writes, due.writes))
        return op

    return _changed(difference.mutant, change)


def _with_callers_as_planned(difference: Difference) -> Schedule:
    """Lets the schedule say of the caller what is true: where each `Caller` stands, and what it writes."""
    found = {op.name: op for op in difference.mutant.ops if isinstance(op, Caller)}
    slots: list[Slot] = []
    for slot, planned in zip(difference.mutant.slots, difference.valid.slots, strict=True):
        due = {op.name: op for op in planned.ops if isinstance(op, Caller)}
        ops = [due.get(op.name, op) for op in slot.ops if not isinstance(op, Caller) or op.name in due]
        missing = [op for name, op in due.items() if op not in ops]
        first = [op for op in missing + ops if isinstance(op, Caller) and op is difference.begin]
        rest = [op for op in ops if op not in first]
        ends = [op for op in missing if op not in first and planned.ops[-1] is op]
        made = [op for op in missing if op not in first and op not in ends]
        slots.append(Slot(slot.event, slot.when, (*first, *made, *rest, *ends)))
    at_once = [op.name for op in takewhile(lambda op: isinstance(op, Caller), difference.valid.ops)]
    return _with_one_beginning(replace(difference.mutant, slots=tuple(slots)), at_once, found)


def _with_one_beginning(mended: Schedule, at_once: Sequence[str], found: dict[str, Caller]) -> Schedule:
    """Lets the first `Caller` say all that those say which stand right behind it in the planned schedule.

    The caller does nothing in between, so that this is true wherever they stand now.

    Args:
        mended: a schedule.
        at_once: their names, the first one's before all.
        found: what has been said before, for the waits.
    """
    names = {op.name for op in mended.ops}
    writes = tuple(dict.fromkeys(region for op in mended.ops if op.name in at_once for region in op.writes))

    def change(op: Op) -> Op:
        kept = [name for name in (found.get(op.name, op) if isinstance(op, Caller) else op).waits if name in names]
        if isinstance(op, Caller) and op.name in at_once:
            return replace(op, writes=writes if op.name == at_once[0] else (), waits=tuple(kept))
        kept = [at_once[0] if name in at_once else name for name in kept]
        return replace(op, waits=tuple(dict.fromkeys(kept)))

    return _changed(mended, change)


def _with_births_first(difference: Difference) -> Schedule:
    """Lets what uses other elements of a buffer than the op that begins it wait for that."""
    births: dict[int, tuple[str, tuple[Region, ...]]] = {}

    def change(op: Op) -> Op:
        if not isinstance(op, (Compute, Launch, Local)):
            return op
        waits = op.waits
        for region in (*op.reads, *op.writes):
            name, written = births.get(region.buffer, ("", ()))
            if name and name not in waits and not any(region.overlaps(other) for other in written):
                waits = (*waits, name)
        for region in op.writes:
            births.setdefault(region.buffer, (op.name, op.writes))
        return replace(op, waits=waits)

    return _changed(difference.mutant, change)


def _gives_nothing(op: Op) -> bool:
    """Returns whether the caller has nothing of an op of the compute stream that it could drop."""
    match op:
        case Caller():
            return not op.writes
        case Deliver():
            return not op.region.numel
        case _:
            return isinstance(op, (Free, Local))


def _with_waits_behind_the_caller(difference: Difference) -> Schedule:
    """Lets what begins memory of compute wait also for the step's own ops there, behind the caller's last work."""
    before: dict[str, set[str]] = {}
    last: dict[str, str] = {}
    computed: list[Op] = []
    begun: set[int] = set()
    buffers = difference.mutant.buffers

    def change(op: Op) -> Op:
        known = {name for other in (*op.waits, last.get(op.stream, "")) for name in before.get(other, ())}
        written = op.writes if isinstance(op, (Launch, Local)) else ()
        begins = {region.buffer for region in written} - begun
        begun.update(begins)
        if op.stream != "compute" and any(buffers[buffer].stream == "compute" for buffer in begins):
            behind = [other for other in computed if other.name not in known]
            if behind and all(map(_gives_nothing, behind)):
                op = replace(op, waits=(*op.waits, behind[-1].name))
        before[op.name] = {op.name, *known}.union(*(before.get(name, ()) for name in op.waits))
        last[op.stream] = op.name
        if op.stream == "compute":
            computed.append(op)
        return op

    return _changed(difference.mutant, change)


KINDS: tuple[Kind, ...] = (
    Kind(
        "idle memory",
        "memory is given back too early, or taken from another stream, but here nobody else has it just then",
        shows=_needs_idle_memory,
    ),
    Kind("no elements", "the race is for a buffer without elements", shows=_is_of_nothing),
    Kind("order of launches", "a communicator is on two streams, whose waits order its launches", shows=_is_of_streams),
    Kind(
        "zeros", "another sum than the one asked for, but what it adds too much happens to be zero", shows=_needs_zeros
    ),
    Kind(
        "stream of a free",
        "a buffer is given back on another stream than its own, which has waited for all its uses anyway",
        mended=_with_frees_at_home,
    ),
    Kind(
        "layout",
        "blocks of one element lie one after another in every layout",
        mended=_with_plain_layouts,
    ),
    Kind(
        "name of a weight",
        "an op names another weight than the one that it packs or unpacks, whose layout is the same",
        mended=_with_weights_as_planned,
    ),
    Kind(
        "no elements of another buffer",
        "an op reads or writes no elements, of another buffer than planned",
        mended=_with_nothing_as_planned,
    ),
    Kind("label of a shard", "the stream of the caller's memory means nothing", mended=_with_labels_of_shards),
    Kind(
        "name of a communicator",
        "a communicator has another name than the one with the same ranks",
        mended=_with_own_communicators,
    ),
    Kind(
        "said of the caller",
        "a `Caller` says what is not so, or stands elsewhere, or on another stream; all waits that it is for are there",
        mended=_with_callers_as_planned,
    ),
    Kind(
        "birth elsewhere",
        "an op uses elements of a buffer that another one has begun, and has itself waited for whoever had the memory",
        mended=_with_births_first,
    ),
    Kind(
        "behind the caller",
        "what begins memory of compute has waited for the caller's last work there, not for the step's own ops behind "
        "it, which give nothing back that it has not waited for otherwise",
        mended=_with_waits_behind_the_caller,
    ),
    Kind("terms of a sum", "a sum of two is the same bits in either order", mended=_with_sums_in_order),
    Kind("idle buffer", "a buffer is declared that no op touches", mended=_without_idle_buffers),
)
