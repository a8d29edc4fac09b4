"""Files of model hubs: names and layouts of a module's weights in files, which may not be those of the module.

# Note [Layouts of files]
transformers renames weights when it loads them, and makes fused ones of separate ones (the experts of a layer, say);
when it saves them it goes back. Its rules are values: patterns with operations on tensors. They are used here as its
own `from_pretrained` and `save_pretrained` use them, but for one group of weights after the other, so that no more than
one group is whole at a time. Run on tensors without data they tell the shapes before anything is read.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .._errors import CheckpointError, LeafError, VersionError, message
from ._convert import Convert, Group, Kind
from ._format import Shape

Tensor = torch.Tensor


def check_module(function: str, module: Any) -> None:
    """Raises LeafError unless it is a module of torch."""
    if not isinstance(module, torch.nn.Module):
        rule = f"module is to be a torch.nn.Module, got {type(module).__name__}"
        hint = "its values do not count: `with torch.device('meta'): module = build()` makes one without"
        raise LeafError(message(function, rule, hint=hint))


def _loaded(library: str, kind: str, module: Any) -> bool:
    """Returns whether a module is of a class of a library; without importing it: then it is not."""
    found = sys.modules.get(library)
    return found is not None and isinstance(module, getattr(found, kind))


def is_of_transformers(module: Any) -> bool:
    """Returns whether a module is a model of transformers."""
    return _loaded("transformers", "PreTrainedModel", module)


def is_adapted(module: Any) -> bool:
    """Returns whether a module is a model of peft."""
    return _loaded("peft", "PeftModel", module)


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a module's tensors.

    Attributes:
        stored: each name that may be in files, with the first name of the same tensor; `from_module` uses that one.
        kinds: dtype and shape by first name.
        unsaved: names of buffers that are in no file, because the module makes them itself.
    """

    stored: dict[str, str]
    kinds: dict[str, Kind]
    unsaved: frozenset[str] = field(default=frozenset())

    @classmethod
    def of(cls, module: Any) -> Names:
        """Returns those of a module."""
        named = [*module.named_parameters(), *module.named_buffers()]
        first = {id(x): name for name, x in reversed(named)}
        state = {name: x for name, x in module.state_dict(keep_vars=True).items() if isinstance(x, Tensor)}
        stored = {name: first[id(x)] for name, x in state.items()}
        kinds = {first[id(x)]: kind_of(x) for x in state.values()}
        return cls(stored, kinds, frozenset(name for name, _ in named if name not in kinds))

    def of_path(self, path: str) -> str | None:
        """Returns the first name of the tensor that lies at a dotted path of a tree; None if there is none.

        It is the path itself, or what follows its first part: ``params.lm_head.weight``.
        """
        for name in (path, path.partition(".")[2]):
            if name in self.stored:
                return self.stored[name]
            if name in self.unsaved:
                return name
        return None

    def first(self, name: str | None) -> str | None:
        """Returns the first name of the tensor of this name; None if there is none."""
        return None if name is None else self.stored.get(name)

    def shape(self, name: str) -> Shape | None:
        """Returns the shape of a tensor by its first name; None of one that is in no file."""
        return self.kinds[name][1] if name in self.kinds else None


def kind_of(tensor: Tensor) -> Kind:
    """Returns dtype and shape of a tensor."""
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def _empty(kind: Kind) -> Tensor:
    return torch.empty(kind[1], dtype=getattr(torch, kind[0]), device="meta")


# --- conversions of transformers --------------------------------------------------------------------------------------
def _rules(function: str) -> Any:
    """Returns the modules of transformers that know them."""
    import transformers

    try:
        from transformers import conversion_mapping, core_model_loading
    except ImportError as error:
        rule = f"transformers {transformers.__version__} does not tell how it converts weights"
        hint = "pip install 'transformers>=5.24'"
        raise VersionError(message(function, rule, [str(error)], hint=hint)) from error
    return conversion_mapping, core_model_loading


def from_files(function: str, module: Any, names: Names, stored: Mapping[str, Kind]) -> list[Group]:
    """Returns what the arrays of files become in a module. An array that it does not know keeps its name."""
    if not is_of_transformers(module):
        return [Group((name,), {name: kind}) for name, kind in stored.items()]
    mapping, loading = _rules(function)
    renamings, converters = _split(loading, mapping.get_model_conversion_mapping(module))
    prefix, known = module.base_model_prefix, dict.fromkeys(names.stored, True)

    def place(name: str) -> tuple[str, str | None]:
        target, pattern = loading.rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:
            target, pattern = loading.rename_source_key(name, [], [], prefix, known)
        return (target, pattern) if target in known else (name, None)

    return _grouped(function, module, loading, converters, stored, place, lambda name: name)


