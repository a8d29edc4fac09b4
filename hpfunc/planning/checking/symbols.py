"""Symbolic contents of memory: values, sequences of values, and the results of collectives on them.

All ranks do the same, so one rank represents all: a value is "my own block of this weight", or "the block of rank 2".
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
"""As a rank: all ranks, in a layout that is not block after block."""
SHORT = -3
"""As a rank: this rank, without the padding of its block. Some rank has fewer elements than the others."""

WHOLE = "that of the whole gradient"
"""As the dtype of a division: the division was before the cast to the dtype of the message."""

Axes: TypeAlias = tuple[str, ...]
Uses: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Nothing:
    """Memory that was never written."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Memory that a reported op has written, or that was freed. It causes no second report."""


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
        uses: the (event, position in its unit) of the gradients that it sums, in order and in groups. The gradients of
            a group were added up before they were scattered. See Note [Carried gradients].
        summed: the mesh axes over which it is summed.
        divided: (divisor, dtype) of each division, in order, because each division rounds.
        early: whether it was divided before it was summed.
        source: (axes, rank) of the sender, while it is a summand that was exchanged over these axes.
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
    """This rank's part of `content` over `axes`: sent by rank `source`, or summed over all ranks if that is None."""

    content: Content
    axes: Axes
    source: int | None


Value: TypeAlias = Nothing | Unknown | Zero | Param | Grad | Chunk


class Piece(NamedTuple):
    """`numel` elements of a value, starting at its element `base`."""

    value: Value
    numel: int
    base: int = 0


Content: TypeAlias = tuple[Piece, ...]
"""The contents of contiguous memory, piece after piece. Equal contents are equal tuples: see `join`."""


def join(contents: Iterable[Content]) -> Content:
    """Concatenates contents. Drops empty pieces, and joins a piece to the one before if it continues that."""
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
    """Returns the base of a piece that would continue this one. For uniform values it is always 0."""
    return piece.base + piece.numel if isinstance(piece.value, (Param, Grad, Chunk)) else 0


def cut(content: Content, start: int, stop: int) -> Content:
    """Returns the contents of elements `start` to `stop`."""
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
    """An op reads wrong values."""


def added(weights: Sequence[Weight], earlier: Content, later: Content) -> Content:
    """Returns the sum of scattered gradients: an earlier sum of groups, plus one more group.

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


# -------------------------------------------------------------------------------------------------- expected contents


@cache
def chain(*dtypes: str) -> tuple[str, ...]:
    """Returns the dtypes that a value passes through, without casts to the same dtype."""
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
    """Returns the whole of a weight or gradient: its blocks in order if its layout is so, else one opaque piece."""
    if weight.num_shards == 1:
        return join([(Piece(value.at(OWN), weight.block_numel),)])
    if not weight.direct or (isinstance(value, Grad) and not weight.even):
        return join([(Piece(value.at(ENTIRE), weight.whole_numel),)])
    return packed([weight], [value])


def packed(weights: Sequence[Weight], values: Sequence[Param | Grad]) -> Content:
    """Returns a message with one part for each rank, which has the rank's block of every weight."""
    num_ranks = weights[0].num_shards
    blocks_of = [(value, weight.block_numel) for weight, value in zip(weights, values, strict=True)]
    ranks = range(num_ranks) if num_ranks > 1 else (OWN,)
    return tuple(Piece(value.at(rank), numel) for rank in ranks for value, numel in blocks_of if numel)


def summed_dtypes(weight: Weight, uses: Uses) -> tuple[str, ...]:
    """Returns the dtypes of a whole gradient: the dtype of the unit, or for a sum the accumulation dtype."""
    return (weight.dtype,) if len(uses) == 1 else (weight.accum_dtype,)


def scattered_dtypes(weight: Weight, uses: tuple[Uses, ...]) -> tuple[str, ...]:
    """Returns the dtypes that a scattered gradient has passed through when it is added to others."""
    first, *others = uses
    if others:
        return (weight.accum_dtype,)
    return chain(*summed_dtypes(weight, first), weight.reduce_dtype, weight.accum_dtype)


def finished(program: Program, weight: int, uses: tuple[Uses, ...], carried: bool) -> Content:
    """Returns the gradient that the caller must get. `carried`: a part of it comes from an earlier backward."""
    w = program.weights[weight]
    early = w.reduce_dtype == "float16" and w.divisor > 1
    dtypes = scattered_dtypes(w, uses)
    if carried and w.num_replicas > 1:
        dtypes = chain(*dtypes, w.reduce_dtype, w.accum_dtype)
    late = w.accum_dtype if carried and w.num_replicas == 1 else w.reduce_dtype
    divided = ((w.divisor, WHOLE if early else late),) if w.divisor > 1 else ()
    return join([(Piece(Grad(weight, OWN, dtypes, uses, sum_axes(w), divided, early), w.block_numel),)])


def shard(weight: Weight, index: int, dtype: str) -> Content:
    """Returns the contents of a shard that the caller has written. The caller does not write the padding."""
    padded = not weight.even and weight.num_shards > 1
    return join([(Piece(Param(index, SHORT if padded else OWN, (dtype,)), weight.block_numel),)])


def sum_axes(weight: Weight) -> frozenset[str]:
    """Returns the axes over which a weight's gradient must be summed."""
    scattered = weight.gather_axes if weight.num_shards > 1 else ()
    return frozenset(scattered) | frozenset(weight.reduce_axes if weight.num_replicas > 1 else ())


# -------------------------------------------------------------------------------------------------------- collectives


def own(content: Content, parts: int) -> Content | None:
    """Returns the part for this rank of a message whose part r is for rank r; None if its parts are not alike."""
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
    """The collectives on contents. `num_ranks` is the number of ranks along the axes of the communicator."""

    def __init__(self, program: Program) -> None:
        self._weights = program.weights

    def apply(self, collective: Collective, content: Content, axes: Axes, num_ranks: int) -> Content:
        """Returns the content that this rank receives if all ranks send `content`."""
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
        """Returns the sum over `axes` of the contents of all ranks."""
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
    """Returns the axes over which a summand of `rank` was exchanged, and the value without its source."""
    match value:
        case Grad(source=(axes, source)) if source == rank:
            return axes, value.at(value.rank)
        case Chunk(content, axes, source) if source == rank:
            return axes, Chunk(content, axes, None)
        case Zero():
            return None, value
        case _:
            raise WrongError(f"finds no summand of rank {rank}: {value}")
