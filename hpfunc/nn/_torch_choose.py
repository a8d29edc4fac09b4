"""Which modules become units: by the caller's words, by default the repeated blocks; and what is left over."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from .._errors import SpecError, UsageError, message

_NAME = "hpfunc.from_module"
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
Named = dict[str, nn.Module]


@dataclass(frozen=True, slots=True)
class Choice:
    """The units of a module.

    Attributes:
        units: path and class name of each, in the order of the module's own; "" is the module itself.
        alone: parameters that belong to a module around units; each is gathered by itself where it is used.
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


def choose(module: nn.Module, units: Any) -> Choice:
    """Returns the units that the caller chose, and those of what is left over.

    Raises:
        SpecError: an entry selects nothing, or units overlap.
        UsageError: `units` is of no known kind, or a unit has no `forward`.
    """
    named = dict(module.named_modules())
    chosen = _repeated(module) if units is None else _selected(named, units)
    _check_overlap(chosen)
    without = [f"{path}: {type(m).__name__}" for path, m in chosen.items() if not _is_called(m)]
    if without:
        hint = "choose the modules in it: a pattern such as 'layers.*'"
        raise UsageError(message(_NAME, "a unit has no forward", without, hint=hint))
    alone: list[str] = []
    rest = dict(_left_over("", module, set(chosen.values()), alone, set()))
    order = {path: place for place, path in enumerate(named)}
    every = sorted({**chosen, **rest}.items(), key=lambda item: order[item[0]])
    return Choice(tuple((path, type(m).__name__) for path, m in every), tuple(dict.fromkeys(alone)))


def _is_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _repeated(module: nn.Module) -> Named:
    """The outermost modules with parts of their own whose class stands at least twice in lists of the module."""
    members = {
        path: child
        for prefix, parent in module.named_modules()
        if isinstance(parent, _CONTAINERS)
        for path, child in _children(prefix, parent)
        if not isinstance(child, _CONTAINERS) and any(child.children()) and any(True for _ in child.parameters())
    }
    counts = Counter(type(child) for child in {id(child): child for child in members.values()}.values())
    blocks = {path: child for path, child in members.items() if counts[type(child)] > 1}
    inner = {id(part) for block in blocks.values() for part in block.modules() if part is not block}
    return {path: child for path, child in blocks.items() if id(child) not in inner}


def _children(prefix: str, parent: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in parent.named_children():
        yield (f"{prefix}.{name}" if prefix else name), child


def _selected(named: Named, units: Any) -> Named:
    entries = list(units) if isinstance(units, list | tuple | set | frozenset) else [units]
    found: Named = {}
    idle = []
    for entry in entries:
        matches = _matching(entry)
        new = {path: module for path, module in named.items() if matches(path, module)}
        if not new:
            idle.append(_spell(entry))
        found |= new
    if idle:
        words = [entry for entry in entries if isinstance(entry, str)]
        raise SpecError(message(_NAME, "an entry of units selects no module", idle, hint=_nearest(words, named)))
    return found


def _matching(entry: Any) -> Callable[[str, nn.Module], bool]:
    if isinstance(entry, str):
        return lambda path, module: fnmatchcase(path, entry)
    if isinstance(entry, nn.Module):
        return lambda path, module: module is entry
    if isinstance(entry, type):
        return lambda path, module: isinstance(module, entry)
    if callable(entry):
        return lambda path, module: bool(entry(path, module))
    rule = f"units must be classes, modules, patterns of paths, or functions of a path and a module, got {entry!r}"
    raise UsageError(message(_NAME, rule, hint="hpfunc.from_module(module, units='layers.*')"))


def _spell(entry: Any) -> str:
    if isinstance(entry, str):
        return f"pattern {entry!r}"
    if isinstance(entry, nn.Module):
        return f"a {type(entry).__name__} that is not in the module"
    return f"class {entry.__name__}" if isinstance(entry, type) else f"function {getattr(entry, '__name__', entry)}"


def _nearest(words: Sequence[str], named: Named) -> str:
    paths = [path for path in named if path]
    near = [path for word in words for path in difflib.get_close_matches(word, paths, n=3, cutoff=0.5)]
    shown = list(dict.fromkeys(near or paths))[:6]
    return f"paths of modules are {', '.join(map(repr, shown))}" if shown else "the module has no parts"


def _check_overlap(chosen: Named) -> None:
    paths = {id(module): path for path, module in chosen.items()}
    bad = [
        f"{paths[id(part)]!r} is part of {path or 'the whole module'!r}"
        for path, module in chosen.items()
        for part in module.modules()
        if part is not module and id(part) in paths
    ]
    if bad:
        hint = "weights of a unit are gathered together: choose either the outer or the inner modules"
        raise SpecError(message(_NAME, "units overlap", bad, hint=hint))


def _left_over(
    path: str, module: nn.Module, chosen: set[nn.Module], alone: list[str], seen: set[nn.Module]
) -> Iterable[tuple[str, nn.Module]]:
    """Yields the smallest modules with parameters of their own that are in no unit yet, and notes what is alone."""
    if module in chosen or module in seen:
        return
    seen.add(module)
    owned = [f"{path}.{name}" if path else name for name, p in module._parameters.items() if p is not None]
    if (owned or is_parametrized(module)) and _is_called(module) and chosen.isdisjoint(module.modules()):
        yield path, module
        return
    alone += owned
    for child_path, child in _children(path, module):
        yield from _left_over(child_path, child, chosen, alone, seen)
