"""What hpfunc relies on of each private name of torch: one row for each, which a new version of torch has to pass.

torch may change these without a word. A version that does fails a row, which says what hpfunc relied on, and where. The
rows need neither an accelerator nor another process, but for those of groups, which run on two ranks.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from hpfunc.backends.torch import borrowed, groups
from tests.backends.private_names import private_names
from tests.helpers.ranks import Pool

USES = private_names(dir(torch.Tensor))
_C: Any = torch._C
Check = Callable[[], None]


@dataclass(frozen=True)
class Row:
    """One private name: what hpfunc relies on, and a check of that, which raises."""

    promise: str
    check: Check
    on_ranks: bool = False


ROWS: dict[str, Row] = {}


def promise(text: str, *names: str, on_ranks: bool = False) -> Callable[[Check], Check]:
    def keep(check: Check) -> Check:
        ROWS.update({name: Row(text, check, on_ranks) for name in names})
        return check

    return keep


def broken(name: str, error: BaseException) -> str:
    """Returns the sentence for a name that does not do what hpfunc relies on."""
    places = ", ".join(f"hpfunc/{use}" for use in USES.get(name, ()))
    found = f"{type(error).__name__}: {error}".strip()
    return f"torch {torch.__version__}: {name.removeprefix('*.')} {ROWS[name].promise} no more ({found}); see {places}"


# --- tensors ----------------------------------------------------------------------------------------------------------
class Named(torch.Tensor):
    """A subclass that counts the calls of its hook."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


@promise("counts writes, in all aliases alike, and cannot be read of a tensor of inference mode", "*._version")
def version() -> None:
    x = torch.ones(2)
    alias, before = x.detach(), x._version
    x.add_(1)
    assert x._version == alias._version == before + 1
    with torch.inference_mode():
        made = torch.ones(2)
    with pytest.raises(RuntimeError):
        _ = made._version


@promise("tells a view and its base", "*._base", "*._is_view")
def base() -> None:
    x = torch.ones(4)
    view = x[1:]
    assert view._is_view()
    assert view._base is x
    assert not x._is_view()
    assert x._base is None
    assert not x.detach().clone()._is_view()


@promise("of a storage is the same number for all tensors in the same memory, and no other", "*._cdata")
def cdata() -> None:
    x, other = torch.ones(4), torch.ones(4)
    assert x.untyped_storage()._cdata == x[1:].view(3, 1).untyped_storage()._cdata
    assert x.untyped_storage()._cdata != other.untyped_storage()._cdata


@promise("counts the holders of a gradient, so that one that somebody else holds is noticed", "*._use_count")
def use_count() -> None:
    x = cast(Any, torch.ones(2, requires_grad=True))
    before = x._use_count()
    kept = x * x
    assert x._use_count() > before, kept
    assert borrowed._alone(), "shared gradients and lent ones have the same counts"


@promise("counts the tensors over a storage", "torch._C._storage_Use_Count")
def storage_use_count() -> None:
    x = torch.ones(4)
    storage = x.untyped_storage()
    before = _C._storage_Use_Count(storage._cdata)
    alias = x.detach()
    assert _C._storage_Use_Count(storage._cdata) == before + 1, alias


@promise("makes a tensor of a subclass, over the same memory", "*._make_subclass")
def make_subclass() -> None:
    x = torch.ones(2)
    made = torch.Tensor._make_subclass(Named, x, True)
    assert type(made) is Named
    assert made.requires_grad
    assert made.data_ptr() == x.data_ptr()


@promise("makes a tensor of a subclass a parameter for isinstance", "*._is_param")
def is_param() -> None:
    made = cast(Any, torch.Tensor._make_subclass(Named, torch.ones(2), True))
    assert not isinstance(made, nn.Parameter)
    made._is_param = True
    assert isinstance(made, nn.Parameter)


@promise("switches a subclass's __torch_function__ off", "torch._C.DisableTorchFunctionSubclass")
def no_torch_function() -> None:
    made = torch.Tensor._make_subclass(Named, torch.ones(2), False)
    before = Named.calls
    with torch._C.DisableTorchFunctionSubclass():
        made.exp()
    assert Named.calls == before
    made.exp()
    assert Named.calls > before


