"""Tests of torch that run on MindSpore as they are: `conftest.py` gives them ranks that compute with it.

Below are those that draw fewer examples here, or leave out what `lacks.py` lists.
"""

# ruff: noqa: F401 - the tests that are imported run here
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import hpfunc as hp
from tests.helpers.frameworks import needs_mindspore
from tests.helpers.leaves import assert_close
from tests.helpers.models import Layout, Model, layouts, models, policies
from tests.helpers.ranks import Pool
from tests.optim import test_norm
from tests.optim.test_loss_scale import test_an_overflow_on_one_rank_is_skipped_by_all, test_float16_training
from tests.optim.test_norm import (
    test_a_norm_that_is_not_finite_is_refused_on_all_ranks,
    test_log_and_clip_share_one_collective,
    test_norms_are_those_of_torch,
    test_one_number_is_sent_for_each_set_of_axes,
    test_plain_tensors_may_differ_between_ranks,
    test_what_is_not_finite_on_one_rank_reaches_all,
)
from tests.steps import test_composition, test_numerics, test_purity, test_recompute, test_uses
from tests.steps.test_accumulate import (
    test_a_plan_may_be_left_in_any_micro_batch,
    test_collectives_of_three_micro_batches,
)
from tests.steps.test_dynamic import (
    test_a_step_that_changes_follows_the_plan_that_was_to_be_expected,
    test_after_a_failure_all_count_their_steps_anew,
    test_any_sequence_gives_the_bits_of_the_reference,
    test_arguments_of_another_structure_have_their_own_history,
    test_control_flow_by_the_data_of_one_rank_is_refused,
    test_who_leaves_a_plan_late_is_waited_for,
)
from tests.steps.test_execute import (
    test_a_delayed_collective_changes_no_bit,
    test_a_failed_step_keeps_nothing,
    test_a_forward_only_step,
    test_a_step_that_changes_goes_on_and_is_planned_anew,
    test_counters_of_a_step,
    test_donated_arrays_are_updated_in_place_and_others_never,
    test_frozen_weights_are_gathered_but_not_reduced,
    test_local_parts_and_gathered_arrays_are_differentiated_too,
    test_the_objects_of_a_step_die_with_it,
    test_two_differentiations_in_one_step,
)
from tests.steps.test_parity import (
    test_a_sum_is_the_mean_times_the_number_of_ranks,
    test_an_axis_that_holds_no_data_stays_cut,
)
from tests.steps.test_purity import (
    test_a_gradient_that_is_kept_never_changes,
    test_a_mean_of_old_weights_is_right,
    test_donated_arguments_of_a_failed_step,
    test_memory_of_donated_steps_does_not_grow,
    test_reading_weights_after_their_update_is_refused_if_they_were_donated,
    test_the_count_sees_what_is_kept,
)
from tests.steps.test_recompute import test_remat_of_a_unit_with_many_kinds_of_arguments_and_outputs
from tests.steps.test_stacked import test_rows_are_weights_of_their_own
from tests.steps.test_uses import test_each_weight_has_one_gradient_whatever_uses_it
from tests.values.test_partition import test_adapters_train_beside_frozen_weights

pytestmark = [pytest.mark.processes, needs_mindspore]
EXAMPLES = settings(max_examples=6, phases=[Phase.explicit, Phase.generate], deadline=None)
MESHES = [(4,), (2, 2), (2,)]


# --- norms ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", [case for case in test_norm.CASES if case != "one"])  # no pool of one
def test_each_element_counts_once(pool: Callable[..., Pool], case: str) -> None:
    test_norm.test_each_element_counts_once(pool, case)


# --- numerics ---------------------------------------------------------------------------------------------------------
@EXAMPLES
@given(
    model=models(),
    layout=layouts(MESHES),
    numerics=test_numerics.numerics_of_any_kind.filter(lambda n: "bfloat16" not in (n.param_dtype, n.output_dtype)),
    policy=st.none() | policies,
)
def test_every_kind_of_numerics(
    pool: Callable[..., Pool], model: Model, layout: Layout, numerics: hp.Numerics, policy: hp.Policy | None
) -> None:
    """Not to the last bit: the judge computes with torch."""
    dtypes = {numerics.reduce_dtype, numerics.accum_dtype, numerics.output_dtype}
    judge = partial(assert_close, tolerance=0.03 if dtypes & {"bfloat16", "float16"} else 1e-4)
    pool(layout.num_ranks).run(test_numerics.compare, model, layout, numerics, policy, "float32", judge)


FIELDS = [hp.Numerics(param_dtype="float16"), *(n for n in test_numerics.FIELDS if n.param_dtype is None)]


@pytest.mark.parametrize("fields", [FIELDS])
def test_each_field_shows(pool: Callable[..., Pool], fields: list[hp.Numerics]) -> None:
    test_numerics.test_each_field_shows(pool, fields)


# --- gradients beside value_and_grad ----------------------------------------------------------------------------------
@pytest.mark.parametrize("planned", [False, True])
def test_arguments_of_units_may_be_differentiated_by_the_framework(pool: Callable[..., Pool], planned: bool) -> None:
    test_uses.test_arguments_of_units_may_be_differentiated_by_the_framework(pool, "transform", planned)


# --- recomputation ----------------------------------------------------------------------------------------------------
@EXAMPLES
@given(model=models(), layout=layouts(MESHES), policy=st.none() | policies, count=st.sampled_from([1, 3]))
def test_recomputed_models_have_the_bits_of_the_eager_reference(
    pool: Callable[..., Pool], model: Model, layout: Layout, policy: hp.Policy | None, count: int
) -> None:
    test: Any = test_recompute.test_recomputed_models_have_the_bits_of_the_eager_reference
    test.hypothesis.inner_test(pool, model, layout, policy, "remat", count, None)


@pytest.mark.parametrize("policy", [None, hp.Policy(prefetch=2)])
def test_collectives_of_a_block_run_again_in_backward(pool: Callable[..., Pool], policy: hp.Policy | None) -> None:
    test_recompute.test_collectives_of_a_block_run_again_in_backward(pool, "remat", "bcc" * 3, policy)


# --- purity -----------------------------------------------------------------------------------------------------------
@EXAMPLES
@given(
    model=models(),
    layout=layouts(MESHES),
    policy=st.none() | policies,
    place=st.sampled_from(["forward", "backward", "update", "apply", "end"]),
    number=st.integers(0, 6),
)
def test_arguments_that_are_not_donated_keep_their_bits(
    pool: Callable[..., Pool], model: Model, layout: Layout, policy: hp.Policy | None, place: str, number: int
) -> None:
    test: Any = test_purity.test_arguments_that_are_not_donated_keep_their_bits
    test.hypothesis.inner_test(pool, model, layout, policy, place, number)


# --- experts, on four ranks -------------------------------------------------------------------------------------------
SHAPES = pytest.mark.parametrize("shape", [(2, 2, 1), (1, 2, 2)])


@SHAPES
@pytest.mark.parametrize(
    ("policy", "mode", "remat"), [(hp.Policy(), None, True), (hp.Policy(prefetch=2), "scatter", False)]
)
def test_experts_beside_dense_weights_in_one_unit(
    pool: Callable[..., Pool], shape: tuple[int, ...], policy: hp.Policy, mode: Any, remat: bool
) -> None:
    test_composition.test_experts_beside_dense_weights_in_one_unit(pool, shape, policy, mode, remat)


@SHAPES
def test_experts_match_one_process(pool: Callable[..., Pool], shape: tuple[int, ...]) -> None:
    test_composition.test_experts_match_one_process(pool, shape)
