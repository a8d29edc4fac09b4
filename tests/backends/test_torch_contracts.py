"""What hpfunc relies on of torch's streams and groups, checked on the sources, stubs and headers that torch installs.

hpfunc's code for CUDA and Ascend runs on none of the machines that test this project. So here every call that it makes
is compared with the signature of what it calls, and each promise about groups that a CPU can keep is tried on one.
Private names have tests of their own: `test_torch_private_names`.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpfunc.backends.torch import groups
from tests.backends.calls import Call, calls, method, refusal, refusal_of_source
from tests.backends.private_names import ROOT
from tests.helpers.ranks import Pool

TORCH = Path(torch.__file__).parent
HEADERS = TORCH / "include/torch/csrc/distributed/c10d"
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("backends/torch", "nn/torch")
    for path in (ROOT / folder).glob("*.py")
)
CALLS = calls("torch", FILES)

# What `DeviceStreams` calls of ``torch.cuda``, which it reaches by the device's name: path, arguments without `self`.
STREAMS = [
    ("Stream.__new__", 1),
    ("Stream.wait_event", 1),
    ("Event.__new__", 0),
    ("Event.record", 1),
    ("Event.synchronize", 0),
    ("Event.query", 0),
    ("Event.elapsed_time", 1),
    ("current_stream", 1),
    ("stream", 1),
    ("get_rng_state", 1),
    ("set_rng_state", 2),
]

# Methods of classes without a Python source: stub, class, method, arguments without `self`, keywords, where.
STUBS = [
    ("_distributed_c10d", "ProcessGroup", "abort", 0, (), "backends/torch/groups.py"),
    ("_distributed_c10d", "ProcessGroup", "size", 0, (), "backends/torch/backend.py"),
    ("_distributed_c10d", "Work", "wait", 0, (), "backends/torch/streams.py"),
    ("_distributed_c10d", "Work", "wait", 1, (), "backends/torch/streams.py"),
    ("_distributed_c10d", "Work", "is_completed", 0, (), "backends/torch/streams.py"),
    ("_distributed_c10d", "Work", "get_future", 0, (), "backends/torch/streams.py"),
    ("_distributed_c10d", "Store", "set", 2, (), "backends/torch/backend.py"),
    ("_distributed_c10d", "Store", "get", 1, (), "backends/torch/backend.py"),
    ("_distributed_c10d", "Store", "check", 1, (), "backends/torch/backend.py"),
    ("_distributed_c10d", "ProcessGroupGloo", "create_device", 0, ("interface",), "backends/torch/groups.py"),
    ("_distributed_c10d", "ProcessGroupGloo", "create_default_device", 0, (), "backends/torch/groups.py"),
]

# Promises of NCCL's backend, and the words of its header, or of those that it implements, in which they are made.
PROMISES = [
    (
        "a collective that is started asynchronously runs on a stream of the communicator, not on the current one",
        "ProcessGroupNCCL.hpp",
        r"each NCCL call is scheduled on a separate CUDA stream that is different from the current CUDA stream",
    ),
    (
        "`wait` of a collective enqueues an edge to the current stream, and the host goes on",
        "ProcessGroupNCCL.hpp",
        r"let current stream wait for the NCCL to finish, this function is async operation",
    ),
    (
        "tensors of a collective are kept alive until somebody waits for it, so that no `record_stream` is needed",
        "ProcessGroupNCCL.hpp",
        r"stashes live references to those tensors until after user-facing streams are synced with comm streams",
    ),
    (
        "it groups sends with receives",
        "ProcessGroupNCCL.hpp",
        r"bool supportsCoalescing\(\) const override \{\s*return true",
    ),
    (
        "several gathers are one launch",
        "ProcessGroupNCCL.hpp",
        r"(?:allgather_into_tensor_coalesced|all_gather_single_coalesced)\([^;]*?override",
    ),
    (
        "several reduce-scatters are one launch",
        "ProcessGroupNCCL.hpp",
        r"(?:reduce_scatter_tensor_coalesced|reduce_scatter_single_coalesced)\([^;]*?override",
    ),
    ("`abort` ends what a communicator does", "ProcessGroupNCCL.hpp", r"\bvoid abort\(\) override;"),
    (
        "`abort` of a group reaches all of its backends",
        "ProcessGroup.hpp",
        r"virtual void abort\(\) \{\s*for \(auto& \w+ : backendTypeToBackend_\) \{\s*\w+\.second->abort\(\);",
    ),
]


@cache
def stub(name: str) -> ast.Module:
    return ast.parse((TORCH / f"_C/{name}.pyi").read_text())


@cache
def words(header: str) -> str:
    """Returns a header with each comment in one line."""
    text = (HEADERS / header).read_text()
    return re.sub(r"\n\s*(?://+\s*)+", " ", text)


def found(path: str) -> Any:
    """Returns what a dotted path leads to; raises AttributeError if there is no such thing."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            thing: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            thing = getattr(thing, part)
        return thing
    raise AttributeError(path)


