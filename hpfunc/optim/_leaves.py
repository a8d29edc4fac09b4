"""Trees of weights as lists of local tensors: the checks and conversions that every optimizer needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import optree

from .. import backends
from .._errors import LeafError, SpecError, UsageError, message
from .._running.writes import refuse_written
from .._transforms.freeze import marks_of
from .._values.array import describe, is_sharded
from .._values.numerics import has_sums
from .._values.tree import flatten, paths, unflatten
from ..backends.foreach import Foreach

Tensor = Any


@dataclass(frozen=True, slots=True)
class Leaves:
    """The leaves of one tree: `ShardedArray`, or plain tensors, which stand for themselves.

    Attributes:
        name: of the tree, for messages.
        tree: the tree, with None in the place of leaves that are left out; `treedef` is its structure.
        leaves: its leaves.
        whole: the tree as it was given, with frozen leaves.
    """

    name: str
    tree: Any
    leaves: list[Any]
    treedef: optree.PyTreeSpec
    whole: Any

    @staticmethod
    def of(function: str, name: str, tree: Any, *, frozen: bool = False) -> Leaves:
        """Takes a tree apart; frozen leaves (see `freeze`) are left out unless `frozen`."""
        leaves, treedef = flatten(tree, is_sharded)
        marks = [] if frozen else marks_of(function, leaves)
        if False not in marks:
            return Leaves(name, tree, leaves, treedef, tree)
        kept = [None if trains is False else leaf for leaf, trains in zip(leaves, marks, strict=True)]
        trained = unflatten(treedef, kept)
        return Leaves(name, trained, *flatten(trained, is_sharded), tree)

    @property
    def locals(self) -> list[Tensor]:
        """The local tensor of each leaf."""
        return [leaf._value if is_sharded(leaf) else leaf for leaf in self.leaves]

    def wrap(self, locals_: Sequence[Tensor]) -> Any:
        """Returns the tree with other values."""
        pairs = zip(self.leaves, locals_, strict=True)
        return unflatten(self.treedef, [leaf.with_local(x) if is_sharded(leaf) else x for leaf, x in pairs])

    def restore(self, function: str, locals_: Sequence[Tensor]) -> Any:
        """Returns the tree with other values and with the unchanged frozen leaves."""
        new = iter(flatten(self.wrap(locals_), is_sharded)[0])
        leaves, treedef = flatten(self.whole, is_sharded)
        pairs = zip(leaves, marks_of(function, leaves), strict=True)
        return unflatten(treedef, [leaf if trains is False else next(new) for leaf, trains in pairs])

    def places(self) -> list[str]:
        """Returns the path of each leaf, without the name of the tree."""
        return paths(self.tree, "", is_sharded)

    def paths(self) -> list[str]:
        """Returns the path of each leaf."""
        return paths(self.tree, self.name, is_sharded)


def leaves_of(function: str, name: str, tree: Any, *, frozen: bool = False) -> tuple[Leaves, Foreach]:
    """Returns the leaves of a tree, without the frozen ones unless `frozen`, and the arithmetic for them.

    Raises:
        LeafError: a leaf is neither a `ShardedArray` nor a tensor, is not floating, has 8-bit floats, or leaves belong
            to two frameworks.
    """
    leaves = Leaves.of(function, name, tree, frozen=frozen)
    values = leaves.locals
    arrays = {i: leaf for i, leaf in enumerate(leaves.leaves) if is_sharded(leaf)}
    refuse_written(function, arrays.values(), lambda: [leaves.paths()[i] for i in arrays])
    backend = backends.of(function, values)
    fits = [backend.is_tensor(x) and backend.is_floating(backend.dtype_name(x)) for x in values]
    if not all(fits):
        kinds = [backend.dtype_name(x) if backend.is_tensor(x) else type(x).__name__ for x in values]
        rows = zip(leaves.paths(), leaves.leaves, kinds, fits, strict=True)
        bad = [f"{path}: {describe(x)}, {kind}" for path, x, kind, fit in rows if not fit]
        hint = "keep other leaves out of the tree that is optimized: hpfunc.partition(tree, hpfunc.is_floating)"
        raise LeafError(message(function, f"{name} has leaves that are not floating arrays", bad, hint=hint))
    if not all(has_sums(backend.dtype_name(x)) for x in values):
        rows = zip(leaves.paths(), leaves.leaves, map(backend.dtype_name, values), strict=True)
        bad = [f"{path}: {describe(x)}, {kind}" for path, x, kind in rows if not has_sums(kind)]
        hint = "keep wider weights, which are cast where they are used; give gradients Numerics(accum_dtype='float32')"
        rule = f"{name} has leaves of 8-bit floats, which have no arithmetic"
        raise LeafError(message(function, rule, bad, hint=hint))
    return leaves, backend.foreach


def like(function: str, name: str, tree: Any, other: Leaves) -> Leaves:
    """Returns the leaves of a tree that has the structure, shapes and specs of `other`.

    Raises:
        SpecError: it differs. The error names every such leaf.
    """
    leaves = Leaves.of(function, name, tree)
    hint = f"{name} and {other.name} come from the same weights; call init again after these have changed"
    if leaves.treedef != other.treedef:
        both = (leaves, other), (other, leaves)
        for one, another in both:
            _refuse_frozen(function, one, another)
        bad = [f"only in {one.name}: {place}" for one, another in both for place in _missing(one, another)]
        bad = bad or [f"{name}: {leaves.treedef}", f"{other.name}: {other.treedef}"]
        raise SpecError(message(function, f"{name} and {other.name} are different trees", bad, hint=hint))
    if all(_kind(a) == _kind(b) for a, b in zip(leaves.leaves, other.leaves, strict=True)):
        return leaves
    bad = [
        f"{path}: {describe(a)}, but in {other.name} {describe(b)}"
        for path, a, b in zip(leaves.paths(), leaves.leaves, other.leaves, strict=True)
        if _kind(a) != _kind(b)
    ]
    raise SpecError(message(function, f"{name} and {other.name} lie differently", bad, hint=hint))


def _refuse_frozen(function: str, leaves: Leaves, other: Leaves) -> None:
    """Raises SpecError naming every leaf that is frozen in the other tree."""
    frozen = set(paths(other.whole, "", is_sharded)).difference(other.places())
    if bad := [leaves.name + place for place in leaves.places() if place in frozen]:
        rule = f"{leaves.name} has leaves that are frozen in {other.name}"
        hint = f"None stands in the place of a frozen leaf; hpfunc.unfreeze({other.name}, where) lets it train"
        raise SpecError(message(function, rule, bad, hint=hint))


def refuse_partial_sums(function: str, leaves: Leaves, why: str) -> None:
    """Raises SpecError naming every array that is still a partial sum."""
    partial = [is_sharded(leaf) and bool(leaf.spec.unreduced) for leaf in leaves.leaves]
    if any(partial):
        pairs = zip(leaves.paths(), leaves.leaves, partial, strict=True)
        bad = [f"{path}: {describe(leaf)}" for path, leaf, is_partial in pairs if is_partial]
        hint = "finish them with hpfunc.reduce first"
        raise SpecError(message(function, f"arrays still are partial sums, {why}", bad, hint=hint))


def _missing(leaves: Leaves, other: Leaves) -> list[str]:
    there = set(other.places())
    return [place for place in leaves.places() if place not in there]


def _kind(leaf: Any) -> object:
    return (leaf.shape, leaf.spec, leaf.mesh) if is_sharded(leaf) else tuple(getattr(leaf, "shape", ()))


def needed(function: str, params: Any, why: str) -> Any:
    """Returns `params`.

    Raises:
        UsageError: they were not given.
    """
    if params is None:
        rule = f"update needs params, because {why}"
        raise UsageError(message(function, rule, hint="optimizer.update(grads, state, params)"))
    return params


def check_state(function: str, state: Any, kind: type) -> None:
    """Raises LeafError if a state is not of the class that the optimizer returns."""
    if not isinstance(state, kind):
        rule = f"the state is not an instance of {kind.__name__}, but of {type(state).__name__}"
        raise LeafError(message(function, rule, hint="take it from init, or from the last update"))


def writable(function: str, leaves: Leaves, ops: Foreach) -> list[Tensor]:
    """Returns tensors with the values of the leaves that may be written to.

    For a donated array this is its own memory, and the array is consumed; for any other it is a copy. An array that is
    at two places of the tree is copied for each place, and an array whose elements share memory is copied too.
    """
    values = leaves.locals
    seen = Counter(leaf._owner for leaf in leaves.leaves if is_sharded(leaf))
    kept = [is_sharded(x) and x.is_donated and seen[x._owner] == 1 for x in leaves.leaves]
    copies = iter(ops.copy([value for value, keep in zip(values, kept, strict=True) if not keep]))
    pairs = zip(leaves.leaves, kept, strict=True)
    return ops.writable([leaf._consume(function) if keep else next(copies) for leaf, keep in pairs])


def pick(items: Sequence[Any], places: Sequence[int]) -> list[Any]:
    """Returns the items at these places."""
    return [items[place] for place in places]


def by_groups(ops: Foreach, tensors: list[Tensor], compute: Callable[[list[int]], list[Tensor]]) -> list[Tensor]:
    """Returns what `compute` returns for the places of each group of tensors, in the order of the tensors."""
    results = list(tensors)
    for places in ops.groups(tensors):
        for place, result in zip(places, compute(places), strict=True):
            results[place] = result
    return results
