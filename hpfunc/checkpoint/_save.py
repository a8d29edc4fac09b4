"""`save`: each rank writes what it owns; the first rank writes the index, last (see Note [Complete])."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

from .. import backends
from .._errors import CheckpointError, LeafError, UsageError, message
from .._running.agreement import agreeing, control
from .._running.writes import refuse_written
from .._values.array import is_sharded
from .._values.mesh import Mesh
from ._format import Tensor, Written, sync_folder, write_file, write_text
from ._index import INDEX, Array, Entry, Index, RankValues, Value, folder, from_data, leftovers, steps, to_data
from ._leaves import Leaf, leaves_of, mesh_of
from ._read import Part
from ._together import as_path, by_first, disk

_NAME = "hpfunc.checkpoint.save"
# Saves that nobody has waited for, by folder and ranks. The next save of the same folder waits for them.
_pending: dict[tuple[Path, tuple[int, ...]], Saving] = {}


def save(
    path: str | Path,
    tree: Any,
    *,
    step: int | None = None,
    keep: int | None = None,
    asynchronous: bool = False,
    mesh: Mesh | None = None,
) -> Saving:
    """Writes a tree as a new checkpoint of a folder: completely or not at all, even if processes are killed.

    Every rank writes the parts that it owns into a safetensors file of its own; of replicas one rank writes. Keys are
    the dotted paths of the leaves. The index, in JSON, has a checksum for each MiB.

    Args:
        path: folder of checkpoints, on storage that all ranks share; made if it does not exist.
        tree: pytree of `ShardedArray`, plain tensors, numbers, bools and strings; all but `PerRank` leaves are the same
            on all ranks.
        step: number of the checkpoint; default: one more than the latest, from 0 on.
        keep: number of checkpoints to keep: older ones are removed when this one is complete; default: all.
        asynchronous: copy the parts of this rank to host memory, and write them in a thread. The arrays may be donated
            at once. The checkpoint is complete after `Saving.wait`, which the next `save` to the folder calls too.
        mesh: whose ranks save; default: the mesh of the arrays, else the one in use.

    Returns:
        The save, already waited for unless `asynchronous`.

    Raises:
        LeafError: leaves cannot be saved, or plain tensors differ between ranks; the error names all of them.
        UsageError: `step` or `keep` is out of its range.
        MeshError: there is no mesh, or arrays lie on other ranks.
        CheckpointError: this rank cannot write, or the step exists already. Other checkpoints are not changed.
        AgreementError: another rank refuses, or has other arguments.
        PeerError: another rank ended.

    Communication: digests, a few numbers, and at the end the checksums from each rank; never inside of the thread.

    >>> import tempfile, torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> state = {"w": hpfunc.shard(torch.ones(4, 2), mesh, hpfunc.P("shard")), "step": 3}
    >>> path = tempfile.mkdtemp()
    >>> hpfunc.checkpoint.save(path, state, step=3).step, hpfunc.checkpoint.latest(path)
    (3, 3)
    """
    where = as_path(path)
    mesh = mesh_of(_NAME, tree, mesh)
    earlier = _pending.get((where, mesh.ranks))
    if earlier is not None:
        earlier.wait()
    leaves: list[Leaf] = []
    options = f"path {path}, step {step}, keep {keep}, asynchronous {asynchronous}"
    with agreeing(mesh, _NAME, lambda: "\n".join([options, *(leaf.fact() for leaf in leaves)])):
        _check_number("step", step, 0)
        _check_number("keep", keep, 1)
        leaves += leaves_of(_NAME, "tree", tree)[0]
        arrays = {leaf.key: leaf.value for leaf in leaves if is_sharded(leaf.value)}
        refuse_written(_NAME, arrays.values(), lambda: list(arrays))
    _check_alike(leaves, mesh)
    number, token = by_first(mesh, _NAME, lambda: _begin(where, step, mesh), 2)
    saving = Saving(where, number, folder(where, number).with_suffix(f".partial-{token}"), leaves, mesh, keep)
    saving._start(asynchronous)
    if asynchronous:
        _pending[where, mesh.ranks] = saving
    else:
        saving.wait()
    return saving


def _check_number(name: str, number: Any, least: int) -> None:
    if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < least):
        raise UsageError(message(_NAME, f"{name} is an integer >= {least}, got {number!r}"))


def _check_alike(leaves: Sequence[Leaf], mesh: Mesh) -> None:
    plain = [leaf for leaf in leaves if leaf.dtype and not leaf.is_per_rank and leaf.local is leaf.value]
    if mesh.size == 1 or not plain:
        return
    backend = backends.get(mesh.framework)
    found = control(mesh).exchange(f"{_NAME}: plain tensors", [backend.digest(leaf.local) for leaf in plain])
    bad = [
        f"{leaf.key}: shape {leaf.shape}, {leaf.dtype}"
        for leaf, digests in zip(plain, zip(*found, strict=True), strict=True)
        if len(set(digests)) > 1
    ]
    if bad:
        hint = "give what each rank has for itself as hpfunc.checkpoint.PerRank(x)"
        raise LeafError(message(_NAME, "plain tensors differ between ranks", bad, mesh=mesh, hint=hint))


def _begin(path: Path, step: int | None, mesh: Mesh) -> tuple[int, int]:
    """Makes the folder to write into. Returns the step, and the number in the folder's name."""
    with disk(_NAME, f"write to {path}", mesh):
        path.mkdir(parents=True, exist_ok=True)
        for left in leftovers(path):
            shutil.rmtree(left)
        have = steps(path)
        number = max(have, default=-1) + 1 if step is None else step
        if number in have:
            hint = "give another step, or remove it first"
            raise CheckpointError(message(_NAME, f"step {number} is in {path} already", hint=hint))
        token = secrets.randbits(48)
        folder(path, number).with_suffix(f".partial-{token}").mkdir()
        return number, token