def unknown(wanted: list[Call]) -> list[str]:
    bad: list[str] = []
    for call in wanted:
        try:
            function = found(call.path)
        except AttributeError as error:
            bad.append(f"{call.path} does not exist ({error}); see {call.place}")
            continue
        bad += filter(None, [refusal(function, call)])
    return bad


# --- signatures -------------------------------------------------------------------------------------------------------
def test_torch_takes_every_call_of_hpfunc() -> None:
    assert len({call.path for call in CALLS if call.path.startswith("torch.distributed.")}) > 15
    assert len({call.path for call in CALLS if call.path.startswith("hpfunc.backends.torch.private.")}) > 30
    assert not unknown(CALLS)


def test_a_call_that_torch_does_not_take_is_told_with_its_place() -> None:
    place = "hpfunc/backends/torch/nowhere.py:1"
    invented = [
        Call("torch.distributed.no_such_collective", 0, (), place),
        Call("torch.distributed.all_reduce", 1, ("no_such",), place),
        Call("torch.cuda.current_stream", 2, (), place),
    ]
    gone, keyword, many = unknown(invented)
    assert gone.startswith("torch.distributed.no_such_collective does not exist")
    assert "torch.distributed.all_reduce(" in keyword
    assert "'no_such'" in keyword
    assert "too many positional arguments" in many
    assert all(text.endswith(place) for text in (gone, keyword, many))


def test_no_group_is_bound_to_a_device() -> None:
    """torch splits the communicator of a default group that is bound to a device, and all ranks must call a split.

    With `use_local_synchronization` those outside of the group do not call it. So hpfunc binds nothing, and hides what
    the caller has bound.
    """
    made = [call for call in CALLS if call.path.endswith(".init_process_group")]
    assert len(made) == 1
    assert not [call for call in made if "device_id" in call.keywords]
    source = (TORCH / "distributed/distributed_c10d.py").read_text()
    assert "if is_initialized() and _get_default_group().bound_device_id:" in source, (
        f"torch {torch.__version__} decides in another way when a new group is split from the default group"
    )


@pytest.mark.parametrize(("path", "count"), STREAMS)
def test_streams_of_cuda_take_what_hpfunc_gives_them(path: str, count: int) -> None:
    own = path.count(".")  # `self`, or the class
    assert not unknown([Call(f"torch.cuda.{path}", count + own, (), "hpfunc/backends/torch/streams.py")])


def test_all_that_device_streams_calls_is_listed() -> None:
    """`DeviceStreams` reaches ``torch.cuda`` by the name of the device, as `module`."""
    tree = ast.parse((ROOT / "backends/torch/streams.py").read_text())
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    used = {node.attr for node in attributes if ast.unparse(node.value) == "module"}
    assert used == {path.split(".")[0] for path, _ in STREAMS} - {"get_rng_state", "set_rng_state"}


@pytest.mark.parametrize(("name", "of", "called", "count", "keywords", "place"), STUBS)
def test_compiled_classes_take_what_hpfunc_gives_them(
    name: str, of: str, called: str, count: int, keywords: tuple[str, ...], place: str
) -> None:
    function = method(stub(name), of, called)
    static = function is not None and any(ast.unparse(x) == "staticmethod" for x in function.decorator_list)
    call = Call(f"torch._C.{name}.{of}.{called}", count + (not static), keywords, f"hpfunc/{place}")
    assert not refusal_of_source(function, call), f"torch {torch.__version__}"
    assert callable(getattr(getattr(getattr(torch._C, name), of), called))


