"""`Mesh` and `PartitionSpec`: how ranks are arranged, and how an array lies on them. Pure values."""

from __future__ import annotations

import difflib
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NoReturn

from .._errors import MeshError, SpecError, UsageError, message
from .foreign_names import MESH, missing

AxisNames = str | Sequence[str]
REPLICATING = frozenset({"replicate", "replica", "dp_replicate", "dp_outer", "ddp"})
CUTTING = frozenset({"shard", "dp_shard", "dp_inner", "fsdp", "zero"})
DATA = frozenset({"hsdp", "data", "data_parallel", "dp", "batch"})
"""Usual names of data axes: for replicas, for shards, or for either. Upper or lower case."""
OTHER = frozenset(
    {"tp", "tensor", "tensor_parallel", "mp", "model", "model_parallel", "pp", "pipe", "pipeline", "stage"}
    | {"ep", "expert", "experts", "cp", "context", "context_parallel", "sp", "seq", "sequence"}
)
"""Usual names of axes of another kind. None of them is taken for a data axis, even if it is the only axis."""


class PartitionSpec:
    """Which mesh axes cut which dim of an array: one entry per dim, from the first; further dims are whole.

    Args:
        *entries: None (not cut), an axis name, or a tuple of axis names, major first.
        unreduced: axes over which each rank holds a partial sum, still to be reduced.

    Raises:
        SpecError: an entry is of another type, or an axis appears twice.

    >>> P("shard", None), P(("replicate", "shard")), P(None, "shard", unreduced={"replicate"})
    (P('shard', None), P(('replicate', 'shard')), P(None, 'shard', unreduced={'replicate'}))
    """

    __slots__ = ("entries", "unreduced")
    entries: tuple[str | tuple[str, ...] | None, ...]
    unreduced: frozenset[str]

    def __init__(self, *entries: str | Sequence[str] | None, unreduced: Iterable[str] = ()) -> None:
        kept: list[str | tuple[str, ...] | None] = []
        for entry in entries:
            if entry is None or isinstance(entry, str):
                kept.append(entry)
            elif isinstance(entry, (tuple, list)) and all(isinstance(axis, str) for axis in entry):
                kept.append(tuple(entry) if len(entry) > 1 else entry[0] if entry else None)
            else:
                raise SpecError(
                    message("hpfunc.P", f"an entry is None, an axis name or a tuple of them, got {entry!r}")
                )
        object.__setattr__(self, "entries", tuple(kept))
        object.__setattr__(self, "unreduced", frozenset([unreduced] if isinstance(unreduced, str) else unreduced))
        twice = sorted({axis for axis in self.axes if self.axes.count(axis) > 1} | (set(self.axes) & self.unreduced))
        if twice:
            raise SpecError(message("hpfunc.P", f"axis {twice[0]!r} appears twice in {self!r}"))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"PartitionSpec is immutable; cannot set {name!r}")

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis that cuts a dim, in order of the dims."""
        return tuple(itertools.chain.from_iterable(self.dim_axes(dim) for dim in range(len(self.entries))))

    def dim_axes(self, dim: int) -> tuple[str, ...]:
        """The axes that cut one dim, major first."""
        entry = self.entries[dim] if dim < len(self.entries) else None
        return () if entry is None else (entry,) if isinstance(entry, str) else entry

    def _key(self) -> tuple[object, frozenset[str]]:
        entries = self.entries
        while entries and entries[-1] is None:
            entries = entries[:-1]
        return entries, self.unreduced

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PartitionSpec) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> tuple[Any, ...]:
        return (functools.partial(PartitionSpec, unreduced=tuple(sorted(self.unreduced))), self.entries)

    def __repr__(self) -> str:
        parts = [repr(entry) for entry in self.entries]
        if self.unreduced:
            parts.append(f"unreduced={{{', '.join(map(repr, sorted(self.unreduced)))}}}")
        return f"P({', '.join(parts)})"


P = PartitionSpec


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks arranged in a grid with named axes.

    Use `make_mesh` to get one; the class itself only describes it and starts nothing.

    Attributes:
        axis_names: names of the axes, major first.
        sizes: number of ranks along each axis.
        data_axes: axes over which ranks hold different data; gradients are reduced over these.
        ranks: global rank at each place of the grid, in row-major order.
        rank: this process's global rank.
        device: device of this process's arrays, ``"cpu"``, ``"cuda:3"``.
        framework: framework of the arrays, ``"torch"``.
        timeout_s: seconds after which a rank that waits for another gives up.
        knows_data_axes: False if `data_axes` is empty because none was given and no name tells. Then functions that
            need them are refused on more than one rank.

    >>> mesh = Mesh(("replicate", "shard"), (2, 2), ("replicate", "shard"), (0, 1, 2, 3), rank=2)
    >>> mesh.coordinate, mesh.group(("shard",)), mesh
    ({'replicate': 1, 'shard': 0}, (2, 3), Mesh(replicate=2, shard=2))
    """

    axis_names: tuple[str, ...]
    sizes: tuple[int, ...]
    data_axes: tuple[str, ...]
    ranks: tuple[int, ...]
    rank: int = 0
    device: str = "cpu"
    framework: str = "torch"
    timeout_s: float = 300.0
    knows_data_axes: bool = True

    def __hash__(self) -> int:  # of the fields that differ between meshes of one process; `ranks` may be long
        return hash((self.axis_names, self.sizes, self.rank))

    def __post_init__(self) -> None:
        described = f"shape {self.sizes} with axes {self.axis_names}"
        if len(self.axis_names) != len(self.sizes) or not self.sizes:
            raise MeshError(message("hpfunc.Mesh", f"needs one name per axis and at least one axis, got {described}"))
        if any(not isinstance(name, str) or not name.isidentifier() for name in self.axis_names):
            raise MeshError(message("hpfunc.Mesh", f"axis names are identifiers, got {self.axis_names}"))
        if len(set(self.axis_names)) != len(self.axis_names):
            raise MeshError(message("hpfunc.Mesh", f"an axis name appears twice: {self.axis_names}"))
        if any(not isinstance(size, int) or size < 1 for size in self.sizes):
            raise MeshError(message("hpfunc.Mesh", f"axis sizes are positive integers, got {described}"))
        if math.prod(self.sizes) != len(self.ranks) or len(set(self.ranks)) != len(self.ranks):
            rule = f"{described} needs {math.prod(self.sizes)} distinct ranks, got {self.ranks}"
            raise MeshError(message("hpfunc.Mesh", rule))
        for name in self.data_axes:
            if name not in self.axis_names:
                raise MeshError(message("hpfunc.Mesh", f"data axis {name!r} is not an axis", mesh=self))
        if self.rank not in self.ranks:
            raise MeshError(message("hpfunc.Mesh", f"rank {self.rank} is not in it", mesh=self))

    @classmethod
    def from_device_mesh(cls, device_mesh: Any, data_axes: AxisNames | None = None, timeout_s: float = 300.0) -> Mesh:
        """Returns the mesh that a torch `DeviceMesh` describes.

        Raises:
            MeshError: the device mesh has no dim names.

        Communication: none.
        """
        names = device_mesh.mesh_dim_names
        if names is None:
            hint = "give init_device_mesh(..., mesh_dim_names=...)"
            raise MeshError(message("hpfunc.Mesh.from_device_mesh", "the DeviceMesh has no dim names", hint=hint))
        device = device_mesh.device_type
        if device != "cpu":
            device = f"{device}:{device_mesh.get_rank() % max(1, device_mesh._device_handle().device_count())}"
        found = default_data_axes(tuple(names)) if data_axes is None else as_axes(data_axes)
        return cls(
            tuple(names),
            tuple(device_mesh.mesh.shape),
            found,
            tuple(device_mesh.mesh.flatten().tolist()),
            rank=device_mesh.get_rank(),
            device=device,
            timeout_s=timeout_s,
            knows_data_axes=data_axes is not None or bool(found),
        )

    @property
    def shape(self) -> dict[str, int]:
        """Axis name to size, in order."""
        return dict(zip(self.axis_names, self.sizes, strict=True))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def coordinate(self) -> dict[str, int]:
        """This rank's place along each axis."""
        return self.coordinate_of(self.rank)

    if not TYPE_CHECKING:  # a type checker should find a wrong name by itself

        def __getattr__(self, name: str) -> Any:
            raise missing("hpfunc.Mesh", name, MESH, dir(type(self)))

    def __getitem__(self, axis: object) -> NoReturn:
        """Raises: a part of a mesh is not a mesh, as it is of torch's."""
        hint = f"collectives and specs name their axes: hpfunc.psum(x, {axis!r}, mesh=mesh), mesh.axis_size({axis!r})"
        raise UsageError(message("hpfunc.Mesh", "a mesh is used as a whole", hint=hint))

    @property
    def is_main(self) -> bool:
        """Whether this rank is the first one, which prints, logs and writes for all."""
        return self.rank == self.ranks[0]

    @property
    def num_data_ranks(self) -> int:
        """Number of parts into which data is divided: that of the ranks along the data axes.

        Raises:
            MeshError: the mesh has more than one rank, and its data axes are not known.
        """
        self.check_data_axes("hpfunc.Mesh.num_data_ranks")
        return self.axis_size(self.data_axes)

    @property
    def data_rank(self) -> int:
        """Which of the `num_data_ranks` parts this rank loads. Ranks along other axes, such as "tp", load the same.

        Raises:
            MeshError: the mesh has more than one rank, and its data axes are not known.
        """
        self.check_data_axes("hpfunc.Mesh.data_rank")
        return self.axis_index(self.data_axes)

    def coordinate_of(self, rank: int) -> dict[str, int]:
        """Returns the place of a global rank along each axis."""
        index = self.ranks.index(rank)
        place = {}
        for name, size in zip(reversed(self.axis_names), reversed(self.sizes), strict=True):
            index, place[name] = divmod(index, size)
        return {name: place[name] for name in self.axis_names}

    def coordinates(self) -> Iterator[dict[str, int]]:
        """Yields the place of every rank, in the order of `ranks`."""
        for place in itertools.product(*map(range, self.sizes)):
            yield dict(zip(self.axis_names, place, strict=True))

    def axis_size(self, axes: AxisNames) -> int:
        """Returns the number of ranks along one axis, or along several together."""
        return math.prod(self.shape[axis] for axis in as_axes(axes))

    def axis_index(self, axes: AxisNames) -> int:
        """Returns this rank's place along one axis, or along several together, major first."""
        return self.index_of(self.coordinate, as_axes(axes))

    def index_of(self, place: Mapping[str, int], axes: Iterable[str]) -> int:
        """Returns the number of a place along several axes together, major first."""
        shape, index = self.shape, 0
        for axis in axes:
            index = index * shape[axis] + place[axis]
        return index

    def sort(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Returns the axes in mesh order."""
        wanted = set(axes)
        return tuple(axis for axis in self.axis_names if axis in wanted)

    def group(self, axes: AxisNames) -> tuple[int, ...]:
        """Returns the global ranks that differ from this one only along `axes`, row-major in their given order."""
        axes, mine, shape = as_axes(axes), self.coordinate, self.shape
        found = []
        for place in itertools.product(*(range(shape[axis]) for axis in axes)):
            there = mine | dict(zip(axes, place, strict=True))
            found.append(self.ranks[self.index_of(there, self.axis_names)])
        return tuple(found)

    def check_axes(self, function: str, axes: AxisNames) -> tuple[str, ...]:
        """Returns `axes` as a tuple.

        Raises:
            MeshError: one is not an axis of the mesh, or appears twice.
        """
        axes = as_axes(axes)
        for axis in axes:
            if axis not in self.axis_names:
                raise MeshError(message(function, f"no mesh axis {axis!r}", mesh=self, hint=did_you_mean(axis, self)))
        if len(set(axes)) != len(axes):
            raise MeshError(message(function, f"an axis appears twice in {axes}", mesh=self))
        return axes

    def check_data_axes(self, function: str) -> None:
        """Raises MeshError if the mesh has more than one rank and its data axes are not known."""
        if not self.knows_data_axes and self.size > 1:
            rule = "it is not known along which axes ranks hold different data"
            some = tuple(axis for axis in self.axis_names if axis.lower() not in OTHER)[:1]
            first = f"data_axes={some} if it is so along {some[0]!r}, " if some else ""
            known = "'replicate', 'shard', 'dp', 'fsdp', 'data', 'batch' tell by their names"
            hint = f"say it in make_mesh: {first}data_axes=() if along none; {known}"
            raise MeshError(message(function, rule, mesh=self, hint=hint))

    def __enter__(self) -> NoReturn:
        hint = "with hpfunc.use_mesh(mesh): ..."
        raise UsageError(message("hpfunc.Mesh", "a mesh by itself is not a context manager", hint=hint))

    def __exit__(self, *_: object) -> None:  # `with` looks for it before it calls `__enter__`
        pass

    def describe(self, beside: Mesh) -> str:
        """Returns the mesh for an error text, with the fields in which it differs from one that has the same text.

        >>> one, two = (Mesh(("a", "b"), (1, 1), axes, (0,)) for axes in (("a",), ()))
        >>> one.describe(two)
        "Mesh(a=1, b=1) with data_axes=('a',)"
        """
        names = [field.name for field in fields(self)][2:]
        others = [f"{n}={getattr(self, n)!r}" for n in names if getattr(self, n) != getattr(beside, n)]
        return f"{self} with {', '.join(others)}" if others and repr(self) == repr(beside) else repr(self)

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{name}={size}' for name, size in self.shape.items())})"


def as_axes(axes: AxisNames) -> tuple[str, ...]:
    """Returns one axis name or several as a tuple."""
    return (axes,) if isinstance(axes, str) else tuple(axes)


def default_data_axes(axis_names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the axes whose names are those of data axes; else the only axis, if its name is not of another kind.

    >>> default_data_axes(("dp_replicate", "dp_shard", "tp")), default_data_axes(("ranks",)), default_data_axes(("tp",))
    (('dp_replicate', 'dp_shard'), ('ranks',), ())
    """
    known = tuple(name for name in axis_names if name.lower() in REPLICATING | CUTTING | DATA)
    alone = len(axis_names) == 1 and axis_names[0].lower() not in OTHER
    return known or (axis_names if alone else ())


def did_you_mean(axis: str, mesh: Mesh) -> str:
    """Returns a hint for a misspelt axis."""
    close = difflib.get_close_matches(axis, mesh.axis_names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"the axes are {', '.join(map(repr, mesh.axis_names))}"