@promise("returns a lazily negated view of the same memory", "torch._neg_view")
def neg_view() -> None:
    x = torch.ones(2)
    view = torch._neg_view(x)
    assert view.is_neg()
    assert view.data_ptr() == x.data_ptr()
    assert view.resolve_neg().tolist() == [-1.0, -1.0]


@promise("tells 0: no overlap, 1: overlap, 2: unknown", "torch._debug_has_internal_overlap")
def overlap() -> None:
    tensors = torch.ones(4), torch.ones(1).expand(4), torch.ones(4).as_strided((2, 2), (1, 1))
    assert [torch._debug_has_internal_overlap(x) for x in tensors] == [0, 1, 2]


# --- lists of tensors -------------------------------------------------------------------------------------------------
def pairs() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [torch.arange(1.0, 4.0), torch.full((2, 2), 4.0)], [torch.full((3,), 2.0), torch.full((2, 2), 0.5)]


FOREACH: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "add": (lambda xs, ys: torch._foreach_add(xs, ys, alpha=3.0), lambda x, y: x + 3 * y),
    "add_": (torch._foreach_add_, lambda x, y: x + y),
    "addcdiv_": (lambda xs, ys: torch._foreach_addcdiv_(xs, ys, xs, 2.0), lambda x, y: x + 2 * y / x),
    "addcmul_": (lambda xs, ys: torch._foreach_addcmul_(xs, ys, ys, 2.0), lambda x, y: x + 2 * y * y),
    "copy_": (lambda xs, ys: torch._foreach_copy_(xs, [y.double() for y in ys]), lambda x, y: y),
    "div_": (lambda xs, ys: torch._foreach_div_(xs, 4.0), lambda x, y: x / 4),
    "lerp_": (lambda xs, ys: torch._foreach_lerp_(xs, ys, 0.25), lambda x, y: x + 0.25 * (y - x)),
    "mul": (lambda xs, ys: torch._foreach_mul(xs, 2.0), lambda x, y: x * 2),
    "mul_": (lambda xs, ys: torch._foreach_mul_(xs, 2.0), lambda x, y: x * 2),
    "norm": (lambda xs, ys: torch._foreach_norm(xs, 2, dtype=torch.float64), lambda x, y: x.double().norm()),
    "sqrt": (lambda xs, ys: torch._foreach_sqrt(xs), lambda x, y: x.sqrt()),
}


def foreach(name: str) -> Check:
    def check() -> None:
        (xs, ys), (call, each) = pairs(), FOREACH[name]
        want = [each(x, y) for x, y in zip(xs, ys, strict=True)]
        got = call(xs, ys)
        got = xs if name.endswith("_") else got
        for x, y in zip(got, want, strict=True):
            assert x.dtype == y.dtype
            assert torch.equal(x, y), (x, y)

    return check


for _name in FOREACH:
    promise("does for each tensor what the operator does for one", f"torch._foreach_{_name}")(foreach(_name))


@promise("returns norms in a wider dtype, and the largest element, NaN if there is one", "torch._foreach_norm")
def foreach_norm() -> None:
    foreach("norm")()
    largest = torch._foreach_norm([torch.tensor([1.0, -3.0]), torch.tensor([1.0, torch.nan])], torch.inf)
    assert [str(x.item()) for x in largest] == ["3.0", "nan"]


@promise("adds a list, or a number, to each tensor in place", "torch._foreach_add_")
def foreach_add() -> None:
    foreach("add_")()
    xs = pairs()[0]
    torch._foreach_add_(xs, 1.0)
    assert xs[0].tolist() == [2.0, 3.0, 4.0]


@promise("multiplies by a number, by a tensor, or by a list of numbers", "torch._foreach_mul")
def foreach_mul() -> None:
    foreach("mul")()
    by_tensor, by_list = torch._foreach_mul(pairs()[0], torch.tensor(2.0)), torch._foreach_mul(pairs()[0], [2.0, 3.0])
    assert [by_tensor[0][0].item(), by_list[1][0, 0].item()] == [2.0, 12.0]


