"""The private names of torch that hpfunc uses. No other file of hpfunc uses one.

torch may change these in any version. So all are looked up here, once, and a torch that lacks some of them is refused
by one error with their names. What hpfunc relies on of each is told, and tested, in `tests/backends/private`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.autograd import profiler

from ..lookup import Lookup

LOOKUP = Lookup("torch", torch.__version__)
_find = LOOKUP.find
_getter = LOOKUP.getter

# --- tensors ----------------------------------------------------------------------------------------------------------
version_of = _getter("torch", "Tensor._version")
base_of = _getter("torch", "Tensor._base")
is_view = _find("torch", "Tensor._is_view")
use_count = _find("torch", "Tensor._use_count")
make_subclass = _find("torch", "Tensor._make_subclass")
storage_id = _getter("torch", "UntypedStorage._cdata")
storage_use_count = _find("torch._C", "_storage_Use_Count")
no_torch_function = _find("torch._C", "DisableTorchFunctionSubclass")
neg_view = _find("torch", "_neg_view")
internal_overlap = _find("torch", "_debug_has_internal_overlap")


def mark_parameter(tensor: Any, is_param: bool) -> None:
    """Says whether a tensor of a subclass is a parameter for isinstance."""
    tensor._is_param = is_param


# --- lists of tensors -------------------------------------------------------------------------------------------------
foreach_add = _find("torch", "_foreach_add")
foreach_add_ = _find("torch", "_foreach_add_")
foreach_addcdiv_ = _find("torch", "_foreach_addcdiv_")
foreach_addcmul_ = _find("torch", "_foreach_addcmul_")
foreach_copy_ = _find("torch", "_foreach_copy_")
foreach_div_ = _find("torch", "_foreach_div_")
foreach_lerp_ = _find("torch", "_foreach_lerp_")
foreach_mul = _find("torch", "_foreach_mul")
foreach_mul_ = _find("torch", "_foreach_mul_")
foreach_norm = _find("torch", "_foreach_norm")
foreach_sqrt = _find("torch", "_foreach_sqrt")

# --- autograd ---------------------------------------------------------------------------------------------------------
graph_task = _find("torch._C", "_current_graph_task_id")
keeps_graph = _find("torch._C._autograd", "_get_current_graph_task_keep_graph")
enclosing_hooks = _find("torch._C._autograd", "_top_saved_tensors_default_hooks")
queue_callback = _find("torch.autograd", "Variable._execution_engine.queue_callback")
interpreter_stack = _find("torch._C._functorch", "peek_interpreter_stack")
_find("torch.autograd.profiler", "_is_profiler_enabled")


def is_profiling() -> bool:
    """Returns whether a profiler records."""
    return profiler._is_profiler_enabled


# --- modes and abstract tensors ---------------------------------------------------------------------------------------
FakeTensor = _find("torch._subclasses.fake_tensor", "FakeTensor")
FakeTensorMode = _find("torch._subclasses.fake_tensor", "FakeTensorMode")
DataDependentOutputException = _find("torch._subclasses.fake_tensor", "DataDependentOutputException")
DynamicOutputShapeException = _find("torch._subclasses.fake_tensor", "DynamicOutputShapeException")
UnsupportedOperatorException = _find("torch._subclasses.fake_tensor", "UnsupportedOperatorException")
TorchDispatchMode = _find("torch.utils._python_dispatch", "TorchDispatchMode")
disable_current_modes = _find("torch.utils._python_dispatch", "_disable_current_modes")
is_wrapper = _find("torch.utils._python_dispatch", "is_traceable_wrapper_subclass")

# --- trees, modules, optimizers, the compiler -------------------------------------------------------------------------
SUPPORTED_NODES = _find("torch.utils._pytree", "SUPPORTED_NODES")
register_pytree_node = _find("torch.utils._pytree", "register_pytree_node")
tree_flatten = _find("torch.utils._pytree", "tree_flatten")
tree_map_only = _find("torch.utils._pytree", "tree_map_only")
tree_unflatten = _find("torch.utils._pytree", "tree_unflatten")
parameters_of = _getter("torch.nn", "Module()._parameters")
buffers_of = _getter("torch.nn", "Module()._buffers")
_call_in_place = _getter("torch.nn", "Module()._compiled_call_impl")
_find("torch.amp", "GradScaler._found_inf_per_device")
_set_strategy = _find("torch._C._dynamo.eval_frame", "set_code_exec_strategy")
_strategy = _find("torch._C._dynamo.eval_frame", "_FrameExecStrategy")
_skip = _find("torch._C._dynamo.eval_frame", "_FrameAction.SKIP")


def reset_method(module: Any) -> Any:
    """Returns what initialises a module, by its public or its private name; None if it has neither."""
    return getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))


def found_inf(scaler: Any, optimizer: Any) -> dict[Any, Any]:
    """Returns the tensors that say whether a `GradScaler` skips a step, by device."""
    return scaler._found_inf_per_device(optimizer)


def run_uncompiled(fn: Any, reason: str) -> None:
    """Makes a function run as it is when a compiled function calls it. See Note [Compiled callers]."""
    fn._torchdynamo_disable, fn._torchdynamo_disable_msg = True, reason  # the tracer looks at these,
    _set_strategy(fn.__code__, _strategy(_skip, _skip))  # and a frame that begins at the strategy of its code


def compiled(module: Any) -> Any:
    """Returns the module that `torch.compile` made this one of; None for any other. The compiler is not imported."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return module._orig_mod if compiler is not None and isinstance(module, compiler.OptimizedModule) else None


