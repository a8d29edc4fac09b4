"""What a unit and a loss may not do, in words that are the same for every framework; and trees taken apart for them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import optree

from .._errors import LeafError, UsageError, message


def is_called_by(qualname: str) -> bool:
    """Returns whether a function whose qualified name begins with `qualname` is on the stack."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_qualname.startswith(qualname):
            return True
        frame = frame.f_back
    return False


@contextmanager
def refusing_writes(wholes: Sequence[Any], names: Sequence[str]) -> Iterator[None]:
    """Raises UsageError naming each of `wholes` that the body writes into."""
    versions = [whole._version for whole in wholes]
    try:
        yield
    finally:
        written = [name for name, whole, v in zip(names, wholes, versions, strict=True) if whole._version != v]
        if written:
            rule = "the unit writes in place into gathered weights"
            hint = "whole weights are read-only; write `w = w + ...`, or keep state out of the weights"
            raise UsageError(message("hpfunc.unit", rule, written, hint=hint))


def refuse_escaped(escaped: Sequence[str], copy: str) -> None:
    """Raises UsageError if there are weights of which an output is a view; `copy` is how the framework copies one."""
    if escaped:
        hint = f"return a copy (`{copy}`), or use hpfunc.unshard where the whole weight is wanted outside of a unit"
        rule = "a gathered weight escapes from the unit as an output"
        raise UsageError(message("hpfunc.unit", rule, escaped, hint=hint))


def refuse_loss(found: str) -> LeafError:
    """Returns the error for a loss that cannot be differentiated."""
    return LeafError(message("hpfunc.value_and_grad", f"the loss must be a real scalar tensor, got {found}"))


def taken_apart(tree: Any, wanted: Callable[[Any], bool]) -> tuple[list[Any], Callable[[Iterable[Any]], Any]]:
    """Returns the leaves that are wanted, and a function that returns the tree with other leaves in their places.

    The function does not hold the leaves.
    """
    leaves, treedef = optree.tree_flatten(tree)
    chosen = [wanted(leaf) for leaf in leaves]
    rest = [None if is_wanted else leaf for leaf, is_wanted in zip(leaves, chosen, strict=True)]

    def put_back(values: Iterable[Any]) -> Any:
        left = iter(values)
        filled = [next(left) if is_wanted else leaf for leaf, is_wanted in zip(rest, chosen, strict=True)]
        return optree.tree_unflatten(treedef, filled)

    return [leaf for leaf, is_wanted in zip(leaves, chosen, strict=True) if is_wanted], put_back
