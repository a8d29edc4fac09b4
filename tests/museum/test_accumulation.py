"""Gradients of several micro-batches: what is added to what, over which ranks, and when."""

from __future__ import annotations

from dataclasses import replace

from hpfunc.planning.planner import Traits, plan
from hpfunc.planning.policy import Policy
from tests.museum.pieces import HSDP, judge, micro_batches, not_ordered
from tests.planning.edits import changed, left_out, moved, named, place_of
from tests.planning.mutants import flat, put, rebuilt
from tests.planning.programs import layers

SCATTERED = plan(micro_batches(2, "shards", HSDP), Policy())
WHOLE = plan(micro_batches(2, "wholes", HSDP), Policy())


def test_micro_batches_are_never_all_reduced() -> None:
    """hyper-parallel 437 (from its description), torchtitan 4505: accumulation left the all-reduce out, for ever.

    A flag that says "not in this micro-batch" was still down in the last one; in a recorded graph it stays down in
    every replay. Each replica then trains for itself, and the averaged loss hides it. Here the all-reduce is left out,
    waits and all, so nothing races. The checker knows over which axes each gradient is summed.
    """
    broken = left_out(SCATTERED, "all_reduce layer1")
    judge(SCATTERED, broken, HSDP, "deliver w1: *summed is ['shard'], not ['replicate', 'shard']*")


def test_what_was_carried_is_added_after_the_all_reduce() -> None:
    """pytorch 125484: the first micro-batch is reduce-scattered only, the last one all-reduced as well.

    To add the carried shard after the all-reduce is tempting, and each replica keeps its own part of the first
    micro-batch. Here the addition is issued right after the all-reduce, with all the waits that this needs. The sum
    of a gradient over two sets of axes is not the gradient of anything.
    """
    broken = moved(SCATTERED, "add carried layer1", after="all_reduce layer1", waits=True)
    judge(SCATTERED, broken, HSDP, "add carried layer1: *")


def test_a_micro_batch_is_all_reduced_and_then_carried() -> None:
    """torchtitan 1929, VeOmni 781: how many all-reduces does a step of two micro-batches need?

    One. Here the first micro-batch is all-reduced before it is carried, and the total once more: its gradient counts
    as often as there are replicas. The checker rejects a sum that is not due.
    """
    last = named(SCATTERED, "all_reduce layer1")
    carried = named(SCATTERED, "reduce_scatter layer1").writes
    first = replace(last, name="all_reduce too early", reads=carried, writes=carried, waits=("reduce_scatter layer1",))
    ops = flat(SCATTERED)
    place = place_of(SCATTERED, "add carried layer1")
    broken = rebuilt(SCATTERED, [*ops[:place], (ops[place][0], first), *ops[place:]], waits=True)
    judge(SCATTERED, broken, HSDP, "add carried layer1: *")


def test_whole_gradients_are_sent_before_the_last_one_is_added() -> None:
    """fairscale 780: a block that is called several times was reduced after its first backward.

    The unit test passed, since its weights were so small that the reduction came too late to do harm. Here the
    reduce-scatter takes the first micro-batch's whole gradient instead of the sum. It is in order and does not race:
    of two uses one is missing.
    """
    total = named(WHOLE, "reduce_scatter layer1").reads
    first = named(WHOLE, "backward layer1").writes
    assert total != first
    broken = moved(changed(WHOLE, "reduce_scatter layer1", reads=first), "reduce_scatter layer1", after="free whole w1")
    judge(WHOLE, rebuilt(broken, flat(broken), waits=True), HSDP, "*deliver w1: *uses is *")


def test_the_sum_of_the_last_two_gradients_is_not_waited_for() -> None:
    """fairscale 777, Megatron-LM 6660 (from its description): the hook that sends runs before the one that adds.

    Here the reduce-scatter does not wait for the addition that follows the second backward on the stream of compute.
    With the hooks in the other order the same schedule would be right, which is why it passed.
    """
    broken = not_ordered(WHOLE, "reduce_scatter layer1", after="accumulate w1*")
    judge(WHOLE, broken, HSDP, "reduce_scatter layer1: *not ordered after accumulate w1*")


def test_an_axis_of_one_rank_loses_the_division() -> None:
    """Megatron-LM 6773 (5281's neighbour in the list): on an axis of one rank nothing is sent, and so nothing scaled.

    The short cut for a group of one skipped the collective together with the division that stood beside it. Here
    the mesh has one shard and two replicas. The checker counts by how much a gradient has been divided.
    """
    mesh = {"replicate": 2, "shard": 1}
    mended = plan(layers(2, mesh, 64), Policy())
    judge(mended, left_out(mended, "scale layer1"), mesh, "deliver w1: *divided is 1, not 2*")


def test_an_optional_step_of_a_sum_is_done_twice() -> None:
    """Automodel 3830, unsloth-zoo 1023: two places divide by the same number, each sure to be the only one.

    Gradients come out too small by the number of ranks, or of micro-batches, and training only looks slow. Here the
    mean is taken twice.
    """
    mended = plan(layers(2, HSDP, 64), Policy(), Traits(ordered_sums=True))
    scale = named(mended, "scale layer1")
    ops = flat(mended)
    place = place_of(mended, "scale layer1")
    twice = [*ops[:place], (ops[place][0], replace(scale, name="scale before")), *ops[place:]]
    judge(mended, rebuilt(mended, twice, waits=True), HSDP, "deliver w1: *divided is 16, not 4*")
    judge(mended, put(mended, place, replace(scale, divisor=16)), HSDP, "deliver w1: *divided is 16, not 4*")
