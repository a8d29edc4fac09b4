"""Which program a step is expected to run next."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hpfunc._running.predict import predict

words = st.lists(st.sampled_from("ABC"), max_size=12).map("".join)


def slow(history: str) -> str:
    """What `predict` computes, as its note says it."""
    for length in range(len(history) - 1, 0, -1):
        ends = [i for i in range(length, len(history)) if history[:i].endswith(history[len(history) - length :])]
        followers = [history[i] for i in ends]
        if followers:
            return max(reversed(followers), key=followers.count)
    return history[-1]


@given(words)
def test_it_is_what_followed_the_longest_suffix_that_occurred_before(history: str) -> None:
    assert predict(history) == (slow(history) if history else None)


@given(st.text("ABCDE", min_size=1, max_size=8), st.integers(0, 40))
def test_a_periodic_history_is_known_after_two_periods(period: str, more: int) -> None:
    length = 2 * len(period) + more
    history = (period * (length // len(period) + 2))[: length + 1]
    assert predict(history[:length]) == history[length]


@given(words, st.sampled_from("AD"), st.integers(2, 20))
def test_what_goes_on_is_expected_to_go_on(before: str, last: str, times: int) -> None:
    assume(last not in before)
    assert predict(before + last * times) == last


@given(words.filter(bool))
def test_only_what_was_seen_is_expected(history: str) -> None:
    assert predict(history) in set(history)


@pytest.mark.parametrize("every", [2, 3, 4, 10])
def test_of_an_evaluation_every_few_steps_only_the_first_ones_surprise(every: int) -> None:
    history = ("A" * (every - 1) + "B") * 6
    wrong = [i for i in range(1, len(history)) if predict(history[:i]) != history[i]]
    assert wrong[0] == every - 1  # the first B could not be known
    assert len(wrong) <= 3, wrong
    assert max(wrong) < 2 * every, wrong


class Counted(str):
    """A letter that counts how often one is compared."""

    __slots__ = ()
    comparisons = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return str.__eq__(self, other)


@pytest.mark.parametrize("pattern", ["A", "AAAAAAAAAB", "AB", "ABAAB"])
def test_work_grows_with_the_length_only(pattern: str) -> None:
    def comparisons(length: int) -> int:
        Counted.comparisons = 0
        predict([Counted(letter) for letter in (pattern * length)[:length]])
        return Counted.comparisons

    assert 0 < comparisons(200) <= 3 * 200
    assert comparisons(3200) <= 3 * 3200
