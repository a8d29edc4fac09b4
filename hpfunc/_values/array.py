"""`ShardedArray`: one global array, of which this rank holds a part."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Protocol, cast

import optree
from optree.registry import __GLOBAL_NAMESPACE as GLOBAL_NAMESPACE

from .._errors import DonatedError, LeafError, SpecError, UsageError, message
from .dtypes import is_floating_dtype
from .layout import Layout, Shape
from .mesh import Mesh, PartitionSpec
from .not_a_tensor import NotATensor, Size, shortened
from .tree import paths


class Tracker(Protocol):
    """The `value_and_grad` run that differentiates an array.

    Attributes:
        state: ``"done"`` when it has ended.
    """

    state: str

    def local(self, array: ShardedArray) -> Any:
        """Returns the array's own part as a tensor whose uses are differentiated."""
        ...


class Owner:
    """A local tensor, shared by all handles of one array. Compared by identity, so it is also a key for the array."""

    __slots__ = ("__weakref__", "consumed_by", "local", "writes")

    def __init__(self, local: Any) -> None:
        self.local = local
        self.writes: int | None = None  # see Note [Noticing writes]
        self.consumed_by: str | None = None


class Step:
    """Identifies one call of a step. An `Origin` with another `Step` is out of date."""

    __slots__ = ()


Origin = tuple[int, Step]


@lru_cache(maxsize=4096)
def layout_of(shape: Shape, spec: PartitionSpec, mesh: Mesh) -> Layout:
    """Returns the layout of these three. Equal ones are one object."""
    return Layout(shape, spec, mesh)


