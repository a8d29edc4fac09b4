"""The path of Ascend, as far as it can be checked without one: the names it calls, and what goes to which stream."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.frameworks import needs_mindspore
from tests.helpers.ranks import Pool

pytestmark = [pytest.mark.processes, needs_mindspore]
ROOT = Path(__file__).parents[2] / "hpfunc"
MODULES = {"distributed": "mindspore.mint.distributed", "runtime": "mindspore.runtime", "mint": "mindspore.mint"}
MODULES |= {"mindspore": "mindspore", "ops": "mindspore.ops"}


def calls(path: Path) -> list[tuple[str, str, int | None, list[str]]]:
    """Returns every ``module.name`` of MindSpore in a file; of a call, how many arguments, and which keywords."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr=name)) if module in MODULES:
                starred = any(isinstance(arg, ast.Starred) for arg in node.args)
                keywords = [keyword.arg for keyword in node.keywords if keyword.arg]
                found.append((module, name, 0 if starred else len(node.args), keywords))
            case ast.Attribute(value=ast.Name(id=module), attr=name) if module in MODULES:
                found.append((module, name, None, []))  # called elsewhere, or in the line of a call
    return found


def unknown(rank: int, wanted: list[tuple[str, str, int | None, list[str]]]) -> list[str]:
    import importlib

    bad = []
    for module, name, count, keywords in wanted:
        function = getattr(importlib.import_module(MODULES[module]), name, None)
        if function is None:
            bad.append(f"{module}.{name} does not exist")
        if function is None or count is None:
            continue
        try:
            inspect.signature(function).bind(*range(count), **dict.fromkeys(keywords))
        except TypeError as error:
            bad.append(f"{module}.{name}: {error}")
        except ValueError:  # a builtin has no signature
            pass
    return bad


@pytest.mark.parametrize("path", ["backends/mindspore/ascend.py", "backends/mindspore/foreach.py"])
def test_every_name_exists(pool: Callable[..., Pool], path: str) -> None:
    wanted = calls(ROOT / path)
    assert len({name for _, name, *_ in wanted}) > 8
    invented = [*wanted, ("runtime", "NoSuchStream", 0, []), ("distributed", "all_reduce", 1, ["no_such"])]
    for bad in pool(4).run(unknown, invented):
        assert [text.split()[0] for text in bad] == ["runtime.NoSuchStream", "distributed.all_reduce:"], bad


def missing(rank: int) -> dict[str, list[str]]:
    from hpfunc.backends import protocol as _base
    from hpfunc.backends.mindspore.ascend import MindSporeAscend
    from hpfunc.backends.mindspore.cpu import MindSporeHost

    parts = (_base.Processes, _base.Memory, _base.Communication, _base.Differentiation)
    names = [name for part in parts for name in vars(part) if not name.startswith("_")]
    assert len(names) > 30
    return {c.__name__: [n for n in names if getattr(c, n, None) is None] for c in (MindSporeHost, MindSporeAscend)}


def test_both_backends_have_every_method_of_the_protocol(pool: Callable[..., Pool]) -> None:
    for found in pool(4).run(missing):
        assert found == {"MindSporeHost": [], "MindSporeAscend": []}


class Recorder:
    """Stands in for MindSpore's modules: writes down calls, and gives objects whose calls it writes down, too."""

    def __init__(self, log: list[str], name: str = "") -> None:
        self._log, self._name = log, name

    def __getattr__(self, name: str) -> Any:
        return Recorder(self._log, f"{self._name}.{name}".strip("."))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        shown = [getattr(arg, "_name", None) or getattr(arg, "label", "") for arg in args]
        self._log.append(f"{self._name}({', '.join(text for text in shown if text)})")
        return Recorder(self._log, f"{self._name}{len(self._log)}")

    def __enter__(self) -> None:
        self._log.append("enter")

    def __exit__(self, *error: object) -> None:
        self._log.append("exit")


def noted(rank: int) -> tuple[list[str], list[bool]]:
    """Issues a gather that waits for a point, and asks where messages are sent from."""
    from unittest import mock

    import mindspore

    from hpfunc.backends.mindspore import ascend

    log: list[str] = []
    fakes = mock.Mock(
        get_world_size=lambda group=None: 2, get_rank=lambda: 1, get_process_group_ranks=lambda group: [0, 1]
    )
    fakes.all_gather_into_tensor = lambda out, into, group, async_op: (log.append("all_gather"), Recorder(log, "work"))[
        1
    ]
    with mock.patch.multiple(ascend, runtime=Recorder(log), distributed=fakes):
        backend = ascend.MindSporeAscend()
        streams = backend.streams("npu:0")
        before = streams.issue("pack", "compute", (), lambda: None, lambda *_: None)
        log.append("--")
        send, receive = (backend.empty((n,), "float32", "npu") for n in (2, 4))
        point = streams.issue(
            "g", "gather", [before], lambda: backend.launch("all_gather", "group", [send], [receive]), lambda *_: None
        )
        log.append("--")
        streams.wait(point, lambda *_: None)
        shard = backend.give(backend.empty((2,), "float32", "npu"))
        own = backend._send_buffer("group", send, receive)
        places = [own.data_ptr() == receive.data_ptr() + 8, backend._send_buffer("group", shard, receive) is shard]
        backend.packed_sends_from = "message"
        places.append(backend._send_buffer("group", send, receive) is send)
    assert isinstance(send, mindspore.Tensor)
    return log, places


def test_a_gather_waits_on_its_own_stream_and_messages_are_sent_from_their_slice(pool: Callable[..., Pool]) -> None:
    for log, places in pool(4).run(noted):
        before, issued, awaited = "\n".join(log).split("\n--\n")
        assert "Event" in before
        kinds = [line.split("(")[0].rstrip("0123456789") for line in issued.splitlines()]
        order = ["Stream", "StreamCtx", "enter", "all_gather", "work.wait", "Event", "exit"]
        assert [kind for kind in kinds if kind in order] == order
        assert "wait_event" in issued.split("all_gather")[0]
        assert "current_stream" in awaited
        assert "wait_event" in awaited
        assert places == [True, True, True]
