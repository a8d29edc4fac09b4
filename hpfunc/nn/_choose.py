"""Which modules become units: those that the caller selects, by default the blocks; and the remaining ones."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

from .._errors import SpecError, UsageError, message
from ._blocks import PARTS_OF_ALL, blocks, can_be_divided, divisible
from ._parts import Module, Named, Parts

_NAME = "hpfunc.from_module"
_LARGE = 1 << 20  # bytes: below, nothing is gained by smaller units


@dataclass(frozen=True, slots=True)
class Unit:
    """A module that is a unit, or a parameter that is one by itself.

    Attributes:
        path: of it; "" is the whole module.
        kind: the name of its class; None: a parameter.
        size_bytes: of its parameters.
    """

    path: str
    kind: str | None
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Choice:
    """The units of a module.

    Attributes:
        modules: those that are modules, in the order of the module's parts.
        alone: parameters that belong to a module around units. Each is gathered by itself where it is used.
        total_bytes: of all parameters.
        advice: warnings, such as for who chose units that hold much of the model, while smaller ones can be chosen.
    """

    modules: tuple[Unit, ...]
    alone: tuple[Unit, ...]
    total_bytes: int
    advice: tuple[str, ...] = ()

    def __str__(self) -> str:
        groups = [list(group) for _, group in groupby(self.modules, key=lambda unit: unit.kind)]
        texts = [self._text(group) for group in groups] + [self._text([unit]) for unit in self.alone]
        return f"{len(self.modules)} units: {', '.join(texts)}"

    def _text(self, group: list[Unit]) -> str:
        paths = [unit.path or "the whole module" for unit in group]
        shown = paths[0] if len(paths) == 1 else f"{paths[0]} to {paths[-1]}"
        name = f"{shown} alone" if group[0].kind is None else f"{len(paths)} {group[0].kind} ({shown})"
        least, most = min(unit.size_bytes for unit in group), max(unit.size_bytes for unit in group)
        sizes, shares = [_size(least), _size(most)], [self._share(least), self._share(most)]
        each = " each" if len(group) > 1 else ""
        return f"{name} [{' to '.join(dict.fromkeys(sizes))}, {' to '.join(dict.fromkeys(shares))} %{each}]"

    def _share(self, size_bytes: int) -> str:
        percent = 100 * size_bytes / max(self.total_bytes, 1)
        return f"{percent:.0f}" if percent >= 1 else "<1"


def _size(size_bytes: int) -> str:
    for exponent, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes >= 1 << exponent:
            return f"{size_bytes / (1 << exponent):.3g} {name}"
    return f"{size_bytes} B"


def choose(parts: Parts, module: Module, units: Any) -> Choice:
    """Returns the units that the caller chose, and units for the remaining modules.

    Raises:
        SpecError: an entry selects nothing, or units overlap.
        UsageError: `units` is of an unknown kind, or a unit cannot be called.
    """
    named, total = parts.named(module), parts.bytes_of(module)
    names = {id(part): path for path, part in named.items()}  # a part that stands in several places has one name
    chosen = blocks(parts, module) if units is None else _selected(parts, named, units)
    around = {id(parts.compiled(part)): part for part in named.values()}  # who chose a module that is called compiled
    chosen = {names[id(x)]: x for x in (around.get(id(part), part) for part in chosen.values())}
    _refuse_inside_compiled(parts, named, chosen)
    _check_overlap(parts, chosen)
    without = [f"{path}: {type(m).__name__}" for path, m in chosen.items() if not parts.is_called(m)]
    if without:
        hint = "choose the modules in it: a pattern such as 'layers.*'"
        raise UsageError(message(_NAME, f"a unit has no {parts.method}", without, hint=hint))
    alone: dict[str, Any] = {}
    rest = dict(_left_over(parts, "", module, {id(m) for m in chosen.values()}, alone, set(), total / PARTS_OF_ALL))
    order = {path: place for place, path in enumerate(named)}
    every = sorted({**chosen, **rest}.items(), key=lambda item: order[item[0]])
    return Choice(
        tuple(Unit(path, _kind(parts, m), parts.bytes_of(m)) for path, m in every),
        tuple(Unit(path, None, parts.size_bytes(x)) for path, x in alone.items()),
        total,
        () if units is None else _advice(parts, chosen, total),
    )


def _kind(parts: Parts, module: Module) -> str:
    compiled = parts.compiled(module)
    return type(module).__name__ if compiled is None else f"compiled {type(compiled).__name__}"


def _advice(parts: Parts, chosen: Named, total: int) -> tuple[str, ...]:
    large = {path: size for path, size in divisible(parts, chosen, total).items() if size > _LARGE}
    if not large:
        return ()
    rule = f"chosen units hold more than 1/{PARTS_OF_ALL} of the bytes each, and consist of blocks"
    shown = [
        f"{path or 'the whole module'}: {type(chosen[path]).__name__}, {_size(size)}, {100 * size / total:.0f} %"
        for path, size in large.items()
    ]
    hint = "choose their blocks, as from_module does without `units`; all of a unit is gathered at once"
    return (message(_NAME, rule, shown, hint=hint),)


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


def _refuse_inside_compiled(parts: Parts, named: Named, chosen: Named) -> None:
    units = {id(unit): path for path, unit in chosen.items()}
    inside = [
        f"{units[id(part)]!r} is part of {path or 'the whole module'!r}"
        for path, module in named.items()
        if parts.compiled(module) is not None
        for part in parts.named(module).values()
        if part is not module and id(part) in units
    ]
    if inside:
        hint = "compile the modules that are units, each by itself, or choose the compiled module"
        raise UsageError(
            message(_NAME, "a unit is part of a compiled module, whose graph cannot gather", inside, hint=hint)
        )


def _left_over(
    parts: Parts, path: str, module: Module, chosen: set[int], alone: dict[str, Any], seen: set[int], limit: float
) -> Iterable[tuple[str, Module]]:
    """Yields the smallest modules with own parameters that are not in a unit yet; notes parameters that are alone."""
    if id(module) in chosen or id(module) in seen:
        return
    seen.add(id(module))
    own = {f"{path}.{name}" if path else name: x for name, x in parts.own(module).items()}
    is_whole = parts.compiled(module) is not None and parts.has_parameters(module)
    if (own or is_whole or parts.computes_own(module)) and parts.is_called(module):
        holds_no_unit = chosen.isdisjoint(id(part) for part in parts.named(module).values())
        if holds_no_unit and not can_be_divided(parts, module, limit):
            yield path, module
            return
    alone |= {name: x for name, x in own.items() if name not in alone}
    for child_path, child in parts.paths(path, module):
        yield from _left_over(parts, child_path, child, chosen, alone, seen, limit)
