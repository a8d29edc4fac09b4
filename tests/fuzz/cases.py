"""A case of the fuzzer: a step as a value. It prints as a short program for people; `build` makes functions of it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

WIDTH = 6  # of every activation; few divisors, so that cuts are uneven
BATCH = 4  # examples of a rank; two micro-batches are two each
Shape = tuple[int, ...]
Entry = str | tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Grid:
    """A mesh.

    Attributes:
        data_axes: axes over which ranks have different data.
        given: whether `make_mesh` is told so; else it has to know their names.
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    data_axes: tuple[str, ...]
    given: bool = True

    def coordinate(self, rank: int) -> dict[str, int]:
        """Returns the place of a rank along each axis."""
        place = {}
        for name, size in reversed(list(zip(self.names, self.sizes, strict=True))):
            place[name], rank = rank % size, rank // size
        return place

    def data_index(self, rank: int) -> int:
        """Returns which data a rank has."""
        place, index = self.coordinate(rank), 0
        for name, size in zip(self.names, self.sizes, strict=True):
            if name in self.data_axes:
                index = index * size + place[name]
        return index

    def size(self, *names: str) -> int:
        """Returns the number of ranks along some axes."""
        count = 1
        for name, size in zip(self.names, self.sizes, strict=True):
            count *= size if name in names else 1
        return count


@dataclass(frozen=True, slots=True)
class Array:
    """A weight.

    Attributes:
        group: ``"a"`` and ``"b"`` are differentiated (the first, and with two argnums the third argument), ``"frozen"``
            is the second, ``"closure"`` none.
        kind: ``"ep"`` stays cut over the axis ep inside of its units, ``"tp"`` over tp; ``"dense"`` stands in a unit
            beside an "ep"; ``"plain"`` is a tensor.
        num_rows: how many leading dims are rows.
    """

    name: str
    shape: Shape
    spec: tuple[Entry, ...]
    group: str = "a"
    kind: str = ""
    dtype: str = "float64"
    num_rows: int = 0


@dataclass(frozen=True, slots=True)
class Ref:
    """An array in the place of a weight: itself, a row of it, or one made of it inside the loss."""

    array: str
    rows: tuple[int, ...] = ()
    is_made: bool = False

    def __str__(self) -> str:
        name = self.array + "".join(f"[{row}]" for row in self.rows)
        return f"made({name})" if self.is_made else name


@dataclass(frozen=True, slots=True)
class Op:
    """An operator of a unit: ``x = kind(x, *weights, **options)``. See `ops`."""

    kind: str
    weights: tuple[Ref, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        parts = ["x", *map(str, self.weights), *(f"{key}={value!r}" for key, value in self.options)]
        return f"x = {self.kind}({', '.join(parts)})"


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit.

    Attributes:
        unused: weights that it gets and does not use.
        output: what it returns; see `build`.
        tree: ``"dict"`` or ``"tuple"`` of its weights.
        is_expert: its weights are gathered over the data axes but ep.
        checkpoints: it calls torch's checkpointing by itself, with its weights as arguments.
    """

    ops: tuple[Op, ...]
    unused: tuple[Ref, ...] = ()
    output: str = "tensor"
    tree: str = "dict"
    remat: bool = False
    is_expert: bool = False
    checkpoints: bool = False

    @property
    def refs(self) -> tuple[Ref, ...]:
        """Every weight that it is given, in order; one array may stand at several places."""
        return (*(ref for op in self.ops for ref in op.weights), *self.unused)


@dataclass(frozen=True, slots=True)
class Call:
    """``h.append(units[-1](... units[0](h[source])))``, under torch's checkpointing, without a gradient, or just so."""

    units: tuple[int, ...]
    source: int
    is_checkpointed: bool = False
    is_without_grad: bool = False

    def __str__(self) -> str:
        text = f"h[{self.source}]"
        for unit in self.units:
            text = f"unit{unit}({text})"
        text = f"checkpoint({text})" if self.is_checkpointed else text
        return f"h[{self.source}] + without_grad({text})" if self.is_without_grad else text


@dataclass(frozen=True, slots=True)
class Join:
    """``h.append(kind(h[first], h[second]))``, outside of units. See `build.JOINS`."""

    kind: str
    first: int
    second: int = 0

    def __str__(self) -> str:
        return f"{self.kind}(h[{self.first}], h[{self.second}])"


@dataclass(frozen=True, slots=True)
class Term:
    """A term of the loss: of an activation, or of an array by its name. See `build`."""

    kind: str
    of: int | str
    factor: float = 1.0

    def __str__(self) -> str:
        return (
            f"{self.factor} * {self.kind}({self.of!r})"
            if isinstance(self.of, str)
            else (f"{self.factor} * {self.kind}(h[{self.of}])")
        )


@dataclass(frozen=True, slots=True)
class Around:
    """What is around the loss; the defaults are the simplest step."""

    returns: str = "value_and_grad"
    has_aux: bool = False
    accumulate: str = ""
    reduce_op: str = "mean"
    param_dtype: str = ""
    reduce_dtype: str = ""
    accum_dtype: str = ""
    policy: tuple[tuple[str, Any], ...] = (("pack_below_bytes", 0),)
    twice: bool = False
    evaluates: bool = False
    update: str = ""
    is_donated: bool = False
    is_remade: bool = False
    is_partitioned: bool = False
    debug: bool = False
    outer: str = ""
    batch: str = "contiguous"

    def __str__(self) -> str:
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in changed) or "the simplest step"


