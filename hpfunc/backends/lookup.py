"""Looks up the private names of a framework, all of them at once, so that one error tells what a version lacks."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from operator import attrgetter
from typing import Any

from .versions import refuse_lacking, refuse_old, warn_of_new


class Lookup:
    """The private names of one framework.

    Attributes:
        names: all that were looked up, each with its path.
        lacking: those that the framework lacks.

    Raises:
        VersionError: the framework is too old.
    """

    def __init__(self, framework: str, version: str) -> None:
        refuse_old(framework, version)
        self._framework, self._version = framework, version
        self.names: list[str] = []
        self.lacking: list[str] = []

    def find(self, module: str, names: str) -> Any:
        """Returns what a module has by these names, with dots between; a name with ``()`` is called.

        Where one is lacking it is noted, and the result is None.
        """
        self.names.append(f"{module}.{names}")
        try:
            found: Any = import_module(module)
            for name in names.split("."):
                found = getattr(found, name.removesuffix("()"))
                found = found() if name.endswith("()") else found
        except (AttributeError, ImportError):
            self.lacking.append(self.names[-1])
            return None
        return found

    def getter(self, module: str, names: str) -> Callable[[Any], Any]:
        """Returns the function that reads the last of these names of an object."""
        self.find(module, names)
        return attrgetter(names.rpartition(".")[2])

    def end(self) -> None:
        """All names were looked up.

        Raises:
            VersionError: some are lacking.

        Warns:
            HpfuncWarning: none is, but hpfunc was not tested with this version.
        """
        refuse_lacking(self._framework, self._version, self.lacking)
        warn_of_new(self._framework, self._version)
