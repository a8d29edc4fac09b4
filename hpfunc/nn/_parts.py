"""What a framework's modules are made of, and how many bytes their parameters have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Module = Any
Named = Mapping[str, Module]


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
        own: returns the parameters that belong to a module and not to its parts, by name.
        size_bytes: returns the size of a parameter.
        computes_own: returns whether a module computes a parameter of its own from those of its parts.
        compiled: returns the part of a module that it calls compiled; None for a module that is not compiled.
    """

    kind: type
    method: str
    lists: tuple[type, ...]
    unset: tuple[Callable[..., Any], ...]
    named: Callable[[Module], dict[str, Module]]
    children: Callable[[Module], Iterable[tuple[str, Module]]]
    own: Callable[[Module], Mapping[str, Any]]
    size_bytes: Callable[[Any], int]
    computes_own: Callable[[Module], bool] = lambda module: False
    compiled: Callable[[Module], Module | None] = lambda module: None

    def is_list(self, module: Module) -> bool:
        """Returns whether a module is a list or dict of modules of the framework."""
        return isinstance(module, self.lists)

    def is_called(self, module: Module) -> bool:
        """Returns whether a module has the method that a call runs."""
        return self.method in vars(module) or getattr(type(module), self.method) not in self.unset

    def paths(self, prefix: str, module: Module) -> Iterator[tuple[str, Module]]:
        """Yields the direct parts of a module by path."""
        for name, child in self.children(module):
            yield (f"{prefix}.{name}" if prefix else name), child

    def below(self, prefix: str, module: Module) -> dict[str, Module]:
        """Returns a module and all its parts by path."""
        return {".".join(filter(None, (prefix, path))): part for path, part in self.named(module).items()}

    def has_parameters(self, module: Module) -> bool:
        """Returns whether a module or a part of it has a parameter."""
        return any(self.own(part) for part in self.named(module).values())

    def bytes_of(self, module: Module) -> int:
        """Returns the bytes of the parameters of a module and its parts, tied ones once."""
        found = {id(x): x for part in self.named(module).values() for x in self.own(part).values()}
        return sum(map(self.size_bytes, found.values()))

    def own_bytes(self, module: Module) -> int:
        """Returns the bytes of the parameters that belong to a module itself."""
        return sum(map(self.size_bytes, self.own(module).values()))
