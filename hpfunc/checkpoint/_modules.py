"""What `export_safetensors` and `import_safetensors` do for a module: its names, what its library does to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .._errors import CheckpointError, UsageError, message
from . import _adapters, _hub
from ._convert import Found, Group, Make, Tensor, check_names, making, stored_arrays, whole, write
from ._hub import Names
from ._index import Array
from ._leaves import Leaf
from ._read import Reader

Rename = Callable[[str], str | None] | None


def _check(function: str, module: Any) -> None:
    _hub.check_module(function, module)
    if getattr(module, "_hf_peft_config_loaded", False):
        hint = "adapt the model by peft.get_peft_model(model, config) in the place of model.add_adapter(config)"
        raise UsageError(message(function, "the module has adapters of its own", hint=hint))


# --- export -----------------------------------------------------------------------------------------------------------
def export(
    function: str, module: Any, arrays: Mapping[str, Array], rename: Rename, reader: Reader, target: Path
) -> Path:
    """Writes arrays of a checkpoint (by dotted path) as the library of a module does. Returns the target."""
    _check(function, module)
    names = Names.of(module)
    pairs = [(path, names.of_path(path) if rename is None else names.first(rename(path))) for path in arrays]
    kept = [(path, name) for path, name in pairs if name is not None]
    check_names(function, kept)
    paths = {name: path for path, name in kept}
    if bad := [f"{name}: {arrays[path]}, but the module has shape {shape}" for name, path in paths.items()
               if (shape := names.shape(name)) not in (None, arrays[path].shape)]:  # fmt: skip
        raise CheckpointError(message(function, "arrays of the checkpoint are not those of the module", bad))
    if _hub.is_adapted(module):
        _adapters.save(function, module, lambda name: _value(reader, paths.get(name), arrays), target)
        return target
    is_folder = target.suffix != ".safetensors"
    _write(function, module, names, paths, arrays, reader, target / _hub.WEIGHTS if is_folder else target)
    if is_folder:
        dtypes = [arrays[paths[name]].dtype for name, _ in module.named_parameters() if name in paths]
        floats = [dtype for dtype in dtypes if "float" in dtype]
        _hub.write_configuration(module, target, floats[0] if floats else "float32")
    return target


def _value(reader: Reader, path: str | None, arrays: Mapping[str, Array]) -> Tensor | None:
    return None if path is None else whole(reader, path, arrays[path])


def _write(
    function: str,
    module: Any,
    names: Names,
    paths: Mapping[str, str],
    arrays: Mapping[str, Array],
    reader: Reader,
    file: Path,
) -> None:
    saved = {name: first for name, first in names.stored.items() if name not in _hub.not_saved(module, names)}
    if missing := [f"{name}: shape {names.shape(first)}" for name, first in saved.items() if first not in paths]:
        hint = "save buffers, too: hpfunc.checkpoint.save(path, {'params': params, 'buffers': buffers})"
        raise CheckpointError(message(function, "the checkpoint has not all that the module saves", missing, hint=hint))
    kinds = {name: (arrays[paths[first]].dtype, arrays[paths[first]].shape) for name, first in saved.items()}
    groups = [
        Group(tuple(paths[saved[name]] for name in group.sources), group.targets, group.convert)
        for group in _hub.to_files(function, module, kinds)
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    write(file, groups, arrays, reader, is_for_torch=True)


# --- import -----------------------------------------------------------------------------------------------------------
def find(function: str, module: Any, path: Path, leaves: Sequence[Leaf], rename: Rename) -> Found:
    """Returns what the files of a module have for the leaves of a tree."""
    _check(function, module)
    names = Names.of(module)
    if rename is None:
        own = {leaf.key: name for leaf in leaves if (name := names.of_path(leaf.key)) is not None}
    else:
        own = {key: name for name in (*names.kinds, *names.unsaved) if (key := rename(name)) is not None}
    if _hub.is_adapted(module):
        return _find_adapter(function, module, path, names, own)
    arrays = stored_arrays(function, _hub.files_in(path) if path.is_dir() else [path])
    groups = _hub.from_files(function, module, names, {name: (x.dtype, x.shape) for name, x in arrays.items()})
    by_name: dict[str, list[tuple[Array, Make | None]]] = {}
    unexpected: dict[str, Array] = {}
    taken = set(own.values())
    for group in groups:
        wanted = {target for target in group.targets if names.first(target) in taken}
        make = {} if group.convert is None else making(group, arrays, wanted)
        for target, (dtype, shape) in group.targets.items():
            array = arrays[group.sources[0]] if group.convert is None else Array(shape, dtype, ())
            if target in wanted:
                by_name.setdefault(names.stored[target], []).append((array, make.get(target)))
            elif names.first(target) is not None or not _hub.may_be_unexpected(module, target):
                unexpected[target] = array
    found = {name: _one(function, name, same) for name, same in by_name.items()}
    optional = {key for key, name in own.items() if name in names.unsaved or _hub.may_be_missing(module, name)}
    every = {key: found[name] for key, name in own.items() if name in found}
    made = {key: make for key, (_, make) in every.items() if make is not None}
    return Found({key: array for key, (array, _) in every.items()} | unexpected, optional, made)


def _one(function: str, name: str, same: Sequence[tuple[Array, Make | None]]) -> tuple[Array, Make | None]:
    """Returns an array and what makes it. Files may have a tied weight under each of its names, if they are alike."""
    (array, first), *others = same
    if not others:
        return array, first

    def value(reader: Reader, array: Array, make: Make | None) -> Tensor:
        return whole(reader, name, array) if make is None else make(reader)

    def make(reader: Reader) -> Tensor:
        tensor = value(reader, array, first)
        for other in others:
            if not tensor.equal(value(reader, *other)):
                hint = "build the module with tie_word_embeddings=False"
                rule = "weights that are one in the module differ in the files"
                raise CheckpointError(message(function, rule, [name], hint=hint))
        return tensor

    return array, make


def _find_adapter(function: str, module: Any, path: Path, names: Names, own: Mapping[str, str]) -> Found:
    tensors = _adapters.load(function, module, path if path.is_dir() else path.parent)
    trained = _adapters.wanted(module)
    kinds = {name: _hub.kind_of(x) for name, x in tensors.items()}
    arrays = {name: Array(shape, dtype, ()) for name, (dtype, shape) in kinds.items()}
    taken = {key: name for key, name in own.items() if name in arrays}
    unexpected = {name: arrays[name] for name in trained if name in arrays and name not in taken.values()}
    make: dict[str, Make] = {key: lambda reader, name=name: tensors[name] for key, name in taken.items()}
    optional = {key for key, name in own.items() if name not in trained}
    return Found({key: arrays[name] for key, name in taken.items()} | unexpected, optional, make)
