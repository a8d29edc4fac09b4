"""Versions of frameworks: which are tested, too old, or newer than those."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence

from .._errors import HpfuncWarning, VersionError, message

Version = tuple[int, ...]

TESTED: dict[str, tuple[Version, Version | None]] = {
    "Python": ((3, 11), None),
    "optree": ((0, 20), None),
    "numpy": ((1, 26), None),
    "torch": ((2, 13), (2, 15)),
    "torch_npu": ((2, 13), (2, 15)),
    "mindspore": ((2, 9), (2, 11)),
}
"""From which version on, and before which, hpfunc is tested. `pyproject.toml` asks for the former alone."""
_CALLER = "hpfunc.backends"


def version_of(text: str) -> Version:
    """Returns the numbers of a version.

    >>> version_of("2.13.0+cu130"), version_of("unknown")
    ((2, 13, 0), ())
    """
    found = re.match(r"\s*(\d{1,9}(?:\.\d{1,9})*)", text)
    return tuple(int(number) for number in found[1].split(".")) if found else ()


def dotted(version: Version) -> str:
    """Returns a version as text."""
    return ".".join(map(str, version))


def asked(name: str, end: Version | None) -> str:
    """Returns what pip is asked for to get a tested version, before `end` if that is given.

    >>> asked("torch", (2, 15)), asked("optree", None)
    ('torch>=2.13,<2.15', 'optree>=0.20')
    """
    return f"{name}>={dotted(TESTED[name][0])}" + (f",<{dotted(end)}" if end else "")


def refuse_old(name: str, version: str) -> None:
    """Raises VersionError for a framework that is older than the first tested version."""
    first, found = TESTED[name][0], version_of(version)
    if found and found < first:  # of a build without numbers nothing is known
        rule = f"{name} {version} is too old, hpfunc needs {dotted(first)} or newer"
        raise VersionError(message(_CALLER, rule, hint=_install(name)))


def refuse_lacking(name: str, version: str, lacking: Sequence[str]) -> None:
    """Raises VersionError if there are private names that a framework lacks."""
    if lacking:
        rule = f"{name} {version} lacks private names that hpfunc uses"
        raise VersionError(message(_CALLER, rule, lacking, hint=f"take a version that has them: {_install(name)}"))


def warn_of_new(name: str, version: str) -> None:
    """Warns of a framework that is newer than all tested versions."""
    end, found = TESTED[name][1], version_of(version)
    if end is not None and found >= end:
        rule = f"{name} {version} is newer than all versions that hpfunc is tested with"
        hint = f"compare a few steps with plain {name}, or {_install(name)}"
        warnings.warn(message(_CALLER, rule, hint=hint), HpfuncWarning, stacklevel=2)


def refuse_unlike(name: str, version: str, framework: str, its_version: str) -> None:
    """Raises VersionError if an extension of a framework is not of the framework's minor version."""
    ours, its = version_of(version)[:2], version_of(its_version)[:2]
    if ours != its:
        rule = f"{name} {version} is made for {framework} {dotted(ours)}, but {framework} {its_version} is installed"
        raise VersionError(message(_CALLER, rule, hint=f"pip install '{name}=={dotted(its)}.*'"))


def _install(name: str) -> str:
    return f"pip install '{asked(name, TESTED[name][1])}'"
