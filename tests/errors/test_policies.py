"""Policies, numerics and accumulations that contradict themselves: exact texts, and nothing changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hpfunc as hp
from tests.helpers import frameworks as ops
from tests.helpers.refusals import cases_among, check_texts, linear, mesh, params, texts_of, total_loss, x

loss = total_loss(linear)


def descend(p: Any, x: torch.Tensor) -> Any:
    value, grads = hp.value_and_grad(loss)(p, x)
    optimizer = hp.optim.sgd(0.1)
    updates, _ = optimizer.update(grads, optimizer.init(p), p)
    return hp.apply_updates(p, updates), value


def stepping(policy: hp.Policy) -> Any:
    """The first call of a donating step with a policy that does not fit it: its arguments must stay."""
    kept = params()
    return lambda: hp.sharded(descend, mesh(), policy=policy, donate_argnums=0)(kept, x()), kept


# --- values ---------------------------------------------------------------------------------------------------------
def a_negative_backward_prefetch(rank: int) -> Any:
    return lambda: hp.Policy(prefetch_backward=-1), None


def a_release_to_a_smaller_group(rank: int) -> Any:
    return lambda: hp.Policy(release=4), None


def an_override_with_an_unknown_release(rank: int) -> Any:
    return lambda: hp.Policy(release_overrides={"head*": "sometimes"}), None


def an_override_that_is_no_pair(rank: int) -> Any:
    return lambda: hp.Policy(release_overrides=["head*"]), None


def a_budget_that_is_no_number(rank: int) -> Any:
    return lambda: hp.Policy(gather_budget_bytes=float("nan")), None


def a_negative_bucket(rank: int) -> Any:
    return lambda: hp.Policy(reduce_bucket_bytes=-1), None


def casting_inputs_to_nothing(rank: int) -> Any:
    return lambda: hp.Numerics(cast_inputs=True), None


def accumulating_in_integers(rank: int) -> Any:
    return lambda: hp.Numerics(accum_dtype="int32"), None


# --- steps ----------------------------------------------------------------------------------------------------------
def a_budget_below_what_is_never_released(rank: int) -> Any:
    return stepping(hp.Policy.zero1(gather_budget_bytes=100))


def a_budget_below_one_unit(rank: int) -> Any:
    return stepping(hp.Policy(gather_budget_bytes=50, release_overrides=[("linear.1", "backward")]))


def a_pattern_that_fits_no_unit(rank: int) -> Any:
    return stepping(hp.Policy(release_overrides={"layers.1.*": "never", "haed*": "never"}))


def a_param_dtype_for_an_integer_leaf(rank: int) -> Any:
    kept = params() | {"table": hp.shard(ops.arange(4), mesh(), hp.P("shard"))}
    return lambda: hp.value_and_grad(loss, numerics=hp.Numerics(param_dtype="bfloat16"))(kept, x()), kept


# --- accumulate -----------------------------------------------------------------------------------------------------
def no_microbatches(rank: int) -> Any:
    return lambda: hp.accumulate(hp.value_and_grad(loss), 0), None


def an_unknown_mode(rank: int) -> Any:
    return lambda: hp.accumulate(hp.value_and_grad(loss), 2, mode="no_sync"), None


def accumulating_what_is_no_gradient(rank: int) -> Any:
    return lambda: hp.accumulate(descend, 2), None


def a_batch_that_does_not_divide(rank: int) -> Any:
    kept = params()
    return lambda: hp.accumulate(hp.value_and_grad(loss), 2)(kept, x()), kept


CASES = cases_among(globals())


def test_python_names_an_unknown_field() -> None:
    with pytest.raises(TypeError, match="prefetsch"):
        hp.Policy.zero2(prefetsch=2)


@pytest.mark.parametrize("name", CASES)
def test_refusals(name: str) -> None:
    check_texts(texts_of(CASES[name]), name)
