"""Whole models as the safetensors that other tools read: `export_safetensors` and `import_safetensors`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from .._errors import CheckpointError, message
from .._running.agreement import agreeing
from .._values.mesh import Mesh
from .._values.tree import unflatten
from ._convert import Found, Group, MakingReader, check_names, stored_arrays, write
from ._index import Array, folder, latest, read_index
from ._leaves import Leaf, leaves_of, mesh_of
from ._load import Allowed, check_allowed, fit, read
from ._read import Reader
from ._together import as_path, disk

_EXPORT, _IMPORT = "hpfunc.checkpoint.export_safetensors", "hpfunc.checkpoint.import_safetensors"
Rename = Callable[[str], str | None]


def export_safetensors(
    path: str | Path,
    file: str | Path,
    *,
    module: Any = None,
    rename: Rename | None = None,
    step: int | None = None,
) -> Path:
    """Writes the arrays of a checkpoint, whole, into one safetensors file.

    One process does this from the files only, without the ranks or the weights of the model, with one array in memory
    at a time, or those that a library converts together. Numbers, strings and `PerRank` leaves are left out.

    Args:
        path: the folder that `save` was given.
        file: the file to write; an old one is replaced once the new one is complete. With `module` also a folder: then
            its configuration is written, too, and ``from_pretrained`` reads the folder.
        module: the torch module, or one like it on the meta device. The file is then that of its library. Of a model
            of transformers it has the names and layouts of the hub, one of the names of a tied weight, and the buffers
            that belong into files. Of a model of peft it is a folder with the adapter alone. Of other modules it has
            the ``state_dict``.
        rename: from a dotted path to the name in the file, None to leave the array out. Default: the path itself. With
            `module`: to the name in the module; default: the path itself, or what follows its first part, as in
            ``params.lm_head.weight``.
        step: number of the checkpoint; default: the latest complete one.

    Returns:
        The path of the file, or of the folder.

    Raises:
        CheckpointError: there is no such checkpoint, two arrays would have one name, the checkpoint has not all that
            the module saves, or a file cannot be read or written.
        LeafError: `module` is not a torch module.
        VersionError: transformers is too old.

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
        with Reader(_EXPORT, folder(where, number), dict(index.heads)) as reader:
            if module is not None:
                from ._modules import export

                return export(_EXPORT, module, arrays, rename, reader, target)
            names = {key: key if rename is None else rename(key) for key in arrays}
            kept = [(key, name) for key, name in names.items() if name is not None]
            check_names(_EXPORT, kept)
            groups = [Group((key,), {name: (arrays[key].dtype, arrays[key].shape)}) for key, name in kept]
            write(target, groups, arrays, reader, is_for_torch=False)
    return target


def import_safetensors(
    path: str | Path,
    like: Any,
    *,
    module: Any = None,
    rename: Rename | None = None,
    allow: Collection[Allowed] = (),
    mesh: Mesh | None = None,
) -> Any:
    """Reads safetensors files of any tool, with whole arrays, into a new tree that is cut like another one.

    Args:
        path: a safetensors file, or a folder: all such files in it are read together.
        like: a tree whose leaves give shape, dtype, spec and mesh. It is not changed.
        module: the torch module that the files are of, or one like it on the meta device. The files are then read as
            its library does. Files of a model of transformers have the names and layouts of the hub; those of a model
            of peft are its adapter alone, and all else keeps the value of `like`. Buffers are read, too: give
            ``like={"params": params, "buffers": apply.buffers}``; those that are in no file keep their values.
        rename: from a name in the files, or with `module` in the module, to a dotted path of `like`; None to leave it
            out. Default: the name itself; with `module` a leaf may also have its name behind a first part:
            ``params.lm_head.weight``.
        allow: differences that are not errors, as for `load`.
        mesh: whose ranks read; default: the mesh of the arrays, else the one in use.

    Returns:
        The tree, with the arrays in memory of their own.

    Raises:
        CheckpointError: a file is truncated or cannot be read; names do not fit (the error lists all).
        LeafError, MeshError, UsageError, AgreementError: as `load`; LeafError also if `module` is not a torch module.
        VersionError: transformers is too old.

    Communication: two digests. Each rank reads the blocks of a MiB that hold its own parts. Arrays that a library makes
        of others, and adapters, each rank reads whole: those that are made together (the experts of a layer) are in
        host memory at one time.

    >>> import tempfile, torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> params = {"w": hpfunc.shard(torch.zeros(4), mesh, hpfunc.P("shard"))}
    >>> hpfunc.checkpoint.import_safetensors(tempfile.mkdtemp(), params, allow={"missing"})["w"].local
    tensor([0., 0., 0., 0.])
    """
    where, facts, plan, found = as_path(path), "", None, Found({})
    mesh = mesh_of(_IMPORT, like, mesh)
    with agreeing(mesh, _IMPORT, lambda: facts):
        check_allowed(_IMPORT, allow)
        leaves, treedef = leaves_of(_IMPORT, "like", like)
        with disk(_IMPORT, f"read {where}", mesh):
            found = _find(where, leaves, module, rename)
        plan = fit(_IMPORT, str(path), leaves, found.arrays, mesh, allow, found.optional, _hint(module is not None))
        facts = plan.facts()
    reader = MakingReader(_IMPORT, where if where.is_dir() else where.parent, found.make)
    return unflatten(treedef, read(_IMPORT, plan, mesh, reader))


def _find(path: Path, leaves: Sequence[Leaf], module: Any, rename: Rename | None) -> Found:
    if module is not None:
        from ._modules import find

        return find(_IMPORT, module, path, leaves, rename)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return Found(stored_arrays(_IMPORT, files, rename))


def _hint(has_module: bool) -> Callable[[Collection[str]], str | None]:
    """Returns what says how files of other names are read; None if that is not it."""

    def hint(refused: Collection[str]) -> str | None:
        if {"missing", "unexpected"} <= set(refused) and not has_module:
            text = "the names are not those of `like`: module=model reads the files of a model of transformers or peft"
            return text + " as its library does, rename=... any others"
        if "unexpected" in refused and "missing" not in refused:
            text = "buffers are read if `like` has them: like={'params': params, 'buffers': apply.buffers}"
            return text + f"; what is not to be read: allow={tuple(refused)!r}"
        return None

    return hint
