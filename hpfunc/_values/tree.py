"""Trees: the few operations on pytrees that hpfunc needs, all by optree."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import optree

from .._errors import SpecError, message

IsLeaf = Callable[[Any], bool]


def flatten(tree: Any, is_leaf: IsLeaf | None = None) -> tuple[list[Any], optree.PyTreeSpec]:
    """Returns the leaves of `tree` and its structure.

    >>> flatten({"b": 1, "a": [2, None]})[0]
    [2, 1]
    """
    leaves, treedef = optree.tree_flatten(tree, is_leaf=is_leaf)
    return leaves, treedef


def paths(tree: Any, name: str, is_leaf: IsLeaf | None = None) -> list[str]:
    """Returns the path of every leaf as source text.

    >>> paths({"layers": [{"w": 1}]}, "params")
    ["params['layers'][0]['w']"]
    """
    return [accessor.codify(name) for accessor in optree.tree_accessors(tree, is_leaf=is_leaf)]


def dotted(accessor: optree.PyTreeAccessor) -> str:
    """Returns a path in its short form: keys, indices and field names with a dot between them; "" is the tree itself.

    >>> dotted(optree.tree_accessors({"layers": [{"w": 1}]})[0])
    'layers.0.w'
    """
    return ".".join(map(_step, accessor))


def _step(entry: optree.PyTreeEntry) -> str:
    return str(entry.field) if isinstance(entry, optree.NamedTupleEntry) else str(entry.entry)


def dotted_paths(tree: Any, is_leaf: IsLeaf | None = None) -> list[str]:
    """Returns the dotted path of every leaf.

    >>> dotted_paths({"layers": [{"w": 1, "b": 2}], "none": None})
    ['layers.0.b', 'layers.0.w']
    """
    return [dotted(accessor) for accessor in optree.tree_accessors(tree, is_leaf=is_leaf)]


def broadcast_prefix(
    function: str, prefix: Any, tree: Any, *, argument: str, name: str, is_prefix_leaf: IsLeaf, is_leaf: IsLeaf
) -> list[tuple[Any, bool]]:
    """Returns, for every leaf of `tree`, the leaf of `prefix` above it, and whether both are at the same place.

    Raises:
        SpecError: `prefix` is not a tree prefix of `tree`.
    """
    found: list[tuple[Any, bool]] = []

    def spread(leaf: Any, subtree: Any) -> None:
        here = is_leaf(subtree) or optree.treespec_is_leaf(optree.tree_structure(subtree, is_leaf=is_leaf))
        found.extend([(leaf, here)] * len(optree.tree_leaves(subtree, is_leaf=is_leaf)))

    try:
        optree.tree_map_(spread, prefix, tree, is_leaf=is_prefix_leaf)
    except (ValueError, TypeError):
        errors = [make(argument) for make in optree.prefix_errors(prefix, tree, is_leaf=is_prefix_leaf)]
        shown = [line for error in errors for line in _sentences(str(error))]
        raise SpecError(
            message(
                function,
                f"{argument} is not a tree prefix of {name}",
                [f"{argument}: {optree.tree_structure(prefix, is_leaf=is_prefix_leaf)}", *shown],
                hint=f"{argument} may be one P for all, or a tree whose leaves stand at or above those of {name}",
            )
        ) from None
    return found


def _sentences(error: str) -> list[str]:
    """Returns the parts of an error of optree, a line each."""
    text = " ".join(error.removeprefix("pytree structure error: ").split())
    return [part.strip(" ,") for part in re.split("At that key path,|,? but at the same key path", text)]


def unflatten(treedef: optree.PyTreeSpec, leaves: Sequence[Any]) -> Any:
    """Returns the tree of this structure with these leaves."""
    return optree.tree_unflatten(treedef, leaves)
