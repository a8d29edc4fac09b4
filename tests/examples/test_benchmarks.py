"""The benchmarks in small: every variant of every case trains alike, and what is computed from timings is right."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.examples.test_parallel import EXAMPLES
from tests.ranks import Pool

SIZES = {"transformer": (3, 32, 16), "many small": (2, 128, 4), "few large": (2, 16, 8)}
FOUR = ("b", "c")
TORCH = ("a", "b", "c", "d", "e", "f", "g")


def program(name: str) -> Any:
    """Returns a module of the benchmarks, imported as by its siblings."""
    folder = str(EXAMPLES / "benchmarks")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def small(worker: Any, key: str) -> Any:
    """Returns a case with a small model."""
    case = worker.CASES[key]
    model = case.task.model
    names = ("num_blocks", "width", "num_tokens")
    sizes = dict(zip(names, SIZES[model.kind], strict=True))
    return replace(case, task=replace(case.task, model=replace(model, **sizes)))


def agreement(rank: int, keys: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Returns how far the variants of each case are apart after two steps."""
    worker = program("worker")
    found = {}
    for key in keys:
        case = small(worker, key)
        variants = {name: worker.make(name, case) for name in case.variants}
        found[key] = worker.check_weights(case, variants)
        for variant in variants.values():
            if (schedule := variant.schedule()) is not None:
                counted = variant.counters().bytes_sent.values()
                assert sum(counted) == pytest.approx(worker.ideal.sent_bytes(schedule), rel=1e-3)
    return found


def disagreement(rank: int) -> str:
    """Returns what is said of a variant that rounds otherwise, and of one that has other data."""
    worker = program("worker")
    case, said = small(worker, "a"), []
    for name, task in (("hpfunc", replace(case.task, bf16=True)), ("FSDP2", replace(case.task, micro_batches=2))):
        variants = {"hpfunc eager": worker.make("hpfunc eager", case)}
        variants[name] = worker.make(name, replace(case, task=task))
        try:
            worker.check_weights(replace(case, tolerance=0.1), variants)
        except SystemExit as error:
            said.append(str(error))
    return "; ".join(said)


@pytest.mark.processes
def test_all_variants_train_alike(pool: Callable[[int], Pool]) -> None:
    found = {}
    for size in (2, 4):
        keys = tuple(key for key in TORCH if (key in FOUR) == (size == 4))
        found |= pool(size).run(agreement, keys)[0]
    for key, apart in found.items():
        assert max(apart.values()) <= program("worker").CASES[key].tolerance
        assert len(apart) >= 4


@pytest.mark.processes
def test_a_variant_that_trains_otherwise_is_not_timed(pool: Callable[[int], Pool]) -> None:
    said = pool(2).run(disagreement)[0]
    assert "hpfunc: other bits than another variant of hpfunc" in said
    assert "FSDP2: after two steps" in said


@pytest.mark.parametrize(
    ("compute_s", "wanted_s"),
    [
        (0.0, 3.0),  # three messages of a second on one link
        (1.0, 4.0),  # the first is waited for; the others hide behind computing, whose last second nothing hides
        (5.0, 16.0),
    ],
)
def test_the_ideal_is_the_longer_of_compute_and_wire(compute_s: float, wanted_s: float) -> None:
    ideal = program("ideal")
    gathers = [ideal.Step("launch", (index,), 10.0) for index in range(3)]
    computes = [ideal.Step("forward", (index,)) for index in range(3)]
    steps = [gathers[0], gathers[1], computes[0], gathers[2], computes[1], computes[2]]
    times = {"forward": compute_s, "backward": 0.0, "update": 0.0}
    assert ideal.replay(steps, times, 10.0) == pytest.approx(wanted_s)


def test_a_slope_is_found_with_its_interval() -> None:
    host_time = program("host_time")
    taken = {depth: [1e-4 + depth * 2e-6 * (1 + spread) for spread in (-0.1, 0, 0.1)] for depth in (4, 16, 64, 256)}
    slope, error = host_time.slope(taken)
    assert slope == pytest.approx(2e-6)
    assert 0 < error < 1e-6
