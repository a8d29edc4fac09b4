"""What a step may change: nothing that was not donated, whatever the policy, and whatever goes wrong in it."""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import hpfunc as hp
from hpfunc._values.array import is_sharded
from tests.helpers import frameworks as ops
from tests.helpers.frameworks import to_framework, to_torch
from tests.helpers.models import Layout, Model, P, layouts, models, policies
from tests.helpers.ranks import Pool, mesh_of
from tests.helpers.waiting import settled
from tests.helpers.zoo import bits

pytestmark = pytest.mark.processes
EXAMPLES = settings(max_examples=10, phases=[Phase.explicit, Phase.generate])
SHAPES = [(2,), (4,), (2, 2)]
SOME_POLICIES = [
    None,
    hp.Policy(),
    hp.Policy(prefetch=0, pack_below_bytes=float("inf")),
    hp.Policy(prefetch=2, release="backward", pack_below_bytes=0),
    hp.Policy(release="never"),
]


class Fault(Exception):
    """Raised in the middle of a step, on all ranks."""


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree, without those of donated arrays that are gone."""
    leaves = optree.tree_leaves(tree, is_leaf=is_sharded)
    held = [leaf._owner.local if is_sharded(leaf) else leaf for leaf in leaves]
    return [x for x in held if ops.is_tensor(x)]


def snapshot(tree: Any) -> list[torch.Tensor]:
    return [bits(x).clone() for x in to_torch(tensors(tree))]


def changed(before: list[torch.Tensor], tree: Any) -> list[int]:
    after = snapshot(tree)
    assert len(before) == len(after)
    return [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if not torch.equal(a, b)]


class Training:
    """A step of AdamW, in which `fault` is raised once: at a place, in the nth call of a unit."""

    def __init__(self, rank: int, model: Model, layout: Layout, policy: hp.Policy | None, donate: Any = ()) -> None:
        self.mesh, self.model, self.rank = mesh_of(layout.shape, layout.names), model, rank
        weights = model.weights()
        self.optimizer = hp.optim.chain(hp.clip_by_global_norm(1.0), hp.optim.adamw(0.01))
        self.params = hp.shard(to_framework(weights), self.mesh, layout.specs(weights))
        self.state = self.optimizer.init(self.params)
        self.fault: tuple[str, int] | None = None
        self.num_calls = 0
        step = self._step
        self.step = step if policy is None else hp.sharded(step, self.mesh, policy=policy, donate_argnums=donate)

    def batch(self, number: int = 0) -> torch.Tensor:
        return to_framework(self.model.batch(self.rank, number))

    def _step(self, params: Any, state: Any, batch: torch.Tensor) -> Any:
        self.num_calls = 0
        loss, grads = hp.value_and_grad(lambda p, b: self.model.loss(p, b, self._unit))(params, batch)
        self._break("update")
        updates, state = self.optimizer.update(grads, state, params)
        self._break("apply")
        params = hp.apply_updates(params, updates)
        self._break("end")
        return params, state, grads, loss

    def _break(self, place: str) -> None:
        if self.fault is not None and self.fault[0] == place:
            raise Fault(place)

    def _unit(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def faulty(p: Any, x: torch.Tensor) -> torch.Tensor:
            place, number = self.fault or ("", 0)
            is_here, self.num_calls = self.num_calls == number, self.num_calls + 1
            if place == "forward" and is_here:
                raise Fault(place)
            y = fn(p, x)
            return ops.with_backward(y, raise_fault) if place == "backward" and is_here else y

        return hp.unit(faulty)


def raise_fault(gradient: torch.Tensor) -> torch.Tensor:
    raise Fault("backward")


def keep_arguments(rank: int, model: Model, layout: Layout, policy: hp.Policy | None, fault: Any) -> Any:
    """Returns which arguments changed: in two steps, in one that fails, in the next; and which results differ."""
    training = Training(rank, model, layout, policy)
    arguments = training.params, training.state, training.batch()
    before, versions = snapshot(arguments), [x._version for x in tensors(arguments)]
    found = []
    for _ in range(2):
        results = training.step(*arguments)
        found.append(changed(before, arguments))
    kept = snapshot(results)
    training.fault = fault
    try:
        training.step(*arguments)
        raised = False
    except Fault:
        raised = True
    training.fault = None
    found += [changed(before, arguments), changed(kept, results)]  # also what earlier steps have returned
    found += [changed(kept, training.step(*arguments)), changed(before, arguments)]
    return raised, found, versions == [x._version for x in tensors(arguments)]


def quietly(rank: int, *arguments: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hp.HpfuncWarning)  # of some of these models nothing can be hidden
        return keep_arguments(rank, *arguments)


@EXAMPLES
@given(
    model=models(),
    layout=layouts(SHAPES),
    policy=st.none() | policies,
    place=st.sampled_from(["forward", "backward", "update", "apply", "end"]),
    number=st.integers(0, 6),
)
def test_arguments_that_are_not_donated_keep_their_bits(
    pool: Callable[[int], Pool], model: Model, layout: Layout, policy: hp.Policy | None, place: str, number: int
) -> None:
    num_units = len(model.calls) + 2
    fault = place, number % num_units
    reaches = place != "backward" or fault[1] - 1 not in model.dropped  # else its output has no gradient
    for raised, found, same_versions in pool(layout.num_ranks).run(quietly, model, layout, policy, fault):
        assert raised or not reaches
        assert found == [[]] * 6
        assert same_versions


def donated_and_failed(rank: int, policy: hp.Policy, place: str) -> tuple[bool, list[int], list[bool]]:
    """A failing step with donated weights: the batch, and weights that were not updated yet, are what they were."""
    layout = Layout((2, 2), ("replicate", "shard"), P("shard"), P("shard"))
    training = Training(rank, Model(), layout, policy, (0, 1))
    params, state, _, _ = training.step(training.params, training.state, training.batch())
    batch = training.batch(1)
    before, kept = snapshot((params, state, batch)), snapshot(batch)
    training.fault = place, 0
    try:
        training.step(params, state, batch)
        raised = False
    except Fault:
        raised = True
    gone = [leaf._owner.consumed_by is not None for leaf in optree.tree_leaves(params, is_leaf=is_sharded)]
    unchanged = changed(before, (params, state, batch)) if place in ("forward", "backward", "update") else []
    return raised and changed(kept, batch) == [], unchanged, gone


@pytest.mark.parametrize("place", ["forward", "backward", "update", "apply", "end"])
def test_donated_arguments_of_a_failed_step(pool: Callable[[int], Pool], place: str) -> None:
    for fine, unchanged, gone in pool(4).run(donated_and_failed, hp.Policy(), place):
        assert fine
        assert unchanged == []
        assert set(gone) == {place == "end"}


# --- memory -----------------------------------------------------------------------------------------------------------
def all_tensors() -> list[Any]:
    # Plain ones: what `lower` has left of abstract ones in other tests has no memory.
    kinds = torch.Tensor, ops.tensor_type()
    return [x for x in gc.get_objects() if type(x) in kinds]


def live(others: list[Any]) -> tuple[int, int]:
    """The number and bytes of all storages that tensors of this process hold, but for some others."""
    gc.collect()
    ids = set(map(id, others))
    found = [to_torch(x).untyped_storage() for x in all_tensors() if id(x) not in ids]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in found}
    return len(sizes), sum(sizes.values())


def grow(rank: int, shape: tuple[int, ...], policy: hp.Policy, keep: bool) -> tuple[list[tuple[int, int]], list[str]]:
    layout = Layout(shape, ("replicate", "shard")[-len(shape) :], P("shard"), P("shard"))
    others = all_tensors()  # the value of one that another test left never came, on MindSpore
    training = Training(rank, Model(), layout, policy, (0, 1))
    params, state, first = training.params, training.state, training.params
    training.params = training.state = None
    counts, kept = [], []
    for number in range(12):
        params, state, grads, loss = training.step(params, state, training.batch(number))
        if keep:
            kept.append(grads)
        del grads, loss
        if number in (2, 7, 11):
            most = counts[-1] if counts else (0, 0)  # the first waits as long as it may
            counts.append(settled(lambda: live(others), lambda found, most=most: keep or found <= most))
    errors = []
    for leaf in optree.tree_leaves(first, is_leaf=is_sharded):
        try:
            errors.append(str(leaf.local.shape))
        except hp.DonatedError as error:
            errors.append(type(error).__name__)
    return counts, errors


@pytest.mark.parametrize("policy", [SOME_POLICIES[1], SOME_POLICIES[3]], ids=str)
def test_memory_of_donated_steps_does_not_grow(pool: Callable[[int], Pool], policy: hp.Policy) -> None:
    for counts, errors in pool(4).run(grow, (2, 2), policy, False):
        assert len(set(counts)) == 1, counts
        assert set(errors) == {"DonatedError"}


def test_the_count_sees_what_is_kept(pool: Callable[[int], Pool]) -> None:
    for counts, _ in pool(2).run(grow, (2,), hp.Policy(), True):
        assert counts[0] < counts[1] < counts[2]


# --- results of earlier steps -----------------------------------------------------------------------------------------
def keep_gradients(rank: int, policy: hp.Policy | None, donate: Any) -> list[list[int]]:
    layout = Layout((2, 2), ("replicate", "shard"), P("shard"), P("shard"))
    training = Training(rank, Model(calls=(0, 1, 2, 1), is_tied=True), layout, policy, donate)
    params, state, kept = training.params, training.state, []
    for number in range(4):
        params, state, grads, loss = training.step(params, state, training.batch(number))
        kept.append((snapshot((grads, loss)), (grads, loss)))
    assert changed(kept[0][0], kept[1][1])  # they are different gradients
    return [changed(before, tree) for before, tree in kept]


@pytest.mark.parametrize("policy", SOME_POLICIES, ids=str)
def test_a_gradient_that_is_kept_never_changes(pool: Callable[[int], Pool], policy: hp.Policy | None) -> None:
    for donate in ((), (0, 1)):
        for found in pool(4).run(keep_gradients, policy, donate):
            assert found == [[]] * 4


# --- a mean of old weights --------------------------------------------------------------------------------------------
DECAY = 0.75


def average(mean: Any, weights: Any) -> Any:
    return optree.tree_map(lambda m, w: ops.scaled(m, DECAY) + ops.scaled(w, 1 - DECAY), mean, weights)


def ema(rank: int, policy: hp.Policy | None, donate: bool, late: bool) -> Any:
    """Averages the weights that each step began with, before or after their update; returns the mean and the truth."""
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    model = Model()
    weights = model.weights(torch.float64)
    params = hp.shard(to_framework(weights), mesh, Layout((2, 2), (), P("shard"), P()).specs(weights))
    optimizer = hp.optim.adamw(0.01)

    def step_fn(params: Any, state: Any, mean: Any, batch: torch.Tensor) -> Any:
        _, grads = hp.value_and_grad(lambda p, b: model.loss(p, b, hp.unit))(params, batch)
        updates, state = optimizer.update(grads, state, params)
        if late:
            new = hp.apply_updates(params, updates)
            return new, state, average(mean, params)
        mean = average(mean, params)
        return hp.apply_updates(params, updates), state, mean

    numbers = (0, 1, 2) if donate else ()
    step = step_fn if policy is None else hp.sharded(step_fn, mesh, policy=policy, donate_argnums=numbers)
    state, mean = optimizer.init(params), optree.tree_map(lambda x: x + 0, params)
    truth = hp.unshard(mean)
    for number in range(4):
        truth = average(truth, hp.unshard(params))
        params, state, mean = step(params, state, mean, to_framework(model.batch(rank, number, torch.float64)))
    return [
        (bits(a), bits(b)) for a, b in zip(*map(optree.tree_leaves, to_torch((hp.unshard(mean), truth))), strict=True)
    ]


@pytest.mark.parametrize("donate", [False, True])
def test_a_mean_of_old_weights_is_right(pool: Callable[[int], Pool], donate: bool) -> None:
    for policy in SOME_POLICIES[:4] if donate else SOME_POLICIES[:2]:
        for pairs in pool(4).run(ema, policy, donate, False):
            assert all(torch.equal(a, b) for a, b in pairs)


def late_ema(rank: int, policy: hp.Policy | None, donate: bool) -> str:
    try:
        return str(all(torch.equal(a, b) for a, b in ema(rank, policy, donate, True)))
    except hp.DonatedError as error:
        return str(error)


def test_reading_weights_after_their_update_is_refused_if_they_were_donated(pool: Callable[[int], Pool]) -> None:
    for policy in SOME_POLICIES[:3]:
        assert pool(4).run(late_ema, policy, False) == ["True"] * 4
    for text in pool(4).run(late_ema, hp.Policy(), True):
        assert "was donated to hpfunc.apply_updates" in text
