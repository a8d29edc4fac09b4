"""Adapters of peft in files of its own, without the model that they adapt.

# Note [A copy for peft]
peft saves the adapter of a module that holds its values, and loads one into such a module. Each of its methods has
names of its own, and some compute what they save. So peft gets a copy of the module, in which only the tensors of the
adapter have values, and its own functions do the rest. Which these are it tells in a first run, on a copy without any.
"""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from .._errors import CheckpointError, message
from ..backends.torch import private

Tensor = torch.Tensor
WEIGHTS, CARD = "adapter_model.safetensors", "README.md"


def _copied(module: Any, value_of: Callable[[str], Tensor | None]) -> Any:
    """Returns a copy of a module with these values, and buffers of its own; other tensors have no data."""
    memo: dict[int, Any] = {}
    for name, x in module.named_parameters():
        value = value_of(name)
        value = torch.empty_like(x, device="meta") if value is None else value
        memo[id(x)] = torch.nn.Parameter(value, requires_grad=x.requires_grad)
    for name, x in module.named_buffers():
        value = value_of(name)
        memo[id(x)] = x.detach().clone() if value is None else value
    return copy.deepcopy(module, memo)


def save(function: str, module: Any, value_of: Callable[[str], Tensor | None], folder: Path) -> None:
    """Writes the active adapter of a module as peft does, into a folder. `value_of` returns whole tensors by name.

    Raises:
        CheckpointError: values of the adapter are missing.
        OSError: it cannot be written.
    """
    adapter = module.active_adapter
    # Those that do not train belong to the adapter in few cases, so their values are asked for only then.
    trained = {name for name, x in module.named_parameters() if x.requires_grad}
    found = {name: value for name in sorted(trained) if (value := value_of(name)) is not None}
    needed = _needed(module, found, adapter)
    found |= {name: value for name in sorted(needed) if (value := value_of(name)) is not None}
    if missing := sorted(_needed(module, found, adapter)):
        hint = "save the weights that train: hpfunc.partition(params, hpfunc.is_trainable)[0]"
        raise CheckpointError(message(function, "the checkpoint has not all of the adapter", missing, hint=hint))
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if (folder / CARD).exists():  # what somebody has written into it stays
        shutil.copy(folder / CARD, partial)
    _copied(module, found.get).save_pretrained(str(partial), selected_adapters=[adapter])
    folder.mkdir(parents=True, exist_ok=True)
    # peft writes an adapter that is not called "default" into a folder of its name.
    for made in (partial if adapter == "default" else partial / adapter, partial):
        for file in made.iterdir():
            if file.is_file():
                file.replace(folder / file.name)
    shutil.rmtree(partial)


def _needed(module: Any, found: Mapping[str, Tensor], adapter: str) -> set[str]:
    """Returns the names of tensors without values that peft would save."""
    from peft import get_peft_model_state_dict

    one = _copied(module, found.get)
    state = one.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = get_peft_model_state_dict(one, state_dict=state, adapter_name=adapter)
    empty = {id(x) for x in made.values() if x.is_meta}
    needed = {name for name, x in state.items() if id(x) in empty}
    if empty and not needed:  # computed from what has no values
        return {name for name, x in one.named_parameters() if x.requires_grad and x.is_meta}
    return needed


def load(function: str, module: Any, folder: Path) -> dict[str, Tensor]:
    """Returns the tensors that an adapter in peft's files has for a module, by name.

    Raises:
        CheckpointError: there is no adapter, or it is not one of the module.
    """
    if not (folder / WEIGHTS).exists():
        hint = "the model that it adapts is read before it is adapted: module=model.get_base_model()"
        raise CheckpointError(message(function, f"no {WEIGHTS} in {folder}", hint=hint))
    from peft import load_peft_weights

    stored = load_peft_weights(str(folder), device="cpu")
    try:
        loaded = _loaded(module, stored, {}).items()  # see Note [A copy for peft]
        found = _loaded(module, stored, {name: torch.empty_like(x, device="cpu") for name, x in loaded})
    except (KeyError, RuntimeError, ValueError) as error:
        rule = f"peft cannot load the adapter of {folder}: {type(error).__name__} {error}"
        hint = "is it one of this module? Of a prompt encoder peft keeps what it computes, not its own weights"
        raise CheckpointError(message(function, rule, hint=hint)) from error
    return {name: x.detach() for name, x in found.items()}


def _loaded(module: Any, stored: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Loads an adapter into a copy of a module with these values, and returns the tensors that peft wrote into."""
    from peft import set_peft_model_state_dict

    one = _copied(module, values.get)
    tensors = dict([*one.named_parameters(), *one.named_buffers()])
    before = {name: private.version_of(x) for name, x in tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tensors without data
        result = set_peft_model_state_dict(one, dict(stored), module.active_adapter)
    if unknown := [name for name in result.unexpected_keys if name != "prompt_embeddings"]:
        raise KeyError(", ".join(unknown))
    return {name: x for name, x in tensors.items() if private.version_of(x) != before[name]}


def wanted(module: Any) -> set[str]:
    """Returns the names that an adapter has to have: of all that trains."""
    return {name for name, x in module.named_parameters() if x.requires_grad}
