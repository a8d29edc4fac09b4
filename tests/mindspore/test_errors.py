"""The refusals of torch on MindSpore: the same cases, in the same words but for those that `lacks.py` lists."""

# ruff: noqa: F401 - the tests that are imported run here
from __future__ import annotations

import pytest

from tests.errors import test_debug, test_meshes, test_modes, test_policies, test_steps, test_values
from tests.errors.test_debug import (
    test_nan_is_the_same_as_nan,
    test_what_is_right_passes_when_it_is_recomputed,
    test_what_is_right_passes_with_the_same_bits,
)
from tests.errors.test_meshes import (
    test_axes_of_data_are_known_by_their_names,
    test_no_axis_is_one_if_that_is_said,
    test_the_mesh_of_a_gradient_is_that_of_any_argument,
)
from tests.errors.test_modes import (
    test_a_loss_of_zero_times_the_weights_is_one,
    test_a_loss_without_gradient_on_one_rank_ends_all,
    test_nothing_to_differentiate_and_plain_tensors_are_no_mistake,
)
from tests.errors.test_warnings import (
    test_a_last_batch_of_another_size_is_warned_of,
    test_a_plan_that_hides_nothing_is_warned_of,
    test_a_step_that_is_made_in_the_loop_is_warned_of,
    test_bad_units_are_warned_of_once,
    test_good_units_are_not_warned_of,
    test_results_that_are_used_are_not_warned_of,
    test_steps_that_are_compared_or_called_again_are_not,
    test_sums_evaluations_and_even_batches_are_not,
    test_the_part_of_a_weight_in_the_loss_is_warned_of,
    test_the_same_text_is_said_once_whatever_line_calls,
    test_updated_weights_that_nobody_keeps_are_warned_of,
    test_whole_weights_and_sums_are_not,
)
from tests.helpers.frameworks import needs_mindspore
from tests.helpers.refusals import check_texts, texts_of
from tests.mindspore.lacks import DIFFERS, LACKS

pytestmark = [pytest.mark.processes, needs_mindspore]
MODULES = (test_values, test_steps, test_policies, test_debug, test_meshes, test_modes)
ALL = {name: case for module in MODULES for name, case in module.CASES.items()}
LEFT_OUT = {name for lack in LACKS.values() for name in lack.tests}


@pytest.mark.parametrize("name", [name for name in ALL if name not in LEFT_OUT])
def test_refusals(name: str) -> None:
    check_texts(texts_of(ALL[name], framework="mindspore"), name, "mindspore" if name in DIFFERS else "")
