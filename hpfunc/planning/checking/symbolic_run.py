"""A symbolic run of a schedule in issue order, which checks the values that it computes.

The right values must reach every `Compute` and every `Deliver`, else the schedule is wrong. This module shares no code
with the planner.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator

from ..ops import Caller, Compute, Deliver, Free, Launch, Local, Op, Region, Slot
from ..program import COMPUTES, Program, segments
from ..schedule import Schedule
from . import symbols
from .symbols import OWN, Axes, Content, Grad, Param, Piece, Unknown, Uses, WrongError


def num_ranks(program: Program) -> dict[Axes, int]:
    """Returns the number of ranks along the axes over which the program's weights are cut or reduced."""
    cuts = {weight.gather_axes: weight.num_shards for weight in program.weights}
    return cuts | {weight.reduce_axes: weight.num_replicas for weight in program.weights}


def wrong_meanings(schedule: Schedule) -> Iterator[tuple[str, str]]:
    """Yields name and reason for each op that reads or leaves wrong values."""
    run = _Run(schedule)
    for slot in schedule.slots:
        for op in slot.ops:
            try:
                run.step(slot, op)
            except WrongError as wrong:
                run.spoil(op)
                yield op.name, str(wrong)
    yield from run.missing()


def scattered(schedule: Schedule, issued: Collection[str]) -> dict[int, Region]:
    """Returns the region of the scattered gradient of each weight that waits for others or for its all-reduce.

    Args:
        schedule: a safe schedule.
        issued: the names of the ops that have run; the others will not run.
    """
    run = _Run(schedule)
    gone: set[int] = set()
    for slot in schedule.slots:
        for op in slot.ops:
            if op.name in issued:
                run.step(slot, op)
                if isinstance(op, (Free, Deliver)):
                    gone |= {region.buffer for region in op.writes}
    kept = (i for i, buffer in enumerate(schedule.buffers) if buffer.kind in ("reduce", "carry") and i not in gone)
    return {weight: region for index in kept for weight, region in run.gradients(index)}


