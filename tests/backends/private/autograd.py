"""Rows of autograd, of modes, and of tensors without data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

from tests.backends.private.rows import promise

_C: Any = torch._C


def in_backward(ask: Callable[[], Any], *, retain: bool = False) -> Any:
    """Returns what `ask` returns during a backward."""
    found: list[Any] = []
    with torch.enable_grad():  # a backward itself runs without
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        y.register_hook(lambda _: found.append(ask()))
        y.sum().backward(retain_graph=retain)
    return found[0]


@promise("is -1 outside of a backward, and another number in each", "torch._C._current_graph_task_id")
def graph_task() -> None:
    ask = torch._C._current_graph_task_id
    nested = in_backward(lambda: (ask(), in_backward(ask), ask()))
    assert ask() == -1
    assert nested[0] == nested[2] != nested[1] != -1


@promise("tells whether the running backward keeps its graph", "torch._C._autograd._get_current_graph_task_keep_graph")
def keep_graph() -> None:
    ask = _C._autograd._get_current_graph_task_keep_graph
    assert [in_backward(ask, retain=retain) for retain in (True, False)] == [True, False]


@promise(
    "returns the innermost pair of hooks, even while they are ignored, and None without any",
    "torch._C._autograd._top_saved_tensors_default_hooks",
)
def top_hooks() -> None:
    ask, hooks = _C._autograd._top_saved_tensors_default_hooks, (lambda x: x, lambda x: x)
    assert not ask(True)
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        assert tuple(ask(True)) == hooks
    assert not ask(True)


@promise(
    "calls back once, when the backward has ended and before it returns",
    "torch.autograd.Variable._execution_engine.queue_callback",
)
def queue_callback() -> None:
    order: list[str] = []
    engine = cast(Any, torch.autograd.Variable._execution_engine)
    x = torch.ones(2, requires_grad=True)
    middle = x * 2
    last = middle * 3
    last.register_hook(lambda _: engine.queue_callback(lambda: order.append("end")))
    middle.register_hook(lambda _: order.append("middle"))
    last.sum().backward()
    assert order == ["middle", "end"]


@promise("is None, but in a transform of torch.func", "torch._C._functorch.peek_interpreter_stack")
def interpreter_stack() -> None:
    found: list[bool] = []
    ask = _C._functorch.peek_interpreter_stack
    torch.func.vmap(lambda x: (found.append(ask() is not None), x)[1])(torch.ones(2))
    assert found == [True]
    assert ask() is None


@promise("tells whether a profiler records", "torch.autograd.profiler._is_profiler_enabled")
def profiler() -> None:
    from torch.autograd import profiler

    before = profiler._is_profiler_enabled
    with profiler.profile():
        during = profiler._is_profiler_enabled
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        new = profiler._is_profiler_enabled
    assert [before, during, new, profiler._is_profiler_enabled] == [False, True, True, False]


@promise(
    "computes shapes of abstract tensors, beside real ones",
    *("torch._subclasses.fake_tensor.FakeTensor", "torch._subclasses.fake_tensor.FakeTensorMode"),
)
def fake() -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    real = torch.ones(2, 3)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(real)
        y = x @ torch.ones(3, 4) + torch.zeros(4)
        z = x + real
    assert all(isinstance(t, FakeTensor) for t in (x, y, z))
    assert (y.shape, y.dtype, y.device) == ((2, 4), torch.float32, torch.device("cpu"))


@promise(
    "is raised where code asks for a value, or for a shape that depends on values, of an abstract tensor",
    "torch._subclasses.fake_tensor.DataDependentOutputException",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException",
)
def fake_values() -> None:
    from torch._subclasses import fake_tensor

    for error, ask in (
        (fake_tensor.DataDependentOutputException, lambda x: bool(x.sum() > 0)),
        (fake_tensor.DynamicOutputShapeException, torch.nonzero),
    ):
        with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True) as mode, pytest.raises(error):
            ask(mode.from_tensor(torch.ones(2)))


@promise(
    "is raised by an operator that cannot compute shapes",
    "torch._subclasses.fake_tensor.UnsupportedOperatorException",
)
def fake_unsupported() -> None:
    from torch._subclasses import fake_tensor

    library = torch.library.Library("hpfunc_contract", "FRAGMENT")
    library.define("no_shapes(Tensor x) -> Tensor")
    library.impl("no_shapes", lambda x: x.clone(), "CPU")
    try:
        with fake_tensor.FakeTensorMode() as mode, pytest.raises(fake_tensor.UnsupportedOperatorException):
            torch.ops.hpfunc_contract.no_shapes(mode.from_tensor(torch.ones(2)))
    finally:
        library._destroy()


@promise(
    "sees every operator, those of its own calls not; and can be left for a while",
    *("torch.utils._python_dispatch.TorchDispatchMode", "torch.utils._python_dispatch._disable_current_modes"),
)
def dispatch_mode() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

    class Listing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.overloadpacket.__name__)
            _ = torch.ones(1) + 1
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    x = torch.ones(2)
    with Listing():
        x.mul(2)
        with _disable_current_modes():
            x.add(2)
        x.exp()
    assert seen == ["mul", "exp"]


@promise("tells tensors that wrap others", "torch.utils._python_dispatch.is_traceable_wrapper_subclass")
def wrapper() -> None:
    from torch.testing._internal.two_tensor import TwoTensor
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass as wraps

    found = [wraps(x) for x in (TwoTensor(torch.ones(2), torch.ones(2)), nn.Parameter(torch.ones(2)), torch.ones(2))]
    assert found == [True, False, False]
