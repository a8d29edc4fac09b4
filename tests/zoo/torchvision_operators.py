"""Lets torchvision load beside a torch from another index than its own.

torchvision of PyPI is compiled for torch with CUDA. Beside the build for CPUs its library of operators does not load,
which it allows; but it registers shape rules for two of them all the same, and that fails where nothing has defined
these. No model of the zoo calls them.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def _defined() -> torch.library.Library | None:
    spec = find_spec("torchvision")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    try:
        for file in (file for folder in folders for file in Path(folder).glob("_C.*")):
            torch.ops.load_library(file)
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for schema in _OPERATORS:
            library.define(schema)
        return library
    return None


LIBRARY = _defined()  # operators live as long as this
