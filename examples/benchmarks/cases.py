"""What `make bench` measures, as values: which task on which network, which variants, and the targets."""

from __future__ import annotations

from dataclasses import dataclass

from models import Model
from variants import Task

TUNED = ("FSDP2 tuned", "FSDP2 tuned, asynchronous reduce-scatter", "FSDP2 tuned, two reduce-scatters")
MINIMAL = "FSDP2 tuned, minimal reduce-scatter"
HPFUNC = ("hpfunc eager", "hpfunc packs nothing", "hpfunc packs all", "hpfunc")


@dataclass(frozen=True, slots=True)
class Target:
    """At least so many times the step time of `hpfunc` is that of another variant; of several, that of the fastest."""

    others: tuple[str, ...]
    must: float
    goal: float | None = None

    @property
    def label(self) -> str:
        """The variants in words."""
        return self.others[0] if len(self.others) == 1 else f"{self.others[0]} (best)"


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison.

    Attributes:
        title: in words.
        network: for `launch.sh`: a rate, ``"loopback"``, or ``RATE,SLOW_RATE,NEAR``: slower between groups of ranks.
        task: what is trained.
        variants: in the order of the table.
        targets: see `Target`.
        repetitions: rounds over all variants.
        tolerance: how far weights may be from those of the first variant after two steps, as a share of how far they
            have moved. The variants of hpfunc must agree to the last bit.
        memory: the variants whose peak memory is measured, each in processes of its own.
    """

    title: str
    network: str
    task: Task
    variants: tuple[str, ...]
    targets: tuple[Target, ...] = ()
    repetitions: int = 4
    tolerance: float = 1e-3
    memory: tuple[str, ...] = ()


SHARDED = Task()
CASES = {
    "a": Case(
        "2 ranks, 1 Gbit/s",
        "1gbit",
        SHARDED,
        ("FSDP2", *TUNED, MINIMAL, "DDP", *HPFUNC),
        (Target(("FSDP2",), 1.75, 2.0), Target(TUNED, 1.3, 1.4), Target((MINIMAL,), 1.2, 1.3)),
        memory=("FSDP2 tuned, two reduce-scatters", "hpfunc"),
    ),
    "b": Case(
        "4 ranks, loopback",
        "loopback",
        Task(mesh=(4,)),
        ("FSDP2", *TUNED, MINIMAL, "DDP", *HPFUNC),
        (Target(("FSDP2",), 1.3), Target(TUNED, 1.15)),
        memory=("FSDP2 tuned, two reduce-scatters", "hpfunc"),
    ),
    "c": Case(
        "2 replicas of 2 shards, 1 Gbit/s within a replica, 250 Mbit/s between them",
        "1gbit,250mbit,2",
        Task(mesh=(2, 2)),
        ("FSDP2", "FSDP2 tuned", "hpfunc packs nothing", "hpfunc"),
        (Target(("FSDP2",), 1.5),),
        repetitions=3,
    ),
    "d": Case(
        "200 tensors of 1 to 64 KiB in each of 8 units, 2 ranks, 1 Gbit/s",
        "1gbit",
        Task(Model("many small")),
        ("FSDP2", *TUNED, *HPFUNC),
        (Target(("hpfunc packs nothing",), 1.5), Target(("FSDP2",), 1.3)),
    ),
    "e": Case(
        "one matrix of 16 MiB in each of 6 units, 2 ranks, 1 Gbit/s",
        "1gbit",
        Task(Model("few large", num_blocks=6, width=2048)),
        ("FSDP2", *TUNED, MINIMAL, *HPFUNC),
        repetitions=2,
    ),
    "f": Case(
        "4 micro-batches, 2 ranks, 1 Gbit/s",
        "1gbit",
        Task(Model(num_blocks=4, num_tokens=64), micro_batches=4),
        ("FSDP2", "FSDP2 tuned", "hpfunc"),
        repetitions=2,
    ),
    "g": Case(
        "weights in bfloat16, gradients reduced in float32, 2 ranks, 1 Gbit/s",
        "1gbit",
        Task(bf16=True),
        ("FSDP2", *TUNED, MINIMAL, "hpfunc eager", "hpfunc"),
        repetitions=2,
        tolerance=0.2,
    ),
    "i": Case(
        "MindSpore, 2 ranks, 1 Gbit/s",
        "1gbit",
        Task(framework="mindspore"),
        ("hpfunc eager", "hpfunc packs nothing", "hpfunc"),
        (Target(("hpfunc eager",), 1 / 0.85),),
    ),
}
