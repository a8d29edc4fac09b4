"""What memory holds, as symbols: values, runs of them, and what the collectives make of them.

All ranks do the same, so one rank stands for all: a value is "my own block of this weight", or "the block of rank 2".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeAlias

from ..ops import Collective
from ..program import Program, Weight

# ------------------------------------------------------------------------------------------------------------- values

OWN = -1
"""As a rank: this rank. The symbol stands for a different block on each rank."""
ENTIRE = -2
"""As a rank: all of them, in a layout that is not block after block."""
SHORT = -3
"""As a rank: this rank, without the padding of its block. Some rank has fewer elements than the others."""

WHOLE = "that of the whole gradient"
"""As the dtype of a division: it came before the cast to the dtype of the message."""

Axes: TypeAlias = tuple[str, ...]
Uses: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Nothing:
    """Memory that nobody has written."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """What an op that is already reported has left behind; it causes no second report."""


@dataclass(frozen=True, slots=True)
class Zero:
    """Zeros."""


class Param(NamedTuple):
    """The block of a weight that belongs to `rank`, after casts through `dtypes`."""

    weight: int
    rank: int
    dtypes: tuple[str, ...]

    def at(self, rank: int) -> Param:
        """Returns the block of another rank."""
        return Param(self.weight, rank, self.dtypes)


class Grad(NamedTuple):
    """The block of a weight's gradient that belongs to `rank`, after casts through `dtypes`.

    Attributes:
        uses: the (event, position in its unit) whose gradients are added up in it, in that order, in groups: those of a
            group were added up before they were scattered. See Note [Carried gradients].
        summed: the mesh axes over which it is summed.
        divided: what it is divided by, and in which dtype, one division after another: each rounds.
        early: it was divided before it was summed.
        source: (axes, rank) while it is the summand that this rank over these axes has sent.
    """

    weight: int
    rank: int
    dtypes: tuple[str, ...]
    uses: tuple[Uses, ...]
    summed: frozenset[str] = frozenset()
    divided: tuple[tuple[int, str], ...] = ()
    early: bool = False
    source: tuple[Axes, int] | None = None

    def at(self, rank: int, source: tuple[Axes, int] | None = None) -> Grad:
        """Returns the block of another rank, or of another sender."""
        return Grad(self.weight, rank, self.dtypes, self.uses, self.summed, self.divided, self.early, source)


class Chunk(NamedTuple):
    """The part of `content` that is this rank's over `axes`: sent by rank `source`, or summed over all if None."""

    content: Content
    axes: Axes
    source: int | None


Value: TypeAlias = Nothing | Unknown | Zero | Param | Grad | Chunk


class Piece(NamedTuple):
    """`numel` elements of a value, from its element `base` on."""

    value: Value
    numel: int
    base: int = 0


Content: TypeAlias = tuple[Piece, ...]
"""What a run of memory holds, piece after piece. Equal contents are equal tuples: see `join`."""


def join(contents: Iterable[Content]) -> Content:
    """Puts contents one after another, with no piece that is empty and none that merely continues the one before."""
    pieces: list[Piece] = []
    for content in contents:
        for piece in content:
            last = pieces[-1] if pieces else None
            if last and last.value == piece.value and piece.base == _next_base(last):
                pieces[-1] = Piece(last.value, last.numel + piece.numel, last.base)
            elif piece.numel:
                pieces.append(piece)
    return tuple(pieces)


def _next_base(piece: Piece) -> int:
    """Returns the base of what would continue a piece; without a form, every element is the first."""
    return piece.base + piece.numel if isinstance(piece.value, (Param, Grad, Chunk)) else 0


def cut(content: Content, start: int, stop: int) -> Content:
    """Returns what elements `start` to `stop` hold."""
    pieces: list[Piece] = []
    offset = 0
    for piece in content:
        end = offset + piece.numel
        if start <= offset and end <= stop:
            pieces.append(piece)
        elif (first := max(start, offset)) < (last := min(stop, end)):
            formed = isinstance(piece.value, (Param, Grad, Chunk))
            pieces.append(Piece(piece.value, last - first, piece.base + first - offset if formed else 0))
        offset = end
    return tuple(pieces)


