"""A few hundred steps drawn at random, in every test run; and that the fuzzer's own parts see what they look for."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.fuzz.cases import Around, Array, Call, Case, Grid, Join, Op, Ref, Term, Unit
from tests.fuzz.compare import Delivered, Find, memory, numbers, poison
from tests.fuzz.draw import Limits, draw
from tests.fuzz.drive import Result, Runner
from tests.fuzz.features import features
from tests.fuzz.functions import KEPT, keep
from tests.fuzz.judge import judge
from tests.fuzz.memory import overlap, overlaps_itself, same_values, span
from tests.fuzz.ops import KINDS
from tests.fuzz.rank import CALLS
from tests.fuzz.reasons import has_reason
from tests.fuzz.report import Report
from tests.fuzz.shrink import candidates, shrink, size

SECONDS = 45.0
COUNT = 300
SIMPLE = Case(
    0,
    Grid((2,), ("shard",), ("shard",)),
    (Array("p0", (6, 6), ("shard",)), Array("p1", (6,), ("shard",))),
    (Unit((Op("linear", (Ref("p0"), Ref("p1"))),)),),
    (Call((0,), 0),),
    (Term("square", 1),),
)


@pytest.mark.slow
@pytest.mark.processes
def test_steps_drawn_at_random_give_the_numbers_of_one_process() -> None:
    report, end = Report(), time.monotonic() + SECONDS
    for first in range(0, COUNT, 20):
        if time.monotonic() > end:
            break
        for result in Runner().run([draw(seed, 4 if seed % 10 == 9 else 2) for seed in range(first, first + 20)]):
            report.add(result)
    assert not report.failures, report.summary(with_features=False)
    assert report.num_cases >= 20


# --- drawing --------------------------------------------------------------------------------------------------------
def test_a_case_is_a_function_of_its_seed_and_limits() -> None:
    assert [draw(seed) for seed in range(20)] == [draw(seed) for seed in range(20)]
    assert draw(3) != draw(4)
    assert all(len(draw(seed, limits=Limits(units=1, ops=1)).units) == 1 for seed in range(20))


def test_every_operator_and_kind_of_array_is_drawn() -> None:
    drawn: Counter[str] = Counter()
    for seed in range(3000):
        drawn.update(features(draw(seed)))
    assert {f"op {name}" for name in KINDS} <= set(drawn)
    wanted = {"array 0 elements", "array 1 element", "array no dims", "array rows", "array twice in a unit",
              "array in two units", "array made in the loss", "array cut over two axes", "array cut over a later dim",
              "remat", "checkpoint", "checkpoint inside", "expert unit", "donated", "loss local", "loss plain",
              "accumulate scatter", "accumulate local", "outer no_grad", "outer inference_mode", "group frozen",
              "group closure", "group b", "array tp", "array ep", "twice", "partitioned", "dtype int64", "dtype bool",
              "dtype complex128", "dtype float32", "join residual_in_place", "unit used twice"}  # fmt: skip
    assert wanted <= set(drawn), wanted - set(drawn)


def test_most_cases_have_a_gradient() -> None:
    raised = 0
    for seed in range(200):
        try:
            judge(draw(seed), 1)
        except Exception:
            raised += 1
    assert raised < 30


def test_a_case_prints_as_a_program() -> None:
    assert str(SIMPLE).splitlines() == [
        "# seed 0: mesh shard=2, data axes ('shard',)",
        "p0 = array(6, 6), P('shard',)  # a",
        "p1 = array(6,), P('shard',)  # a",
        "unit0(x):  # dict",
        "    x = linear(x, p0, p1)",
        "    return tensor",
        "loss(x):  # h[0] = 1.0 * x",
        "    h[1] = unit0(h[0])",
        "    return 1.0 * square(h[1])",
        "step: the simplest step",
    ]


# --- judging --------------------------------------------------------------------------------------------------------
def _result(case: Case = SIMPLE) -> tuple[Any, Any]:
    """Returns what a right step delivers to rank 0, and the judge's call."""
    wanted = judge(case, 1)[0]
    parts = {"p0": wanted.gradients[0]["p0"][:3].clone(), "p1": wanted.gradients[0]["p1"][:3].clone()}
    return [{"loss": wanted.losses[0][0].clone(), "gradients": parts, "aux": []}], wanted


def test_right_numbers_are_right() -> None:
    passes, wanted = _result()
    assert list(numbers(SIMPLE, 0, Delivered((passes, None, None)), wanted, lambda: wanted)) == []


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda each: each["gradients"]["p0"].mul_(1 + 1e-7), "wrong gradient"),
        (lambda each: each["gradients"]["p1"].zero_(), "wrong gradient"),
        (lambda each: each["gradients"].update(p1=each["gradients"]["p1"][:2]), "wrong shape"),
        (lambda each: each["gradients"]["p1"].fill_(float("nan")), "wrong gradient"),
        (lambda each: each["loss"].add_(1e-8), "wrong loss"),
    ],
)
def test_wrong_numbers_are_found(change: Any, kind: str) -> None:
    passes, wanted = _result()
    change(passes[0])
    assert [found for found, _ in numbers(SIMPLE, 0, Delivered((passes, None, None)), wanted, lambda: wanted)] == [kind]


