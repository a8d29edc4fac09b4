"""Which modules become units: those that the caller selects, by default the repeated blocks; and the remaining ones.

`Parts` is what a framework has to provide; all else is the same for every framework.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

from .._errors import SpecError, UsageError, message

Module = Any
Named = Mapping[str, Module]
_NAME = "hpfunc.from_module"


@dataclass(frozen=True, slots=True)
class Parts:
    """How a framework's modules are made of parts.

    Attributes:
        kind: the class of all modules.
        method: the name of the method that a call of a module runs.
        lists: the framework's classes of lists and dicts of modules.
        unset: methods of that name that only say that a class has none.
        named: returns a module and all its parts by path, each once. The path of the module is "".
        children: returns the direct parts of a module by name, each once.
        own: returns the names of the parameters that belong to a module and not to its parts.
        computes_own: returns whether a module computes a parameter of its own from those of its parts.
    """

    kind: type
    method: str
    lists: tuple[type, ...]
    unset: tuple[Callable[..., Any], ...]
    named: Callable[[Module], dict[str, Module]]
    children: Callable[[Module], Iterable[tuple[str, Module]]]
    own: Callable[[Module], list[str]]
    computes_own: Callable[[Module], bool] = lambda module: False

    def is_list(self, module: Module) -> bool:
        """Returns whether a module is a list or dict of modules of the framework."""
        return isinstance(module, self.lists)

    def is_called(self, module: Module) -> bool:
        """Returns whether a module has the method that a call runs."""
        return getattr(type(module), self.method) not in self.unset


@dataclass(frozen=True, slots=True)
class Choice:
    """The units of a module.

    Attributes:
        units: path and class name of each, in the order of the module's parts; "" is the module itself.
        alone: parameters that belong to a module around units. Each is gathered by itself where it is used.
    """

    units: tuple[tuple[str, str], ...]
    alone: tuple[str, ...]

    def __str__(self) -> str:
        parts = []
        for kind, group in groupby(self.units, key=lambda unit: unit[1]):
            paths = [path or "the whole module" for path, _ in group]
            shown = paths[0] if len(paths) == 1 else f"{paths[0]} to {paths[-1]}"
            parts.append(f"{len(paths)} {kind} ({shown})")
        parts += [f"{path} alone" for path in self.alone]
        return f"{len(self.units)} units: {', '.join(parts)}"


def choose(parts: Parts, module: Module, units: Any) -> Choice:
    """Returns the units that the caller chose, and units for the remaining modules.

    Raises:
        SpecError: an entry selects nothing, or units overlap.
        UsageError: `units` is of an unknown kind, or a unit cannot be called.
    """
    named = parts.named(module)
    chosen = _repeated(parts, named) if units is None else _selected(parts, named, units)
    _check_overlap(parts, chosen)
    without = [f"{path}: {type(m).__name__}" for path, m in chosen.items() if not parts.is_called(m)]
    if without:
        hint = "choose the modules in it: a pattern such as 'layers.*'"
        raise UsageError(message(_NAME, f"a unit has no {parts.method}", without, hint=hint))
    alone: list[str] = []
    rest = dict(_left_over(parts, "", module, {id(m) for m in chosen.values()}, alone, set()))
    order = {path: place for place, path in enumerate(named)}
    every = sorted({**chosen, **rest}.items(), key=lambda item: order[item[0]])
    return Choice(tuple((path, type(m).__name__) for path, m in every), tuple(dict.fromkeys(alone)))


def _repeated(parts: Parts, named: Named) -> dict[str, Module]:
    """The outermost modules with parts of their own whose class stands at least twice in lists of the module."""
    members = {
        path: child
        for prefix, parent in named.items()
        if parts.is_list(parent)
        for path, child in _children(parts, prefix, parent)
        if not parts.is_list(child) and any(parts.children(child)) and _has_parameters(parts, child)
    }
    counts = Counter(type(child) for child in {id(child): child for child in members.values()}.values())
    blocks = {path: child for path, child in members.items() if counts[type(child)] > 1}
    inner = {id(part) for block in blocks.values() for part in parts.named(block).values() if part is not block}
    return {path: child for path, child in blocks.items() if id(child) not in inner}


def _has_parameters(parts: Parts, module: Module) -> bool:
    return any(parts.own(part) for part in parts.named(module).values())


def _children(parts: Parts, prefix: str, parent: Module) -> Iterator[tuple[str, Module]]:
    for name, child in parts.children(parent):
        yield (f"{prefix}.{name}" if prefix else name), child


def _selected(parts: Parts, named: Named, units: Any) -> dict[str, Module]:
    entries = list(units) if isinstance(units, list | tuple | set | frozenset) else [units]
    found: dict[str, Module] = {}
    idle = []
    for entry in entries:
        matches = _matching(parts, entry)
        new = {path: module for path, module in named.items() if matches(path, module)}
        if not new:
            idle.append(_spell(parts, entry))
        found |= new
    if idle:
        words = [entry for entry in entries if isinstance(entry, str)]
        raise SpecError(message(_NAME, "an entry of units selects no module", idle, hint=_nearest(words, named)))
    return found


def _matching(parts: Parts, entry: Any) -> Callable[[str, Module], bool]:
    if isinstance(entry, str):
        return lambda path, module: fnmatchcase(path, entry)
    if isinstance(entry, parts.kind):
        return lambda path, module: module is entry
    if isinstance(entry, type):
        return lambda path, module: isinstance(module, entry)
    if callable(entry):
        return lambda path, module: bool(entry(path, module))
    rule = f"units must be classes, modules, patterns of paths, or functions of a path and a module, got {entry!r}"
    raise UsageError(message(_NAME, rule, hint="hpfunc.from_module(module, units='layers.*')"))


def _spell(parts: Parts, entry: Any) -> str:
    if isinstance(entry, str):
        return f"pattern {entry!r}"
    if isinstance(entry, parts.kind):
        return f"a {type(entry).__name__} that is not in the module"
    return f"class {entry.__name__}" if isinstance(entry, type) else f"function {getattr(entry, '__name__', entry)}"


def _nearest(words: Sequence[str], named: Named) -> str:
    paths = [path for path in named if path]
    near = [path for word in words for path in difflib.get_close_matches(word, paths, n=3, cutoff=0.5)]
    shown = list(dict.fromkeys(near or paths))[:6]
    return f"paths of modules are {', '.join(map(repr, shown))}" if shown else "the module has no parts"


def _check_overlap(parts: Parts, chosen: Named) -> None:
    paths = {id(module): path for path, module in chosen.items()}
    bad = [
        f"{paths[id(part)]!r} is part of {path or 'the whole module'!r}"
        for path, module in chosen.items()
        for part in parts.named(module).values()
        if part is not module and id(part) in paths
    ]
    if bad:
        hint = "weights of a unit are gathered together: choose either the outer or the inner modules"
        raise SpecError(message(_NAME, "units overlap", bad, hint=hint))


def _left_over(
    parts: Parts, path: str, module: Module, chosen: set[int], alone: list[str], seen: set[int]
) -> Iterable[tuple[str, Module]]:
    """Yields the smallest modules with own parameters that are not in a unit yet; notes parameters that are alone."""
    if id(module) in chosen or id(module) in seen:
        return
    seen.add(id(module))
    own = [f"{path}.{name}" if path else name for name in parts.own(module)]
    holds_no_unit = chosen.isdisjoint(id(part) for part in parts.named(module).values())
    if (own or parts.computes_own(module)) and parts.is_called(module) and holds_no_unit:
        yield path, module
        return
    alone += own
    for child_path, child in _children(parts, path, module):
        yield from _left_over(parts, child_path, child, chosen, alone, seen)
