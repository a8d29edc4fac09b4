"""A step that is called again and again with the same weights, whose updated ones nobody keeps: that is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

from .._errors import message
from .._running.session import Session
from .._running.warn_once import warn_once
from .._values.array import Owner, ShardedArray, is_sharded
from .._values.not_a_tensor import named
from .._values.tree import flatten

_LIMIT = 5  # a few in a row may be meant: results that are compared, or a benchmark


class FirstCalls:
    """What the first calls of a step were given, and whether somebody has their results."""

    def __init__(self) -> None:
        self._given: list[ref[Owner]] = []
        self._made: list[ref[Owner]] = []
        self._count = 0

    def note(self, fn: Callable[..., Any], session: Session, given: Iterable[ShardedArray], result: Any) -> None:
        """Warns if this call was given the same arrays as those before it, and updated ones are gone.

        Args:
            fn: the function of the step.
            session: that of the call.
            given: the arrays among its arguments.
            result: what it returned.
        """
        if self._count >= _LIMIT:
            return
        owners = [ref(array._owner) for array in given]
        if not session.has_updates or (self._count and owners != self._given):
            self._count = _LIMIT
            return
        if self._count == 0:
            made = [leaf for leaf in flatten(result, is_sharded)[0] if is_sharded(leaf)]
            self._given, self._made = owners, [ref(array._owner) for array in made]
        self._count += 1
        if self._count == _LIMIT and all(owner() is None for owner in self._made):
            rule = f"{named(fn)} was called {_LIMIT} times with the same weights, and the updated ones were not kept"
            hint = "a step returns what is new: params, opt_state, loss = step(params, opt_state, ...)"
            warn_once(message("hpfunc.sharded", rule, hint=hint), session.mesh)
