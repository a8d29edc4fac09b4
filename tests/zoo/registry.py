"""The architectures of the zoo, by name: ``"task:model"``."""

from __future__ import annotations

from collections.abc import Iterable

from tests.zoo import from_diffusers, from_timm, torchvision_operators
from tests.zoo.architecture import Architecture
from tests.zoo.names import NAMES_OF_TRANSFORMERS

assert torchvision_operators  # imported here, because all three libraries import torchvision where it is installed


def names(sources: Iterable[str] = ("transformers", "timm", "diffusers")) -> list[str]:
    """Returns the names of these sources, in the order of the table."""
    found: list[str] = []
    for source in sources:
        if source == "transformers":
            found += [f"{task}:{model}" for task, models in NAMES_OF_TRANSFORMERS.items() for model in models.split()]
        else:
            found += [f"{source}:{model}" for model in {"timm": from_timm, "diffusers": from_diffusers}[source].MODELS]
    return found


def find(name: str) -> Architecture:
    """Returns the architecture of a name. Its library is imported here.

    Raises:
        KeyError: there is none.
    """
    task, _, model = name.partition(":")
    if task == "timm":
        return from_timm.architecture(model)
    if task == "diffusers":
        return from_diffusers.architecture(model)
    from tests.zoo import from_transformers  # it imports transformers, which takes seconds

    return from_transformers.architecture(task, model)
