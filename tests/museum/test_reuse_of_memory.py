"""Memory that is given to somebody else, or written again, before its last reader is ordered."""

from __future__ import annotations

from hpfunc.planning.ops import Local
from hpfunc.planning.planner import Traits, plan
from hpfunc.planning.policy import Policy
from tests.museum.pieces import HSDP, judge, micro_batches, not_ordered, sharing
from tests.planning.edits import changed, inserted, moved, named, rebuffered, region
from tests.planning.programs import layers, stack, weight

THREE = plan(layers(3, HSDP, 64), Policy())
PACKED = plan(stack(*((weight(f"a{i}", 20, HSDP), weight(f"b{i}", 12, HSDP)) for i in range(3))), Policy())
TWICE = plan(micro_batches(2, "shards", HSDP), Policy())


def test_the_input_of_a_reduce_scatter_is_reused_while_it_is_sent() -> None:
    """ROCm/pytorch 3500, 3501: inputs of reduce-scatters stood on a list that only the last group of weights emptied.

    When autograd called the hooks in another order, memory came free while the network still read it: norms of
    gradients jumped from 17 to 96. Here a `Free` does not wait for the reduce-scatter that reads its buffer, and the
    gradient of the next layer takes the memory. For the checker a `Free` is a write to all that it gives away, so it
    must happen after every reader.
    """
    broken = not_ordered(THREE, "free gradient w2", after="reduce_scatter layer2")
    judge(THREE, broken, HSDP, "free gradient w2: uses gradient w2, but is not ordered after reduce_scatter layer2")


def test_an_addition_on_the_stream_of_collectives_reads_what_compute_has_given_back() -> None:
    """pytorch 181218: a loss in chunks. The backward of a chunk took memory that the last addition still read.

    The addition ran on the stream of reduce-scatters, the backward on that of compute, and to wait for the
    reduce-scatter alone was not enough. Here the whole gradients are given back after the last kernel that has been
    issued before the one that packs them. The checker asks for every reader, not for the collective only.
    """
    broken = changed(PACKED, "free gradient a2", waits=("backward layer1",))
    judge(PACKED, broken, HSDP, "free gradient a2: uses gradient a2, but is not ordered after pack gradient layer2")


def test_the_shards_of_all_layers_end_in_one_memory() -> None:
    """pytorch 180889: the buffer of the all-reduce was let go by rebinding a name to its cast.

    Under pressure on the allocator all layers got one piece of memory, and all gradients became those of the layer
    that ran last. Here two layers share a reduce buffer that nobody gave back between them. The second reduce-scatter
    writes what the first layer's all-reduce still reads: a write after a read, without an order.
    """
    broken = sharing(THREE, "reduce layer2", "reduce layer1")
    judge(THREE, broken, HSDP, "*uses reduce layer2, but is not ordered after *")


def test_a_copy_on_another_stream_reads_what_its_owner_has_freed() -> None:
    """pytorch 180665: sums were allocated on the stream of reduce-scatters and copied to the host on another one.

    The allocator knows the first stream only, so the next reduce-scatter overwrote what the copy had not read yet:
    silently wrong in 30 to 60 % of all backwards. Here the `Free` of what was exchanged does not wait for the sum that
    another stream forms of it. Buffers belong to a stream, so the checker asks for a wait on all others.
    """
    mended = plan(layers(3, HSDP, 64), Policy(), Traits(ordered_sums=True))
    broken = not_ordered(mended, "free staging w2", after="sum layer2")
    judge(mended, broken, HSDP, "free staging w2: uses staging w2, but is not ordered after sum layer2")


def test_a_buffer_comes_from_the_pool_of_a_stream_that_does_not_use_it() -> None:
    """Megatron-LM 6187: main gradients were allocated while the model was wrapped, so from the pool of compute.

    They lived on the stream of reduce-scatters, and compute could take their memory while one was under way. Here the
    message of gradients is taken from the memory of gathers, where a gather may still be using it. That the first
    writer is on the buffer's own stream, or waits for all that this one has been given, is a rule of the checker.
    """
    broken = rebuffered(PACKED, "send layer2#2", stream="gather")
    judge(PACKED, broken, HSDP, "*begins send layer2#2 on stream reduce_scatter, which belongs to stream gather")


def test_two_buffers_for_the_gradients_of_three_layers() -> None:
    """Megatron-LM 5222: double buffers. The third layer's gradient went where the first one's was still being sent.

    One waited until a single buffer was in use, not until the one to be written was free; neighbours share it often,
    and the error was small. Here the last layer of backward writes into the buffer of the first, which nobody frees
    between. The backward is not ordered after the reduce-scatter that reads it.
    """
    broken = sharing(THREE, "gradient w2", "gradient w0", freed="free gradient w2")
    judge(THREE, broken, HSDP, "backward layer0: uses gradient w2, but is not ordered after reduce_scatter layer2")


