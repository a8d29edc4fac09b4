"""Steps that change from call to call: each gives the bits of the eager reference, and is planned where it could be."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import optree
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

import hpfunc as hp
from hpfunc._running.predict import predict
from hpfunc._transforms import plans as kept_plans
from tests.helpers import frameworks as ops
from tests.helpers.chain import chain, data, layer_unit, layers
from tests.helpers.frameworks import to_torch
from tests.helpers.leaves import assert_same_bits
from tests.helpers.models import P
from tests.helpers.ranks import Pool, mesh_of, outcome

pytestmark = pytest.mark.processes
WIDTH = 7  # cut into two, it is padded
What = tuple[Any, ...]


def drop(*kept: int) -> What:
    """The layers that are used, in their order: layer drop, early exit, another order, one of them twice."""
    return "layers", kept


def act(what: What, params: Any, x: torch.Tensor) -> Any:
    """Does one of the things that a step may do."""
    match what:
        case "layers", kept:
            return hp.value_and_grad(lambda p, x: chain([p[i] for i in kept], x))(params, x)
        case "evaluate", kept:
            return hp.pmean(chain([params[i] for i in kept], x), params[0]["w"].mesh.data_axes)
        case "forward", kept:
            return chain([params[i] for i in kept], x)
        case "times", number:
            return [hp.value_and_grad(chain)(params, x + i) for i in range(number)]
        case "subset", kept:
            return hp.value_and_grad(chain)([params[i] for i in kept], x)
        case "rows", number:
            return hp.value_and_grad(chain)(params, ops.repeat(x, number))
    raise AssertionError(what)


def program(what: What) -> What:
    """Returns a name of the program that it runs: a batch of another shape runs the same one."""
    return drop(0, 1, 2, 3) if what[0] == "rows" else what


def follows(whats: Sequence[What], kept: int = 64) -> list[bool]:
    """Returns which calls run by a plan: those that were expected, and whose plan is still there."""
    history: list[What] = []
    plans: list[What] = []
    found = []
    for what in map(program, whats):
        found.append(predict(history) == what and what in plans)
        history.append(what)
        plans = [*(plan for plan in plans if plan != what), what][-kept:]
    return found


def tensors(tree: Any) -> list[torch.Tensor]:
    return optree.tree_leaves(to_torch(tree))


def changing(
    rank: int, whats: Sequence[What], policy: hp.Policy, kept: int
) -> tuple[list[tuple[bool, Any, Any]], list[str]]:
    """Returns for each call whether it was planned, its tensors and those of the eager reference; and the plans."""
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    params = hp.shard(layers(4, WIDTH), mesh, P("shard"))
    now: list[What] = []
    run = hp.sharded(lambda params, x: act(now[-1], params, x), mesh, policy=policy, debug=True)
    found = []
    kept_plans.KEPT_PLANS, default = kept, kept_plans.KEPT_PLANS
    try:
        for number, what in enumerate(whats):
            now.append(what)
            x = data(rank + 10 * number, WIDTH)
            with hp.use_mesh(mesh):
                want = act(what, params, x)
            got = run(params, x)
            found.append((run.followed_plan, tensors(got), tensors(want)))
    finally:
        kept_plans.KEPT_PLANS = default
    return found, [schedule.fingerprint for schedule in run.schedules]


def assert_changes(pool: Callable[[int], Pool], whats: Sequence[What], policy: hp.Policy, kept: int = 64) -> None:
    results = pool(4).run(changing, whats, policy, kept)
    for found, plans in results:
        for _, got, want in found:
            assert_same_bits(got, want)
        assert [planned for planned, _, _ in found] == follows(whats, kept)
        assert len(set(plans)) == len(plans) == min(kept, len(set(map(program, whats))))
        assert plans == results[0][1]


ALL, SHORT, EVALUATE = drop(0, 1, 2, 3), drop(0, 1), ("evaluate", (0, 1, 2, 3))
DRAW = random.Random(0)
SEQUENCES = {
    "layer drop": [drop(*(i for i in range(4) if i == 0 or DRAW.random() < 0.6)) for _ in range(8)],
    "early exit": [drop(*range(4 - number % 4)) for number in range(9)],
    "another order": [drop(0, 1, 2, 3), drop(0, 2, 1, 3), drop(3, 2, 1, 0, 0)] * 3,
    "alternating": [ALL, SHORT] * 3,
    "training and evaluation": [ALL, ALL, EVALUATE] * 3,
    "a number of differentiations": [("times", 1 + number % 3) for number in range(9)],
    "another part of the weights": [("subset", (0, 2)), ("subset", (1, 3, 2)), ALL] * 3,
    "another batch": [("rows", number) for number in (1, 2, 2, 5, 1)],
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_step_that_changes_follows_the_plan_that_was_to_be_expected(pool: Callable[[int], Pool], name: str) -> None:
    assert_changes(pool, SEQUENCES[name], hp.Policy(prefetch=2))


def test_what_is_expected_of_these_sequences() -> None:
    """So that the test above does not compare two wrong expectations."""
    assert follows(SEQUENCES["alternating"]) == [False] * 3 + [True] * 3
    assert follows(SEQUENCES["early exit"]) == [False] * 5 + [True] * 4
    assert follows(SEQUENCES["another batch"]) == [False] + [True] * 4
    assert follows(SEQUENCES["training and evaluation"])[6:] == [True] * 3
    assert follows([ALL, SHORT, EVALUATE] * 3, kept=2) == [False] * 9
    assert follows([ALL, ALL, SHORT, ALL, ALL, EVALUATE, ALL, ALL], kept=2)[-3:] == [False, False, True]


WHATS = [ALL, SHORT, EVALUATE, drop(2, 2, 0), ("times", 2), ("subset", (3, 0)), ("rows", 3), ("evaluate", (1, 3))]
POLICIES = [hp.Policy(), hp.Policy(3, "backward", 0), hp.Policy(2, "never", float("inf"))]


@settings(max_examples=4, phases=[Phase.explicit, Phase.generate])
@given(st.lists(st.sampled_from(WHATS), min_size=3, max_size=9), st.sampled_from(POLICIES), st.sampled_from([1, 2, 64]))
@example([ALL, SHORT, EVALUATE] * 3, hp.Policy(), 2)
@example([ALL, ALL, SHORT, ALL, ALL, EVALUATE, ALL, ALL], hp.Policy(), 2)
def test_any_sequence_gives_the_bits_of_the_reference(
    pool: Callable[[int], Pool], whats: list[What], policy: hp.Policy, kept: int
) -> None:
    assert_changes(pool, whats, policy, kept)


# --- arguments ------------------------------------------------------------------------------------------------------
def two_models(rank: int) -> list[bool]:
    """Two sets of weights take turns, one of them with two kinds of step: each has a history of its own."""
    mesh = mesh_of((2,), ("shard",))
    both = [hp.shard(layers(count, WIDTH), mesh, P("shard")) for count in (2, 3)]
    now = [SHORT]
    run = hp.sharded(lambda params, x: act(now[0], params, x), mesh)
    followed = []
    for number in range(10):
        now[0] = SHORT if number % 2 or number % 4 else drop(1, 0)
        run(both[number % 2], data(rank, WIDTH))
        followed.append(run.followed_plan)
    return followed


def test_arguments_of_another_structure_have_their_own_history(pool: Callable[[int], Pool]) -> None:
    # The first model alternates between two programs, and is known from its fourth call on. The second never changes.
    want = [False, False, False, True, False, True, True, True, True, True]
    assert pool(2).run(two_models) == [want] * 2


# --- ranks that disagree --------------------------------------------------------------------------------------------
def disagreeing(rank: int, shape: tuple[int, int], what: What, other: What, calls_before: int) -> Any:
    """On one call rank 1 does something else, because of its own data. Returns what each rank is told, and the rest."""
    mesh = mesh_of(shape, ("replicate", "shard"))
    params = hp.shard(layers(4, WIDTH), mesh, P("shard"))

    def step(params: Any, x: torch.Tensor) -> Any:
        return act(other if x[0, 0] > 100 else what, params, x)

    run = hp.sharded(step, mesh, policy=hp.Policy(prefetch=2))
    x = data(rank, WIDTH)
    for _ in range(calls_before):
        run(params, x)
    begin = time.monotonic()
    text = outcome(run, params, x + (1000 if rank == 1 else 0))
    if text == "returned":  # it needed nothing of the other any more, and is told in the next call
        text = outcome(run, params, x)
    seconds = time.monotonic() - begin
    with hp.use_mesh(mesh):
        want = tensors(act(what, params, x))
    got = [tensors(run(params, x)) for _ in range(3)]
    return text, seconds, run.followed_plan, got, want


@pytest.mark.parametrize("calls_before", [0, 1, 3])
@pytest.mark.parametrize(
    ("shape", "what", "other"),
    [
        ((2, 2), ALL, SHORT),
        ((2, 2), SHORT, ALL),
        ((2, 2), EVALUATE, ("evaluate", (0, 1))),
        ((1, 2), ("forward", (0, 1, 2, 3)), ("forward", (0, 1))),
        ((1, 2), ("forward", (0, 1)), ("forward", (0, 1, 2, 3))),
    ],
)
def test_control_flow_by_the_data_of_one_rank_is_refused(
    pool: Callable[[int], Pool], shape: tuple[int, int], what: What, other: What, calls_before: int
) -> None:
    results = pool(shape[0] * shape[1]).run(disagreeing, shape, what, other, calls_before)
    texts = [text for text, *_ in results]
    assert any(text.startswith("AgreementError") for text in texts), texts
    for text, seconds, followed, got, want in results:
        assert text.startswith(("AgreementError", "PeerError")), text
        assert seconds < 15, text  # a promise: nobody waits for the timeout of the group, 20 s
        assert followed
        for tensors_of_call in got:
            assert_same_bits(tensors_of_call, want)


def changing_after_failure(rank: int) -> list[str]:
    """One rank hears of a failure a call late. Later all leave a plan together, and then one of them is slow."""
    mesh = mesh_of((2,), ("shard",))
    params = hp.shard(layers(4, WIDTH), mesh, P("shard"))
    now: list[What] = [("forward", (0, 1, 2, 3))]

    def step(params: Any, x: torch.Tensor) -> Any:
        if rank == 1 and x[0, 0] > 100:
            return act(("forward", (0, 1)), params, x)
        if rank == 1 and x[0, 0] < -100:
            time.sleep(1.2)
        return act(now[0], params, x)

    run = hp.sharded(step, mesh, policy=hp.Policy(prefetch=2))
    x = data(rank, WIDTH)
    run(params, x)
    texts = [outcome(run, params, x + (1000 if rank == 1 else 0))]
    if texts == ["returned"]:
        texts.append(outcome(run, params, x))
    texts = texts[-1:] + [outcome(run, params, x) for _ in range(2)]
    now[0] = drop(0, 1)
    texts.append(outcome(run, params, x))
    texts.append(outcome(run, params, x - (1000 if rank == 1 else 0)))
    return [text.split(":", maxsplit=1)[0] for text in texts]


def test_after_a_failure_all_count_their_steps_anew(pool: Callable[[int], Pool]) -> None:
    (first, *after), (second, *others) = pool(2).run(changing_after_failure)
    assert {first, second} <= {"AgreementError", "PeerError"}
    assert after == others == ["returned"] * 4


def leaving_slowly(rank: int) -> tuple[list[str], bool]:
    """All leave their plan twice, the second time one of them long after the others."""
    mesh = mesh_of((2,), ("shard",))
    params = hp.shard(layers(4, WIDTH), mesh, P("shard"))
    now: list[tuple[int, ...]] = [()]

    def step(params: Any, x: torch.Tensor) -> Any:
        for i in now[0]:
            x = layer_unit(params[i], x)
            if rank == 1 and now[0] == (0, 3, 2):
                time.sleep(0.8)
        return x

    run = hp.sharded(step, mesh, policy=hp.Policy(prefetch=2))
    texts = [outcome(run, params, data(rank, WIDTH)) for now[0] in [(0, 1, 2, 3), (0, 1, 3), (0, 3, 2)]]
    return texts, run.followed_plan


def test_who_leaves_a_plan_late_is_waited_for(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(leaving_slowly) == [(["returned"] * 3, False)] * 2
