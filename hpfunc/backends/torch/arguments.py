"""Arguments that a unit changes, such as a cache that it fills: a second run would change them once more.

The contents of an argument are found through lists, tuples, dicts, sets and attributes of objects, but not through
functions, modules and classes. A tensor has changed if it was written to, any other object if it holds other objects.

# Note [Arguments as they were]
A unit that is computed again (`remat`) gets its arguments as they were at its call. Tensors are saved, and the lists,
tuples and dicts of the call are made anew. An object that is a leaf of them, such as a cache of keys and values, is the
same one in both runs. So it is given its former contents while the second run takes place, and afterwards those that it
had in between: a cache that each unit fills is empty again for each, and the caller sees it filled once. Only what was
written into a tensor cannot be taken back without a copy of it: that is refused.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import optree

from ..._errors import UsageError, message

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, types.ModuleType)
Version = Callable[[Any], Any]  # a value that changes when a leaf is written to; None for an object that is not a leaf
Changed = list[tuple[str, list[Any]]]  # arguments, each with the objects in it that have changed


class Arguments:
    """The arguments of a call as they are now, each with its contents.

    Args:
        only_objects: look only into what is neither a tensor nor made anew for a second run of the call.
    """

    __slots__ = ("_held", "_version")

    def __init__(self, args: Any, kwargs: Any, version: Version, *, only_objects: bool = False) -> None:
        self._version = version
        named = [(f"args[{i}]", x) for i, x in enumerate(args)] + [(f"kwargs[{key!r}]", x) for key, x in kwargs.items()]
        self._held: list[tuple[str, list[tuple[Any, Any]]]] = []
        for name, x in named:
            roots = [leaf for leaf in optree.tree_leaves(x) if version(leaf) is None] if only_objects else [x]
            parts = [(part, self._state(part)) for part in self._parts(roots)]
            if parts:
                self._held.append((f"{name}: {type(x).__name__}", parts))

    def _parts(self, left: list[Any]) -> Iterator[Any]:
        """Yields these objects, and each object in them once."""
        seen: dict[int, Any] = {}
        while left:
            x = left.pop()
            if isinstance(x, _PLAIN) or id(x) in seen:
                continue
            seen[id(x)] = x  # held, so that no other object takes its address
            yield x
            if self._version(x) is None:
                left.extend(_contents(x).values())

    def _state(self, part: Any) -> Any:
        version = self._version(part)
        return _contents(part) if version is None else version

    def changed(self) -> Changed:
        """Returns the arguments that have changed."""
        found = [
            (text, [part for part, state in parts if not _same(state, self._state(part))]) for text, parts in self._held
        ]
        return [(text, parts) for text, parts in found if parts]

    def holding(self, things: list[Any]) -> list[str]:
        """Returns the arguments that hold one of these objects, each with its type."""
        return [text for text, parts in self._held if any(part is thing for part, _ in parts for thing in things)]

    def written(self, changed: Changed) -> list[str]:
        """Returns those of the changed arguments in which a tensor was written to, or a generator drawn from."""
        return [text for text, parts in changed if any(self._version(part) is not None for part in parts)]

    @contextmanager
    def put_back(self, label: str) -> Iterator[None]:
        """Gives all objects the contents that they had, while the body runs. See Note [Arguments as they were].

        Raises:
            UsageError: a tensor in one of them was written to since, or an object does not take its former contents.
        """
        if written := self.written(self.changed()):
            raise _refuse_later(label, written)
        before = [(x, state) for _, parts in self._held for x, state in parts if self._version(x) is None]
        now = [(x, _contents(x)) for x, _ in before]
        try:
            _restore(before)
            if changed := self.changed():
                raise refuse(label, [text for text, _ in changed])
            yield
        finally:
            _restore(now)


def refuse(label: str, arguments: list[str]) -> UsageError:
    """Returns the error for a unit that changes arguments and is computed again."""
    rule = f"the unit {label!r} changes its arguments, and is computed again in backward, which would change them twice"
    hint = "return what is new in the place of changing an argument, or do not recompute this unit;"
    hint += " for a cache of keys and values pass use_cache=False"
    return UsageError(message("hpfunc.unit", rule, arguments, hint=hint))


def _refuse_later(label: str, arguments: list[str]) -> UsageError:
    rule = f"tensors in arguments of the unit {label!r} were written to since its call, and it is computed again"
    hint = "write out of place (`x = x + y` for `x += y`), or do not recompute this unit;"
    hint += " for a cache of keys and values pass use_cache=False"
    return UsageError(message("hpfunc.unit", rule, arguments, hint=hint))


def _contents(x: Any) -> dict[Any, Any]:
    """Returns the contents of a container or an object, by key."""
    if isinstance(x, Mapping):
        return {("item", key): value for key, value in x.items()} | _attributes(x)
    if isinstance(x, list | tuple | deque):
        return dict(enumerate(x)) | _attributes(x)
    if isinstance(x, set | frozenset):
        return {("element", i): element for i, element in enumerate(x)}
    return {} if callable(x) else _attributes(x)


def _attributes(x: Any) -> dict[str, Any]:
    kinds = type(x).__mro__
    slots = (vars(kind).get("__slots__", ()) for kind in kinds)
    names = [name for its in slots for name in ([its] if isinstance(its, str) else its)]
    found = {name: getattr(x, name, _UNSET) for name in names if name not in ("__dict__", "__weakref__")}
    kept = {name for kind in kinds for name, y in vars(kind).items() if isinstance(y, functools.cached_property)}
    every = found | {name: value for name, value in getattr(x, "__dict__", {}).items() if name not in kept}
    return {name: value for name, value in every.items() if value is not _UNSET}


_UNSET = object()


def _same(before: Any, after: Any) -> bool:
    if not isinstance(before, dict):
        return before == after
    if before.keys() != after.keys():
        return False
    return all(x is after[key] or (isinstance(x, _PLAIN) and x == after[key]) for key, x in before.items())


def _restore(states: list[tuple[Any, dict[Any, Any]]]) -> None:
    """Gives objects other contents, as `_contents` has returned them."""
    for x, contents in states:
        now = _contents(x)
        if _same(contents, now):
            continue
        if isinstance(x, dict):
            # That of a subclass may do more, or refuse.
            kind: Any = OrderedDict if isinstance(x, OrderedDict) else dict
            kind.clear(x)
            for key, value in contents.items():
                if isinstance(key, tuple):
                    kind.__setitem__(x, key[1], value)
        elif isinstance(x, list | deque):
            x.clear()
            x.extend(value for key, value in contents.items() if isinstance(key, int))
        elif isinstance(x, set):
            x.clear()
            x.update(contents.values())
        _set_attributes(x, contents, now)


def _set_attributes(x: Any, contents: dict[Any, Any], now: dict[Any, Any]) -> None:
    # The methods of `object`: those of a frozen class refuse.
    for name in now:
        if isinstance(name, str) and name not in contents:
            object.__delattr__(x, name)
    for name, value in contents.items():
        if isinstance(name, str) and now.get(name, _UNSET) is not value:
            object.__setattr__(x, name, value)
