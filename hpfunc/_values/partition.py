"""Trees of weights in parts: `partition` and `combine`, to train some weights only, and `unstack`."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import optree

from .._errors import SpecError, UsageError, message
from .array import describe, is_sharded
from .dtypes import is_floating_dtype
from .tree import dotted, dotted_paths, flatten, unflatten

Where = Callable[[str, Any], bool] | str | Sequence[str]
_PARTITION, _COMBINE = "hpfunc.partition", "hpfunc.combine"


def partition(tree: Any, where: Where) -> tuple[Any, Any]:
    """Returns a tree as two: the leaves that `where` selects, and the rest. `combine` puts them together again.

    Both have the structure of `tree`, with None in the place of each leaf of the other part. None is not a leaf, so
    `value_and_grad` and optimizers see the leaves of one part only; the others are frozen.

    Args:
        tree: any pytree; its leaves are `ShardedArray`, tensors or anything else.
        where: glob patterns, one or several, or a function from the path of a leaf and the leaf to a bool (such as
            `is_floating`). Paths are dotted, ``"layers.0.attn.w"``. A pattern stands for whole paths: ``*`` for any
            characters, also dots, ``?`` for one, ``[ab]`` for one of these.

    Returns:
        ``(selected, rest)``.

    Raises:
        SpecError: a pattern selects nothing.
        UsageError: `where` is neither patterns nor a function.

    Communication: none.

    Source: Kidger and Garcia, Equinox (2021).

    >>> params = {"layers": [{"w": 1.0, "lora_a": 2.0}], "head": 3.0}
    >>> adapters, base = hpfunc.partition(params, "layers.*.lora_*")
    >>> adapters
    {'layers': [{'w': None, 'lora_a': 2.0}], 'head': None}
    >>> hpfunc.combine(adapters, base) == params
    True
    """
    leaves, treedef = flatten(tree, is_sharded)
    names = dotted_paths(tree, is_sharded)
    selects = selector(_PARTITION, where, names)
    chosen = [bool(selects(name, leaf)) for name, leaf in zip(names, leaves, strict=True)]
    selected = unflatten(treedef, [leaf if take else None for leaf, take in zip(leaves, chosen, strict=True)])
    rest = unflatten(treedef, [None if take else leaf for leaf, take in zip(leaves, chosen, strict=True)])
    return selected, rest


def selector(function: str, where: Where, names: Sequence[str]) -> Callable[[str, Any], bool]:
    """Returns `where` as a function of a path and a leaf.

    Raises:
        SpecError: a pattern fits none of `names`.
        UsageError: `where` is neither patterns nor a function.
    """
    if callable(where):
        return where
    patterns = [where] if isinstance(where, str) else where
    if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
        rule = f"where must be a pattern, several of them, or a function of a path and a leaf, got {where!r}"
        raise UsageError(message(function, rule, hint='such as "layers.*.w"'))
    idle = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]
    if idle:
        bad = [f"pattern {pattern!r}" for pattern in idle]
        raise SpecError(message(function, "a pattern selects no leaf", bad, hint=_nearest(idle, names)))
    return lambda name, leaf: any(fnmatchcase(name, pattern) for pattern in patterns)


def _nearest(patterns: Sequence[str], names: Sequence[str]) -> str:
    near = [name for pattern in patterns for name in difflib.get_close_matches(pattern, names, n=3, cutoff=0.5)]
    shown = list(dict.fromkeys(near or names))[:6]
    if not shown:
        return "the tree has no leaves"
    more = ", ..." if not near and len(names) > len(shown) else ""
    return f"{'the nearest paths are' if near else 'paths are'} {', '.join(map(repr, shown))}{more}"


def combine(*trees: Any) -> Any:
    """Returns the tree with all leaves of the given ones: at each place, the leaf that is not None.

    Args:
        trees: parts of one tree, as `partition` makes them, in any order and number.

    Raises:
        SpecError: two trees have a leaf at one place, or their structures differ.
        UsageError: no tree is given.

    Communication: none.

    >>> hpfunc.combine({"w": 1, "b": None}, {"w": None, "b": 2})
    {'w': 1, 'b': 2}
    """
    if not trees:
        raise UsageError(message(_COMBINE, "no tree is given", hint="hpfunc.combine(selected, rest)"))
    flat = [optree.tree_flatten(tree, is_leaf=is_sharded, none_is_leaf=True) for tree in trees]
    treedef = flat[0][1]
    if any(other != treedef for _, other in flat):
        _refuse_structures(trees)
    columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
    found = [[leaf for leaf in column if leaf is not None] for column in columns]
    if any(len(some) > 1 for some in found):
        _refuse_twice(trees[0], columns)
    return unflatten(treedef, [some[0] if some else None for some in found])


def _places(tree: Any) -> list[str]:
    accessors = optree.tree_accessors(tree, is_leaf=is_sharded, none_is_leaf=True)
    return [dotted(accessor) or "the tree itself" for accessor in accessors]


def _refuse_structures(trees: Sequence[Any]) -> None:
    first, *others = [_places(tree) for tree in trees]
    bad = []
    for i, other in enumerate(others, start=1):
        bad += [f"{name}: in tree 0, not in tree {i}" for name in first if name not in other]
        bad += [f"{name}: in tree {i}, not in tree 0" for name in other if name not in first]
    bad = bad or [f"tree {i}: {optree.tree_structure(tree, is_leaf=is_sharded)}" for i, tree in enumerate(trees)]
    hint = "combine what hpfunc.partition made of one tree; a leaf that is elsewhere leaves None in its place"
    raise SpecError(message(_COMBINE, "the trees have different structures", bad, hint=hint))


def _refuse_twice(tree: Any, columns: Sequence[Sequence[Any]]) -> None:
    bad = []
    for name, column in zip(_places(tree), columns, strict=True):
        holders = [i for i, leaf in enumerate(column) if leaf is not None]
        if len(holders) > 1:
            which = " and ".join(f"tree {i}" for i in holders)
            bad.append(f"{name}: in {which}; {describe(column[holders[0]])}")
    hint = "give each leaf in one tree; set it to None in the others"
    raise SpecError(message(_COMBINE, "two trees have a leaf at the same place", bad, hint=hint))


def is_floating(path: str, leaf: Any) -> bool:
    """Returns whether a leaf is an array of floating numbers: what `value_and_grad` can differentiate.

    For `partition`, to split off integer and boolean arrays, which have no gradient.

    Args:
        path: not used.
        leaf: a `ShardedArray`, a tensor, or anything else.

    >>> import torch
    >>> hpfunc.partition({"w": torch.ones(2), "table": torch.arange(2)}, hpfunc.is_floating)[0]
    {'w': tensor([1., 1.]), 'table': None}
    """
    return is_floating_dtype(getattr(leaf, "dtype", ""))


def unstack(tree: Any) -> list[Any]:
    """Returns the layers of a tree whose arrays are stacked over layers: one tree for each row of its arrays.

    Rows share the memory of their array. Inside `value_and_grad` the rows of its gradient are their gradients.

    Args:
        tree: pytree of `ShardedArray` (or tensors), all with the same number of rows; no axis cuts their first dim.

    Raises:
        SpecError: arrays have different numbers of rows, no rows, or a first dim that is cut.

    Communication: none.

    >>> import torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> stacked = hpfunc.shard({"w": torch.ones(3, 4, 2)}, mesh, hpfunc.P(None, "shard"))
    >>> len(hpfunc.unstack(stacked)), hpfunc.unstack(stacked)[0]["w"].shape
    (3, (4, 2))
    """
    leaves, treedef = flatten(tree, is_sharded)
    bad = [(is_sharded(leaf) and bool(leaf.spec.dim_axes(0))) or not getattr(leaf, "shape", ()) for leaf in leaves]
    if any(bad):
        names = zip(dotted_paths(tree, is_sharded), leaves, bad, strict=True)
        hint = "leave the first dim whole: hpfunc.P(None, 'shard')"
        listed = [f"{name}: {describe(leaf)}" for name, leaf, is_bad in names if is_bad]
        raise SpecError(message("hpfunc.unstack", "the rows of an array are cut, or it has none", listed, hint=hint))
    counts = [leaf.shape[0] for leaf in leaves]
    if len(set(counts)) > 1:
        names = [f"{n}: {describe(leaf)}" for n, leaf in zip(dotted_paths(tree, is_sharded), leaves, strict=True)]
        raise SpecError(message("hpfunc.unstack", "arrays have different numbers of rows", names))
    return [unflatten(treedef, [leaf[row] for leaf in leaves]) for row in range(counts[0] if counts else 0)]


def num_parameters(tree: Any, where: Where | None = None) -> int:
    """Returns the number of elements of a tree: of whole arrays, not of this rank's parts.

    An array that stands at several places counts once.

    Args:
        tree: any pytree; leaves other than `ShardedArray` and tensors do not count.
        where: which leaves, as for `partition`, such as `is_trainable`; None: all.

    Raises:
        SpecError, UsageError: as `partition`.

    Communication: none.

    >>> import torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> params = hpfunc.shard({"w": torch.ones(4, 2), "b": torch.ones(2)}, mesh, hpfunc.P("shard"))
    >>> hpfunc.num_parameters(params), hpfunc.num_parameters(hpfunc.freeze(params, "w"), hpfunc.is_trainable)
    (10, 2)
    """
    names, leaves = dotted_paths(tree, is_sharded), flatten(tree, is_sharded)[0]
    selects = (lambda name, leaf: True) if where is None else selector("hpfunc.num_parameters", where, names)
    counted: dict[Any, int] = {}
    for name, leaf in zip(names, leaves, strict=True):
        if selects(name, leaf) and hasattr(leaf, "shape"):
            root, rows = leaf._root() if is_sharded(leaf) else (leaf, ())
            counted[root._owner if is_sharded(root) else id(root), rows] = math.prod(leaf.shape)
    return sum(counted.values())
