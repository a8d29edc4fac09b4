"""The calls of a framework in hpfunc's sources, and whether functions take them. Nothing is imported, nothing runs."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.backends.private_names import ROOT, imported, path_of


@dataclass(frozen=True)
class Call:
    """One call: what is called, with how many arguments, with which keywords, and where."""

    path: str
    count: int
    keywords: tuple[str, ...]
    place: str


def calls(package: str, files: list[str], root: Path = ROOT) -> list[Call]:
    """Returns every call of a name of `package`, private ones too; ``partial(name, ...)`` is one."""
    found: list[Call] = []
    for file in files:
        tree = ast.parse((root / file).read_text())
        aliases = {name: full for name, full in imported(tree).items() if full.partition(".")[0] == package}
        aliases |= _private(tree, f"hpfunc.backends.{package}.private")
        found += [Call(*call, f"{root.name}/{file}:{line}") for call, line in _calls(tree, aliases)]
    return found


def _private(tree: ast.Module, path: str) -> dict[str, str]:
    """Returns the names by which a file knows the file of private names, or names in it."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
    found = {alias.asname or alias.name: path for node in imports for alias in node.names if alias.name == "private"}
    inside = [node for node in imports if (node.module or "").rpartition(".")[2] == "private"]
    return found | {alias.asname or alias.name: f"{path}.{alias.name}" for node in inside for alias in node.names}


def _calls(tree: ast.Module, aliases: dict[str, str]) -> Iterator[tuple[tuple[str, int, tuple[str, ...]], int]]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="partial"), args=[function, *args], keywords=keywords):
                pass
            case ast.Call(func=function, args=args, keywords=keywords):
                pass
            case _:
                continue
        path = path_of(function, aliases)
        starred = any(isinstance(arg, ast.Starred) for arg in args) or any(keyword.arg is None for keyword in keywords)
        if path and not starred:
            yield (path, len(args), tuple(keyword.arg for keyword in keywords if keyword.arg)), node.lineno


def refusal(function: Any, call: Call) -> str:
    """Returns why a function does not take a call; nothing if it does, or if nobody knows (a builtin)."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*range(call.count), **dict.fromkeys(call.keywords))
    except TypeError as error:
        return f"{call.path}{signature}: {error}; see {call.place}"
    return ""


def method(tree: ast.Module, of: str, name: str) -> ast.FunctionDef | None:
    """Returns a method of a class in a source or stub, by its name; a function of the module if `of` is empty."""
    bodies = [tree.body] if not of else [x.body for x in ast.walk(tree) if isinstance(x, ast.ClassDef) and x.name == of]
    every = (part for body in bodies for part in body)
    return next((part for part in every if isinstance(part, ast.FunctionDef) and part.name == name), None)


def refusal_of_source(function: ast.FunctionDef | None, call: Call) -> str:
    """The same for a function that was only read."""
    if function is None:
        return f"{call.path} does not exist; see {call.place}"
    args = function.args
    places = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    named = {*places[call.count :], *(arg.arg for arg in args.kwonlyargs)}
    missing = places[call.count : len(places) - len(args.defaults)]
    wrong = [f"no keyword {key!r}" for key in call.keywords if key not in named and not args.kwarg]
    wrong += [f"{name!r} is not given" for name in missing if name not in call.keywords]
    wrong += ["too many arguments"] if call.count > len(places) and not args.vararg else []
    return f"{call.path}({ast.unparse(args)}): {', '.join(wrong)}; see {call.place}" if wrong else ""
