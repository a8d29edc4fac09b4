"""What hpfunc relies on of torch_npu, read from its sources: to import it needs the libraries of an Ascend device.

To run these without a device, unpack a wheel of torch_npu, put its folder on PYTHONPATH, and set
TORCH_DEVICE_BACKEND_AUTOLOAD=0, without which torch imports it. They were written with version 2.13.0 (for torch 2.13).
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.backends.calls import Call, method, refusal_of_source

_SPEC = importlib.util.find_spec("torch_npu")
NPU = Path(_SPEC.origin).parent if _SPEC is not None and _SPEC.origin else None

pytestmark = pytest.mark.skipif(NPU is None, reason="torch_npu is not installed (pip install 'hpfunc[npu]')")

# As in ``torch.cuda``: source, class, method or function, arguments without `self`.
STREAMS = [
    ("npu/streams.py", "Stream", "__new__", 1),
    ("npu/streams.py", "Stream", "wait_event", 1),
    ("npu/streams.py", "Event", "__new__", 0),
    ("npu/streams.py", "Event", "record", 1),
    ("npu/streams.py", "Event", "synchronize", 0),
    ("npu/utils.py", "", "current_stream", 1),
    ("npu/utils.py", "", "stream", 1),
    ("npu/random.py", "", "get_rng_state", 1),
    ("npu/random.py", "", "set_rng_state", 2),
]

# Promises of HCCL's backend, and the words of its header in which they are made.
PROMISES = [
    ("it groups sends with receives", r"bool supportsCoalescing\(\) const override \{\s*return true"),
    ("several gathers are one call", r"allgather_into_tensor_coalesced\([^;]*?override"),
    ("several reduce-scatters are one call", r"reduce_scatter_tensor_coalesced\([^;]*?override"),
    (
        "`wait` of a collective is an edge of the current stream",
        r"Let current stream wait on the completing of the HCCL work",
    ),
    ("`shutdown` ends its communicators", r"\bvoid shutdown\(\) override;"),
]


@cache
def text(path: str) -> str:
    assert NPU is not None
    return (NPU / path).read_text()


@cache
def source(path: str) -> ast.Module:
    return ast.parse(text(path))


@cache
def version() -> str:
    return re.findall(r"__version__ = '([^']*)'", text("version.py"))[0]


def header() -> str:
    path = "include/torch_npu/csrc/distributed/ProcessGroupHCCL.hpp"
    if NPU is None or not (NPU / path).exists():
        pytest.skip(f"torch_npu {version()} is installed without its headers")
    return text(path)


def test_it_is_made_for_this_torch() -> None:
    assert version().split(".")[:2] == torch.__version__.split(".")[:2]


@pytest.mark.parametrize(("path", "of", "name", "count"), STREAMS)
def test_streams_of_npu_take_what_hpfunc_gives_them(path: str, of: str, name: str, count: int) -> None:
    call = Call(f"torch.npu.{of}.{name}".replace("..", "."), count + bool(of), (), "hpfunc/backends/torch/streams.py")
    assert not refusal_of_source(method(source(path), of, name), call), f"torch_npu {version()}"


def test_streams_are_names_of_torch_npu() -> None:
    exported = re.search(r"__all__ = \[(.*?)\]", text("npu/__init__.py"), re.DOTALL)
    assert exported is not None
    missing = [name for name in ("Stream", "Event", "current_stream", "stream") if f'"{name}"' not in exported[1]]
    assert not missing, f"torch.npu of torch_npu {version()} lacks {missing}; see hpfunc/backends/torch/streams.py"
    assert 'rename_privateuse1_backend("npu")' in text("_init/registry/backend.py"), "torch.npu is reached by this name"


def test_hccl_is_the_backend_of_npu_and_needs_no_options() -> None:
    """`TorchBackend.group` asks torch for the default backend of the device, and gives it no options."""
    tree = source("_init/registry/distributed.py")
    registered = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.distributed.Backend.register_backend"
    ]
    first = registered[0]
    assert ast.literal_eval(first.args[0]) == "hccl", "the first that is registered for a device is its default"
    assert {key.arg: ast.literal_eval(key.value) for key in first.keywords} == {
        "extended_api": True,
        "devices": ["npu"],
    }
    made = method(tree, "", "_new_process_group_hccl_helper")
    assert made is not None
    assert [arg.arg for arg in made.args.args] == ["dist_backend_opts", "pg_options"]
    assert "if pg_options is None" in ast.unparse(made)
    assert "pg_options._timeout = dist_backend_opts.timeout" in ast.unparse(made)


def test_its_own_maker_of_groups_takes_what_torch_gives_it_and_knows_our_gloo() -> None:
    """On torch below 2.14 it replaces torch's own, through which the groups on the host are made, too."""
    tree = source("_compat/distributed.py")
    [made] = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "_new_process_group_helper"
    ]
    own = {arg.arg for arg in made.args.args}
    wanted = set(inspect.signature(dist.distributed_c10d._new_process_group_helper).parameters)
    assert wanted <= own, f"torch_npu {version()}: _new_process_group_helper lacks {wanted - own}"
    body = ast.unparse(made)
    assert "Backend._plugins[backend_str.upper()]" in body
    assert "creator_fn(dist_backend_opts, backend_options)" in body
    for part in ("store", "group_rank", "group_size", "group_id", "global_ranks_in_group"):  # those of `_host_group`
        assert f"dist_backend_opts.{part} = " in body, f"torch_npu {version()} does not tell a backend {part}"


def test_its_batch_of_sends_and_receives_replaces_that_of_torch() -> None:
    patches = text("_init/patches/distributed_patches.py")
    assert re.search(
        r'"distributed\.batch_isend_irecv",\s*"distributed\.distributed_c10d\._batch_isend_irecv"', patches
    )
    made = method(source("distributed/distributed_c10d.py"), "", "_batch_isend_irecv")
    call = Call("torch.distributed.batch_isend_irecv", 1, (), "hpfunc/backends/torch/collectives.py")
    assert not refusal_of_source(made, call), f"torch_npu {version()}"
    assert made is not None
    assert "return cm.works" in ast.unparse(made)
    assert "return [_group.batch_isend_irecv(" in ast.unparse(made)


@pytest.mark.parametrize(("promise", "pattern"), PROMISES, ids=[promise for promise, _ in PROMISES])
def test_the_header_of_hccl_promises(promise: str, pattern: str) -> None:
    assert re.search(pattern, header()), (
        f"ProcessGroupHCCL of torch_npu {version()} does not say any more that {promise}"
    )


def test_a_group_of_hccl_cannot_be_aborted() -> None:
    """A known lack, told in docs/devices.md: its `abort` has an argument, so it does not override that of a backend.

    Then ``group.abort()`` does nothing, and a rank that waits for a failed one ends by HCCL's own timeout only.
    """
    assert not re.search(r"\bvoid abort\(\) override;", backend_of(header())), (
        f"torch_npu {version()} can abort a group: say so in docs/devices.md"
    )


def backend_of(text: str) -> str:
    """Returns a header without the class of a single collective, which has an `abort` of its own."""
    begin = text.index("class WorkHCCL")
    end = text.index("struct Options", begin)
    return text[:begin] + text[end:]