class Saving:
    """A checkpoint that is being written. Get one from `save`.

    Attributes:
        step: its number.
    """

    def __init__(self, path: Path, step: int, partial: Path, leaves: list[Leaf], mesh: Mesh, keep: int | None) -> None:
        self.step = step
        self._path, self._partial, self._mesh, self._keep = path, partial, mesh, keep
        self._leaves: list[Leaf] = leaves
        self._thread: Thread | None = None
        self._text = ""
        self._error: Exception | None = None
        self._is_over = False

    def wait(self) -> None:
        """Returns once the checkpoint is complete. All ranks call it. Called again, it does nothing, or raises again.

        Raises:
            CheckpointError: this rank could not write. This checkpoint does not exist; others are not changed.
            AgreementError: another rank could not.

        Communication: two agreements, and the checksums from each rank.

        >>> import tempfile
        >>> mesh = hpfunc.make_mesh((1,), ("shard",))
        >>> saving = hpfunc.checkpoint.save(tempfile.mkdtemp(), {"step": 3}, mesh=mesh, asynchronous=True)
        >>> saving.wait()
        """
        if not self._is_over:
            self._is_over = True
            _pending.pop((self._path, self._mesh.ranks), None)
            try:
                self._finish()
            except Exception as error:
                self._error = error
                if self._mesh.rank == self._mesh.ranks[0]:
                    shutil.rmtree(self._partial, ignore_errors=True)
        if self._error is not None:
            raise self._error

    def _start(self, asynchronous: bool) -> None:
        try:
            tensors, values = self._contents(asynchronous)
        except Exception as error:  # the other ranks learn it in `wait`
            self._error = error
            return
        if asynchronous:
            self._thread = Thread(target=self._write, args=(tensors, values), name=f"save step {self.step}")
            self._thread.start()
        else:
            self._write(tensors, values)

    def _contents(self, copy: bool) -> tuple[list[Tensor], dict[str, Value]]:
        """Returns the tensors that this rank writes, and its `PerRank` values."""
        bytes_of = backends.get(self._mesh.framework).to_bytes
        tensors = [
            Tensor(leaf.key, leaf.dtype, tuple(leaf.local.shape), bytes_of(leaf.local, copy=copy))
            for leaf in self._leaves
            if leaf.dtype and leaf.is_written_by(self._mesh) and (0 not in leaf.local.shape or leaf.is_per_rank)
        ]
        return tensors, {x.key: Value(x.plain) for x in self._leaves if x.is_per_rank and not x.dtype}

    def _write(self, tensors: list[Tensor], values: dict[str, Value]) -> None:
        """Writes this rank's file, and sets the text that the other ranks need to know. Runs no collective."""
        name, mesh = f"rank-{self._mesh.ranks.index(self._mesh.rank):05d}.safetensors", self._mesh
        file = Written({}, {})
        try:
            with disk(_NAME, f"write {self._partial / name}", mesh):
                if not self._partial.is_dir():
                    hint = "the path must be on storage that all ranks share"
                    rule = f"rank {mesh.rank} does not see the folder that rank {mesh.ranks[0]} has made"
                    raise CheckpointError(message(_NAME, rule, [str(self._partial)], hint=hint))
                if tensors:
                    file = write_file(self._partial / name, tensors)
        except Exception as error:
            self._error = error
            return
        entries: dict[str, Entry] = {**values}
        for leaf in self._leaves:
            stored = file.tensors.get(leaf.key)
            if stored is not None:
                part = Part(tuple(place.start for place in leaf.box), stored)
                entries[leaf.key] = Array(stored.shape, stored.dtype, (part,))
        self._text = json.dumps({"entries": {key: to_data(x) for key, x in entries.items()}, "heads": file.heads})

    def _finish(self) -> None:
        if self._thread is not None:
            self._thread.join()
        with agreeing(self._mesh, _NAME, lambda: ""):
            if self._error is not None:
                raise self._error
        texts = [self._text]
        if self._mesh.size > 1:
            texts = control(self._mesh).exchange_text(f"{_NAME}: what each rank wrote", self._text)
        by_first(self._mesh, _NAME, lambda: self._complete([json.loads(text) for text in texts]))
        self._leaves = []

    def _complete(self, ranks: list[dict[str, Any]]) -> list[int]:
        """Writes the index, gives the folder its name, and removes old checkpoints (see `keep`)."""
        heads = {name: tuple(head) for each in ranks for name, head in each["heads"].items()}
        entries = [{key: from_data(entry) for key, entry in each["entries"].items()} for each in ranks]
        index = Index(self.step, {leaf.key: _entry(leaf, entries) for leaf in self._leaves}, heads)
        final = folder(self._path, self.step)
        with disk(_NAME, f"write {final}", self._mesh):
            write_text(self._partial / INDEX, index.to_json())
            sync_folder(self._partial)
            self._partial.rename(final)
            sync_folder(self._path)
        if self._keep is not None:
            with disk(_NAME, f"remove old checkpoints of {self._path}; step {self.step} is complete", self._mesh):
                _remove_old(self._path, self._keep, self.step)
        return [0]


def _entry(leaf: Leaf, ranks: Sequence[dict[str, Entry]]) -> Entry:
    """Returns the entry of a leaf in the index, from what each rank has written."""
    found = [rank[leaf.key] for rank in ranks if leaf.key in rank]
    if leaf.is_per_rank:
        assert len(found) == len(ranks)
        return RankValues(tuple(entry for entry in found if not isinstance(entry, RankValues)))
    if leaf.dtype is None:
        return Value(leaf.value)
    return Array(
        leaf.shape, leaf.dtype, tuple(part for entry in found if isinstance(entry, Array) for part in entry.parts)
    )


def _remove_old(path: Path, keep: int, new: int) -> None:
    for step in steps(path)[:-keep]:
        if step != new:
            old = folder(path, step)
            gone = old.rename(old.with_suffix(".removed"))
            with suppress(OSError):  # the next save deletes what is left
                shutil.rmtree(gone)
