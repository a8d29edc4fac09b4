"""Numbers that remember how they were made: every element is a digest of the term that it stands for.

Two elements are equal exactly if they are the same term (but for a collision, of which there is one chance in 10^17):
the same shards and gradients, cast, added and divided in the same order. Only what arithmetic in floating point keeps
bit for bit is kept here: a sum of two does not depend on their order, adding zero changes nothing, zero stays zero.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

Terms = NDArray[np.int64]

NOTHING = -1
"""An element that nobody has written."""
ABSENT = -2
"""An element of padding, for which there is no memory at all: the caller's arrays are not padded."""
CALLERS = -3
"""What the caller, or whoever got the memory next, has left there. More negative: what an op under way leaves."""

_POSITIVE = np.int64(2**63 - 1)
_ODD = np.int64(-7046029254386353131)
_ODD2 = np.int64(-4658895280553007687)


@cache
def salt(*parts: object) -> np.int64:
    """Returns a number that is another one for other parts."""
    text = repr(parts).encode()
    return np.int64(zlib.crc32(text) << 31 ^ zlib.crc32(text[::-1] + b"salt"))


def mix(terms: Terms, key: np.int64) -> Terms:
    """Returns an injective looking function of the terms, another one for another key; never zero or negative."""
    mixed = (terms ^ key) * _ODD
    mixed ^= mixed >> np.int64(29)
    mixed *= _ODD2
    mixed ^= mixed >> np.int64(32)
    return (mixed & _POSITIVE) | np.int64(1)


def fresh(numel: int, *key: object) -> Terms:
    """Returns terms that are equal to no others."""
    return mix(np.arange(1, numel + 1, dtype=np.int64), salt("fresh", *key))


def cast(terms: Terms, old: str, new: str) -> Terms:
    """Returns the terms in another dtype."""
    return terms if old == new else np.where(terms == 0, 0, mix(terms, salt("cast", new)))


def divide(terms: Terms, divisor: int, dtype: str) -> Terms:
    """Returns the terms divided, in their dtype."""
    return terms if divisor == 1 else np.where(terms == 0, 0, mix(terms, salt("divide", divisor, dtype)))


def add(a: Terms, b: Terms, dtype: str, *, neutral: bool = True) -> Terms:
    """Returns the sums of two, whichever comes first; `neutral`: zero added to something is that."""
    key = salt("add", dtype)
    total = mix(mix(a, key) + mix(b, key), key)
    return np.where(a == 0, b, np.where(b == 0, a, total)) if neutral else total


def add_all(parts: Sequence[Terms], dtype: str, *, neutral: bool = True) -> Terms:
    """Returns the sum of several, the first two first."""
    total = parts[0]
    for part in parts[1:]:
        total = add(total, part, dtype, neutral=neutral)
    return total
