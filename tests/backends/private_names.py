"""The private names of frameworks that hpfunc uses, found in hpfunc's sources."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2] / "hpfunc"
# Private names in these are those of transformers, Lightning and accelerate: `integrations` compares the methods that
# it overrides with the host when it is imported, and `_hub` does without attributes that are not there.
OF_HOSTS = ("integrations/", "checkpoint/_hub.py")


def private_names(package: str, of_tensors: Iterable[str] = (), root: Path = ROOT) -> dict[str, list[str]]:
    """Returns each private name of a framework, and where it is used, as ``path:line`` below `root`.

    A name of a module is written with its path, as in ``torch._foreach_add``. A private attribute of an object is
    written ``*._version``: the sources do not tell of which object. It is the framework's if tensors have it
    (`of_tensors`), or if no class of hpfunc defines it. In a file that imports both frameworks it is MindSpore's. Names
    that are looked up are left out: see `declared`.
    """
    other = "mindspore" if package == "torch" else None
    trees = {path: ast.parse(path.read_text()) for path in sorted(root.rglob("*.py"))}
    own = {name for tree in trees.values() for name in _defined(tree)}.difference(of_tensors)
    found: dict[str, list[str]] = {}
    for path, tree in trees.items():
        aliases = imported(tree)
        packages = {full.partition(".")[0] for full in aliases.values()}
        if package not in packages or path.relative_to(root).as_posix().startswith(OF_HOSTS):
            continue
        uses = [*_modules(tree, aliases, package)]
        if other not in packages:
            uses += [(f"*.{name}", line) for name, line in _attributes(tree, aliases) if name not in own]
            uses += [(f"*.{name}", line) for name, line in _strings(tree)]
        for name, line in uses:
            if not any(other.startswith(f"{name}.") for other, _ in uses):
                found.setdefault(name, []).append(f"{path.relative_to(root).as_posix()}:{line}")
    return found


def declared(file: str, root: Path = ROOT) -> dict[str, list[str]]:
    """Returns the names that a file looks up by `Lookup`, and where, as `private_names` does."""
    found = _lookups(ast.parse((root / file).read_text()))
    return {f"{module.value}.{names.value}": [f"{file}:{module.lineno}"] for module, names in found}


def _lookups(tree: ast.Module) -> Iterator[tuple[ast.Constant, ast.Constant]]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Name(id="_find" | "_getter") | ast.Attribute(attr="find" | "getter"),
                args=[ast.Constant(value=str()) as module, ast.Constant(value=str()) as names],
            ):
                yield module, names


def _is_of(package: str, path: str) -> bool:
    return path.partition(".")[0] == package


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


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


def _modules(tree: ast.Module, aliases: dict[str, str], package: str) -> Iterator[tuple[str, int]]:
    """Yields private names that are reached from a module of the framework, with their lines."""
    inner = {id(_without_cast(node.value)) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names, level=0) if _is_of(package, module):
                paths = [f"{module}.{alias.name}" for alias in names]
                yield from ((path, node.lineno) for path in paths if _part(path))
            case ast.Attribute() if id(node) not in inner:
                path = path_of(node, aliases)
                if path and _is_of(package, path) and _part(path):
                    yield path, node.lineno


def _attributes(tree: ast.Module, aliases: dict[str, str]) -> Iterator[tuple[str, int]]:
    """Yields private attributes of objects other than `self` and modules of frameworks, with their lines."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name) if _is_private(name):
                if (path_of(node, aliases) or "").partition(".")[0] not in ("torch", "mindspore"):
                    yield name, node.lineno


def _strings(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yields strings that name a private attribute, as in ``vars(module)["_buffers"]``, with their lines."""
    slots = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and _names_slots(node)]
    known = {id(part) for assign in slots for part in ast.walk(assign)}
    known |= {id(part) for lookup in _lookups(tree) for part in lookup}
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