def test_a_method_that_is_only_read_is_compared_too() -> None:
    source = ast.parse("class A:\n    def f(self, x, y=1, *, z): ...")
    good, few, many, other = (
        refusal_of_source(method(source, "A", "f"), Call("A.f", count, keywords, "here"))
        for count, keywords in ((2, ("z",)), (1, ("z",)), (4, ("z",)), (2, ("z", "no_such")))
    )
    assert not good
    assert ["'x' is not given" in few, "too many" in many, "no keyword 'no_such'" in other] == [True] * 3
    assert refusal_of_source(method(source, "A", "g"), Call("A.g", 1, (), "here")) == "A.g does not exist; see here"


@pytest.mark.parametrize(("text", "header", "pattern"), PROMISES, ids=[text for text, *_ in PROMISES])
def test_the_headers_of_torch_promise(text: str, header: str, pattern: str) -> None:
    if not (HEADERS / header).exists():
        pytest.skip(f"torch {torch.__version__} is installed without {header}")
    assert re.search(pattern, words(header)), f"{header} of torch {torch.__version__} does not say any more that {text}"


# --- groups, on a CPU -------------------------------------------------------------------------------------------------
def in_groups(rank: int) -> dict[str, Any]:
    """Ranks 2, 0 and 3, 1, in this order, talk in groups of their own."""
    untyped: Any = dist  # its stubs know groups as numbers, too, and works as None
    ranks = [2, 0] if rank % 2 == 0 else [3, 1]
    one, two = (
        groups.new_group(ranks, groups.group_name(ranks, purpose, 0), purpose, groups.HOST, 20.0, options)
        for purpose in ("contract 0", "contract 1")
        for options in (groups.host_options(purpose, 20.0),)
    )
    send, wholes = torch.full((2,), float(rank)), torch.empty(4)
    untyped.all_gather_single(wholes, send, group=one, async_op=True).wait()
    share, told = torch.empty(1), torch.full((1,), float(rank))
    untyped.reduce_scatter_single(share, torch.tensor([1.0, 10.0]) * (rank + 1), group=one, async_op=True).wait()
    untyped.broadcast(told, group=one, group_src=1, async_op=True).wait()
    texts: list[Any] = [None] * one.size()
    untyped.all_gather_object(texts, (one.group_name, two.group_name), group=two)
    first = rank == ranks[0]  # which receives three numbers from the second
    out, into = torch.arange(0.0 if first else 3.0) + 10 * rank, torch.empty(3 if first else 0)
    sizes = ([0, 3], [0, 0]) if first else ([0, 0], [3, 0])
    untyped.all_to_all_single(into, out, *sizes, group=one, async_op=True).wait()
    return {
        "ranks": dist.get_process_group_ranks(one),
        "place": one.rank(),
        "gathered": wholes.tolist(),
        "share": share.tolist(),
        "told": told.tolist(),
        "sent": into.tolist(),
        "backend": dist.get_backend(one),
        "description": one.group_desc,
        "names": texts,
        "works": hasattr(dist.all_reduce(told, group=two, async_op=True), "wait"),
    }


@pytest.mark.processes
def test_groups_keep_the_order_of_their_ranks_and_have_names_of_their_own(pool: Callable[..., Pool]) -> None:
    for rank, got in enumerate(pool(4).run(in_groups)):
        ranks = [2, 0] if rank % 2 == 0 else [3, 1]
        place = ranks.index(rank)
        assert got["ranks"] == ranks, "get_process_group_ranks is in the order of the ranks that were given"
        assert got["place"] == place, "a rank's place in a group is its place among these"
        assert got["gathered"] == [float(r) for r in ranks for _ in range(2)], "parts are gathered in the group's order"
        assert got["share"] == [[1.0, 10.0][place] * sum(r + 1 for r in ranks)], "shares go out in the group's order"
        assert got["told"] == [float(ranks[1])], "group_src is a place in the group"
        assert got["sent"] == ([10.0 * ranks[1] + i for i in range(3)] if place == 0 else []), "sizes are by place"
        assert (got["backend"], got["description"], got["works"]) == (groups.HOST, "hpfunc contract 0", True)
        first, second = got["names"]
        assert first == second, "all ranks of a group give it the same name"
        assert first[0] != first[1], "two groups of the same ranks have names, and so rendezvous, of their own"