# --- autograd ---------------------------------------------------------------------------------------------------------
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


# --- modes and abstract tensors ---------------------------------------------------------------------------------------
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


# --- trees, modules, optimizers, the compiler -------------------------------------------------------------------------
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


@promise("holds a module's own tensors by name", "*._parameters", "*._buffers")
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


@promise("returns the tensors that say whether GradScaler skips a step", "*._found_inf_per_device")
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


@promise("is asked by the compiler's tracer of a function that it is about to enter", "*._torchdynamo_disable")
def disabled() -> None:
    tracer = (Path(torch.__file__).parent / "_dynamo/symbolic_convert.py").read_text()
    assert re.search(r'get_function\(\),\s*"_torchdynamo_disable",\s*False', tracer)


@promise("is the reason that the compiler's tracer gives for it", "*._torchdynamo_disable_msg")
def disabled_message() -> None:
    tracer = (Path(torch.__file__).parent / "_dynamo/symbolic_convert.py").read_text()
    assert re.search(r'get_function\(\),\s*"_torchdynamo_disable_msg",\s*None', tracer)


# --- groups -----------------------------------------------------------------------------------------------------------
@promise("are the options of a gloo group, which take devices, threads and a timeout",
         "*._Options", "*._devices", "*._threads", "*._timeout")  # fmt: skip
def gloo_options() -> None:
    gloo = cast(Any, dist.ProcessGroupGloo)
    options, device = gloo._Options(), gloo.create_device(interface="lo")
    options._devices, options._threads, options._timeout = [device, device], 4, timedelta(seconds=3)
    assert (len(options._devices), options._threads, options._timeout) == (2, 4, timedelta(seconds=3))


def group() -> Any:
    """Returns a new group of this world, as hpfunc makes its groups."""
    ranks, purpose = list(range(dist.get_world_size())), f"contract {len(_torch().pg_names)}"
    name = groups.group_name(ranks, purpose, 0)
    return groups.new_group(ranks, name, purpose, groups.HOST, 20.0, groups.host_options(purpose, 20.0))


def _torch() -> Any:
    return dist.distributed_c10d._world


@promise(
    "is the store at which the processes met", "torch.distributed.distributed_c10d._get_default_store", on_ranks=True
)
def default_store() -> None:
    store = dist.PrefixStore("hpfunc contract", dist.distributed_c10d._get_default_store())
    store.set(f"{dist.get_rank()}", "here")
    store.wait([f"{rank}" for rank in range(dist.get_world_size())])
    assert store.get("1") == b"here"
    assert [store.check([key]) for key in ("0", "nobody")] == [True, False]


@promise(
    "is the group of all ranks, whose device can be read, and set to none",
    "torch.distributed.distributed_c10d._get_default_group",
    on_ranks=True,
)
def default_group() -> None:
    default = cast(Any, dist.distributed_c10d._get_default_group())
    assert default.size() == dist.get_world_size()
    default.bound_device_id = torch.device("cpu", 0)
    assert default.bound_device_id == torch.device("cpu", 0)
    default.bound_device_id = None
    assert default.bound_device_id is None


@promise(
    "makes a group of its own ranks, in their order, under the name that it is given",
    "torch.distributed.distributed_c10d._new_process_group_helper",
    on_ranks=True,
)
def named_groups() -> None:
    ranks = list(range(dist.get_world_size()))[::-1]
    options, name = groups.host_options("contract", 20.0), f"contract/{len(_torch().pg_names)}"
    made = groups.new_group(ranks, name, "contract", groups.HOST, 20.0, options)
    assert made.group_name == name
    assert made.rank() == ranks.index(dist.get_rank())
    total = torch.ones(1)
    dist.all_reduce(total, group=made)
    assert total.item() == dist.get_world_size()


