"""What the caller does before a step, after it, and with what the step has given it."""

from __future__ import annotations

from hpfunc.planning.ops import Local
from hpfunc.planning.planner import plan
from hpfunc.planning.policy import Policy
from tests.museum.pieces import HSDP, judge, micro_batches, not_ordered
from tests.planning.edits import inserted, left_out, moved, named, rebuffered
from tests.planning.mutants import flat, rebuilt
from tests.planning.programs import layers

THREE = plan(layers(3, HSDP, 64), Policy())
TWICE = plan(
    micro_batches(2, "", HSDP, (64, 200, 64)), Policy()
)  # two differentiations in one step, each with its own gradients


def test_the_first_gathers_race_with_the_optimizer() -> None:
    """pytorch 128975: gathers of a step have to wait for the optimizer of the step before it.

    FSDP2 lets its streams wait for the caller's at the beginning of each forward, or for an event that the user gives
    it. A schedule that knows only its own ops has nothing that writes a shard, and so nothing to wait for. Here a
    `Caller` stands at the beginning, which writes the shards; the first gather does not wait for it.
    """
    broken = not_ordered(THREE, "gather layer0", after="begin")
    judge(THREE, broken, HSDP, "gather layer0: uses shard w0, but is not ordered after begin")
    judge(THREE, broken, HSDP, "gather layer1: is not ordered after the beginning of the step")


def test_the_optimizer_runs_within_backward() -> None:
    """pytorch 64661: to update each weight as soon as its gradient is there overlaps, and saves memory.

    But a released weight is gathered again for its backward, out of a shard which then must still be the old one, and
    on another stream. Here the caller gets its shards back before the last gather has read its own. A second `Caller`
    is a write of each shard, after which nobody may use it.
    """
    broken = moved(THREE, "end", after="free whole w2")
    judge(THREE, broken, HSDP, "gather layer0#2: uses shard w0 after end")


def test_memory_of_a_delivered_gradient_goes_back_to_a_side_stream() -> None:
    """pytorch 193686, 132445: what a reduce-scatter has written is allocated on its stream, and used on the caller's.

    When the caller drops a gradient, the allocator gives its memory to the next reduce-scatter, which knows nothing of
    the optimizer that still reads it. Here the sums that are delivered are memory of the reduce-scatters' stream. What
    is delivered must be memory of the stream of compute, which is the caller's: the checker's rule.
    """
    broken = TWICE
    for buffer in TWICE.buffers:
        if buffer.kind == "reduce":
            broken = rebuffered(broken, buffer.name, stream="reduce_scatter")
    broken = rebuilt(broken, flat(broken), waits=True)  # none for the memory of compute, which it now does not take
    judge(TWICE, broken, HSDP, "deliver w1: delivers reduce layer1, which is memory of stream reduce_scatter*")


def test_a_gradient_that_autograd_still_holds_is_divided_in_place() -> None:
    """Reports of many numbers, like Megatron-LM 3670 and DDP's views of buckets: a hook scales what it was given.

    Autograd may have given the same tensor to two weights (the sum of two gets one gradient), or give out a view with
    any strides. Here a whole gradient is divided in place before it is sent, and the division after that is left out:
    in order, no race. A gradient is borrowed, so nothing but its backward may write it.
    """
    gradients = named(THREE, "backward layer1").writes
    early = Local("scale early", "scale", "compute", gradients, gradients, divisor=4)
    broken = inserted(left_out(THREE, "scale layer1"), "free whole w1", early, waits=True)
    # The machine gives each gradient memory of its own, so it shows nothing.
    judge(THREE, broken, HSDP, "scale early: writes gradient w1, which is only borrowed from autograd", shows="right")
