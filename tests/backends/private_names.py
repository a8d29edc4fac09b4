"""The private names of torch that hpfunc uses, found in hpfunc's sources."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2] / "hpfunc"


def private_names(of_tensors: Iterable[str], root: Path = ROOT) -> dict[str, list[str]]:
    """Returns each private name of torch, and where it is used, as ``path:line`` below `root`.

    A name of a module is written with its path, as in ``torch._foreach_add``. A private attribute of an object is
    written ``*._version``: the sources do not tell of which object. It is torch's if tensors have it (`of_tensors`), or
    if no class of hpfunc defines it.
    """
    trees = {path: ast.parse(path.read_text()) for path in sorted(root.rglob("*.py"))}
    own = {name for tree in trees.values() for name in _defined(tree)}.difference(of_tensors)
    found: dict[str, list[str]] = {}
    for path, tree in trees.items():
        aliases = imported(tree)
        if not any(_is_torch(full) for full in aliases.values()):
            continue
        uses = [*_modules(tree, aliases)]
        if not any(full.partition(".")[0] == "mindspore" for full in aliases.values()):
            uses += [(f"*.{name}", line) for name, line in _attributes(tree, aliases) if name not in own]
            uses += [(f"*.{name}", line) for name, line in _strings(tree)]
        for name, line in uses:
            if not any(other.startswith(f"{name}.") for other, _ in uses):
                found.setdefault(name, []).append(f"{path.relative_to(root).as_posix()}:{line}")
    return found


def _is_torch(path: str) -> bool:
    return path.partition(".")[0] == "torch"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _defined(tree: ast.Module) -> Iterator[str]:
    """Yields the attributes that the classes of a file define."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(body=body):
                for part in body:
                    match part:
                        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                            yield name
                        case ast.Assign(targets=[ast.Name(id="__slots__")], value=slots):
                            yield from ast.literal_eval(slots)
                        case ast.Assign(targets=[ast.Name(id=name)]):
                            yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name


def imported(tree: ast.Module) -> dict[str, str]:
    """Returns the names that a file imports, each with its full path; relative imports are left out."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                whole = [alias.name if alias.asname else alias.name.partition(".")[0] for alias in names]
                found |= {alias.asname or name: name for alias, name in zip(names, whole, strict=True)}
            case ast.ImportFrom(module=str(module), names=names, level=0):
                found |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in names}
    return found


def _modules(tree: ast.Module, aliases: dict[str, str]) -> Iterator[tuple[str, int]]:
    """Yields private names that are reached from a module of torch, with their lines."""
    inner = {id(_without_cast(node.value)) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names, level=0) if _is_torch(module):
                paths = [f"{module}.{alias.name}" for alias in names]
                yield from ((path, node.lineno) for path in paths if _part(path))
            case ast.Attribute() if id(node) not in inner:
                path = path_of(node, aliases)
                if path and _is_torch(path) and _part(path):
                    yield path, node.lineno


def _attributes(tree: ast.Module, aliases: dict[str, str]) -> Iterator[tuple[str, int]]:
    """Yields private attributes of objects other than `self`, with their lines."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name) if _is_private(name) and not _is_torch(path_of(node, aliases) or ""):
                yield name, node.lineno


def _strings(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yields strings that name a private attribute, as in ``vars(module)["_buffers"]``, with their lines."""
    slots = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and _names_slots(node)]
    known = {id(part) for assign in slots for part in ast.walk(assign)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(name)) if _is_private(name) and name.isidentifier() and id(node) not in known:
                if not name.startswith("_hpfunc"):
                    yield name, node.lineno


def _names_slots(node: ast.Assign) -> bool:
    return any(isinstance(target, ast.Name) and target.id == "__slots__" for target in node.targets)


def _part(path: str) -> bool:
    return any(map(_is_private, path.split(".")))


def path_of(node: ast.expr, aliases: dict[str, str]) -> str | None:
    """Returns the full path of a chain of attributes that begins at an imported name; None for another expression."""
    node = _without_cast(node)
    if isinstance(node, ast.Attribute):
        before = path_of(node.value, aliases)
        return before and f"{before}.{node.attr}"
    return aliases.get(node.id) if isinstance(node, ast.Name) else None


def _without_cast(node: ast.expr) -> ast.expr:
    """Returns `x` of ``cast(Any, x)``."""
    match node:
        case ast.Call(func=ast.Name(id="cast"), args=[_, inner]):
            return inner
    return node
