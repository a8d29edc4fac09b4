"""Rows of trees, modules, optimizers and the compiler."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hpfunc.backends.torch import private
from tests.backends.private.rows import promise


@promise(
    "knows a type that was registered with a pair of functions",
    *("torch.utils._pytree.SUPPORTED_NODES", "torch.utils._pytree.register_pytree_node"),
)
def register_pytree() -> None:
    class Pair:
        def __init__(self, *parts: Any) -> None:
            self.parts = parts

    pytree.register_pytree_node(Pair, lambda x: (list(x.parts), "meta"), lambda parts, meta: Pair(*parts, meta))
    try:
        assert Pair in pytree.SUPPORTED_NODES
        assert pytree.tree_map(lambda x: x + 1, Pair(1, 2)).parts == (2, 3, "meta")
    finally:
        pytree._deregister_pytree_node(Pair)


@promise(
    "takes trees apart and puts them together",
    *("torch.utils._pytree.tree_flatten", "torch.utils._pytree.tree_unflatten", "torch.utils._pytree.tree_map_only"),
)
def trees() -> None:
    tree = [1, {"a": (2.0, {3})}]
    leaves, spec = pytree.tree_flatten(tree, is_leaf=lambda x: not isinstance(x, tuple | list | dict))
    assert leaves == [1, 2.0, {3}]
    assert pytree.tree_unflatten(leaves, spec) == tree
    assert pytree.tree_map_only(float, lambda x: x + 1, tree) == [1, {"a": (3.0, {3})}]


@promise("holds a module's own tensors by name", "torch.nn.Module()._parameters", "torch.nn.Module()._buffers")
def slots() -> None:
    norm = cast(Any, nn.BatchNorm1d(2))
    slots = vars(norm)["_parameters"], vars(norm)["_buffers"]
    assert list(slots[0]) == ["weight", "bias"]
    slots[0]["weight"], slots[1]["running_mean"] = nn.Parameter(torch.zeros(2)), torch.full((2,), 5.0)
    assert norm.weight.tolist() == [0.0, 0.0]
    assert norm.running_mean.tolist() == [5.0, 5.0]


@promise("initialises a module that has no reset_parameters", "*._reset_parameters")
def reset_parameters() -> None:
    attention = cast(Any, nn.MultiheadAttention(4, 2))
    assert not hasattr(attention, "reset_parameters")
    attention.in_proj_weight.detach().fill_(9.0)
    attention._reset_parameters()
    assert not (attention.in_proj_weight == 9.0).any()


@promise("returns the tensors that say whether GradScaler skips a step", "torch.amp.GradScaler._found_inf_per_device")
def found_inf() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    [found] = scaler._found_inf_per_device(optimizer).values()
    assert not found.item()
    found.copy_(torch.ones_like(found))
    scaler.step(optimizer)
    assert weight.tolist() == [1.0, 1.0], "the step was not skipped"


@promise(
    "makes a code object run as it is",
    "torch._C._dynamo.eval_frame._FrameAction.SKIP",
    "torch._C._dynamo.eval_frame._FrameExecStrategy",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
)
def skipped_code() -> None:
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    assert [strategy.cur_action, strategy.recursive_action] == [skip, skip]

    def plain(x: int) -> int:
        return x + 1

    eval_frame.set_code_exec_strategy(plain.__code__, strategy)
    assert plain(1) == 2


@promise("is the module that `torch.compile` was given, and a part of what it returned", "*._orig_mod")
def compiled_module() -> None:
    module = torch.nn.Linear(1, 1)
    compiled: Any = torch.compile(module, backend="eager")
    assert private.compiled(compiled) is module
    assert dict(compiled.named_children()) == {"_orig_mod": module}
    assert "forward" in vars(compiled)
    assert private.compiled(module) is None


@promise("says that a module was compiled in place, which a copy is not", "torch.nn.Module()._compiled_call_impl")
def compiled_in_place() -> None:
    module = torch.nn.Linear(1, 1)
    assert not private.is_compiled_in_place(module)
    module.compile(backend="eager")
    assert private.is_compiled_in_place(module)
    assert not private.is_compiled_in_place(copy.deepcopy(module))


@promise("is asked by the compiler's tracer of a function that it is about to enter", "*._torchdynamo_disable")
def disabled() -> None:
    tracer = (Path(torch.__file__).parent / "_dynamo/symbolic_convert.py").read_text()
    assert re.search(r'get_function\(\),\s*"_torchdynamo_disable",\s*False', tracer)


@promise("is the reason that the compiler's tracer gives for it", "*._torchdynamo_disable_msg")
def disabled_message() -> None:
    tracer = (Path(torch.__file__).parent / "_dynamo/symbolic_convert.py").read_text()
    assert re.search(r'get_function\(\),\s*"_torchdynamo_disable_msg",\s*None', tracer)
