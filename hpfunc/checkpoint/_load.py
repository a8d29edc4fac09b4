"""`load`: each rank reads the blocks that its own parts need."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .. import backends
from .._errors import CheckpointError, UsageError, message
from .._running.agreement import agreeing
from .._running.writes import watch
from .._values.array import is_sharded
from .._values.mesh import Mesh
from .._values.tree import unflatten
from ._format import checksum
from ._index import Array, Entry, RankValues, Value, folder, latest, read_index
from ._leaves import Leaf, PerRank, leaves_of, mesh_of
from ._read import Reader
from ._together import as_path, disk

Allowed = Literal["missing", "unexpected", "misfit", "cast"]
ALLOWED = ("missing", "unexpected", "misfit", "cast")
_NAME = "hpfunc.checkpoint.load"


def load(
    path: str | Path,
    like: Any,
    *,
    step: int | None = None,
    allow: Collection[Allowed] = (),
    mesh: Mesh | None = None,
) -> Any:
    """Reads a checkpoint into a new tree that is cut like another one, on any mesh and any number of ranks.

    Args:
        path: the folder that `save` was given.
        like: a tree as a new run makes it. Its leaves give shape, dtype, spec and mesh. It is not changed.
        step: number of the checkpoint; default: the latest complete one.
        allow: accepted differences. ``"missing"``: leaves that the checkpoint lacks keep the value of `like`.
            ``"unexpected"``: leaves that `like` lacks are not read. ``"misfit"``: leaves of another shape or kind, or
            of a `PerRank` that another number of ranks saved, keep the value of `like`. ``"cast"``: arrays of another
            dtype are read and cast, numbers of another type converted.
        mesh: whose ranks load; default: the mesh of the arrays, else the one in use.

    Returns:
        The tree, with the arrays in memory of their own.

    Raises:
        CheckpointError: there is no such checkpoint; leaves are missing, unexpected or do not fit (all are named); a
            file cannot be read or differs from what was written (the file, the leaf and the bytes are named).
        LeafError, MeshError: `like` has leaves that cannot be saved, or arrays on other ranks.
        UsageError: `allow` has an unknown name.
        AgreementError: another rank refuses, or sees another checkpoint.

    Communication: two digests. Each rank reads the blocks of a MiB that hold its own parts.

    >>> import tempfile, torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> state = {"w": hpfunc.shard(torch.ones(4), mesh, hpfunc.P("shard")), "step": 3}
    >>> path = tempfile.mkdtemp()
    >>> saving = hpfunc.checkpoint.save(path, state)
    >>> start = {"w": hpfunc.shard(torch.zeros(4), mesh, hpfunc.P()), "step": 0}
    >>> loaded = hpfunc.checkpoint.load(path, like=start)
    >>> loaded["w"].local, loaded["w"].spec, loaded["step"]
    (tensor([1., 1., 1., 1.]), P(), 3)
    """
    where = as_path(path)
    mesh = mesh_of(_NAME, like, mesh)
    plan: Plan | None = None
    facts = ""
    with agreeing(mesh, _NAME, lambda: facts):
        check_allowed(_NAME, allow)
        leaves, treedef = leaves_of(_NAME, "like", like)
        with disk(_NAME, f"read {where}", mesh):
            number = latest(where) if step is None else step
            if number is None:
                hint = "save one first, or begin anew where hpfunc.checkpoint.latest(path) is None"
                raise CheckpointError(message(_NAME, f"no complete checkpoint in {path}", hint=hint))
            index = read_index(_NAME, where, number)
        plan = fit(_NAME, f"step {number} of {path}", leaves, index.leaves, mesh, allow)
        facts = f"step {number} of {path}, index {checksum(index.to_json().encode())}\n" + plan.facts()
    reader = Reader(_NAME, folder(where, index.step), dict(index.heads))
    return unflatten(treedef, read(_NAME, plan, mesh, reader))


def check_allowed(function: str, allow: Collection[str]) -> None:
    """Raises UsageError if `load` does not know a name."""
    unknown = [allow] if isinstance(allow, str) else [name for name in allow if name not in ALLOWED]
    if unknown:
        rule = f"allow takes a collection of {', '.join(map(repr, ALLOWED))}, got {unknown[0]!r}"
        raise UsageError(message(function, rule))


@dataclass(frozen=True, slots=True)
class Plan:
    """For each leaf what to read; None if it keeps the value of `like`."""

    leaves: list[Leaf]
    entries: list[Array | Value | None]

    def facts(self) -> str:
        """Returns what must be equal on all ranks."""
        pairs = zip(self.leaves, self.entries, strict=True)
        rows = [(x.key, "kept" if entry is None else "read", x.value) for x, entry in pairs]
        return "\n".join(f"{key}: {did}, {f'spec {x.spec}' if is_sharded(x) else 'plain'}" for key, did, x in rows)


def fit(
    function: str,
    source: str,
    leaves: list[Leaf],
    stored: Mapping[str, Entry],
    mesh: Mesh,
    allow: Collection[str],
    optional: Collection[str] = (),
    hint_for: Callable[[Collection[str]], str | None] = lambda refused: None,
) -> Plan:
    """Returns what to read. Leaves with keys in `optional` may be missing.

    `hint_for` may know a better hint than that of all for these kinds of differences.

    Raises:
        CheckpointError: names every leaf that is missing, unexpected or does not fit, unless that is allowed.
    """
    entries: list[Array | Value | None] = []
    faults: dict[str, list[str]] = {name: [] for name in ALLOWED}
    for leaf in leaves:
        entry = stored.get(leaf.key)
        kind, fault = ("missing", describe(leaf)) if entry is None else _misfit(leaf, entry, mesh)
        if kind is not None and not (kind == "missing" and leaf.key in optional):
            faults[kind].append(f"{kind}: {leaf.key}: {fault}")
        entries.append(None if entry is None or kind == "misfit" else _of_this_rank(entry, mesh))
    known = {leaf.key for leaf in leaves}
    faults["unexpected"] = [f"unexpected: {key}: {entry}" for key, entry in stored.items() if key not in known]
    refused = [name for name in ALLOWED if faults[name] and name not in allow]
    if refused:
        rule = f"{source} and the tree `like` do not fit"
        hint = hint_for(refused)
        hint = hint or f"if that is meant: allow={tuple(refused)!r}; else give a tree like the one that was saved"
        raise CheckpointError(message(function, rule, [line for name in refused for line in faults[name]], hint=hint))
    return Plan(leaves, entries)


def _of_this_rank(entry: Entry, mesh: Mesh) -> Array | Value:
    return entry.entries[mesh.ranks.index(mesh.rank)] if isinstance(entry, RankValues) else entry


def describe(leaf: Leaf) -> str:
    """Returns a leaf for an error text."""
    kind = "PerRank " if leaf.is_per_rank else ""
    return kind + (f"shape {leaf.shape}, {leaf.dtype}" if leaf.dtype else f"{type(leaf.plain).__name__} {leaf.plain!r}")


def _misfit(leaf: Leaf, entry: Entry, mesh: Mesh) -> tuple[str | None, str]:
    """Returns how a leaf differs from what is stored, if it does."""
    text = f"{describe(leaf)}, but {entry} was saved"
    if leaf.is_per_rank != isinstance(entry, RankValues):
        return "misfit", text
    if isinstance(entry, RankValues) and len(entry.entries) != mesh.size:
        return "misfit", f"{text}, and {mesh.size} load"
    entry = _of_this_rank(entry, mesh)  # that of another rank may have another shape
    if isinstance(entry, Array):
        if leaf.dtype is None or (not leaf.is_per_rank and leaf.shape != entry.shape):
            return "misfit", text
        return (None, "") if leaf.dtype == entry.dtype else ("cast", text)
    if leaf.dtype is not None or (type(entry.value) is str) != (type(leaf.plain) is str):
        return "misfit", text
    return (None, "") if type(entry.value) is type(leaf.plain) else ("cast", text)


def read(function: str, plan: Plan, mesh: Mesh, reader: Reader) -> list[Any]:
    """Reads the leaves and returns them. The reader is closed.

    Raises:
        CheckpointError: this rank cannot read, or what it reads is damaged.
        AgreementError: another rank cannot.
    """
    with agreeing(mesh, function, lambda: ""), disk(function, f"read {reader.folder}", mesh), reader:
        return [
            leaf.value if entry is None else _wrap(leaf, _one(leaf, entry, mesh, reader))
            for leaf, entry in zip(plan.leaves, plan.entries, strict=True)
        ]


def _one(leaf: Leaf, entry: Array | Value, mesh: Mesh, reader: Reader) -> Any:
    """Returns this rank's value."""
    if isinstance(entry, Value):
        return type(leaf.plain)(entry.value)
    of = leaf.plain.mesh if is_sharded(leaf.plain) else mesh
    backend = backends.get(of.framework)
    # A `PerRank` value may have any shape: it may be the rest of a batch.
    box = tuple(slice(0, n) for n in entry.shape) if leaf.is_per_rank else leaf.box
    data = reader.read(leaf.key, entry.parts, box, entry.dtype)
    shape = tuple(place.stop - place.start for place in box)
    tensor = backend.from_bytes(data, shape, entry.dtype, backend.device_of(leaf.local))
    assert leaf.dtype is not None
    return tensor if entry.dtype == leaf.dtype else backend.cast(tensor, leaf.dtype)


def _wrap(leaf: Leaf, value: Any) -> Any:
    if leaf.is_per_rank:
        return PerRank(value)
    return watch(leaf.value.with_local(value)) if is_sharded(leaf.value) else value
