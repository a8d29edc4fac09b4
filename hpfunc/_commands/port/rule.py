"""What a rule of the tables says about a construct."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .report import Verdict

CLIP = "grads = hp.clip_with_norm(grads, {max_norm}, hp.global_norm(grads))"


@dataclass(frozen=True)
class Rule:
    """What becomes of a construct.

    Attributes:
        verdict: see `Finding`.
        code: what to write, with the fields ``{arg}`` (the first argument), ``{value}`` (of an option), ``{target}``
            (what is assigned), ``{owner}`` (of a method), ``{model}`` and others of `translate`.
        reason: why, or what to know; with the same fields.
        parameters: the names of positional arguments, for options that are given by position.
        options: what becomes of each option, by its name; for some by its value, where ``*`` stands for all others.
            One that is not listed is not known.
    """

    verdict: Verdict
    code: str = ""
    reason: str = ""
    parameters: tuple[str, ...] = ()
    options: Mapping[str, Rule | Mapping[str, Rule]] | None = field(default=None)


def write(
    code: str, reason: str = "", parameters: str = "", options: Mapping[str, Rule | Mapping[str, Rule]] | None = None
) -> Rule:
    """Something else is written; `parameters` are names, separated by blanks."""
    return Rule("write", code, reason, tuple(parameters.split()), options)


def remove(reason: str, parameters: str = "", options: Mapping[str, Rule | Mapping[str, Rule]] | None = None) -> Rule:
    """Nothing is written."""
    return Rule("remove", "", reason, tuple(parameters.split()), options)


def keep(reason: str) -> Rule:
    """It stays."""
    return Rule("keep", "", reason)


def missing(reason: str) -> Rule:
    """There is nothing like it."""
    return Rule("missing", "", reason)