def split(content: Content, parts: int) -> list[Content]:
    """Returns the parts of a message, one for each rank."""
    numel = sum(piece.numel for piece in content) // parts
    found: list[list[Piece]] = [[] for _ in range(parts)]
    offset = 0
    for piece in content if numel else ():
        for part in range(offset // numel, min(parts, -(-(offset + piece.numel) // numel))):
            found[part] += cut((piece,), part * numel - offset, (part + 1) * numel - offset)
        offset += piece.numel
    return [tuple(pieces) for pieces in found]


class WrongError(Exception):
    """An op does not find what it needs."""


def added(weights: Sequence[Weight], earlier: Content, later: Content) -> Content:
    """Returns the sum of scattered gradients: of groups that were added up, and of one more.

    Floating-point addition is not associative, so the order of terms is part of the value.
    """
    if [piece.numel for piece in earlier] != [piece.numel for piece in later]:
        raise WrongError("adds what does not lie alike")
    return tuple(_added(weights, *pair) for pair in zip(earlier, later, strict=True))


def _added(weights: Sequence[Weight], earlier: Piece, later: Piece) -> Piece:
    a, b = earlier.value, later.value
    if isinstance(a, Zero) and isinstance(b, Zero):
        return earlier
    if (
        not isinstance(a, Grad)
        or not isinstance(b, Grad)
        or a.rank != OWN
        or len(b.uses) != 1
        or not a.uses
        or b.source
    ):
        raise WrongError("does not add one scattered gradient to those before it")
    weight = weights[a.weight]
    due = frozenset(weight.gather_axes if weight.num_shards > 1 else ())
    for value in (a, b):
        if value.summed != due or chain(*value.dtypes, weight.accum_dtype) != scattered_dtypes(weight, value.uses):
            raise WrongError(f"adds what is not the scattered gradient of {weight.name}: {value}")
    alike = a._replace(uses=b.uses, dtypes=b.dtypes) == b and earlier.base == later.base
    if not alike or a.uses[-1][-1:] >= b.uses[0][:1]:
        raise WrongError(f"adds gradients of {weight.name} that do not follow each other")
    return earlier._replace(value=a._replace(uses=a.uses + b.uses, dtypes=(weight.accum_dtype,)))


# ------------------------------------------------------------------------------------------------------ what is right


@cache
def chain(*dtypes: str) -> tuple[str, ...]:
    """Returns the dtypes that a value passes through, without casts that change nothing."""
    return tuple(dtype for index, dtype in enumerate(dtypes) if index == 0 or dtype != dtypes[index - 1])


def cast(content: Content, dtype: str) -> Content:
    """Returns the content in another dtype."""
    return tuple(
        Piece(piece.value._replace(dtypes=chain(*piece.value.dtypes, dtype)), piece.numel, piece.base)
        if isinstance(piece.value, (Param, Grad))
        else piece
        for piece in content
    )


def blocks(weight: Weight, value: Param | Grad) -> Content:
    """Returns the whole of a weight or gradient: its blocks in order if that is its layout, or one opaque piece."""
    if weight.num_shards == 1:
        return join([(Piece(value.at(OWN), weight.block_numel),)])
    if not weight.direct or (isinstance(value, Grad) and not weight.even):
        return join([(Piece(value.at(ENTIRE), weight.whole_numel),)])
    return packed([weight], [value])


def packed(weights: Sequence[Weight], values: Sequence[Param | Grad]) -> Content:
    """Returns a message with a part for each rank: this rank's block of every weight."""
    num_ranks = weights[0].num_shards
    blocks_of = [(value, weight.block_numel) for weight, value in zip(weights, values, strict=True)]
    ranks = range(num_ranks) if num_ranks > 1 else (OWN,)
    return tuple(Piece(value.at(rank), numel) for rank in ranks for value, numel in blocks_of if numel)


def summed_dtypes(weight: Weight, uses: Uses) -> tuple[str, ...]:
    """Returns the dtypes of a whole gradient: that of the unit, or, if it is a sum, that in which it was added up."""
    return (weight.dtype,) if len(uses) == 1 else (weight.accum_dtype,)


def scattered_dtypes(weight: Weight, uses: tuple[Uses, ...]) -> tuple[str, ...]:
    """Returns the dtypes through which a scattered gradient has passed when it is added to others."""
    first, *others = uses
    if others:
        return (weight.accum_dtype,)
    return chain(*summed_dtypes(weight, first), weight.reduce_dtype, weight.accum_dtype)


def finished(program: Program, weight: int, uses: tuple[Uses, ...], carried: bool) -> Content:
    """Returns the gradient that the caller is to get; `carried`, if a part of it comes from an earlier backward."""
    w = program.weights[weight]
    early = w.reduce_dtype == "float16" and w.divisor > 1
    dtypes = scattered_dtypes(w, uses)
    if carried and w.num_replicas > 1:
        dtypes = chain(*dtypes, w.reduce_dtype, w.accum_dtype)
    late = w.accum_dtype if carried and w.num_replicas == 1 else w.reduce_dtype
    divided = ((w.divisor, WHOLE if early else late),) if w.divisor > 1 else ()
    return join([(Piece(Grad(weight, OWN, dtypes, uses, sum_axes(w), divided, early), w.block_numel),)])


def shard(weight: Weight, index: int, dtype: str) -> Content:
    """Returns what the caller has written into the shard of a weight: no padding, where there is any."""
    padded = not weight.even and weight.num_shards > 1
    return join([(Piece(Param(index, SHORT if padded else OWN, (dtype,)), weight.block_numel),)])


def sum_axes(weight: Weight) -> frozenset[str]:
    """Returns the axes over which a weight's gradient has to be summed."""
    scattered = weight.gather_axes if weight.num_shards > 1 else ()
    return frozenset(scattered) | frozenset(weight.reduce_axes if weight.num_replicas > 1 else ())


# -------------------------------------------------------------------------------------------------------- collectives


def own(content: Content, parts: int) -> Content | None:
    """Returns part `OWN` of a message whose part r is for rank r; None if its parts are not alike."""
    candidates = []
    for rank, part in enumerate(split(content, parts)):
        pieces: list[Piece] = []
        for piece in part:
            if isinstance(piece.value, Grad) and piece.value.rank == rank:
                pieces.append(Piece(piece.value.at(OWN), piece.numel, piece.base))
            elif isinstance(piece.value, Zero):
                pieces.append(piece)
            else:
                return None
        candidates.append(join([tuple(pieces)]))
    return candidates[0] if all(candidate == candidates[0] for candidate in candidates) else None


class Collectives:
    """The collectives, on contents. `num_ranks` says how many ranks the axes of a communicator have."""

    def __init__(self, program: Program) -> None:
        self._weights = program.weights

    def apply(self, collective: Collective, content: Content, axes: Axes, num_ranks: int) -> Content:
        """Returns what this rank receives if all ranks send `content`."""
        match collective:
            case "all_gather":
                return self.all_gather(content, axes, num_ranks)
            case "all_to_all":
                return self.all_to_all(content, axes, num_ranks)
            case "all_reduce":
                return self.total(content, axes)
            case "reduce_scatter":
                mine = own(content, num_ranks)
                if mine is None:
                    raise WrongError("sends parts that are not the blocks of rank 0, 1, ... in order")
                return self.total(mine, axes)

    def all_gather(self, content: Content, axes: Axes, num_ranks: int) -> Content:
        """See `apply`."""
        match content:
            case (Piece(Chunk(whole, over, None), _, 0),) if over == axes:
                return self.total(whole, axes)
        blocks_of: list[tuple[Param, Piece]] = []
        for piece in content:
            value = piece.value
            if isinstance(value, Param) and value.rank == SHORT:
                raise WrongError(f"gathers the shard of {self._weights[value.weight].name}, which is not padded yet")
            if not isinstance(value, Param) or value.rank != OWN or self._weights[value.weight].gather_axes != axes:
                raise WrongError(f"gathers over {axes} what is not a shard cut over them: {value}")
            blocks_of.append((value, piece))
        return join(
            (Piece(value.at(rank), piece.numel, piece.base),) for rank in range(num_ranks) for value, piece in blocks_of
        )

    def all_to_all(self, content: Content, axes: Axes, num_ranks: int) -> Content:
        """See `apply`."""
        mine = own(content, num_ranks)
        if mine is None:
            numel = sum(piece.numel for piece in content) // num_ranks
            return tuple(Piece(Chunk(content, axes, rank), numel) for rank in range(num_ranks))
        return join((_sent(piece, (axes, rank)),) for rank in range(num_ranks) for piece in mine)

    def sum_parts(self, content: Content, parts: int, num_ranks: dict[Axes, int]) -> Content:
        """Sums the parts of an exchange."""
        axes: Axes | None = None
        summands: list[Content] = []
        for rank, part in enumerate(split(content, parts)):
            pieces: list[Piece] = []
            for piece in part:
                over, value = _received(piece.value, rank)
                axes = axes if over is None else over
                pieces.append(Piece(value, piece.numel, piece.base))
            summands.append(join([tuple(pieces)]))
        exchanged = axes is None or num_ranks[axes] == parts
        if not exchanged or any(summand != summands[0] for summand in summands):
            raise WrongError("sums parts that are not the summands of rank 0, 1, ... in order")
        match summands[0]:
            case (Piece(Chunk(), _, 0),):
                return summands[0]
        return self.total(summands[0], axes or ())

    def total(self, content: Content, axes: Axes) -> Content:
        """Returns the sum over `axes` of what each rank holds."""
        return tuple(Piece(self._sum(piece.value, axes), piece.numel, piece.base) for piece in content)

    def _sum(self, value: Value, axes: Axes) -> Value:
        if isinstance(value, Zero):
            return value
        if not isinstance(value, Grad) or value.rank != OWN or value.source:
            raise WrongError(f"sums over {axes} what is not a block of a gradient: {value}")
        weight = self._weights[value.weight]
        due = {weight.gather_axes: weight.num_shards, weight.reduce_axes: weight.num_replicas}
        if due.get(axes, 1) == 1 or value.summed & set(axes):
            raise WrongError(f"sums gradient of weight {value.weight} over {axes}, which is not due")
        if value.dtypes[-1] != weight.reduce_dtype:
            raise WrongError(f"sums gradient of weight {value.weight} in {value.dtypes[-1]}, not {weight.reduce_dtype}")
        return value._replace(summed=value.summed | set(axes))


def _sent(piece: Piece, source: tuple[Axes, int]) -> Piece:
    value = piece.value
    return Piece(value.at(value.rank, source), piece.numel, piece.base) if isinstance(value, Grad) else piece


def _received(value: Value, rank: int) -> tuple[Axes | None, Value]:
    """Returns over which axes a summand of `rank` was exchanged, and the value without its source."""
    match value:
        case Grad(source=(axes, source)) if source == rank:
            return axes, value.at(value.rank)
        case Chunk(content, axes, source) if source == rank:
            return axes, Chunk(content, axes, None)
        case Zero():
            return None, value
        case _:
            raise WrongError(f"finds no summand of rank {rank}: {value}")