class _Run:
    """The memory of one rank, and the gradients that it has delivered."""

    def __init__(self, schedule: Schedule) -> None:
        self._program = schedule.program
        self._buffers = schedule.buffers
        self._collectives = symbols.Collectives(schedule.program)
        self._num_ranks = num_ranks(schedule.program)
        self._memory: list[Content] = [(Piece(symbols.Nothing(), buffer.numel),) for buffer in schedule.buffers]
        self._segments = [delivered for delivered, _ in segments(schedule.program)]
        self._expected = _expected(schedule.program)
        self._first_uses = _first_uses(schedule.program)
        self._delivered: set[tuple[int, int]] = set()
        self._given: set[Region] = set()

    def step(self, slot: Slot, op: Op) -> None:
        match op:
            case Compute():
                self._compute(op)
            case Caller():
                self._caller(slot, op)
            case Launch() | Local():
                self._transfer(op)
            case Free():
                self._memory[op.buffer] = (Piece(Unknown(), self._buffers[op.buffer].numel),)
            case Deliver():
                self._deliver(slot, op)

    def gradients(self, index: int) -> Iterator[tuple[int, Region]]:
        """Yields the weight and the region of each gradient in a buffer."""
        start = 0
        for piece in self._memory[index]:
            if isinstance(piece.value, Grad):
                yield piece.value.weight, Region(index, start, start + piece.numel)
            start += piece.numel

    def spoil(self, op: Op) -> None:
        for region in op.writes if isinstance(op, (Compute, Caller, Launch, Local)) else ():
            self._write(region, (Piece(Unknown(), region.numel),))

    def missing(self) -> Iterator[tuple[str, str]]:
        for segment, weight in sorted(set(self._expected) - self._delivered):
            yield self._program.weights[weight].name, f"its gradient of backward {segment} is never delivered"

    # ---------------------------------------------------------------------------------------------------------- memory

    def _read(self, region: Region) -> Content:
        content = self._memory[region.buffer]
        if region.numel != self._buffers[region.buffer].numel:
            content = symbols.cut(content, region.start, region.stop)
        if any(isinstance(piece.value, symbols.Nothing) for piece in content):
            raise WrongError(f"reads elements of {self._buffers[region.buffer].name} that were never written")
        return content

    def _same_dtype(self, region: Region, dtype: str) -> None:
        """Raises WrongError for a region of another dtype: without elements its contents do not tell."""
        buffer = self._buffers[region.buffer]
        if buffer.dtype != dtype:
            raise WrongError(f"takes {dtype} from {buffer.name}, which is {buffer.dtype}")

    def _write(self, region: Region, content: Content) -> None:
        buffer = self._buffers[region.buffer]
        numel = 0
        for piece in content:
            numel += piece.numel
            if isinstance(piece.value, (Param, Grad)) and piece.value.dtypes[-1] != buffer.dtype:
                raise WrongError(f"writes {piece.value.dtypes[-1]} into {buffer.name}, which is {buffer.dtype}")
        if numel != region.numel:
            raise WrongError(f"writes {numel} elements into {region.numel} of {buffer.name}")
        if numel == buffer.numel:
            self._memory[region.buffer] = symbols.join([content])
            return
        old = self._memory[region.buffer]
        after = symbols.cut(old, region.stop, buffer.numel)
        self._memory[region.buffer] = symbols.join([symbols.cut(old, 0, region.start), content, after])

    # ------------------------------------------------------------------------------------------------------------- ops

    def _caller(self, slot: Slot, op: Caller) -> None:
        for region in op.writes:
            buffer = self._buffers[region.buffer]
            if buffer.weight is None or region.numel != buffer.numel:
                raise WrongError(f"writes {buffer.name}, which is not the shard of a weight, or not all of it")
            made_here = self._program.weights[buffer.weight].origin is None
            if made_here and slot.event < self._first_uses.get(buffer.weight, 0):
                raise WrongError(f"writes {buffer.name} before its unit is called: the step has not made it yet")
            written = symbols.shard(self._program.weights[buffer.weight], buffer.weight, buffer.dtype)
            self._write(region, (Piece(symbols.Nothing(), region.numel),) if region in self._given else written)
            self._given.add(region)

    def _compute(self, op: Compute) -> None:
        event = self._program.events[op.event]
        members = self._program.unit_of(event).weights
        for weight, region in zip(members, op.reads, strict=False):
            w = self._program.weights[weight]
            whole = symbols.blocks(w, Param(weight, OWN, symbols.chain(w.shard_dtype, w.dtype)))
            found = self._read(region)
            unknown = any(isinstance(piece.value, Unknown) for piece in found)
            if found != whole and not unknown:
                raise WrongError(f"reads from {self._buffers[region.buffer].name} what is not the whole of {w.name}")
            self._same_dtype(region, w.dtype)
        trainable = [(position, w) for position, w in enumerate(members) if self._program.weights[w].trainable]
        written = trainable if event.kind == "backward" else []
        if len(op.reads) != len(members) or len(op.writes) != len(written):
            raise WrongError(f"needs {len(members)} reads and {len(written)} writes")
        for (position, weight), region in zip(written, op.writes, strict=True):
            self._same_dtype(region, self._program.weights[weight].dtype)
            self._write(region, self._whole_gradient(weight, ((op.event, position),)))

    def _whole_gradient(self, weight: int, uses: Uses) -> Content:
        w = self._program.weights[weight]
        return symbols.blocks(w, Grad(weight, OWN, symbols.summed_dtypes(w, uses), (uses,)))

    def _transfer(self, op: Launch | Local) -> None:
        contents = [self._read(region) for region in op.reads]
        if any(isinstance(piece.value, Unknown) for content in contents for piece in content):
            self.spoil(op)  # the op that has written it is reported
            return
        if isinstance(op, Launch):
            axes, num_ranks = op.communicator.axes, self._num_ranks[op.communicator.axes]
            results = [self._collectives.apply(op.collective, content, axes, num_ranks) for content in contents]
        else:
            results = self._results(op, contents)
        if len(results) != len(op.writes):
            raise WrongError(f"has {len(results)} results and {len(op.writes)} writes")
        for region, content in zip(op.writes, results, strict=True):
            self._write(region, content)

    def _results(self, op: Local, contents: list[Content]) -> list[Content]:
        match op.kind:
            case "zero":
                return [(Piece(symbols.Zero(), region.numel),) for region in op.writes]
            case "copy":
                return [symbols.cast(c, self._dtype(region)) for c, region in zip(contents, op.writes, strict=False)]
            case "scale":
                return [tuple(self._scaled(piece, op.divisor) for piece in content) for content in contents]
            case "own":
                return self._owned(op, contents)
            case "sum_parts":
                return [self._collectives.sum_parts(content, op.parts, self._num_ranks) for content in contents]
            case "accumulate":
                return self._accumulated(op, contents)
            case "pack_shards":
                return [self._packed_shards(op, contents)]
            case "unpack_wholes":
                return self._unpacked(op, contents)
            case "pack_gradients":
                return [self._packed_gradients(op, contents)]

    def _dtype(self, region: Region) -> str:
        return self._buffers[region.buffer].dtype

    def _scaled(self, piece: Piece, divisor: int) -> Piece:
        value = piece.value
        if isinstance(value, symbols.Zero):
            return piece
        if not isinstance(value, Grad) or value.rank != OWN:
            raise WrongError(f"scales what is not a block of a gradient: {value}")
        if divisor == 1:
            return piece
        early = value.early or value.summed != symbols.sum_axes(self._program.weights[value.weight])
        divided = (*value.divided, (divisor, value.dtypes[-1]))
        return piece._replace(value=value._replace(divided=divided, early=early))

    def _owned(self, op: Local, contents: list[Content]) -> list[Content]:
        owned: list[Content] = []
        for weight, content, region in zip(op.weights, contents, op.writes, strict=True):
            self._check_whole_gradient(weight, content)
            casted = symbols.cast(content, self._dtype(region))
            owned.append(casted if op.divisor == 1 else tuple(self._scaled(piece, op.divisor) for piece in casted))
        return owned

    def _check_whole_gradient(self, weight: int, content: Content) -> Grad:
        """Returns the value of a whole gradient. Raises WrongError for other contents."""
        w = self._program.weights[weight]
        value = content[0].value if content else Grad(weight, OWN, (w.dtype,), ((),))
        if not isinstance(value, Grad) or content != self._whole_gradient(weight, value.uses[0]):
            raise WrongError(f"does not read the whole gradient of {w.name}")
        return value

    def _accumulated(self, op: Local, contents: list[Content]) -> list[Content]:
        """Returns sums of an earlier and a later term. The order is checked, because it determines the bits."""
        pairs = list(zip(contents[::2], contents[1::2], strict=True))
        if not op.weights:
            sums = [symbols.added(self._program.weights, *pair) for pair in pairs]
            return [symbols.cast(total, self._dtype(region)) for total, region in zip(sums, op.writes, strict=True)]
        return [self._one_more(weight, *pair) for weight, pair in zip(op.weights, pairs, strict=True)]

    def _one_more(self, weight: int, earlier: Content, later: Content) -> Content:
        """Returns the sum of a whole gradient and the gradient of one more use."""
        contents = (earlier, later)
        uses = [
            content[0].value.uses if content and isinstance(content[0].value, Grad) else ((),) for content in contents
        ]
        if any(len(groups) != 1 for groups in uses) or not (uses[0][0] or not earlier) or len(uses[1][0]) > 1:
            raise WrongError("does not add one gradient to those before it")
        if any(self._whole_gradient(weight, groups[0]) != c for groups, c in zip(uses, contents, strict=True)):
            raise WrongError(f"adds what is not the whole gradient of {self._program.weights[weight].name}")
        return self._whole_gradient(weight, uses[0][0] + uses[1][0])

    def _packed_shards(self, op: Local, contents: list[Content]) -> Content:
        weights = [(self._program.weights[weight], weight) for weight in op.weights]
        if contents != [symbols.shard(w, weight, w.shard_dtype) for w, weight in weights]:
            raise WrongError("does not read the shards of its weights, in order")
        padded = ((Piece(Param(weight, OWN, (w.shard_dtype,)), w.block_numel),) for w, weight in weights)
        return symbols.cast(symbols.join(padded), self._dtype(op.writes[0]))

    def _unpacked(self, op: Local, contents: list[Content]) -> list[Content]:
        weights = [self._program.weights[weight] for weight in op.weights]
        dtypes = [symbols.chain(w.shard_dtype, w.dtype) for w in weights]
        values = [Param(weight, OWN, chain) for weight, chain in zip(op.weights, dtypes, strict=True)]
        if contents != [symbols.packed(weights, values)]:
            raise WrongError("does not read the gathered blocks of its weights, in order")
        return [symbols.blocks(w, value) for w, value in zip(weights, values, strict=True)]

    def _packed_gradients(self, op: Local, contents: list[Content]) -> Content:
        weights = [self._program.weights[weight] for weight in op.weights]
        values: list[Grad] = []
        for weight, content in zip(op.weights, contents, strict=False):
            value = self._check_whole_gradient(weight, content)
            dtypes = symbols.chain(*value.dtypes, self._dtype(op.writes[0]))
            divided = ((op.divisor, symbols.WHOLE),) if op.divisor > 1 else ()
            values.append(value._replace(dtypes=dtypes, divided=divided, early=bool(divided)))
        if not weights or len(contents) != len(weights) or len({w.num_shards for w in weights}) > 1:
            raise WrongError("does not read one gradient for each of its weights")
        return symbols.packed(weights, values)

    def _deliver(self, slot: Slot, op: Deliver) -> None:
        segment = self._segments[slot.event] + (slot.when == "after" and self._ends(slot.event))
        weight = self._program.weights[op.weight]
        if (segment, op.weight) in self._delivered:
            raise WrongError(f"delivers the gradient of {weight.name} a second time")
        self._delivered.add((segment, op.weight))
        uses = self._expected.get((segment, op.weight))
        if uses is None:
            raise WrongError(f"delivers a gradient of {weight.name}, which has none here")
        content = self._read(op.region)
        if any(isinstance(piece.value, Unknown) for piece in content):
            return
        right = symbols.finished(self._program, op.weight, *uses)
        if content != right:
            raise WrongError(f"delivers for {weight.name} what is not its gradient: {_difference(content, right)}")
        self._same_dtype(op.region, weight.accum_dtype)

    def _ends(self, event: int) -> bool:
        return self._program.events[event].kind == "end_backward" and not self._program.events[event].carry


