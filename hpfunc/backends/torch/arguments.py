"""Arguments that a unit changes, such as a cache that it fills: a second run would change them once more.

The contents of an argument are found through lists, tuples, dicts, sets and attributes of objects, but not through
functions, modules and classes. A tensor has changed if it was written to, any other object if it holds other objects.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..._errors import UsageError, message

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, types.ModuleType)
Version = Callable[[Any], Any]  # a value that changes when a leaf is written to; None for an object that is not a leaf


class Arguments:
    """The arguments of a call as they are now, each with its contents."""

    __slots__ = ("_held", "_version")

    def __init__(self, args: Any, kwargs: Any, version: Version) -> None:
        self._version = version
        named = [(f"args[{i}]", x) for i, x in enumerate(args)] + [(f"kwargs[{key!r}]", x) for key, x in kwargs.items()]
        self._held = [(name, x, [(part, self._state(part)) for part in self._parts(x)]) for name, x in named]

    def _parts(self, root: Any) -> Iterator[Any]:
        """Yields an argument, and each object in it once."""
        seen: dict[int, Any] = {}
        left = [root]
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

    def changed(self) -> list[tuple[str, Any, list[Any]]]:
        """Returns the arguments that have changed: name, argument, and the changed objects in it."""
        found = [
            (name, x, [part for part, state in parts if not _same(state, self._state(part))])
            for name, x, parts in self._held
        ]
        return [(name, x, parts) for name, x, parts in found if parts]

    def holding(self, things: list[Any]) -> list[str]:
        """Returns the arguments that hold one of these objects, each with its type."""
        return [_spell(name, x) for name, x, parts in self._held if any(p is t for p, _ in parts for t in things)]


def _spell(name: str, x: Any) -> str:
    return f"{name}: {type(x).__name__}"


def refuse(label: str, arguments: list[str]) -> UsageError:
    """Returns the error for a unit that changes arguments and is computed again."""
    rule = f"the unit {label!r} changes its arguments, and is computed again in backward, which would change them twice"
    hint = "return what is new in the place of changing an argument, or do not recompute this unit;"
    hint += " for a cache of keys and values pass use_cache=False"
    return UsageError(message("hpfunc.unit", rule, arguments, hint=hint))


def refuse_changes(label: str, arguments: Arguments) -> None:
    """Raises UsageError if arguments have changed."""
    changed = arguments.changed()
    if changed:
        raise refuse(label, [_spell(name, x) for name, x, _ in changed])


def _contents(x: Any) -> dict[Any, Any]:
    """Returns the contents of a container or an object, by key."""
    if isinstance(x, Mapping):
        return {("item", key): value for key, value in x.items()} | _attributes(x)
    if isinstance(x, list | tuple | deque):
        return dict(enumerate(x)) | _attributes(x)
    if isinstance(x, set | frozenset):
        return {("element", i): element for i, element in enumerate(x)}
    return {} if callable(x) else _attributes(x)


def _attributes(x: Any) -> dict[Any, Any]:
    kinds = type(x).__mro__
    slots = (vars(kind).get("__slots__", ()) for kind in kinds)
    names = [name for its in slots for name in ([its] if isinstance(its, str) else its)]
    found = {name: getattr(x, name, None) for name in names if name not in ("__dict__", "__weakref__")}
    kept = {name for kind in kinds for name, y in vars(kind).items() if isinstance(y, functools.cached_property)}
    return found | {name: value for name, value in getattr(x, "__dict__", {}).items() if name not in kept}


def _same(before: Any, after: Any) -> bool:
    if not isinstance(before, dict):
        return before == after
    if before.keys() != after.keys():
        return False
    return all(x is after[key] or (isinstance(x, _PLAIN) and x == after[key]) for key, x in before.items())
