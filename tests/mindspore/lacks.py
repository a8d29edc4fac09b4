"""What MindSpore on a CPU lacks beside torch: what a rank sees of it, and which tests of torch it leaves out.

`test_lacks.py` shows each of them, and that every test of torch that has ranks runs on MindSpore too, or stands here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import hpfunc as hp
from tests.helpers import frameworks as ops
from tests.helpers.frameworks import to_framework
from tests.helpers.ranks import outcome
from tests.helpers.refusals import mesh, params


@dataclass(frozen=True)
class Lack:
    """Something that torch has.

    Attributes:
        reason: why it is not there.
        shown: what a rank sees of it: the error, or what happens instead.
        says: a part of that.
        tests: the tests of torch, and the cases of refusals, that do not run for this reason.
    """

    reason: str
    shown: Callable[[int], str]
    says: str
    tests: tuple[str, ...] = ()


def descend(p: Any, x: Any) -> Any:
    return hp.value_and_grad(lambda p, x: hp.unit(lambda w, x: ops.linear(x, w))(p["layers"][0]["w"], x).sum())(p, x)


def lowering(rank: int) -> str:
    return outcome(hp.sharded(descend, mesh()).lower, params(), ops.ones(3, 4))


def asking_for_a_value(rank: int) -> str:
    """On torch `init` refuses a function that needs values: it is recorded without data."""
    return outcome(hp.init, lambda: {"w": ops.zeros(4) + float(ops.ones(1).sum())}, mesh(), hp.P("shard"))


def writing(rank: int) -> str:
    """Adds to a whole weight in place, and returns whether that changed it."""
    kept: list[Any] = []

    def write(p: Any) -> Any:
        p["b"].add_(1.0)
        kept.append(float(p["b"].sum()))
        return p["b"].sum()

    hp.unit(write)(params()["layers"][0])
    return f"the weight has the sum {kept[0]}"


def checkpointing(rank: int) -> str:
    unit = hp.unit(lambda w, x: ops.linear(x, w))
    grad = hp.grad(lambda p, x: ops.checkpoint(lambda x: unit(p["layers"][0]["w"], x).sum(), x))
    return outcome(grad, params(), ops.ones(3, 4))


def differentiating_a_graph(rank: int) -> str:
    return outcome(lambda: ops.ones(1).backward())


def mapping(rank: int) -> str:
    import mindspore

    return outcome(lambda: mindspore.vmap(lambda x: hp.psum(x, "shard", mesh=mesh()))(ops.ones(2, 3)))


def multiplying(rank: int) -> str:
    x = to_framework(torch.ones(3, 4, dtype=torch.bfloat16))
    half = hp.shard(to_framework(torch.ones(4, 4, dtype=torch.bfloat16)), mesh(), hp.P("shard"))
    return outcome(hp.grad(lambda w, x: hp.unit(lambda w, x: ops.linear(x, w))(w, x).sum()), half, x)


def repeating_random_numbers(rank: int) -> str:
    drop = hp.unit(lambda p, x: ops.dropout(ops.linear(x, p["random"]), 0.5), remat=True)
    w = hp.shard({"random": ops.ones(16, 4)}, mesh(), hp.P("shard"))
    return outcome(hp.grad(lambda w, x: drop(w, x).sum()), w, ops.ones(8, 4))


LACKS = {
    "ShardedStep.lower": Lack(
        "operators do not run without data, and on data a step that needs a value would go one way unseen",
        lowering,
        "LoweringError: hpfunc.sharded: MindSpore's operators cannot run without data",
        ("steps.test_execute::test_lower_finds_what_a_call_would_do",),
    ),
    "init without data": Lack(
        "operators are neither recorded nor run without data, so the whole tree is made first",
        asking_for_a_value,
        "returned",
        ("values.test_init",),
    ),
    "writing into a whole weight": Lack(
        "operators on a CPU write into no tensor, so there is nothing to find",
        writing,
        "the sum 0.0",
        (
            "a_weight_written_in_place",
            "a_weight_written_in_place_without_gradients",
            "a_weight_written_when_it_is_computed_again",
        ),
    ),
    "activation checkpointing around a unit": Lack(
        "it computes again in the middle of a unit's backward; `unit(remat=True)` is there",
        checkpointing,
        "Hint: recompute by units: hpfunc.unit(fn, remat=True)",
        (
            "steps.test_execute::test_activation_checkpointing_around_units",
            "steps.test_recompute::test_weights_that_a_checkpoint_inside_holds_are_given_back",
            "steps.test_recompute::test_a_recompute_has_the_number_of_the_use_that_it_repeats",
        ),
    ),
    "a graph beside the transforms": Lack(
        "MindSpore differentiates functions: there is no graph to keep, and no `backward()`",
        differentiating_a_graph,
        "'Tensor' object has no attribute 'backward'",
        ("a_graph_of_an_ended_call",),
    ),
    "second order, vmap, jvp": Lack(
        "`torch.func` has no counterpart that takes a collective",
        mapping,
        "Error",
        ("transforms.test_laws",),
    ),
    "random numbers in a unit with remat": Lack(
        "random operators on a CPU have a state of their own, which no recomputation restores",
        repeating_random_numbers,
        "UsageError: hpfunc.unit: a unit with remat=True computes something else when it is computed again",
        (
            "steps.test_recompute::test_recomputation_changes_no_bit_and_gathers_exactly",
            "steps.test_recompute::test_ranks_along_data_axes_have_their_own_random_numbers",
        ),
    ),
    "matrix products of bfloat16": Lack(
        "the CPU stores, casts and sums bfloat16, and has no other operators for it",
        multiplying,
        "on the CPU bfloat16 only stores and casts; compute in float32",
        (
            "steps.test_accumulate::test_the_error_of_float32_sums_does_not_grow_with_their_number",
            "steps.test_accumulate::test_the_error_of_bfloat16_sums_does",
            "steps.test_parity::test_low_precision_reduction_shows",
        ),
    ),
}

# Texts that are not those of torch, and why. They are in a folder of their own.
THE_NAME = "it names the framework"
THE_COPY = "a copy is made by another method"
DIFFERS = {
    "leaves_that_are_no_tensors": THE_NAME,
    "only_another_framework": THE_NAME,
    "one_rank_has_another_type": THE_NAME,
    "sharded_twice": THE_NAME,
    "a_view_of_a_weight_that_escapes": THE_COPY,
    "a_weight_that_escapes": THE_COPY,
    "a_weight_that_escapes_when_it_is_computed_again": THE_COPY,
    "a_step_that_needs_a_value": "every step is refused by `lower`",
    "a_unit_under_reentrant_checkpointing": "every recomputation is refused but that of `remat`",
}

# Tests of torch with ranks that say nothing of MindSpore, or whose like is somewhere else here.
NOT_HERE = {
    "checkpoint": "what it reads and writes is bytes; test_checkpoint",
    "museum": "faults of the core; its steps are of the kinds that test_shared and test_units have",
    "nn": "`torch.nn.Module` is torch's",
    "optim.test_bind": "torch's parameters and optimizers are torch's",
    "optim.test_bound_state": "torch's parameters and optimizers are torch's",
    "commands": "scripts of torch, and a demo in torch",
    "integrations": "the hosts train modules of torch",
    "zoo": "its models are modules of torch",
    "steps.test_compile": "torch.compile is torch's",
    "backends.test_digest": "what is digested is the runtime's own tensor, which is torch's for both frameworks",
    "backends.test_device_path": "CUDA is torch's; that of Ascend is in test_ascend",
    "backends.test_torch_contracts": "what torch promises; MindSpore's promises are in test_contracts",
    "backends.test_torch_private_names": "names of torch",
    "transforms.test_dtypes": "what travels is the runtime's own tensor, which is torch's for both frameworks",
    "optim.test_from_torch": "torch's optimizers are torch's",
    "steps.test_grad_mode": "no_grad and inference_mode are torch's",
    "steps.test_host_work": "what it counts are the core's calls, the same for each framework",
    "interop.test_interop": "DTensor, DeviceMesh and DLPack are torch's",
    "interop.test_dcp": "torch.distributed.checkpoint is torch's; test_checkpoint",
    "steps.test_sizes": "its models are torch's, for expanded and strided tensors; laws and parity draw sizes",
    "docs.test_code_blocks": "the pages are written for torch",
    "examples": "these start processes of their own; test_train_text, test_fsdp_demo",
    "errors.test_array_misuse": "the functions, and the lines that are shown, are torch's",
    "errors.test_wrong_arguments": "refused before any framework is asked; what one spec cuts is the core's",
    "errors.test_unit_functions": "the functions that fail, and the modules, are torch's",
    "errors.test_failures": "the control group is the same one over gloo, for both frameworks",
    "steps.test_borrowed": "strides and holders of gradients are torch's; here each gradient is copied",
    "steps.test_saved_tensors": "the writes are torch's; operators on a CPU write into no tensor here",
    "steps.test_inner_gradients": "`torch.autograd.grad` is torch's: there is no graph to differentiate in a loss",
    "steps.test_views": "views of another dtype are torch's",
    "steps.test_names": "names and keys are the core's, the same for each framework",
    "running.test_doctor_process": "what is compared are facts of processes, by the core, for both frameworks",
    "running.test_probe": "what it measures is gloo, for both frameworks",
    "steps.test_without_grad": "no_grad, its checkpoints and functions are torch's",
    "fuzz": "its steps are written in torch, and compared with plain torch",
    "helpers.test_ranks": "the pool itself",
    "running.test_loop": "the control group is the same one over gloo, for both frameworks; its models are torch's",
    "running.test_replicas": "what is compared are bits in host memory, by the core; errors.test_steps runs here",
    "backends.test_groups": "the groups of a CPU are torch's, for both frameworks",
    "values.test_dataclasses": "classes are optree's nodes, for both frameworks",
    "values.test_picture": "pictures show layouts, which no framework knows of",
    "values.test_world": "the same gloo world; test_launch",
    "values.test_array": "arrays with torch's tensors in one process; test_laws",
    "values.test_copies": "writes are counted by torch; MindSpore counts none",
    "transforms.test_collectives": "test_laws has the same judge",
    "steps.test_profile": "torch's profiler",
    "transforms.test_texts": "names are the core's, the same for each framework",
    "transforms.test_arrays": "test_laws",
    "steps.test_execute::test_an_even_cut_of_the_first_dim_is_never_copied": "it sees torch's operators copy",
    "steps.test_execute::test_what_is_packed_or_cut_elsewhere_is_copied": "it sees torch's operators copy",
    "steps.test_execute::test_a_gradient_stays_where_its_reduce_scatter_put_it": "the same host memory",
    "steps.test_execute::test_at_most_prefetch_and_one_units_are_whole": "test_units: test_whole_weights_are_released",
    "steps.test_execute::test_all_units_are_whole_if_the_policy_says_so": "test_units: test_whole_weights_are_released",
    "steps.test_execute::test_a_plan_can_be_left_in_the_middle_of_the_backward": "three ranks, and a hook of torch",
    "steps.test_execute::test_a_step_that_is_over_keeps_nothing": "test_memory_of_donated_steps_does_not_grow",
    "steps.test_recompute::test_nothing_of_the_inside_is_kept_and_it_is_computed_again": "it sees torch's operators",
    "steps.test_recompute::test_what_is_not_recomputed_is_kept": "it sees torch's operators",
    "steps.test_recompute::test_a_recomputed_step_that_is_over_keeps_nothing": "it sees torch's operators",
    "steps.test_parity::test_two_replicas_of_four_shards": "eight ranks",
}
