"""The leaves of a tree that is saved or loaded: arrays, values, and `PerRank` values."""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

import optree

from .. import backends
from .._errors import LeafError, MeshError, message
from .._running.context import mesh_in_use
from .._values.array import is_sharded
from .._values.mesh import Mesh
from .._values.tree import dotted_paths, flatten
from ..backends import Backend
from ._format import CODES, Shape
from ._read import Box

VALUES = (bool, int, float, str)


@dataclass(frozen=True, slots=True)
class PerRank:
    """A leaf with a value of its own on each rank: the state of a random generator, a position in the data.

    Any other plain tensor or number must be the same on all ranks. As many ranks load a `PerRank` as saved it.

    Attributes:
        value: a plain tensor, a number, a bool or a string.

    >>> hpfunc.checkpoint.PerRank(3).value
    3
    """

    value: Any


def is_leaf(value: Any) -> bool:
    """Returns whether a node of a tree is taken as one leaf."""
    return is_sharded(value) or isinstance(value, PerRank)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf, and its name in errors and in the index.

    Attributes:
        key: its dotted path.
        dtype: dtype of a tensor; None for a value.
    """

    key: str
    value: Any
    dtype: str | None

    @property
    def plain(self) -> Any:
        """The value itself; that of this rank of a `PerRank`."""
        return self.value.value if self.is_per_rank else self.value

    @property
    def is_per_rank(self) -> bool:
        """Whether each rank has its own."""
        return isinstance(self.value, PerRank)

    @property
    def shape(self) -> Shape:
        """Global shape of a tensor."""
        return tuple(self.plain.shape)

    @property
    def local(self) -> Any:
        """This rank's tensor."""
        return self.plain._value if is_sharded(self.plain) else self.plain

    @property
    def box(self) -> Box:
        """Where this rank's tensor lies in the array."""
        if is_sharded(self.plain):
            return self.plain.layout.local_slices(self.plain.mesh.coordinate)
        return tuple(slice(0, n) for n in self.shape)

    def is_written_by(self, mesh: Mesh) -> bool:
        """Returns whether this rank writes its tensor. Of ranks with the same part a hash of the key picks one.

        >>> mesh = hpfunc.Mesh(("replicate",), (2,), ("replicate",), (0, 1))
        >>> [Leaf(key, 1, "int64").is_written_by(mesh) for key in "abcd"]
        [False, False, False, True]
        """
        if self.is_per_rank:
            return True
        where, whole = (self.value.mesh, self.value.spec.axes) if is_sharded(self.value) else (mesh, ())
        holders = where.group(where.sort(set(where.axis_names) - set(whole)))
        return holders[zlib.crc32(self.key.encode()) % len(holders)] == mesh.rank

    def fact(self) -> str:
        """Returns what must be equal on all ranks."""
        kind = "per rank" if self.is_per_rank else ""
        if is_sharded(self.value):
            kind = f"spec {self.value.spec}"
        if self.dtype is None:
            return f"{self.key}: {kind}" if self.is_per_rank else f"{self.key}: {self.value!r}"
        shape = "" if self.is_per_rank else f"shape {self.shape}, "
        return f"{self.key}: {shape}{self.dtype} {kind}"


def leaves_of(function: str, name: str, tree: Any) -> tuple[list[Leaf], optree.PyTreeSpec]:
    """Returns the leaves of a tree.

    Raises:
        LeafError: names every leaf that cannot be saved.
    """
    found, treedef = flatten(tree, is_leaf)
    plain = [leaf.value if isinstance(leaf, PerRank) else leaf for leaf in found]
    backend = backends.of(function, [leaf for leaf in plain if not is_sharded(leaf)])
    kept, bad = [], []
    keys = dotted_paths(tree, is_leaf)
    twice = {key for key, count in Counter(keys).items() if count > 1}
    for key, leaf, value in zip(keys, found, plain, strict=True):
        dtype, fault = _dtype(backend, leaf, value)
        fault = "another leaf has the same dotted path" if key in twice else fault
        kept.append(Leaf(key, leaf, dtype))
        if fault:
            bad.append(f"{key or name}: {fault}")
    if bad:
        hint = "leave other things out of the tree, or make tensors, numbers or strings of them"
        raise LeafError(message(function, f"leaves of {name} cannot stand in a checkpoint", bad, hint=hint))
    return kept, treedef


def _dtype(backend: Backend, leaf: Any, value: Any) -> tuple[str | None, str | None]:
    """Returns the dtype of a leaf (None for a value), and what is wrong with the leaf."""
    if is_sharded(value):
        if isinstance(leaf, PerRank):
            return None, "a ShardedArray is not a value of PerRank"
        if value._held_dtype is None:
            return None, "the array was donated"
        if value.spec.unreduced:
            return None, f"still a partial sum, spec {value.spec}; finish it with hpfunc.reduce"
        backend, value = backends.get(value.mesh.framework), value._value
    if type(value) in VALUES:
        return None, None
    if not backend.is_tensor(value):
        return None, f"a {type(value).__name__}"
    dtype = backend.dtype_name(value)
    return dtype, None if dtype in CODES else f"dtype {dtype}, which safetensors files do not have"


def mesh_of(function: str, tree: Any, mesh: Mesh | None) -> Mesh:
    """Returns the mesh whose ranks save or load together: the given one, else that of the arrays, else the one in use.

    Raises:
        MeshError: there is none, or arrays lie on other ranks.
    """
    named = zip(dotted_paths(tree, is_leaf), flatten(tree, is_leaf)[0], strict=True)
    arrays = [(key, x) for key, x in named if is_sharded(x)]
    found = mesh or next((array.mesh for _, array in arrays), None) or mesh_in_use()
    if found is None:
        rule, hint = "the tree has no ShardedArray, so nothing tells which ranks take part", "give mesh=..."
        raise MeshError(message(function, rule, hint=hint))
    other = [f"{key}: {x.mesh} of ranks {x.mesh.ranks}" for key, x in arrays if set(x.mesh.ranks) != set(found.ranks)]
    if other:
        raise MeshError(message(function, "arrays lie on other ranks than those that take part", other, mesh=found))
    return found
