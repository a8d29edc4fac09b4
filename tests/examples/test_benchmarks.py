"""The benchmarks in small: every variant of every case trains alike, and what is computed from timings is right."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpfunc.planning.checking.checker import check
from hpfunc.planning.checking.interpreter import interpret
from hpfunc.planning.checking.reference import World, reference
from hpfunc.planning.ops import Launch, Local, Region, itemsize
from hpfunc.planning.planner import plan
from hpfunc.planning.schedule import Schedule
from tests.helpers.examples import EXAMPLES
from tests.helpers.ranks import Pool
from tests.planning.programs import Case, cases

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
        assert tuple(apart) == program("worker").CASES[key].variants


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


# ------------------------------------------------------------------------------------- packing, prefetch, zero-copy


def in_place(schedule: Schedule) -> list[Region]:
    """Returns what travels from where it lies, or is received or summed up where it belongs; all-reduces aside."""

    def of(regions: tuple[Region, ...], *kinds: str) -> list[Region]:
        return [region for region in regions if region.numel and schedule.buffers[region.buffer].kind in kinds]

    found = []
    for op in schedule.ops:
        if isinstance(op, Launch) and op.communicator.purpose != "all_reduce":
            found += of(op.reads, "shard", "gradient", "total") + of(op.writes, "whole", "reduce", "carry")
        if isinstance(op, Local) and op.kind == "sum_parts":
            found += of(op.writes, "reduce", "carry")
    return found


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(0, 1000))
def test_a_schedule_without_zero_copy_is_safe_and_right(case: Case, timing: int) -> None:
    planned = plan(case.program, case.policy, case.traits)
    staged = program("staged").staged(planned)
    before, after = check(planned), check(staged)
    assert not in_place(staged)
    more = sum(r.numel * itemsize(planned.buffers[r.buffer].dtype) for r in in_place(planned))
    assert sum(after.local_bytes.values()) == sum(before.local_bytes.values()) + more
    assert (after.sent_bytes, after.launches) == (before.sent_bytes, before.launches)
    world = World(case.program, case.mesh_sizes, seed=timing)
    for found, wanted in zip(interpret(staged, world, timing), reference(world), strict=True):
        assert found.agrees(wanted), str(staged)


def experiment(rank: int) -> dict[str, tuple[dict[str, float], int, int]]:
    """Returns for each choice the phases of a step, the bytes that it has copied, and those of its schedule."""
    experiments = program("experiments")
    case = small(program("worker"), "c")
    choices = [choice for choice in experiments.CHOICES if choice.prefetch != 1]
    variants = {str(choice): experiments.train(case.task, choice) for choice in choices}
    named = {f"hpfunc {name}": variant for name, variant in variants.items()}
    experiments.worker.check_weights(replace(case, variants=tuple(named)), named)
    found = {}
    for name, variant in variants.items():
        phases = variant.step()
        planned = sum(check(variant.schedule()).local_bytes.values())
        found[name] = (phases, variant.counters().bytes_copied, planned)
    return found


@pytest.mark.processes
def test_experiments_train_alike_and_copy_what_their_schedules_say(pool: Callable[[int], Pool]) -> None:
    found = pool(4).run(experiment)[0]
    assert len(found) == 12
    for name, (phases, copied, planned) in found.items():
        other = name.replace("zero-copy", "copies")
        if other != name:
            assert found[other][1] - copied == found[other][2] - planned > 0
        assert min(phases[phase] for phase in ("forward", "backward", "update", "forward gathers")) > 0
        assert phases["forward gathers"] <= phases["forward"]
        assert (phases["forward copies"] == 0) == (name in ("nothing, 0, zero-copy", "nothing, 2, zero-copy"))


def taken(experiments: Any, slow: str = "") -> Any:
    """Returns results in which packing everything takes 8 % more of a forward, and nothing else does but noise."""
    measure = experiments.measure
    phases = ("forward", "backward", "update")
    parts = ("copies", "gathers", "waits")
    found = {}
    for choice in experiments.CHOICES:
        noise = (1.0, 1.06, 0.99, 1.03, 1.08) if choice.packing == "by itself" else (1.0, 1.0, 1.0, 1.0, 1.0)
        forward_s = 0.1 * (1.08 if str(choice) == slow else 1.0) * (1 if choice.prefetch else 1.5)
        found[choice.name] = [
            measure.Repetition(
                (forward_s + 0.2 + 0.01) * share,
                0.2,
                1e6,
                0.0,
                {"forward": forward_s * share, "backward": 0.2 * share, "update": 0.01 * share}
                | {f"{phase} {part}": 0.001 for phase in phases for part in parts},
            )
            for share in noise
        ]
    return measure.Results(measure.Options(repetitions=5), found)


def test_a_phase_that_packing_slows_down_is_named() -> None:
    experiments = program("experiments")
    founds = {"short": taken(experiments), "long": taken(experiments, "everything, 1, copies")}
    verdicts = experiments.verdicts(founds)
    assert [(verdict.value, verdict.is_met) for verdict in verdicts] == [(0, True), (0, True), (1, False), (0, True)]
    assert verdicts[2].detail == "forward of everything, 1, copies 1.08 1.08 1.08"
    assert "min median max" in experiments.table_of(founds["long"])
    assert "everything, 1, copies" in experiments.table_of(founds["long"])
    assert "prefetch 1 / 0 (0.86)" in experiments.findings(founds).splitlines()[0]


def test_experiments_are_told_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiments, bench = program("experiments"), program("bench")
    one = taken(experiments).record() | {"pack_below_bytes": 65536}
    monkeypatch.setattr(bench, "launch", lambda *args, **kwargs: {"short": one, "long": one})
    record: dict[str, Any] = {}
    text, verdicts = bench.run_experiments(False, [], record, tmp_path)
    assert record["experiments"]["long"] == one
    assert "by itself hpfunc packs weights below 64 KiB" in text
    assert text.count("| nothing, 0, zero-copy ") == 2
    assert "Over loopback" in text
    assert len(verdicts) == 4
    assert (tmp_path / "experiments.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("spans", "wanted_s"),
    [
        ([], 0.0),
        ([(0.0, 3.0), (1.0, 2.0)], 2.0),  # the window begins at 1
        ([(4.0, 9.0), (2.0, 3.0)], 2.0),  # and ends at 5
    ],
)
def test_seconds_of_gathers_under_way_count_once(spans: list[tuple[float, float]], wanted_s: float) -> None:
    assert program("experiments").covered_s(spans, (1.0, 5.0)) == pytest.approx(wanted_s)
