"""`tests/steps/test_accumulate.py` on MindSpore: the same judge, models and policies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import hpfunc as hp
from tests.helpers.accumulation import NUMERICS, Run, one_big_batch, train
from tests.helpers.frameworks import needs_mindspore
from tests.helpers.leaves import assert_close, assert_same_bits
from tests.helpers.models import MESHES_OF_FOUR, Layout, Model, layouts, models, policies
from tests.helpers.ranks import Pool

pytestmark = [pytest.mark.processes, needs_mindspore]
EXAMPLES = settings(max_examples=6, phases=[Phase.explicit, Phase.generate])
# A matrix product does not exist on the CPU in bfloat16.
NUMERICS_ON_CPU = [n for n in NUMERICS if n.param_dtype is None]
modes = st.sampled_from(["scatter", "local"])


@EXAMPLES
@given(model=models(), layout=layouts(MESHES_OF_FOUR), policy=st.none() | policies, count=st.integers(1, 3), mode=modes)
def test_micro_batches_equal_one_big_batch(
    pool: Callable[..., Pool], model: Model, layout: Layout, policy: hp.Policy | None, count: int, mode: str
) -> None:
    results = pool(4).run(train, model, layout, Run(count, mode, policy))
    want = one_big_batch(model, layout.num_ranks, count)
    for _, weights, followed in results:
        assert_close(weights, want, 1e-12)
        assert followed == (policy is not None)


@EXAMPLES
@given(
    model=models(),
    layout=layouts(MESHES_OF_FOUR),
    policy=policies,
    mode=modes,
    numerics=st.sampled_from(NUMERICS_ON_CPU),
)
def test_every_schedule_gives_the_bits_of_the_eager_reference(
    pool: Callable[..., Pool], model: Model, layout: Layout, policy: hp.Policy, mode: str, numerics: hp.Numerics
) -> None:
    ranks = pool(4)
    eager = ranks.run(train, model, layout, Run(2, mode, None, numerics, torch.float32))
    planned = ranks.run(train, model, layout, Run(2, mode, policy, numerics, torch.float32))
    for (grads, weights, followed), (eager_grads, eager_weights, _) in zip(planned, eager, strict=True):
        assert followed
        assert_same_bits(grads, eager_grads)
        assert_same_bits(weights, eager_weights)
