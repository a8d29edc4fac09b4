"""Which modules are units if the caller names none: the blocks of a model.

# Note [Blocks]
A block is what a model repeats: a module with parts whose class stands at least twice in lists, or a chain of layers
(a Sequential) whose classes do. Blocks within blocks do not count. A module with parts that stands in a list without
another of its class is a block, too: of a layer that is used many times (ALBERT's) a list holds one, and of a kind of
layer that a hybrid model has once, as well. Not so in a Sequential, where a module may stand for any reason.

# Note [Blocks by bytes]
Whole weights of a unit exist together, and their gather is hidden behind the unit before. So a unit should not hold
much of the model: at most a fifth, which five units of the same size would hold. Two kinds of blocks hold more although
the model allows otherwise. A class with few instances whose parts are blocks again is a stage (a vision model has four,
and most bytes in the last two): its blocks are the units, in all stages, because in the first ones few bytes
meet many activations, which recomputing keeps by units. And of a class with many instances a few can be far larger than
the others: such a one is divided into its parts, and so is a chain. A decoder of two layers stays one of two units.

Experts look like the blocks of a stage, and must never be units: which of them a call uses depends on the data, and
units are gathered by all ranks at the same time. What tells a stage from them: its blocks stand in a Sequential, all of
which runs, or alone in a list; or they have parts with parts, as an expert has not; or they stand in lists of the stage
itself, and stages differ in size, as modules with experts do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from ._parts import Module, Named, Parts

PARTS_OF_ALL = 5  # no unit should hold more than one of so many equal parts of the bytes
_GAIN = 0.9  # a module is divided only if no piece holds more of it than this
_OWN = 0.1  # parameters that belong to a divided module itself are gathered one by one: they must be few
_BLOCKS = 0.5  # of the bytes of a stage, at least, are in its blocks
_UNEVEN = 1.2  # stages differ in size by more than this factor


@dataclass(frozen=True, slots=True)
class Candidate:
    """A module in a list that may be a block; those with the same key are instances of one kind."""

    module: Module
    key: Hashable
    is_chained: bool  # whether it stands in a Sequential, of which all members run
    place: int  # the identity of its list


def blocks(parts: Parts, module: Module) -> dict[str, Module]:
    """Returns the units of a module by default, by path. See Note [Blocks] and Note [Blocks by bytes]."""
    limit = parts.bytes_of(module) / PARTS_OF_ALL
    found = _repeated(parts, parts.named(module))
    while (divided := _divided(parts, found, limit)).keys() != found.keys():
        found = divided
    return found


def divisible(parts: Parts, found: Named, total: int) -> dict[str, int]:
    """Returns path and bytes of the modules that hold too much of so many bytes, and would be divided by default."""
    divided = _divided(parts, found, total / PARTS_OF_ALL)
    sizes = {path: parts.bytes_of(module) for path, module in found.items() if path not in divided}
    return {path: size for path, size in sizes.items() if size * PARTS_OF_ALL > total}


def can_be_divided(parts: Parts, module: Module, limit: float) -> bool:
    """Returns whether a module holds more bytes than the limit, and its parts can be units in its place."""
    return parts.bytes_of(module) > limit and _pieces(parts, "", module, limit) is not None


def _repeated(parts: Parts, named: Named) -> dict[str, Module]:
    """The outermost blocks among some modules. See Note [Blocks]."""
    found = _candidates(parts, named)
    counts = Counter({id(each.module): each.key for each in found.values()}.values())
    often = {path: each.module for path, each in found.items() if counts[each.key] > 1}
    repeated = {id(module) for module in often.values()}
    often |= {
        path: each.module
        for path, each in found.items()
        if counts[each.key] == 1 and not each.is_chained and repeated.isdisjoint(_inside(parts, each.module))
    }
    inner = {part for module in often.values() for part in _inside(parts, module)}
    return {path: each.module for path, each in found.items() if path in often and id(each.module) not in inner}


def _candidates(parts: Parts, named: Named) -> dict[str, Candidate]:
    found = {}
    compiled = {
        id(x) for part in named.values() if parts.compiled(part) is not None for x in parts.named(part).values()
    }
    for prefix, parent in named.items():
        if parts.is_list(parent) and id(parent) not in compiled:
            for path, child in parts.paths(prefix, parent):
                if (key := _key(parts, child)) is not None:
                    found[path] = Candidate(child, key, parts.is_called(parent), id(parent))
    return found


def _key(parts: Parts, module: Module) -> Hashable | None:
    """The kind of a module that may be a block. None: it cannot be one."""
    inner = [child for _, child in parts.children(module)]
    if not inner or not parts.is_called(module) or not parts.has_parameters(module):
        return None
    if not parts.is_list(module):
        return type(module if (compiled := parts.compiled(module)) is None else compiled)
    is_flat = not any(any(parts.children(child)) for child in inner)
    return (type(module), *map(type, inner)) if is_flat and sum(map(parts.has_parameters, inner)) > 1 else None


def _inside(parts: Parts, module: Module) -> set[int]:
    return {id(part) for part in parts.named(module).values() if part is not module}


# --- by bytes ---------------------------------------------------------------------------------------------------------
def _divided(parts: Parts, found: Named, limit: float) -> dict[str, Module]:
    """Blocks with those that hold more than the limit divided once. See Note [Blocks by bytes]."""
    kinds: dict[Hashable, dict[str, Module]] = {}
    for path, module in found.items():
        kinds.setdefault(_key(parts, module) or type(module), {})[path] = module
    divided: dict[str, Module] = {}
    for members in kinds.values():
        large = {path: module for path, module in members.items() if parts.bytes_of(module) > limit}
        num_instances = len({id(module) for module in members.values()})
        if large and num_instances < PARTS_OF_ALL and (inner := _parts_of_stages(parts, members, large)):
            divided |= inner
            continue
        for path, module in members.items():
            can_divide = path in large and (num_instances >= PARTS_OF_ALL or parts.is_list(module))
            pieces = _pieces(parts, path, module, limit) if can_divide else None
            divided |= {path: module} if pieces is None else pieces
    return divided


def _parts_of_stages(parts: Parts, members: Named, large: Named) -> dict[str, Module] | None:
    """The modules that all members of a class consist of, if the large ones are stages: they consist of blocks."""
    found = _certain(parts, members)
    if found is None or not all(_is_stage(parts, module, found) for module in large.values()):
        return None
    pieces = {name: x for path, module in members.items() for name, x in _parts_of(parts, path, module)}
    return {name: piece for name, piece in pieces.items() if any(parts.children(piece)) and parts.is_called(piece)}


def _is_stage(parts: Parts, module: Module, found: Named) -> bool:
    inside = _inside(parts, module)
    blocks_bytes = sum(parts.bytes_of(block) for block in found.values() if id(block) in inside)
    candidates = _candidates(parts, parts.named(module)).values()
    lists = Counter((each.place, None if each.is_chained else each.key) for each in candidates)
    if max(lists.values(), default=0) < 2 or parts.computes_own(module) or parts.compiled(module) is not None:
        return False
    return blocks_bytes > _BLOCKS * parts.bytes_of(module)


def _certain(parts: Parts, members: Named) -> dict[str, Module] | None:
    """The blocks inside of modules of one class; None if they might be experts. See Note [Blocks by bytes]."""
    below = {path: part for prefix, module in members.items() for path, part in parts.below(prefix, module).items()}
    found, candidates = _repeated(parts, below), _candidates(parts, below)
    sizes = [parts.bytes_of(module) for module in members.values()]
    is_uneven = max(sizes) > _UNEVEN * min(sizes)
    direct = {id(x) for module in members.values() for x in _lists_of(parts, module)}
    lengths = Counter(each.place for each in candidates.values())
    for path, module in found.items():
        each = candidates[path]
        is_deep = any(any(parts.children(child)) for _, child in parts.children(module))
        is_alone = lengths[each.place] == 1
        if not (each.is_chained or is_deep or is_alone or (is_uneven and each.place in direct)):
            return None
    return found


def _lists_of(parts: Parts, module: Module) -> Iterator[Module]:
    """Yields a module if it is a list, the lists that are direct parts of it, and those within them."""
    if parts.is_list(module):
        yield module
    for _, child in parts.children(module):
        if parts.is_list(child):
            yield from _lists_of(parts, child)


def _pieces(parts: Parts, path: str, module: Module, limit: float) -> dict[str, Module] | None:
    """The modules with parts that a module consists of; None if it cannot be divided, or that would not help."""
    pieces = _fine(parts, path, module, limit)
    if pieces is None or max(map(parts.bytes_of, pieces.values()), default=0) > _GAIN * parts.bytes_of(module):
        return None
    return {name: piece for name, piece in pieces.items() if any(parts.children(piece)) and parts.is_called(piece)}


def _fine(parts: Parts, path: str, module: Module, limit: float) -> dict[str, Module] | None:
    """The modules that a module consists of, themselves divided where they hold more than the limit."""
    if parts.computes_own(module) or parts.compiled(module) is not None:
        return None
    if parts.own_bytes(module) > _OWN * parts.bytes_of(module):
        return None
    direct = {id(x) for x in _lists_of(parts, module)}
    candidates = _candidates(parts, parts.below(path, module)).values()
    kinds = Counter((each.place, each.key) for each in candidates if each.place in direct)
    if max(kinds.values(), default=0) > 1 and _certain(parts, {path: module}) is None:
        return None
    pieces: dict[str, Module] = {}
    for name, piece in _parts_of(parts, path, module):
        is_large = parts.bytes_of(piece) > limit and any(parts.children(piece))
        inner = _fine(parts, name, piece, limit) if is_large else None
        pieces |= {name: piece} if inner is None else inner
    return pieces


def _parts_of(parts: Parts, path: str, module: Module) -> Iterator[tuple[str, Module]]:
    """Yields the direct parts of a module that have parameters, and those of its lists."""
    for name, child in parts.paths(path, module):
        if parts.is_list(child):
            yield from _parts_of(parts, name, child)
        elif parts.has_parameters(child):
            yield name, child