def to_files(function: str, module: Any, stored: Mapping[str, Kind]) -> list[Group]:
    """Returns what the arrays of a module, by name, become in files."""
    if not is_of_transformers(module):
        return [Group((name,), {name: kind}) for name, kind in stored.items()]
    mapping, loading = _rules(function)
    used = getattr(module, "_weight_conversions", None)  # those that `from_pretrained` has used
    if used is None:
        every = mapping.get_model_conversion_mapping(module, add_legacy=False)
        used = [rule for rule in every if not isinstance(rule, loading.PrefixChange)]
    renamings, converters = _split(loading, [rule.reverse_transform() for rule in reversed(used)])

    def place(name: str) -> tuple[str, str | None]:
        target, pattern = loading.apply_converters(name, converters)
        return (target, pattern) if pattern is not None else (loading.apply_renamings(name, renamings), None)

    def rename(name: str) -> str:
        return loading.apply_renamings(name, renamings)

    return _grouped(function, module, loading, converters, stored, place, rename)


def _split(loading: Any, rules: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    every = list(rules)
    kinds = (loading.WeightRenaming, loading.WeightConverter)
    renamings, converters = ([rule for rule in every if isinstance(rule, kind)] for kind in kinds)
    return renamings, converters


def _grouped(
    function: str,
    module: Any,
    loading: Any,
    converters: list[Any],
    stored: Mapping[str, Kind],
    place: Callable[[str], tuple[str, str | None]],
    rename: Callable[[str], str],
) -> list[Group]:
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    groups: list[Group] = []
    members: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(stored, key=loading.dot_natural_key):  # the order of experts
        target, pattern = place(name)
        if pattern is None:
            groups.append(Group((name,), {target: stored[name]}))
        else:
            members.setdefault(target, []).append((name, pattern))
    for target, pairs in members.items():
        convert = _converting(module, by_pattern[pairs[0][1]], target, pairs, rename)
        sources = tuple(name for name, _ in pairs)
        try:
            made = convert([_empty(stored[name]) for name in sources])
        except Exception as error:  # an operation of transformers may raise anything
            rule, hint = "transformers cannot convert these arrays", "the files are not whole, or are of another model"
            bad = [f"{name}: shape {stored[name][1]}" for name in sources]
            text = message(function, f"{rule}: {type(error).__name__} {error}", bad, hint=hint)
            raise CheckpointError(text) from error
        groups.append(Group(sources, {name: kind_of(x) for name, x in made.items()}, convert))
    return groups


def _converting(
    module: Any, rule: Any, target: str, pairs: list[tuple[str, str]], rename: Callable[[str], str]
) -> Convert:
    def convert(tensors: list[Tensor]) -> dict[str, Tensor]:
        one = copy.deepcopy(rule)
        for (name, pattern), tensor in zip(pairs, tensors, strict=True):
            one.add_tensor(target, name, pattern, tensor)
        tensors.clear()  # the rule drops each as soon as it is used
        made = one.convert(target, model=module, config=module.config)
        return {rename(name): x[0] if isinstance(x, list) else x for name, x in made.items()}

    return convert


# --- what a library leaves out ----------------------------------------------------------------------------------------
def not_saved(module: Any, names: Names) -> set[str]:
    """Returns names that the library does not write: those that it says, and all but one of the same tensor."""
    by_first: dict[str, list[str]] = {}
    for name, first in names.stored.items():
        by_first.setdefault(first, []).append(name)
    tied = getattr(module, "all_tied_weights_keys", {})
    kept = {next((name for name in same if name not in tied), same[0]) for same in by_first.values()}
    return set(names.stored) - kept | set(getattr(module, "_keys_to_ignore_on_save", None) or ())


def may_be_missing(module: Any, name: str) -> bool:
    """Returns whether the library does without an array of this name."""
    return _matches(getattr(module, "_keys_to_ignore_on_load_missing", None), name)


def may_be_unexpected(module: Any, name: str) -> bool:
    """Returns whether the library takes no notice of an array of this name in files."""
    if is_of_transformers(module) and re.search(r"rotary_emb\.inv_freq$|(^|\.)position_ids$", name):
        return True  # buffers of older versions
    return _matches(getattr(module, "_keys_to_ignore_on_load_unexpected", None), name)


def _matches(patterns: Iterable[str] | None, name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())


# --- files beside the weights -----------------------------------------------------------------------------------------
WEIGHTS = "model.safetensors"


def files_in(folder: Path) -> list[Path]:
    """Returns the files with the weights of a folder: those of the library if it has written some, else all."""
    index = folder / f"{WEIGHTS}.index.json"
    if index.exists():
        import json

        return sorted({folder / name for name in json.loads(index.read_bytes())["weight_map"].values()})
    return [folder / WEIGHTS] if (folder / WEIGHTS).exists() else sorted(folder.glob("*.safetensors"))


def write_configuration(module: Any, folder: Path, dtype: str) -> None:
    """Writes what `from_pretrained` reads beside the weights, which are of this dtype."""
    if not is_of_transformers(module):
        return
    config = copy.deepcopy(module.config)
    config.dtype, config.architectures = dtype, [type(module).__name__]
    config.save_pretrained(folder)
    if module.can_generate():
        module.generation_config.save_pretrained(folder)