@promise(
    "has the groups that are alive, with their stores, and the names and ranks of each",
    "torch.distributed.distributed_c10d._world",
    on_ranks=True,
)
def tables() -> None:
    first = group()
    assert _torch().pg_names[first] == first.group_name
    assert isinstance(_torch().pg_map[first][1], dist.Store)
    assert dist.get_process_group_ranks(first) == list(_torch().pg_group_ranks[first])
    first.abort()
    dist.destroy_process_group(first)
    assert first not in _torch().pg_map


@promise(
    "are the kinds of devices of a group, and the library that serves each, which NCCL's can be aborted together by",
    "*._device_types",
    "*._get_backend",
    "*._group_start",
    "*._group_end",
    on_ranks=True,
)
def libraries() -> None:
    made = group()
    assert [device.type for device in made._device_types] == ["cpu"]
    assert isinstance(made._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
    nccl = getattr(_C._distributed_c10d, "ProcessGroupNCCL", None)
    assert nccl is None or all(hasattr(nccl, name) for name in ("_group_start", "_group_end"))


@promise(
    "starts the collectives of its block together, when the block ends",
    "torch.distributed._coalescing_manager",
    on_ranks=True,
)
def coalescing() -> None:
    inspect.signature(dist._coalescing_manager).bind(group=None, async_ops=True)
    ours, (rank, size) = group(), (dist.get_rank(), dist.get_world_size())
    send, receive = torch.full((2,), float(rank)), [torch.full((2 * size,), -1.0) for _ in range(2)]
    with dist._coalescing_manager(group=ours, async_ops=True) as grouped:
        started = [dist.all_gather_single(out, send, group=ours, async_op=False) for out in receive]
    grouped.wait()
    assert started == [None, None]
    want = torch.arange(float(size)).repeat_interleave(2)
    assert all(torch.equal(out, want) for out in receive)


# --- the tests --------------------------------------------------------------------------------------------------------
def outcome(rank: int, name: str) -> str:
    """Checks one name, and returns what is broken."""
    try:
        ROWS[name].check()
    except (Exception, pytest.fail.Exception) as error:
        return broken(name, error)
    return ""


def test_each_private_name_has_a_row() -> None:
    new, old = sorted(USES.keys() - ROWS.keys()), sorted(ROWS.keys() - USES.keys())
    assert not new, f"private names of torch without a row here: {[(name, USES[name]) for name in new]}"
    assert not old, f"rows for names that hpfunc does not use: {old}"


@pytest.mark.parametrize("name", sorted(name for name, row in ROWS.items() if not row.on_ranks))
def test_a_private_name_does_what_hpfunc_relies_on(name: str) -> None:
    if said := outcome(0, name):
        pytest.fail(said, pytrace=False)


@pytest.mark.processes
@pytest.mark.parametrize("name", sorted(name for name, row in ROWS.items() if row.on_ranks))
def test_a_private_name_of_groups_does_what_hpfunc_relies_on(pool: Callable[..., Pool], name: str) -> None:
    if said := next(filter(None, pool(2).run(outcome, name)), ""):
        pytest.fail(said, pytrace=False)


def test_a_name_that_is_gone_is_told_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_neg_view")
    said = outcome(0, "torch._neg_view")
    assert "torch._neg_view returns a lazily negated view of the same memory no more (AttributeError" in said
    assert re.search(r"hpfunc/backends/torch/saved_tensors.py:\d+", said)


def test_private_names_are_found_however_they_are_reached(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(
        """
import torch
import torch.distributed as dist
from typing import cast
from torch._a import b
from torch.utils import _pytree as pytree

class Own:
    __slots__ = ("_kept",)

    def _mine(self): ...

def use(x, own):
    own._mine(), own._kept, x._theirs, vars(x)["_named"], torch.public
    cast(int, torch._C)._deep, pytree.tree_map, dist.distributed_c10d._world.names
"""
    )
    (tmp_path / "other.py").write_text("import numpy as np\nnp._private")
    names = ["*._named", "*._theirs", "torch._C._deep", "torch._a.b", "torch.distributed.distributed_c10d._world.names"]
    assert sorted(private_names((), tmp_path)) == [*names, "torch.utils._pytree.tree_map"]