def _divisors(*values: Grad) -> list[str]:
    """Returns the divisors of values for display, with the steps of the division if their products are equal."""
    products = [str(math.prod(divisor for divisor, _ in value.divided)) for value in values]
    if len(set(products)) > 1:
        return products
    return [" and ".join(f"{divisor} in {dtype}" for divisor, dtype in value.divided) for value in values]


def _difference(content: Content, right: Content) -> str:
    """Returns the fields in which the content differs from the right one."""
    match content, right:
        case (Piece(Grad() as found),), (Piece(Grad() as wanted),):
            values, divided = (found, wanted), _divisors(found, wanted)
            shown = [v._replace(summed=sorted(v.summed), divided=d) for v, d in zip(values, divided, strict=True)]
            fields = zip(Grad._fields, *shown, strict=True)
            differ = [f"{name} is {is_}, not {due}" for name, is_, due in fields if is_ != due]
            return "; ".join(differ) or "other elements of it"
    return "several pieces, or no gradient"


def _expected(program: Program) -> dict[tuple[int, int], tuple[tuple[Uses, ...], bool]]:
    """Returns, by (segment, weight), the uses that its gradient sums, in groups, and whether any group is carried."""
    groups: defaultdict[tuple[int, int], dict[int, Uses]] = defaultdict(dict)
    last: dict[int, int] = {}
    for index, (event, (delivered, scattered)) in enumerate(zip(program.events, segments(program), strict=True)):
        last[delivered] = scattered
        for position, weight in enumerate(program.unit_of(event).weights if event.kind == "backward" else ()):
            if program.weights[weight].trainable:
                found = groups[delivered, weight]
                found[scattered] = (*found.get(scattered, ()), (index, position))
    return {key: (tuple(found.values()), min(found) < last[key[0]]) for key, found in groups.items()}


def _first_uses(program: Program) -> dict[int, int]:
    """Returns the first event that uses each weight."""
    uses = [(index, program.unit_of(event)) for index, event in enumerate(program.events) if event.kind in COMPUTES]
    return {weight: index for index, unit in reversed(uses) for weight in unit.weights}
