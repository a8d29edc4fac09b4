"""Predicts the next entry of a history. A pure function, so that ranks with equal histories predict the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)

# Note [What a step does next]
# Find the longest suffix of the history that also occurs earlier, and predict the entry that followed it. If the suffix
# occurs several times, predict the most frequent follower, and the latest one among equals. If not even the last entry
# occurred before, predict that entry again.
#
# Take a history of n >= 2 p entries with period p. The suffix that recurs p entries earlier has n - p >= p entries. It
# is the longest one: a match of p or more entries at a distance that is not a multiple of p would imply a shorter
# period. So every prediction from then on is right. In the first two periods frequency decides: AAAB AA predicts A.


def predict(history: Sequence[Key]) -> Key | None:
    """Returns the predicted next entry; None for an empty history. See Note [What a step does next].

    The last entry is the most recent one. Takes time in proportion to the length.

    >>> predict("ABABA"), predict("AAABAAABAAA"), predict("AAB"), predict("")
    ('B', 'B', 'B', None)
    """
    backwards = history[::-1]
    lengths = _common_prefixes(backwards)
    longest = max(lengths[1:], default=0)
    if longest == 0:
        return backwards[0] if backwards else None
    # Entry i - 1 of `backwards` followed entry i. `Counter` prefers the first, which is the latest, among equals.
    followers = Counter(backwards[i - 1] for i in range(1, len(backwards)) if lengths[i] == longest)
    return followers.most_common(1)[0][0]


def _common_prefixes(text: Sequence[Hashable]) -> list[int]:
    """Returns for each place the length of the longest common prefix of the text and its suffix there (Z function).

    >>> _common_prefixes("ABABC")
    [5, 0, 2, 0, 0]
    """
    lengths = [len(text)] * len(text)
    start = end = 0  # of the match with the prefix that reaches farthest so far
    for i in range(1, len(text)):
        length = min(lengths[i - start], end - i) if i < end else 0
        while i + length < len(text) and text[length] == text[i + length]:
            length += 1
        if i + length > end:
            start, end = i, i + length
        lengths[i] = length
    return lengths
