"""The private names of MindSpore that hpfunc uses: no other file of hpfunc uses one. See `backends.lookup`."""

from __future__ import annotations

from typing import Any

import mindspore

from ..lookup import Lookup

LOOKUP = Lookup("mindspore", mindspore.__version__)
_find = LOOKUP.find

Function = _find("mindspore.common._grad_function", "_Function")
executor = _find("mindspore.graph.api", "_pynative_executor")
_find("mindspore.graph.api", "_pynative_executor.clear_res")
_find("mindspore.graph.api", "_pynative_executor.grad_flag")
_find("mindspore.graph.api", "_pynative_executor.is_saved_tensor_hook_active")
_find("mindspore.graph.api", "_pynative_executor.requires_grad")
_find("mindspore.graph.api", "_pynative_executor.set_grad_flag")
_find("mindspore.graph.api", "_pynative_executor.sync")
_find("mindspore.nn", "Cell()._params")
_find("mindspore.nn", "Cell()._buffers")
_find("mindspore.nn", "Cell()._init_flag")
TABLES = ("_params", "_buffers")
"""The attributes in which a cell holds its own parameters and buffers."""
requires_grad = LOOKUP.getter("mindspore", "Tensor._requires_grad")
_recompute_cell = LOOKUP.getter("mindspore.nn", "Cell()._recompute_cell")


def params_of(cell: Any) -> Any:
    """Returns a cell's own parameters, by name."""
    return vars(cell)["_params"]


def buffers_of(cell: Any) -> Any:
    """Returns a cell's own buffers, by name."""
    return vars(cell)["_buffers"]


def put_params(cell: Any, params: Any) -> None:
    """Gives a cell other parameters, which it takes for initialised."""
    vars(cell).update({"_params": params, "_init_flag": True})


def is_recomputed(cell: Any) -> bool:
    """Returns whether somebody has called the `recompute` of a cell."""
    return _recompute_cell(cell) is not None


LOOKUP.end()