def test_a_buffer_is_zeroed_by_a_stream_that_does_not_wait() -> None:
    """Megatron-LM 7400 (from its description): buffers of gradients are reset before all of them are reduced.

    Here the stream of compute resets a reduce buffer, ready for the next step, as soon as the reduce-scatter is done,
    and does not know of the all-reduce over the replicas that reads and writes it on a third stream. Two writes of
    one region without an order.
    """
    reset = Local("reset", "zero", "compute", (), (region(THREE, "reduce layer1"),), ("reduce_scatter layer1",))
    broken = inserted(THREE, "free gradient w0", reset, waits=False)
    judge(THREE, broken, HSDP, "*reset*not ordered after *")


def test_shards_are_zeroed_between_the_micro_batches() -> None:
    """Megatron-LM 7186: every backward counted as the last one, so each cleared what those before had added up.

    Only the last micro-batch reached the optimizer. Here a `zero` on the right stream, in good order, wipes the
    carried shard before the second micro-batch is added. No race: the meaning is wrong, and the checker follows
    which uses a gradient is the sum of.
    """
    carried = region(TWICE, "reduce layer1")
    broken = inserted(
        TWICE, "add carried layer1", Local("zero carried layer1", "zero", "reduce_scatter", (), (carried,)), waits=True
    )
    judge(TWICE, broken, HSDP, "*add carried layer1*")


def test_a_gathered_message_is_freed_while_it_is_unpacked() -> None:
    """pytorch 147810 (from its description): what was gathered is copied out on one stream and reused on another.

    Here the message out of which a unit's weights are unpacked is given back without waiting for the unpacking, and
    the next gather receives into it. The unit then computes with a mixture of two layers.
    """
    broken = not_ordered(PACKED, "free gathered layer0", after="unpack layer0")
    judge(PACKED, broken, HSDP, "free gathered layer0: uses gathered layer0, but is not ordered after unpack layer0")


def test_whole_weights_are_released_while_the_unit_computes() -> None:
    """pytorch 106705, 177147: which of the waits between a gather and the use before it is one too many?

    With a bounded number of buffers the gather of a later unit takes the memory of an earlier one, so it has to come
    after that unit's last kernel. Here the release does not wait for it. A wait that another one implies may go: the
    checker goes by what happens before what, and then accepts.
    """
    broken = not_ordered(THREE, "free whole w0", after="forward layer0")
    judge(THREE, broken, HSDP, "free whole w0: uses whole w0, but is not ordered after forward layer0")
    waits = named(THREE, "forward layer1").waits
    doubled = changed(THREE, "forward layer1", waits=(*waits, "gather layer0"))  # forward layer0 has waited for it
    judge(doubled, changed(THREE, "forward layer1", waits=("gather layer0",)), HSDP, "forward layer1: *gather layer1")


def test_a_hook_on_a_side_stream_packs_what_is_already_being_sent() -> None:
    """Megatron-LM 3670 (and 7400's order of hooks): a hook inherited the stream on which its model had been wrapped.

    It scaled and checked gradients there, and the reduce-scatter did not wait for it. Here the packing of gradients
    runs on a stream that the reduce-scatter does not follow. The message has no write that happens before its
    reader.
    """
    broken = changed(PACKED, "pack gradient layer1", stream="all_reduce")
    judge(
        PACKED, broken, HSDP, "reduce_scatter layer1: uses send layer1*, but is not ordered after pack gradient layer1"
    )


def test_a_collective_starts_before_its_input_is_written() -> None:
    """ROCm/pytorch 3612: one thread moved the data of all ranks, on its own stream, with no order to theirs.

    It read a rank's input before the copy into it had run. It went well on one maker's devices and badly on the
    other's. Here a reduce-scatter does not wait for the backward that makes its input.
    """
    broken = not_ordered(THREE, "reduce_scatter layer1", after="backward layer1")
    judge(THREE, broken, HSDP, "reduce_scatter layer1: uses gradient w1, but is not ordered after backward layer1")


def test_a_gather_lands_in_memory_that_gradients_are_added_to() -> None:
    """Megatron-LM 4609: gathers received into the buffer of gradients, which was not zeroed after that.

    Backward added the gradients to what was left of the weights. Here the carried shard of a step is what a gather
    has received last. The checker knows of each element what it holds, and a block of a weight is not a gradient.
    """
    reduce = named(TWICE, "add carried layer1")
    shard = region(TWICE, "shard w1")
    broken = changed(TWICE, "add carried layer1", reads=(shard, reduce.reads[1]))
    judge(TWICE, broken, HSDP, "add carried layer1: *")


def test_a_gradient_is_divided_after_it_was_given_away() -> None:
    """A kind of many reports, without a number of its own: what the caller already holds is still being scaled.

    Here the delivery is issued before the mean is taken. The caller would see the sum first and the mean later, or
    half of each; the checker allows no use after a delivery.
    """
    broken = moved(THREE, "scale layer1", after="deliver w1")
    judge(THREE, broken, HSDP, "scale layer1: uses reduce layer1 after deliver w1")
