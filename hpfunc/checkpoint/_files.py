"""Whole models as the safetensors that other tools read: `export_safetensors` and `import_safetensors`."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from .._errors import CheckpointError, message
from .._running.agreement import agreeing
from .._values.mesh import Mesh
from .._values.tree import unflatten
from ._format import ITEM_BYTES, header, read_header, sync_folder
from ._index import Array, folder, latest, read_index
from ._leaves import leaves_of, mesh_of
from ._load import Allowed, check_allowed, fit, read
from ._read import Part, Reader
from ._together import as_path, disk

_EXPORT, _IMPORT = "hpfunc.checkpoint.export_safetensors", "hpfunc.checkpoint.import_safetensors"
Rename = Callable[[str], str | None]


def export_safetensors(
    path: str | Path, file: str | Path, *, rename: Rename | None = None, step: int | None = None
) -> Path:
    """Writes the arrays of a checkpoint, whole, into one safetensors file.

    One process does this from the files only, without the ranks or the model, with one array in memory at a
    time. Numbers, strings and `PerRank` leaves are left out.

    Args:
        path: the folder that `save` was given.
        file: the file to write; an old one is replaced once the new one is complete.
        rename: from a dotted path to the name in the file, None to leave the array out. Default: the path itself.
        step: number of the checkpoint; default: the latest complete one.

    Returns:
        The path of the file.

    Raises:
        CheckpointError: there is no such checkpoint, two arrays would have one name, or a file cannot be read or
            written.

    Communication: none. In a program of several ranks let one of them call it.

    >>> import tempfile, torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> state = {"params": {"w": hpfunc.shard(torch.ones(4), mesh, hpfunc.P("shard"))}, "step": 3}
    >>> path = tempfile.mkdtemp()
    >>> saving = hpfunc.checkpoint.save(path, state)
    >>> file = hpfunc.checkpoint.export_safetensors(
    ...     path, path + "/model.safetensors", rename=lambda key: key.removeprefix("params.")
    ... )
    >>> hpfunc.checkpoint.import_safetensors(file, like=state["params"])["w"].local
    tensor([1., 1., 1., 1.])
    """
    where, target = as_path(path), as_path(file)
    with disk(_EXPORT, f"export {where} to {target}"):
        number = latest(where) if step is None else step
        if number is None:
            raise CheckpointError(message(_EXPORT, f"no complete checkpoint in {path}"))
        index = read_index(_EXPORT, where, number)
        arrays = {key: entry for key, entry in index.leaves.items() if isinstance(entry, Array)}
        names = {key: key if rename is None else rename(key) for key in arrays}
        kept = [(key, name) for key, name in names.items() if name is not None]
        kept.sort(key=lambda pair: -ITEM_BYTES[arrays[pair[0]].dtype])  # as in `write_file`
        _check_names(kept)
        partial = target.with_name(f"{target.name}.partial")
        with Reader(_EXPORT, folder(where, number), dict(index.heads)) as reader, partial.open("wb") as out:
            out.write(header((name, arrays[key].dtype, arrays[key].shape) for key, name in kept))
            for key, _ in kept:
                box = tuple(slice(0, n) for n in arrays[key].shape)
                out.write(memoryview(reader.read(key, arrays[key].parts, box, arrays[key].dtype)))
            out.flush()
            os.fsync(out.fileno())
        partial.replace(target)
        sync_folder(target.parent)
    return target


def _check_names(kept: list[tuple[str, str]]) -> None:
    by_name: dict[str, list[str]] = {}
    for key, name in kept:
        by_name.setdefault(name, []).append(key)
    bad = [f"{name}: of {', '.join(keys)}" for name, keys in by_name.items() if len(keys) > 1]
    if bad:
        raise CheckpointError(message(_EXPORT, "rename gives one name to several arrays", bad))


def import_safetensors(
    path: str | Path,
    like: Any,
    *,
    rename: Rename | None = None,
    allow: Collection[Allowed] = (),
    mesh: Mesh | None = None,
) -> Any:
    """Reads safetensors files of any tool, with whole arrays, into a new tree that is cut like another one.

    Args:
        path: a safetensors file, or a folder: all such files in it are read together.
        like: a tree whose leaves give shape, dtype, spec and mesh. It is not changed.
        rename: from a name in the files to a dotted path of `like`, None to leave it out. Default: the name itself.
        allow: differences that are not errors, as for `load`.
        mesh: whose ranks read; default: the mesh of the arrays, else the one in use.

    Returns:
        The tree, with the arrays in memory of their own.

    Raises:
        CheckpointError: a file is truncated or cannot be read; names do not fit (the error lists all).
        LeafError, MeshError, UsageError, AgreementError: as `load`.

    Communication: two digests. Each rank reads the blocks of a MiB that hold its own parts.

    >>> import tempfile, torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> params = {"w": hpfunc.shard(torch.zeros(4), mesh, hpfunc.P("shard"))}
    >>> hpfunc.checkpoint.import_safetensors(tempfile.mkdtemp(), params, allow={"missing"})["w"].local
    tensor([0., 0., 0., 0.])
    """
    mesh = mesh_of(_IMPORT, like, mesh)
    where, facts, plan = as_path(path), "", None
    with agreeing(mesh, _IMPORT, lambda: facts):
        check_allowed(_IMPORT, allow)
        leaves, treedef = leaves_of(_IMPORT, "like", like)
        with disk(_IMPORT, f"read {where}", mesh):
            found = _arrays(where, rename)
        plan = fit(_IMPORT, str(path), leaves, found, mesh, allow)
        facts = plan.facts()
    return unflatten(treedef, read(_IMPORT, where if where.is_dir() else where.parent, plan, mesh))


def _arrays(path: Path, rename: Rename | None) -> dict[str, Array]:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    found: dict[str, Array] = {}
    for file in files:
        for name, stored in read_header(_IMPORT, file).items():
            key = name if rename is None else rename(name)
            if key in found:
                hint = "parts of arrays, by torch.distributed.checkpoint, are read by its HuggingFaceStorageReader"
                fault = f"{key}: again in {file}"
                raise CheckpointError(message(_IMPORT, "a name stands twice in the files", [fault], hint=hint))
            if key is not None:
                place = tuple(0 for _ in stored.shape)
                found[key] = Array(stored.shape, stored.dtype, (Part(place, stored),))
    return found