@pytest.mark.parametrize(("roundings", "kinds"), [(3.0, []), (30.0, ["wrong gradient"])])
def test_a_gradient_that_cancels_may_differ_by_what_float32_rounds(roundings: float, kinds: list[str]) -> None:
    rounded = replace(SIMPLE, around=Around(param_dtype="float32"))
    passes, wanted = _result(rounded)
    noise = 1e-3  # of plain torch's, far more than the tolerance for float32
    exact = replace(wanted, gradients=[{name: g + noise for name, g in wanted.gradients[0].items()}])
    passes[0]["gradients"]["p1"] += roundings * noise
    assert [kind for kind, _ in numbers(rounded, 0, Delivered((passes, None, None)), wanted, lambda: exact)] == kinds


@pytest.mark.parametrize("remat", [True, False])
def test_a_unit_whose_argument_is_written_to_may_be_refused_if_it_is_computed_again(remat: bool) -> None:
    frozen = tuple(replace(array, name=f"f{array.name}", group="frozen") for array in SIMPLE.arrays)
    lost = Unit((Op("linear", (Ref("fp0"), Ref("fp1"))),), output="lost", remat=remat)  # saves no argument by itself
    body = (Call((0,), 0), Call((1,), 1), Join("relu_in_place", 1))
    case = replace(SIMPLE, arrays=SIMPLE.arrays + frozen, units=(*SIMPLE.units, lost), body=body)
    assert has_reason("... was written to in place since", case) == remat


@pytest.mark.parametrize("remat", [True, False])
def test_a_unit_that_writes_into_its_argument_may_be_refused_if_it_is_computed_again(remat: bool) -> None:
    unit = Unit((Op("input_written", (Ref("p1"),)), Op("linear", (Ref("p0"), Ref("p1")))), remat=remat)
    case = replace(SIMPLE, units=(unit,))
    assert has_reason("the unit changes its arguments, and is computed again in backward", case) == remat


def test_shared_memory_is_found() -> None:
    a = torch.zeros(6)
    assert overlap(a[:4], a[3:])
    assert not overlap(a[:3], a[3:])
    assert not overlap(a, a[6:])
    assert span(a[6:]) == (0, 0)
    assert overlaps_itself(torch.zeros(1).expand(3))
    assert not overlaps_itself(torch.zeros(3, 2).t())
    passes, _ = _result()
    passes[0]["gradients"] = {"p0": a[:4], "p1": a[3:]}
    got = Delivered((passes, None, None))
    assert "shared memory: two delivered tensors" in [kind for kind, _ in memory(SIMPLE, got, [])]
    assert "shared memory: with an argument" in [kind for kind, _ in memory(SIMPLE, got, [a])]
    assert [kind for kind, _ in poison(got, 0)] == ["written: another gradient"]


def test_writing_into_what_a_function_keeps_is_found() -> None:
    KEPT.clear()
    keep(torch.ones(2)).mul_(0.5)
    passes, _ = _result()
    assert [kind for kind, _ in memory(SIMPLE, Delivered((passes, None, None)), [])] == [
        "written: what a function keeps"
    ]
    KEPT.clear()


def test_values_are_compared_with_nan_like_nan() -> None:
    nan = torch.tensor([1.0, float("nan")])
    assert same_values(nan, nan.clone())
    assert not same_values(nan, torch.tensor([2.0, float("nan")]))
    assert not same_values(nan, nan.double())


def test_every_call_of_an_update_has_its_judge() -> None:
    case = replace(SIMPLE, around=Around(update="sgd"))
    losses = [float(call.losses[0][0]) for call in judge(case, CALLS)]
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == CALLS


# --- shrinking and reporting ----------------------------------------------------------------------------------------
def test_a_case_shrinks_to_what_fails() -> None:
    def run(cases: Any) -> Any:  # fails if an operator chunk is there
        for case in cases:
            found = any(op.kind == "chunk" for unit in case.units for op in unit.ops)
            yield Result(case, ((0, Find("seen", "eager", "")),) if found else ())

    large = next(case for case in map(draw, range(1000)) if "op chunk" in features(case) and size(case) > 100)
    small = shrink(large, "seen (eager)", run, 60.0)
    assert size(small) < 35
    assert [op.kind for unit in small.units for op in unit.ops] == ["chunk"]


def test_smaller_cases_can_be_run() -> None:
    for seed in range(10):
        case = draw(seed)
        for smaller in candidates(case):
            str(smaller)
            assert all(array.name for array in smaller.arrays)


def test_a_report_names_the_smallest_case_of_each_kind() -> None:
    report = Report()
    finds = ((1, Find("wrong gradient", "planned", "text")),)
    report.add(Result(next(c for c in map(draw, range(99)) if size(c) > 60), finds))
    report.add(Result(SIMPLE, finds))
    report.add(Result(SIMPLE))
    assert report.kinds == {"wrong gradient (planned)": 2}
    assert report.smallest["wrong gradient (planned)"] == (SIMPLE, "rank 1: text")
    assert "3 cases, 2 with finds" in report.summary()