def is_compiled_in_place(module: Any) -> bool:
    """Returns whether `Module.compile` was called. A copy of the module is not compiled."""
    return _call_in_place(module) is not None


# --- groups -----------------------------------------------------------------------------------------------------------
coalescing = _find("torch.distributed", "_coalescing_manager")
default_group = _find("torch.distributed.distributed_c10d", "_get_default_group")
default_store = _find("torch.distributed.distributed_c10d", "_get_default_store")
_new_group = _find("torch.distributed.distributed_c10d", "_new_process_group_helper")
_world = _find("torch.distributed.distributed_c10d", "_world")
_find("torch.distributed.distributed_c10d", "_world.pg_map")
_find("torch.distributed.distributed_c10d", "_world.pg_group_ranks")
_devices_of = _getter("torch.distributed", "ProcessGroup._device_types")
_library_of = _find("torch.distributed", "ProcessGroup._get_backend")
_gloo_options = _find("torch.distributed", "ProcessGroupGloo._Options")
_find("torch.distributed", "ProcessGroupGloo._Options._devices")
_find("torch.distributed", "ProcessGroupGloo._Options._threads")
_find("torch.distributed", "ProcessGroupGloo._Options._timeout")


def new_group(
    ranks: list[int], place: int, name: str, description: str, backend: str, timeout: timedelta, options: Any
) -> Any:
    """Returns a new group of these ranks, of which this one is at a place, under a name that they all give."""
    store = _world.pg_map[default_group()][1]  # at which the processes met
    given = {"backend_options": options, "timeout": timeout, "group_desc": description}
    group, _ = _new_group(len(ranks), place, ranks, backend, store, name, **given)
    _world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


def knows_group(group: Any) -> bool:
    """Returns whether a group has not been destroyed."""
    return group in _world.pg_map


def libraries_of(group: Any) -> list[Any]:
    """Returns the library of each kind of device of a group."""
    return [_library_of(group, device) for device in _devices_of(group)]


@contextmanager
def aborting(libraries: Sequence[Any]) -> Iterator[None]:
    """Within it NCCL's communicators are aborted together: in turn, one could wait for a collective of another one."""
    nccl = next((each for each in libraries if hasattr(each, "_group_start")), None)
    if nccl is not None:
        nccl._group_start()
    try:
        yield
    finally:
        if nccl is not None:
            nccl._group_end()


def gloo_options(devices: Sequence[Any], threads: int, timeout: timedelta) -> Any:
    """Returns the options of a gloo group."""
    options = _gloo_options()
    options._devices, options._threads, options._timeout = devices, threads, timeout
    return options


LOOKUP.end()
