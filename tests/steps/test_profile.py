"""Names of units and of collectives in profiles of torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hpfunc as hp
from hpfunc.backends.torch import ranges
from tests.helpers.chain import data, layers, step
from tests.helpers.models import P
from tests.helpers.ranks import Pool, mesh_of

pytestmark = pytest.mark.processes


def profiled(rank: int) -> list[tuple[str, float, float]]:
    """Returns name, begin and end of all that the profiler records of a planned step and of an evaluation."""
    mesh = mesh_of((2,), ("shard",))
    params = hp.shard(layers(3), mesh, P("shard"))
    unit = hp.unit(lambda p, x: torch.tanh(x @ p["w"]), name="layer")

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for p in params[:2]:
            x = unit(p, x)
        return checkpoint(unit, params[2], x, use_reentrant=False).square().mean()

    run = hp.sharded(hp.value_and_grad(loss), mesh)
    run(params, data(rank))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(params, data(rank))
        hp.unit(lambda p, x: x @ p["w"], name="evaluated")(params[0], data(rank))
    assert run.followed_plan
    return [(event.name, event.time_range.start, event.time_range.end) for event in profile.events() or ()]


def test_the_profiler_shows_units_and_ops_by_their_names(pool: Callable[[int], Pool]) -> None:
    kinds = "forward", "before backward", "after backward"
    units = {f"{kind} layer.{i}" for i in range(3) for kind in kinds} | {"recompute layer.2", "forward evaluated.0"}
    for events in pool(2).run(profiled):
        spans_of: dict[str, list[Any]] = {}
        for name, *span in events:
            if name.startswith("hpfunc::"):
                spans_of.setdefault(name.removeprefix("hpfunc::"), []).append(span)
        # What other work waits for is marked once more where it has ended.
        ranges = {name: max(spans, key=lambda span: span[1] - span[0]) for name, spans in spans_of.items()}
        assert {"gather layer.0", "reduce_scatter layer.1", "scale layer.0"} | units <= set(ranges)
        assert not any(name.startswith("recompute") for name in set(ranges) - units)
        spans = {f"forward {i}": ranges[f"forward layer.{i}"] for i in range(3)}
        for i in range(3):
            begin, end = ranges[f"before backward layer.{i}"][0], ranges[f"after backward layer.{i}"][1]
            spans[f"backward {i}"] = [begin, end]
        for name, (begin, end) in spans.items():
            inside = [operator for operator, start, stop in events if begin <= start and stop <= end]
            assert inside.count("aten::tanh") == (name.startswith("forward")), name
            assert inside.count("aten::tanh_backward") == (name.startswith("backward")), name
        launched = ranges["reduce_scatter layer.1"]
        within = ranges["after backward layer.1"]
        assert within[0] <= launched[0]
        assert launched[1] <= within[1]


def num_ranges(rank: int, recording: bool) -> int:
    """Returns how many ranges two steps enter."""
    mesh, entered = mesh_of((2,), ("shard",)), []
    params = hp.shard(layers(2), mesh, P("shard"))

    def enter(name: str) -> Any:
        entered.append(name)
        return nullcontext()

    found, ranges.record_function = ranges.record_function, enter
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) if recording else nullcontext():
            step(params, data(rank))
    finally:
        ranges.record_function = found
    return len(entered)


def test_nothing_has_a_name_while_nobody_records(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(num_ranges, False) == [0, 0]
    assert min(pool(2).run(num_ranges, True)) > 10
