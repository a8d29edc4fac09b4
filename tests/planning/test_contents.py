"""The algebra of the checker's symbolic memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpfunc.planning.checking.symbols import (
    OWN,
    Collectives,
    Content,
    Grad,
    Param,
    Piece,
    WrongError,
    Zero,
    cut,
    join,
    own,
    split,
)
from hpfunc.planning.program import Program
from tests.planning.programs import weight

FSDP = {"shard": 2}
PROGRAM = Program((weight("w", 8, FSDP), weight("v", 8, FSDP)), (), ())
AXES = ("shard",)


def elements(content: Content) -> list[object]:
    """Returns what a content says, element by element."""
    formed = (Param, Grad)
    return [
        (piece.value, piece.base + index if isinstance(piece.value, formed) else 0)
        for piece in content
        for index in range(piece.numel)
    ]


def contents() -> st.SearchStrategy[Content]:
    values = st.sampled_from([Zero(), Param(0, 0, ("float32",)), Param(0, 1, ("float32",)), Param(1, 0, ("float32",))])
    pieces = st.builds(
        lambda value, numel, base: Piece(value, numel, base if isinstance(value, Param) else 0),
        values,
        st.integers(0, 5),
        st.integers(0, 3),
    )
    return st.lists(pieces, max_size=6).map(tuple)


@given(contents(), contents())
def test_join_keeps_every_element_and_has_one_form(one: Content, two: Content) -> None:
    joined = join([one, two])
    assert elements(joined) == elements(one) + elements(two)
    assert (join([one]) == join([two])) == (elements(one) == elements(two))


@given(contents(), st.integers(0, 30), st.integers(0, 30))
def test_cut_is_a_slice(content: Content, start: int, stop: int) -> None:
    assert elements(cut(join([content]), start, stop)) == elements(content)[start:stop]


@given(contents(), st.integers(1, 5))
def test_split_cuts_equal_parts(content: Content, parts: int) -> None:
    joined = join([content] * parts)
    numel = len(elements(content))
    assert split(joined, parts) == [cut(joined, rank * numel, (rank + 1) * numel) for rank in range(parts)]


def gradient(rank: int, source: int | None = None) -> Grad:
    sent = None if source is None else (AXES, source)
    return Grad(0, rank, ("float32",), ((0, 0),), source=sent)


def test_own_needs_the_blocks_in_order() -> None:
    right = (Piece(gradient(0), 4), Piece(gradient(1), 4))
    assert own(right, 2) == (Piece(gradient(OWN), 4),)
    assert own(right[::-1], 2) is None
    assert own((*right, Piece(gradient(0), 8)), 2) is None
    assert len(split(right, 4)) == 4


def test_an_exchange_and_a_sum_are_a_reduce_scatter() -> None:
    collectives = Collectives(PROGRAM)
    sent = (Piece(gradient(0), 4), Piece(gradient(1), 4))
    exchanged = collectives.apply("all_to_all", sent, AXES, 2)
    assert exchanged == (Piece(gradient(OWN, 0), 4), Piece(gradient(OWN, 1), 4))
    summed = collectives.sum_parts(exchanged, 2, {AXES: 2})
    assert summed == collectives.apply("reduce_scatter", sent, AXES, 2)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ((Piece(gradient(OWN, 0), 4), Piece(gradient(OWN, 0), 4)), "finds no summand of rank 1"),
        ((Piece(gradient(OWN, 0), 4), Piece(gradient(OWN, 1), 3), Piece(Zero(), 1)), "sums parts that are not"),
    ],
)
def test_other_parts_are_not_summed(content: Content, text: str) -> None:
    with pytest.raises(WrongError, match=text):
        Collectives(PROGRAM).sum_parts(content, 2, {AXES: 2})


def test_only_shards_are_gathered_and_only_blocks_reduced() -> None:
    collectives = Collectives(PROGRAM)
    with pytest.raises(WrongError, match="not a shard"):
        collectives.apply("all_gather", (Piece(gradient(OWN), 4),), AXES, 2)
    with pytest.raises(WrongError, match="not the blocks"):
        collectives.apply("reduce_scatter", (Piece(gradient(1), 4), Piece(gradient(0), 4)), AXES, 2)
    with pytest.raises(WrongError, match="not due"):
        collectives.apply("all_reduce", (Piece(gradient(OWN), 4),), ("replicate",), 2)