@dataclass(frozen=True, slots=True)
class Case:
    """A whole step."""

    seed: int
    grid: Grid
    arrays: tuple[Array, ...]
    units: tuple[Unit, ...]
    body: tuple[Call | Join, ...]
    loss: tuple[Term, ...]
    around: Around = field(default_factory=Around)
    has_detached_loss: bool = False

    @property
    def num_ranks(self) -> int:
        """Of the mesh."""
        return self.grid.size(*self.grid.names)

    def array(self, name: str) -> Array:
        """Returns an array by its name."""
        return next(array for array in self.arrays if array.name == name)

    @property
    def trained_groups(self) -> tuple[str, ...]:
        """The groups that are differentiated: `argnums` is 0, or (0, 2) if there is something in ``"b"``."""
        return ("a", "b") if any(array.group == "b" for array in self.arrays) else ("a",)

    def __str__(self) -> str:
        mesh = ", ".join(f"{name}={size}" for name, size in zip(self.grid.names, self.grid.sizes, strict=True))
        told = f"data axes {self.grid.data_axes}{'' if self.grid.given else ' (by name)'}"
        lines = [f"# seed {self.seed}: mesh {mesh}, {told}"]
        for array in self.arrays:
            facts = [array.group, array.kind, array.dtype if array.dtype != "float64" else ""]
            rows = f"{array.num_rows} dims of rows" if array.num_rows else ""
            kept = ", ".join(fact for fact in (*facts, rows) if fact)
            lines.append(f"{array.name} = array{array.shape}, P{array.spec}  # {kept}")
        for i, unit in enumerate(self.units):
            flags = {"remat": unit.remat, "all axes but ep": unit.is_expert, "checkpoints inside": unit.checkpoints}
            notes = [unit.tree, *(name for name, is_so in flags.items() if is_so)]
            lines.append(f"unit{i}(x):  # {', '.join(notes)}")
            lines += [f"    {op}" for op in unit.ops]
            lines += [f"    # unused: {ref}" for ref in unit.unused]
            lines.append(f"    return {unit.output}")
        lines.append("loss(x):  # h[0] = 1.0 * x")
        lines += [f"    h[{i}] = {statement}" for i, statement in enumerate(self.body, start=1)]
        total = " + ".join(map(str, self.loss))
        lines.append(f"    return {f'({total}).detach()' if self.has_detached_loss else total}")
        lines.append(f"step: {self.around}")
        return "\n".join(lines)
