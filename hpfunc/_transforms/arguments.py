"""The arguments and results of a step: checked with all ranks, cut, named, and returned."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import backends
from .._errors import DonatedError, SpecError, message
from .._running.agreement import agreeing
from .._running.session import Session
from .._running.warn_once import warn_once
from .._running.writes import renewed, watch
from .._values.array import ShardedArray, Step, describe, is_sharded, layout_of
from .._values.mesh import Mesh, PartitionSpec
from .._values.tree import flatten, paths, unflatten
from .shard import leaf_specs

_NAME = "hpfunc.sharded"
KEPT_CALLS = 128


@dataclass(slots=True)
class Known:
    """What is known about arguments of one structure.

    Attributes:
        names: the path of each sharded leaf.
        specs: the entry of `in_specs` for each leaf.
        donated: which leaves may be updated in place.
        history: fingerprints of the programs that the step ran with such arguments, oldest first.
    """

    names: dict[int, str]
    specs: list[PartitionSpec | None]
    donated: set[int]
    history: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_CALLS))


class Arguments:
    """The arguments and results of a step, for all structures, shapes and specs that it was called with.

    Attributes:
        structures: what is known, by structure of the arguments.
        uneven: the tensors of this call that `in_specs` cuts into parts of different sizes.
    """

    def __init__(
        self, fn: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any, donate: tuple[int, ...]
    ) -> None:
        self._fn, self.mesh = fn, mesh
        self._in_specs, self._out_specs, self.donate = in_specs, out_specs, donate
        self.structures: dict[object, Known] = {}
        self.uneven: list[str] = []

    @property
    def histories(self) -> list[deque[str]]:
        """The history of each structure of arguments."""
        return [known.history for known in self.structures.values()]

    def known(
        self, session: Session, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any], treedef: Any
    ) -> Known:
        """Returns what is known about such arguments. New ones are first checked with all ranks."""
        signature = treedef, tuple((x.layout, x._held_dtype, x.is_frozen) if is_sharded(x) else None for x in leaves)
        if (found := self.structures.get(signature)) is not None:
            return found
        names = self._names(args, kwargs)
        if session.is_abstract:
            return self._check(args, names, leaves)
        if self.structures:
            session.control.leave("it was called with arguments of other shapes, specs or structure than before")
        described = [f"{n}: {describe(x)}" for n, x in zip(names, leaves, strict=True) if is_sharded(x)]
        with agreeing(self.mesh, _NAME, lambda: "\n".join(described)):
            found = self._check(args, names, leaves)
        self.structures[signature] = found
        return found

    def _names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        known = _positional_names(self._fn)
        labels = [known[i] if i < len(known) else f"args[{i}]" for i in range(len(args))]
        named = [path for label, arg in zip(labels, args, strict=True) for path in paths(arg, label, is_sharded)]
        return named + [path for key in sorted(kwargs) for path in paths(kwargs[key], key, is_sharded)]

    def _check(self, args: tuple[Any, ...], names: Sequence[str], leaves: Sequence[Any]) -> Known:
        arrays = [(n, x) for n, x in zip(names, leaves, strict=True) if is_sharded(x)]
        gone = [n for n, x in arrays if x._owner.consumed_by is not None]
        if gone:
            hint = "use what the step returned, or leave the argument out of donate_argnums"
            raise DonatedError(message(_NAME, "an argument was donated before", gone, hint=hint))
        foreign = [(n, x.mesh) for n, x in arrays if x.mesh != self.mesh]
        if foreign:
            bad = [f"{name}: on {other.describe(self.mesh)}" for name, other in foreign]
            shown = self.mesh.describe(foreign[0][1])
            raise SpecError(message(_NAME, "an argument lies on another mesh", bad, mesh=shown))
        if any(not 0 <= n < len(args) for n in self.donate):
            rule = f"donate_argnums={self.donate}, but there are {len(args)} positional arguments"
            raise SpecError(message(_NAME, rule))
        specs: list[PartitionSpec | None] = []
        if self._in_specs is not None:
            specs = self._specs_of(args)
        counts = [len(flatten(arg, is_sharded)[0]) for arg in args]
        donated = {i for n in self.donate for i in range(sum(counts[:n]), sum(counts[: n + 1]))}
        specs += [None] * (len(leaves) - len(specs))
        return Known({i: n for i, n in enumerate(names) if is_sharded(leaves[i])}, specs, donated)

    def _specs_of(self, args: tuple[Any, ...]) -> list[PartitionSpec | None]:
        if not isinstance(self._in_specs, PartitionSpec):
            return leaf_specs(_NAME, args, "args", tuple(self._in_specs), self.mesh)
        leaves, treedef = flatten(args, is_sharded)
        plain = unflatten(treedef, [0 if is_sharded(leaf) else leaf for leaf in leaves])  # one P says nothing of arrays
        return leaf_specs(_NAME, plain, "args", self._in_specs, self.mesh)

    def fill(self, step: Step, leaves: Sequence[Any], known: Known) -> tuple[list[Any], dict[int, ShardedArray]]:
        """Returns the leaves that the step gets: arrays with their origin, and this rank's part of global tensors."""
        filled, arrays, backend = list(leaves), {}, backends.get(self.mesh.framework)
        self.uneven = []
        for i, (leaf, spec) in enumerate(zip(leaves, known.specs, strict=True)):
            if is_sharded(leaf):
                filled[i] = arrays[i] = leaf._handle(origin=(i, step), donated=i in known.donated)
            elif spec is not None and backend.is_tensor(leaf):
                layout = layout_of(tuple(leaf.shape), spec, self.mesh)
                filled[i] = leaf[layout.local_slices(self.mesh.coordinate)]
                if not layout.is_even:
                    self.uneven.append(f"shape {layout.shape}, spec {spec!r}")
        return filled, arrays

    def finish(self, outputs: Any, arrays: dict[int, ShardedArray]) -> Any:
        """Wraps plain outputs according to `out_specs`, and consumes donated handles."""
        leaves, treedef = flatten(outputs, is_sharded)
        specs: list[PartitionSpec | None] = [None] * len(leaves)
        if self._out_specs is not None:
            specs = leaf_specs(_NAME, outputs, "outputs", self._out_specs, self.mesh)
        kept = [self._wrap(x, s) for x, s in zip(leaves, specs, strict=True)]
        for array in arrays.values():
            if array.is_donated and array._owner.consumed_by is None:
                array._consume(f"{_NAME}({getattr(self._fn, '__name__', 'step')})")
        return unflatten(treedef, kept)

    def _wrap(self, leaf: Any, spec: PartitionSpec | None) -> Any:
        if is_sharded(leaf):
            return renewed(leaf)
        if spec is None or not backends.get(self.mesh.framework).is_tensor(leaf):
            return leaf
        shape = tuple(n * self.mesh.axis_size(spec.dim_axes(dim)) for dim, n in enumerate(leaf.shape))
        return watch(ShardedArray(leaf, shape, spec, self.mesh))


def warn_of_uneven(uneven: Sequence[str], session: Session) -> None:
    """Warns if gradients were means over ranks that had parts of different sizes."""
    mesh = session.mesh
    if any(weight.trainable and weight.divisor > 1 for weight in session.weights):
        rule = "in_specs cuts an argument into parts of different sizes, and gradients are means over ranks"
        hint = (
            "each rank counts alike, not each row: give a batch that divides; or a loss that is a sum over rows, with "
        )
        hint += "Numerics(reduce_op='sum'), and divide by the number of all rows"
        warn_once(message(_NAME, rule, uneven, mesh=mesh, hint=hint), mesh)


def _positional_names(fn: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # a builtin may have no signature
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
