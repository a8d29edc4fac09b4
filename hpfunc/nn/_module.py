"""From a module to a function and its parameters, and back."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from .._values.argument_names import check_mesh
from .._values.mesh import Mesh
from ._function import ModuleFunction

Tensor = Any


def _made_by(framework: str) -> Any:
    return importlib.import_module(f".{framework}.module", __package__)


def _of(module: Any) -> Any:
    """Returns the code for a module's framework. A value that is not a module gets torch's, which refuses it."""
    mindspore = sys.modules.get("mindspore")
    return _made_by("mindspore" if mindspore is not None and isinstance(module, mindspore.nn.Cell) else "torch")


def from_module(module: Any, units: Any = None, *, remat: bool = False) -> tuple[ModuleFunction, dict[str, Tensor]]:
    """Returns a module as a pure function, and its parameters. The module is not changed.

    Each chosen module is a unit (see `unit`), and so is each smallest remaining module with parameters of its own. A
    parameter that is used outside of the module that it belongs to, or that belongs to a module around units, is
    gathered there by itself, as a unit with its name. ``print(apply)`` lists the units with their sizes.

    Args:
        module: a `torch.nn.Module`, or a `mindspore.nn.Cell`.
        units: a class, a module, a pattern of dotted paths (``"layers.*"``), a function of a path and a module that
            returns a bool, or a list of such. Default: the repeated blocks, which are the outermost modules with parts
            of their own whose class stands at least twice in a ModuleList, Sequential or ModuleDict (CellList,
            SequentialCell or CellDict). What holds more than a fifth of the bytes is divided where that is possible:
            the stages of a vision model into their blocks, and a block far larger than the others into its parts.
        remat: recompute units in backward instead of saving their activations; see `unit`.

    Returns:
        ``(apply, params)``: see `ModuleFunction`; and a dict by path, as in ``module.named_parameters()`` or
        ``cell.parameters_and_names()``, where a tied parameter stands once. Its tensors share the memory of the module
        until `shard` cuts them. They are parameters with the ``requires_grad`` of the module's: an array that is cut
        from one without gradient is frozen (see `freeze`). Call ``requires_grad_`` on the module before this.
        Moving statistics, which MindSpore keeps as parameters without gradient, are buffers.

    Raises:
        SpecError: an entry of `units` selects nothing, or units overlap.
        UsageError: the module has parameters without shape (lazy ones), or two of them in the same memory, cannot be
            copied, or a unit has no ``forward`` (``construct``); a cell keeps parameters in a list, has a ``bprop``, or
            recomputes by itself.

    Communication: none.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    >>> apply, params = hpfunc.from_module(model)
    >>> print(apply)
    Sequential.forward: 2 units: 2 Linear (0 to 2) [20 B to 48 B, 29 to 71 % each]
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> params = hpfunc.shard(params, mesh, hpfunc.P("shard"))
    >>> apply(params, torch.ones(3, 2)).shape
    torch.Size([3, 1])
    """
    return _of(module).from_module(module, units, remat)


def init_module(
    source: Any,
    mesh: Mesh,
    specs: Any,
    units: Any = None,
    *,
    init_fn: Callable[[Any], None] | None = None,
    remat: bool = False,
) -> tuple[ModuleFunction, dict[str, Any]]:
    """Returns a module as a pure function, and its sharded parameters, without the whole model on any rank.

    Values are made weight by weight, as in `init`. They are the values that a plain call of the function gives with the
    same seed.

    Args:
        source: a function without arguments that builds the module, the same on all ranks, in its dtype (torch cannot
            convert a module that has no data: no ``.to()`` in it); or a torch module on the meta device.
        mesh: where the parameters lie.
        specs: one `P`, or a dict of them by path.
        units: as for `from_module`.
        init_fn: for a module on the meta device: called with each part of it, inner ones first, as by
            ``module.apply(init_fn)``, it initialises what the part has of its own; default: ``reset_parameters``.
        remat: as for `from_module`.

    Returns:
        ``(apply, params)``, as `from_module`, with a `ShardedArray` for each parameter.

    Raises:
        UsageError: a parameter or buffer of a module on the meta device was never written.
        SpecError, LeafError, AgreementError, LoweringError: as `init`.

    Communication: a digest.

    >>> import torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> apply, params = hpfunc.init_module(lambda: torch.nn.Linear(2, 4), mesh, hpfunc.P("shard"))
    >>> params["weight"]
    ShardedArray(shape=(4, 2), dtype=torch.float32, spec=P('shard'))
    """
    check_mesh("hpfunc.init_module", mesh, "hpfunc.init_module(source, mesh, specs)")
    return _made_by(mesh.framework).init_module(source, mesh, specs, units, init_fn, remat)


def to_module(params: Mapping[str, Any], module: Any, buffers: Mapping[str, Tensor] | None = None) -> Any:
    """Writes weights into a module, which then computes with them, and returns it.

    Args:
        params: `ShardedArray` or plain tensors by path, for all parameters of the module.
        module: a `torch.nn.Module` or `mindspore.nn.Cell`, such as the one that `from_module` was given.
        buffers: plain tensors by path; default: the buffers of the module are not changed.

    Raises:
        LeafError: paths or shapes are not those of the module.
        UsageError: the module is on the meta device, or has parameters without shape.

    Communication: a digest and an all-gather for each array. One is whole at a time, beside the module itself.

    >>> import torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> params = hpfunc.shard({"weight": torch.ones(1, 2)}, mesh, hpfunc.P("shard"))
    >>> hpfunc.to_module(params, model).weight.data
    tensor([[1., 1.]])
    """
    return _of(module).to_module(params, module, buffers)
