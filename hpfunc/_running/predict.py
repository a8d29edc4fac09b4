"""What comes next in a history: a pure function, so that ranks with one history expect one thing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)

# Note [What a step does next]
# The history's longest suffix that occurred before is looked for, and what followed it then is expected now. Where it
# occurred several times, what followed most often is taken, of those the latest. If not even the last entry occurred
# before, it is expected again.
#
# In a history of period p, of which 2 p entries are known, the suffix that is p entries back is longer than any other:
# it has n - p >= p entries, and one of p or more at a distance that is no multiple of p would give a shorter period. So
# from then on every prediction is right. In the first two periods "most often" counts: AAAB AA expects A.


def predict(history: Sequence[Key]) -> Key | None:
    """Returns what follows a history, most recent last; None if it is empty. See Note [What a step does next].

    It takes time in proportion to the length.

    >>> predict("ABABA"), predict("AAABAAABAAA"), predict("AAB"), predict("")
    ('B', 'B', 'B', None)
    """
    backwards = history[::-1]
    lengths = _common_prefixes(backwards)
    longest = max(lengths[1:], default=0)
    if longest == 0:
        return backwards[0] if backwards else None
    # Before place i of `backwards` stands what followed; the latest comes first, and wins between equals.
    followers = Counter(backwards[i - 1] for i in range(1, len(backwards)) if lengths[i] == longest)
    return followers.most_common(1)[0][0]


def _common_prefixes(text: Sequence[Hashable]) -> list[int]:
    """Returns for each place how long the text from there on agrees with its beginning (the Z function).

    >>> _common_prefixes("ABABC")
    [5, 0, 2, 0, 0]
    """
    lengths = [len(text)] * len(text)
    start = end = 0  # of the stretch found so far that agrees with the beginning and reaches farthest
    for i in range(1, len(text)):
        length = min(lengths[i - start], end - i) if i < end else 0
        while i + length < len(text) and text[length] == text[i + length]:
            length += 1
        if i + length > end:
            start, end = i, i + length
        lengths[i] = length
    return lengths