class ShardedArray(NotATensor):
    """One global array, cut over a mesh; this rank holds `local`. Immutable, a pytree node with `local` as its child.

    Get one from `shard` or `init`. Element-wise code runs on it through `optree.tree_map`, which sees the local
    tensors. Two handles may stand for the same memory; a donated array raises `DonatedError` on every use.

    Attributes:
        layout: how it is cut.
    """

    __slots__ = ("_born", "_donated", "_origin", "_owner", "_row", "_tracker", "_trains", "layout")
    layout: Layout
    _unshard: ClassVar[Callable[[ShardedArray], Any]]  # by `unshard`, which stands above
    _drawn: ClassVar[Callable[[ShardedArray], str]]  # by `visualize`, likewise
    _owner: Owner
    _tracker: Tracker | None
    _origin: Origin | None
    _donated: bool
    _row: tuple[ShardedArray, int] | None
    _trains: bool | None
    _born: tuple[int, ...] | None

    def __init__(
        self, local: Any, shape: Shape, spec: PartitionSpec, mesh: Mesh, *, trains: bool | None = None
    ) -> None:
        self._set(Owner(local), layout_of(tuple(shape), spec, mesh), trains=trains)

    def _set(
        self, owner: Owner, layout: Layout, tracker: Tracker | None = None, origin: Origin | None = None,
        donated: bool = False, row: tuple[ShardedArray, int] | None = None, *,
        trains: bool | None = None, born: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        put = object.__setattr__
        put(self, "_owner", owner)
        put(self, "layout", layout)
        put(self, "_tracker", tracker)
        put(self, "_origin", origin)
        put(self, "_donated", donated)
        put(self, "_row", row)
        put(self, "_trains", trains)
        put(self, "_born", born)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"ShardedArray is immutable; cannot set {name!r}")

    @property
    def local(self) -> Any:
        """This rank's part, a tensor of the framework. Inside `value_and_grad` its uses are differentiated."""
        if self._row is not None:
            return self._row[0].local[self._row[1]]
        if self._tracker is not None:
            return self._tracker.local(self)
        return self._value

    @property
    def _value(self) -> Any:
        """The local tensor, never differentiated."""
        if self._row is not None:
            return self._row[0]._value[self._row[1]]
        owner = self._owner
        if owner.consumed_by is not None:
            rule = f"the array of shape {self.shape}, spec {self.spec} was donated to {owner.consumed_by}"
            hint = "use what the step returned, or leave the argument out of donate_argnums"
            raise DonatedError(message("hpfunc.ShardedArray", rule, hint=hint))
        return owner.local

    @property
    def dtype(self) -> Any:
        """Dtype of the framework."""
        return self._value.dtype

    @property
    def shape(self) -> Shape:
        """Global shape."""
        return self.layout.shape

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.layout.shape)

    @property
    def size(self) -> int:
        """Number of elements of the global array, as in numpy and JAX; `shape` has the sizes of its dims."""
        return Size(math.prod(self.layout.shape))

    def numel(self) -> int:
        """Returns the number of elements of the global array."""
        return math.prod(self.layout.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the global array. This rank holds ``local.nbytes`` of them."""
        return self.numel() * int(self._value.itemsize)

    @property
    def device(self) -> Any:
        """Device of this rank's part, as the framework has it."""
        return getattr(self._value, "device", self.mesh.device)

    def is_floating_point(self) -> bool:
        """Returns whether the elements are floating numbers: what `value_and_grad` can differentiate."""
        return is_floating_dtype(self.dtype)

    def full(self) -> Any:
        """Returns all values as a plain tensor with memory of its own. All ranks of the axes that cut it call this."""
        return ShardedArray._unshard(self)

    @property
    def spec(self) -> PartitionSpec:
        """Which axes cut which dim, and over which axes the array is still a partial sum."""
        return self.layout.spec

    @property
    def mesh(self) -> Mesh:
        """The mesh that it lies on."""
        return self.layout.mesh

    @property
    def _held_dtype(self) -> Any:
        """The same as `dtype`, but None for a donated array."""
        if self._row is not None:
            return self._row[0]._held_dtype
        return getattr(self._owner.local, "dtype", None)

    @property
    def is_donated(self) -> bool:
        """Whether the memory may be updated in place (see `sharded`)."""
        return self._donated

    @property
    def is_frozen(self) -> bool:
        """Whether `value_and_grad` and optimizers leave the array as it is. See `freeze`."""
        return self._trains is False

    def _other(self, owner: Owner, **facts: Any) -> ShardedArray:
        """Returns an array of another owner, with the layout, mark and birth of this one unless `facts` have others."""
        array = object.__new__(ShardedArray)
        array._set(owner, **{"layout": self.layout, "trains": self._trains, "born": self._born, **facts})
        return array

    def _marked(self, trains: bool | None) -> ShardedArray:
        """Returns another handle to the same memory, marked as trainable, frozen, or neither (None)."""
        known = {"tracker": self._tracker, "origin": self._origin, "donated": self._donated, "row": self._row}
        return self._other(self._owner, **known, trains=trains)

    def with_local(self, local: Any) -> ShardedArray:
        """Returns an array with the same shape, spec and mesh, and other values; frozen if this one is."""
        return self._other(Owner(local))

    def __getitem__(self, index: int) -> ShardedArray:
        """Returns a row: the array without its first dim, which no axis may cut. It shares the memory.

        Thus weights of many layers can be kept in one array. Each row that a unit uses is a weight of its own, and the
        rows of the array's gradient are the gradients of its rows.

        Raises:
            IndexError: there is no such row.
            SpecError: the first dim is cut, or the array has no dims.
            UsageError: the index is not an integer.

        Communication: none.
        """
        name = "hpfunc.ShardedArray"
        if isinstance(index, bool) or not isinstance(index, int):
            hint = "a[i] takes one integer; for other parts index what a unit sees, or `.local`"
            raise UsageError(message(name, f"an array is indexed with {index!r}", [describe(self)], hint=hint))
        if not self.shape or self.spec.dim_axes(0):
            hint = "leave the first dim whole: hpfunc.P(None, 'shard')"
            raise SpecError(message(name, "the rows of an array are cut, or it has none", [describe(self)], hint=hint))
        if not -self.shape[0] <= index < self.shape[0]:
            raise IndexError(f"row {index} of an array of {self.shape[0]} rows")
        spec = PartitionSpec(*self.spec.entries[1:], unreduced=self.spec.unreduced)
        layout, index = layout_of(self.shape[1:], spec, self.mesh), index % self.shape[0]
        born = None if self._born is None else (*self._born, index)
        known = {"tracker": self._tracker, "origin": self._origin, "row": (self, index)}
        return self._other(Owner(None), **known, layout=layout, born=born)

    def _root(self) -> tuple[ShardedArray, tuple[int, ...]]:
        """Returns the array under all indexing, and the indices."""
        if self._row is None:
            return self, ()
        root, rows = self._row[0]._root()
        return root, (*rows, self._row[1])

    def _handle(self, origin: Origin | None = None, *, donated: bool = False) -> ShardedArray:
        """Returns another handle to the same memory. For a row it is an array of its own, which is never donated."""
        if self._row is not None:
            return self._other(Owner(self._value), origin=origin)
        return self._other(self._owner, origin=origin, donated=donated)

    def _tracked(self, tracker: Tracker) -> ShardedArray:
        """Returns a handle whose uses are differentiated.

        It has an owner of its own, so that an array at two places of a tree has two gradients, as in JAX.
        """
        return self._other(Owner(self._value), tracker=tracker, origin=self._origin)

    def _consume(self, by: str) -> Any:
        """Returns the local tensor and makes every handle to it unusable."""
        local = self._value
        self._owner.consumed_by, self._owner.local = by, None
        return local

    def __copy__(self) -> ShardedArray:
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedArray:
        """Returns an array with memory of its own."""
        if self._tracker is not None and self._tracker.state != "done":
            hint = "a copy would have no gradient: use the array itself, or copy it before value_and_grad"
            raise self._refusal("an array is copied while it is differentiated", hint)
        return self.with_local(copy.deepcopy(self._value, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        hint = "hpfunc.checkpoint.save writes the arrays of all ranks, and load reads them on any mesh; "
        hint += "hpfunc.unshard(array) is a plain tensor, for torch.save or another process"
        raise self._refusal("an array cannot be pickled: this rank has a part of it only", hint)

    def __len__(self) -> int:
        if not self.shape or self.spec.dim_axes(0):
            hint = "array.shape has its global sizes; hpfunc.unshard(array) is a plain tensor"
            rule = "an array is not a sequence unless its first dim is whole"
            raise LeafError(message("hpfunc.ShardedArray", rule, [describe(self)], hint=hint))
        return self.shape[0]

    def _repr_html_(self) -> str:
        return ShardedArray._drawn(self)

    def _described(self) -> str:
        return describe(self)

    def _tensor_type(self) -> type:
        return self._row[0]._tensor_type() if self._row is not None else type(self._owner.local)

    def __repr__(self) -> str:
        if self._owner.consumed_by is not None:
            return f"ShardedArray(shape={self.shape}, spec={self.spec}, donated to {self._owner.consumed_by})"
        frozen = ", frozen" if self.is_frozen else ""
        return f"ShardedArray(shape={self.shape}, dtype={getattr(self._value, 'dtype', '?')}, spec={self.spec}{frozen})"


def born(array: ShardedArray, birth: tuple[int, ...]) -> ShardedArray:
    """Sets the birth of a new array, which is equal on all ranks, and returns the array. See Note [Births]."""
    object.__setattr__(array, "_born", birth)
    return array


is_sharded: Callable[[Any], bool] = ShardedArray.__instancecheck__
"""Returns whether a value is a `ShardedArray`: the `is_leaf` of trees whose arrays are leaves.

The same as `isinstance`, but without a Python frame: trees call it for each node.
"""


@dataclass(frozen=True, slots=True)
class Metadata:
    """What a pytree keeps of an array beside its child. Trees with trainable and with frozen arrays compare equal."""

    shape: Shape
    spec: PartitionSpec
    mesh: Mesh
    trains: bool | None = field(default=None, compare=False)


def flatten_array(array: ShardedArray) -> tuple[tuple[Any], Metadata]:
    """Returns the child and the metadata of an array, as pytree registries want them."""
    return (array.local,), Metadata(array.shape, array.spec, array.mesh, array._trains)


def unflatten_array(metadata: Metadata, children: Any) -> ShardedArray:
    """Returns the array that `flatten_array` took apart."""
    (local,) = children
    return ShardedArray(local, metadata.shape, metadata.spec, metadata.mesh, trains=metadata.trains)


cast(Any, optree.register_pytree_node)(  # its types ask for a Collection
    ShardedArray,
    lambda array: (*flatten_array(array), ("local",)),
    unflatten_array,
    path_entry_type=optree.GetAttrEntry,
    namespace=GLOBAL_NAMESPACE,
)


def describe(array: Any) -> str:
    """Returns a leaf for an error text: its shape and spec, or its type."""
    if isinstance(array, ShardedArray):
        return f"shape {array.shape}, spec {array.spec}{', frozen' if array.is_frozen else ''}"
    shape = getattr(array, "shape", None)
    return f"{type(array).__name__} {shortened(repr(array))}" if shape is None else f"shape {tuple(shape)}"


def check_sharded(
    function: str, name: str, tree: Any, hint: str, *, allow: Callable[[Any], bool] | None = None
) -> None:
    """Raises LeafError naming every leaf of `tree` that is not a `ShardedArray` and that `allow` does not accept."""
    leaves = optree.tree_leaves(tree, is_leaf=is_sharded)
    is_bad = [not is_sharded(leaf) and not (allow is not None and allow(leaf)) for leaf in leaves]
    if any(is_bad):
        named = zip(paths(tree, name, is_sharded), leaves, strict=True)
        bad = [f"{path}: {describe(leaf)}" for path, leaf in itertools.compress(named, is_bad)]
        raise LeafError(message(function, f"{name} has leaves that are no ShardedArray", bad, hint=hint))


def check_one_mesh(
    function: str, arrays: Sequence[ShardedArray], mesh: Mesh, names: Callable[[], list[str]], hint: str | None = None
) -> None:
    """Raises SpecError naming every array, with its mesh, if not all of them lie on `mesh`."""
    if all(array.layout.mesh is mesh or array.mesh == mesh for array in arrays):
        return
    others = [array.mesh for array in arrays if array.mesh != mesh]
    if all(array.mesh != mesh for array in arrays):
        rule, shown = "an array lies on another mesh", mesh.describe(others[0])
    else:
        rule, shown = "arrays lie on different meshes", None
    bad = [
        f"{name}: on {array.mesh.describe(others[0] if array.mesh == mesh else mesh)}"
        for name, array in zip(names(), arrays, strict=True)
    ]
    raise SpecError(message(function, rule, bad, mesh=shown, hint=hint))


def check_gatherable(
    function: str, named: Sequence[tuple[str, ShardedArray]], axes: tuple[str, ...] | None = None
) -> None:
    """Raises SpecError naming every array that cannot be gathered over `axes` (None: the data axes) alone."""
    misplaced = [(n, a) for n, a in named if a.layout.misplaced(a.mesh.data_axes if axes is None else axes) is not None]
    if misplaced:
        bad = [f"{name}: {describe(array)}" for name, array in misplaced]
        hint = "in P(('tp', 'shard')) the first axis is the major one; put the axes that are gathered last"
        raise SpecError(message(function, "a data axis cuts a dim outside of an axis that stays cut", bad, hint=hint))
    partial = [f"{name}: {describe(a)}" for name, a in named if a.spec.unreduced]
    if partial:
        hint = "finish it with hpfunc.reduce first"
        raise UsageError(message(function, "an array still is a partial sum", partial, hint=hint))
