"""Each rule of the checker, broken by hand: a planned schedule with one mistake, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from hpfunc._errors import ScheduleError
from hpfunc.planning.checking.checker import check, find_violations
from hpfunc.planning.ops import Communicator, Free, Local, Op, Region
from hpfunc.planning.planner import Traits, plan
from hpfunc.planning.policy import Policy
from hpfunc.planning.program import Event, Program, Unit
from hpfunc.planning.schedule import Schedule
from tests.planning.edits import changed, left_out, named, place_of, rebuffered, region
from tests.planning.mutants import flat, rebuilt
from tests.planning.programs import STEP, layers, stack, weight

FSDP = {"shard": 4}
HSDP = {"replicate": 2, "shard": 2}
HSDP3 = {"replicate": 3, "shard": 2}
ORDERED = Traits(ordered_sums=True)


def texts(schedule: Schedule) -> list[str]:
    return [str(violation) for violation in find_violations(schedule)]


def with_op(schedule: Schedule, after: str, op: Op, *, waits: bool = True) -> Schedule:
    """Returns the schedule with one more op."""
    ops = flat(schedule)
    place = place_of(schedule, after)
    return rebuilt(schedule, [*ops[: place + 1], (ops[place][0], op), *ops[place + 1 :]], waits=waits)


TWO = plan(layers(2, FSDP), Policy())
BOTH = plan(layers(2, HSDP), Policy(), ORDERED)
THREE = plan(layers(2, HSDP3), Policy(), ORDERED)
SMALL = plan(stack((weight("a", 64, HSDP), weight("b", 64, HSDP))), Policy())
CAST = plan(layers(2, HSDP, dtype="bfloat16"), Policy())
TIED = plan(
    Program(
        (weight("w", 64, FSDP),),
        (Unit("layer", (0,)),),
        (*(Event("forward", 0, use) for use in (0, 1)), *(Event("backward", 0, use) for use in (1, 0)), *STEP),
    ),
    Policy(),
)
KEPT = plan(
    Program(
        (weight("w", 64, FSDP), weight("v", 64, FSDP)),
        (Unit("layer", (0,)),),
        (*(Event("forward", 0, use) for use in (0, 1, 2)), *(Event("backward", 0, use) for use in (2, 1, 0)), *STEP),
    ),
    Policy(release="never"),
)


@pytest.mark.parametrize("schedule", [TWO, BOTH, THREE, SMALL, CAST, TIED])
def test_planned_schedules_are_safe(schedule: Schedule) -> None:
    assert texts(schedule) == []


# -------------------------------------------------------------------------------------------------------- well formed


MALFORMED: dict[str, Callable[[], Schedule]] = {
    "gather layer1: waits for 'backward layer1', which is not issued before it: it would wait forever": lambda: changed(
        TWO, "gather layer1", waits=("backward layer1",)
    ),
    "gather layer1: waits for 'gather layer1', which is not issued before it: it would wait forever": lambda: changed(
        TWO, "gather layer1", waits=("gather layer1",)
    ),
    "gather layer0: two ops have this name": lambda: changed(TWO, "gather layer1", name="gather layer0"),
    "whole w0: 2 buffers have this name": lambda: rebuffered(TWO, "whole w1", name="whole w0"),
    "slots: are not in the order of the events, each at most once": lambda: replace(TWO, slots=TWO.slots[::-1]),
    "forward layer0: is not the last op before its event": lambda: changed(TWO, "forward layer0", event=1),
    "forward layer0: has no Compute before it": lambda: left_out(TWO, "forward layer0"),
    "deliver w1: is on stream gather, not on compute": lambda: changed(TWO, "deliver w1", stream="gather"),
    "reduce_scatter layer0: uses reduce_scatter@shard on stream gather, "
    "which is used on stream reduce_scatter before": lambda: changed(TWO, "reduce_scatter layer0", stream="gather"),
    "gather layer0: uses gather@expert, over whose axes no weight is cut or reduced": lambda: changed(
        TWO, "gather layer0", communicator=Communicator("gather", ("expert",))
    ),
    "deliver w1: names buffer 99, which does not exist": lambda: changed(TWO, "deliver w1", region=Region(99, 0, 1)),
    "deliver w1: names weight 9, which does not exist": lambda: changed(TWO, "deliver w1", weight=9),
    "deliver w1: reaches beyond its buffer: reduce layer1[1:1025]": lambda: changed(
        TWO, "deliver w1", region=region(TWO, "reduce layer1")._replace(start=1, stop=1025)
    ),
    "gather layer0: all_to_all over 4 ranks from shard w0 into whole w0 cannot be": lambda: changed(
        TWO, "gather layer0", collective="all_to_all"
    ),
    "gather layer0: sends float32 and receives bfloat16": lambda: rebuffered(TWO, "whole w0", dtype="bfloat16"),
    "gather layer0: sends 0 messages and receives 1": lambda: changed(TWO, "gather layer0", reads=()),
    "scale layer1: scale cannot have 0 reads and 1 writes of these sizes": lambda: changed(
        TWO, "scale layer1", reads=()
    ),
    "sum layer1: sum_parts cannot have 1 reads and 1 writes of these sizes": lambda: changed(
        BOTH, "sum layer1", parts=3
    ),
    "accumulate w: accumulate cannot have 1 reads and 1 writes of these sizes": lambda: changed(
        TIED, "accumulate w", reads=named(TIED, "accumulate w").reads[:1]
    ),
    "pack layer0: pack_shards cannot have 2 reads and 1 writes of these sizes": lambda: changed(
        SMALL, "pack layer0", weights=(0,)
    ),
    "unpack layer0: unpack_wholes cannot have 1 reads and 2 writes of these sizes": lambda: changed(
        SMALL, "unpack layer0", weights=(0,)
    ),
    "zero layer0: zero cannot have 1 reads and 1 writes of these sizes": lambda: changed(
        SMALL, "zero layer0", reads=named(SMALL, "zero layer0").writes
    ),
}


@pytest.mark.parametrize("text", MALFORMED)
def test_what_is_malformed_is_named(text: str) -> None:
    assert text in texts(MALFORMED[text]())


# ------------------------------------------------------------------------------------------------- order and lifetime


def early_free() -> Schedule:
    """Returns a schedule that frees a whole weight before it is used."""
    moved = named(TWO, "free whole w0")
    return with_op(left_out(TWO, moved.name), "gather layer0", replace(moved, waits=()), waits=False)


UNSAFE: dict[str, Callable[[], Schedule]] = {
    "forward layer0: uses whole w0, but is not ordered after gather layer0": lambda: changed(
        TWO, "forward layer0", waits=()
    ),
    "free whole w0: uses whole w0, but is not ordered after forward layer0": lambda: changed(
        plan(layers(2, FSDP), Policy(prefetch=0)), "free whole w0", waits=()
    ),
    "reduce_scatter layer1: uses gradient w1, but is not ordered after backward layer1": lambda: changed(
        TWO, "reduce_scatter layer1", waits=()
    ),
    "free gradient w1: uses gradient w1, but is not ordered after reduce_scatter layer1": (
        lambda: changed(TWO, "free gradient w1", waits=())
    ),
    "sum layer1: uses staging w1, but is not ordered after reduce_scatter layer1": lambda: changed(
        BOTH, "sum layer1", waits=()
    ),
    "scale layer1: uses reduce layer1, but is not ordered after all_reduce layer1": lambda: changed(
        BOTH, "scale layer1", waits=()
    ),
    "forward layer0: uses whole w0 after free whole w0": early_free,
    "free again: uses whole w0 after free whole w0": lambda: with_op(
        TWO, "free whole w0", replace(named(TWO, "free whole w0"), name="free again")
    ),
    "free reduce: uses reduce layer1 after deliver w1": lambda: with_op(
        TWO, "deliver w1", Free("free reduce", region(TWO, "reduce layer1").buffer, "reduce_scatter")
    ),
    "scale again: uses reduce layer1 after deliver w1": lambda: with_op(
        TWO, "deliver w1", replace(named(TWO, "scale layer1"), name="scale again")
    ),
    "gather layer1: writes shard w0, which belongs to the caller": lambda: changed(
        rebuffered(TWO, "shard w0", numel=4096),
        "gather layer1",
        writes=(Region(region(TWO, "shard w0").buffer, 0, 4096),),
    ),
    "free shard: frees shard w0, which belongs to the caller": lambda: with_op(
        TWO, "free whole w0", Free("free shard", region(TWO, "shard w0").buffer, "gather")
    ),
    "deliver w1: delivers shard w0, which belongs to the caller": lambda: changed(
        TWO, "deliver w1", region=region(TWO, "shard w0")
    ),
    "whole w0: this buffer is neither freed nor delivered": lambda: left_out(
        plan(layers(2, FSDP), Policy(release="never")), "free whole w0"
    ),
    "gradient w0: this buffer is never written": lambda: changed(TWO, "backward layer0", writes=()),
    "free gradient w0: gives gradient w0 away, which nobody has written": lambda: changed(
        TWO, "backward layer0", writes=()
    ),
    "free gradient w1: frees gradient w1 on stream gather, which belongs to stream compute": lambda: changed(
        TWO, "free gradient w1", stream="gather"
    ),
    "gather layer0: begins whole w0 on stream gather, which belongs to stream all_reduce": lambda: rebuffered(
        TWO, "whole w0", stream="all_reduce"
    ),
    "begin: the first op is not the caller's": lambda: left_out(TWO, "begin"),
    "gather layer0: is not ordered after the beginning of the step": lambda: changed(TWO, "gather layer0", waits=()),
    "gather layer0: uses shard w0, but is not ordered after begin": lambda: changed(TWO, "gather layer0", waits=()),
    "shard w0: this buffer is not handed back to the caller": lambda: left_out(TWO, "end"),
    "zero layer0: begins reduce layer0 on stream reduce_scatter, but is not ordered after what the caller has done": (
        lambda: changed(plan(layers(2, HSDP, 100), Policy()), "zero layer0", waits=())
    ),
    "deliver w1: delivers reduce layer1, which is memory of stream reduce_scatter: "
    "the caller drops it unseen by that": lambda: rebuffered(TWO, "reduce layer1", stream="reduce_scatter"),
    "scale: writes gradient w1, which is only borrowed from autograd": lambda: with_op(
        TWO,
        "reduce_scatter layer1",
        Local("scale", "scale", "compute", *[(region(TWO, "gradient w1"),)] * 2, divisor=2),
    ),
    "deliver w1: delivers gradient w1, which is only borrowed from autograd": lambda: changed(
        TWO, "deliver w1", region=region(TWO, "gradient w1")._replace(stop=1024)
    ),
    "begin: writes whole w0, which belongs to the schedule": lambda: changed(
        TWO, "begin", writes=(region(TWO, "whole w0"),)
    ),
    "copy: writes gradient w1, which it also reads, or writes it twice": lambda: with_op(
        TWO,
        "free whole w1",
        Local("copy", "copy", "compute", (region(TWO, "gradient w1"),), (region(TWO, "gradient w1"),)),
    ),
}


@pytest.mark.parametrize("text", UNSAFE)
def test_what_is_unsafe_is_named(text: str) -> None:
    assert text in texts(UNSAFE[text]())


# ------------------------------------------------------------------------------------------------------------ meaning


def swapped(schedule: Schedule, name: str, side: str) -> Schedule:
    return changed(schedule, name, **{side: tuple(reversed(getattr(named(schedule, name), side)))})


def exchanged_gradients() -> Schedule:
    """Returns a schedule that delivers to each of two weights the gradient of the other."""
    half = changed(BOTH, "deliver w1", region=region(BOTH, "reduce layer0"))
    return changed(half, "deliver w0", region=region(BOTH, "reduce layer1"))


UNEVEN = plan(layers(2, FSDP, 4097, even=False), Policy(pack_below_bytes=0))
SIX = plan(layers(1, HSDP3), Policy())
ROUNDED = plan(layers(1, FSDP, reduce_dtype="bfloat16"), Policy())
OUTPUT = region(ROUNDED, "output w0")
PAIR = plan(stack((weight("a", 4096, FSDP), weight("b", 4096, FSDP))), Policy(pack_below_bytes=0))

WRONG: dict[str, Callable[[], Schedule]] = {
    "forward layer0: reads from whole a what is not the whole of a": lambda: swapped(PAIR, "gather layer0", "writes"),
    "forward layer0: reads from whole b what is not the whole of a": lambda: swapped(PAIR, "forward layer0", "reads"),
    "forward layer0: needs 1 reads and 0 writes": lambda: changed(TWO, "forward layer0", reads=()),
    "forward layer0: reads elements of whole w0 that were never written": lambda: left_out(TWO, "gather layer0"),
    "deliver w1: delivers for w1 what is not its gradient: divided is 1, not 4": lambda: left_out(TWO, "scale layer1"),
    "deliver w1: delivers for w1 what is not its gradient: divided is 3, not 4": lambda: changed(
        TWO, "scale layer1", divisor=3
    ),
    "deliver w1: delivers for w1 what is not its gradient: summed is ['shard'], "
    "not ['replicate', 'shard']; early is True, not False": lambda: left_out(
        plan(layers(2, HSDP), Policy()), "all_reduce layer1"
    ),
    "deliver w1: delivers for w1 what is not its gradient: weight is 0, not 1; "
    "uses is (((3, 0),),), not (((2, 0),),)": exchanged_gradients,
    "deliver w: delivers for w what is not its gradient: uses is (((3, 0),),), not (((2, 0), (3, 0)),)": lambda: (
        changed(
            left_out(left_out(TIED, "accumulate w"), "free gradient w#2"),
            "reduce_scatter layer",
            reads=named(TIED, "accumulate w").reads[1:],
        )
    ),
    "all_reduce again: sums gradient of weight 1 over ('replicate',), which is not due": lambda: with_op(
        BOTH, "all_reduce layer1", replace(named(BOTH, "all_reduce layer1"), name="all_reduce again")
    ),
    "accumulate w: does not add one gradient to those before it": lambda: changed(
        KEPT, "accumulate w", reads=(region(KEPT, "whole w"), named(KEPT, "accumulate w").reads[1])
    ),
    "accumulate w#2: does not add one gradient to those before it": lambda: swapped(KEPT, "accumulate w#2", "reads"),
    "accumulate w: adds what is not the whole gradient of v": lambda: changed(KEPT, "accumulate w", weights=(1,)),
    "pack layer0: does not read the shards of its weights, in order": lambda: swapped(SMALL, "pack layer0", "reads"),
    "unpack layer0: does not read the gathered blocks of its weights, in order": lambda: changed(
        SMALL, "unpack layer0", weights=(1, 0)
    ),
    "pack gradient layer0: does not read the whole gradient of b": lambda: swapped(
        SMALL, "pack gradient layer0", "weights"
    ),
    "w1: its gradient of backward 0 is never delivered": lambda: left_out(TWO, "deliver w1"),
    "deliver again: delivers the gradient of w1 a second time": lambda: with_op(
        TWO, "deliver w1", replace(named(TWO, "deliver w1"), name="deliver again")
    ),
    "gather layer0: gathers the shard of w0, which is not padded yet": lambda: changed(
        UNEVEN, "gather layer0", reads=named(UNEVEN, "pack w0").reads
    ),
    "deliver w0: delivers for w0 what is not its gradient: "
    "divided is 2 in float32 and 3 in float32, not 6 in float32": lambda: with_op(
        changed(SIX, "scale layer0", divisor=2),
        "scale layer0",
        replace(named(SIX, "scale layer0"), name="scale again", divisor=3),
    ),
    "deliver w0: delivers for w0 what is not its gradient: divided is 4 in float32, not 4 in bfloat16": lambda: with_op(
        changed(ROUNDED, "scale layer0", divisor=1),
        "cast layer0",
        Local("scale", "scale", "compute", (OUTPUT,), (OUTPUT,), divisor=4),
    ),
    "scale whole: scales what is not a block of a gradient: Param(weight=0, rank=0, dtypes=('float32',))": lambda: (
        with_op(
            TWO,
            "gather layer0",
            Local("scale whole", "scale", "gather", (region(TWO, "whole w0"),), (region(TWO, "whole w0"),)),
        )
    ),
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_is_named(text: str) -> None:
    assert text in texts(WRONG[text]())


def test_no_element_is_read_of_what_nobody_has_written() -> None:
    """There is no memory of which it could be."""
    program = stack((weight("w0", 0, FSDP),), (weight("w1", 4096, FSDP),))
    empty = plan(program, Policy())
    early = changed(empty, "forward layer0", reads=(region(empty, "gradient w1")._replace(stop=0),))
    assert texts(early) == ["forward layer0: reads gradient w1, which nobody has written"]


def test_weights_without_elements_have_their_dtype() -> None:
    """Their contents do not tell one buffer from another, but a unit sees the dtype, and so does the caller."""
    program = stack((weight("w0", 0, FSDP, dtype="bfloat16"),), (weight("w1", 64, FSDP, dtype="bfloat16"),))
    empty = plan(program, Policy())
    assert find_violations(empty) == ()
    shard, output = (region(empty, name)._replace(stop=0) for name in ("shard w0", "whole w1"))
    assert texts(changed(empty, "forward layer0", reads=(shard,), waits=named(empty, "forward layer0").waits)) == [
        "forward layer0: takes bfloat16 from shard w0, which is float32"
    ]
    late = texts(changed(empty, "deliver w0", region=output))
    assert "deliver w0: takes float32 from whole w1, which is bfloat16" in late


def test_what_follows_from_a_mistake_is_not_reported_again() -> None:
    """The gradients of a backward that has read nothing are not blamed on those that use them."""
    assert texts(left_out(TWO, "gather layer0")) == [
        "free whole w0: gives whole w0 away, which nobody has written",
        "whole w0: this buffer is never written",
        "forward layer0: reads elements of whole w0 that were never written",
        "backward layer0: reads elements of whole w0 that were never written",
    ]


def test_the_error_lists_every_violation() -> None:
    broken = changed(left_out(TWO, "scale layer1"), "scale layer0", divisor=2)
    with pytest.raises(ScheduleError) as caught:
        check(broken)
    assert str(caught.value).splitlines() == [
        "hpfunc.check: the schedule is not safe to run",
        "  deliver w1: delivers for w1 what is not its gradient: divided is 1, not 4",
        "  deliver w0: delivers for w0 what is not its gradient: divided is 2, not 4",
    ]


def test_what_is_not_made_yet_cannot_be_gathered() -> None:
    made = plan(layers(2, FSDP), Policy())
    weights = tuple(replace(weight, origin=None) for weight in made.program.weights)
    assert texts(replace(made, program=replace(made.program, weights=weights))) == [
        "begin: writes shard w1 before its unit is called: the step has not made it yet"
    ]


def test_a_report_counts_what_a_rank_sends_and_copies() -> None:
    report = check(SMALL)  # two weights of 64, in one message, on 2 x 2 ranks
    assert report.launches == {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1}
    assert report.sent_bytes == {"all_gather": 64 * 4, "reduce_scatter": 64 * 4, "all_reduce": 128 * 4}
    written = {"pack_shards": 256, "unpack_wholes": 512, "pack_gradients": 512, "zero": 256, "scale": 512}
    assert report.local_bytes == written
    assert (report.max_whole_units, report.peak_at) == (1, "unpack layer0")


def test_a_report_finds_the_peak() -> None:
    """One layer: the whole weight, its gradient and nothing else is there when backward ends."""
    report = check(plan(layers(1, FSDP), Policy()))
    assert (report.peak_bytes, report.peak_at) == (2 * 4096 * 4, "backward layer0")
