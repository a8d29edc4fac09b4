"""Whether `check` and the simulated device agree on how many collectives have room.

Random steps are planned with `Policy.communicators` 1, 2 and 3, and each plan is run on a device that has room for 1, 2
and 3 collectives at a time, with streams that are slow on some ranks. What `check` accepts for a room must not hang in
it. Not all that it refuses must: for that the ranks have to begin their collectives in different orders.

    python -m tests.device.rooms --count 1000 --seed 0

prints how many did. `tests/device/test_rooms.py` runs some.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import hpfunc as hp
from hpfunc.planning.checking.checker import find_violations
from tests.device import simulated
from tests.device.cases import local
from tests.device.harness import STREAMS, device, observe
from tests.helpers.models import Layout, Model, layouts, models, policies
from tests.helpers.ranks import RankError, mesh_of, stop_all

ROOMS = (1, 2, 3)
DELAYS_US = (0, 0, 200, 1000)
LOOKS_S = 0.5  # twice the same after so long, and the device stands still
PATIENCE_S = 30.0  # where it must not


@dataclass(frozen=True)
class Drawn:
    """A step to plan.

    Attributes:
        model: what is trained.
        layout: how it is cut.
        policy: how it is planned.
        calls: whether units call collectives of their own.
        timing: which streams are slow, on which ranks.
    """

    model: Model
    layout: Layout
    policy: hp.Policy
    calls: bool
    timing: int


@dataclass(frozen=True)
class Run:
    """One run of a plan in one room."""

    room: int
    accepted: bool
    hung: bool
    same_bits: bool


@st.composite
def drawn_steps(draw: Any) -> Drawn:
    policy = replace(draw(policies), communicators=draw(st.sampled_from(ROOMS)))
    layout = draw(layouts([(2,), (2,), (2, 2)]))
    return Drawn(draw(models()), layout, policy, draw(st.booleans()), draw(st.integers(0, 1 << 20)))


# --- in the ranks ----------------------------------------------------------------------------------------------------
def runs(rank: int, drawn: Drawn) -> tuple[str, list[Run]]:
    """Returns the fingerprint of the plan, and what happened in each room."""
    mesh = mesh_of(drawn.layout.shape, drawn.layout.names)
    weights = drawn.model.weights()
    params = hp.shard(weights, mesh, drawn.layout.specs(weights))
    batch = drawn.model.batch(rank, 0).to(mesh.device)

    def loss(params: Any, batch: torch.Tensor) -> torch.Tensor:
        return drawn.model.loss(params, batch, calling_unit if drawn.calls else hp.unit)

    step = hp.sharded(hp.value_and_grad(loss), mesh, policy=drawn.policy)
    for _ in range(2):
        want = local(step(params, batch))
    schedule, found = step.last_schedule, []
    assert schedule is not None
    for room in ROOMS:
        accepted = not find_violations(schedule, communicators=room)
        draw = random.Random(f"{drawn.timing} {rank} {room}")
        for stream in ("compute", *STREAMS):
            device().set_delay(stream, draw.choice(DELAYS_US))
        device().set_max_in_flight(room)
        result = step(params, batch)
        assert step.followed_plan
        hung = stands_still(PATIENCE_S if accepted else 0.0)
        device().set_max_in_flight(0)  # whatever waits for a place has one now
        device().set_delay("", 0)
        device().set_hang_s(PATIENCE_S)
        same = all(torch.equal(a, b) for a, b in zip(local(result), want, strict=True))
        found.append(Run(room, accepted, hung, same))
    return schedule.fingerprint, found


def calling_unit(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a unit that sends what it has computed around the ring of ranks along "shard"."""

    def around(p: Any, x: torch.Tensor) -> torch.Tensor:
        y, count = fn(p, x), hp.axis_size("shard")
        return y + 0.5 * hp.ppermute(y, "shard", [(place, (place + 1) % count) for place in range(count)])

    return hp.unit(around, name=fn.__name__)


def stands_still(patience_s: float) -> bool:
    """Waits for the device. Returns True if it does not end, and has stood at one place for longer than that."""
    seen, since = "", time.monotonic()
    device().set_hang_s(LOOKS_S)
    while True:
        try:
            torch.accelerator.synchronize()
            return False
        except RuntimeError:
            standing = device().standing()
        if standing != seen:
            seen, since = standing, time.monotonic()
        elif time.monotonic() - since > patience_s:
            return True


# --- in the test -----------------------------------------------------------------------------------------------------
@dataclass
class Tally:
    """What has happened in all runs.

    Attributes:
        plans: their fingerprints.
        accepted: runs in a room that `check` accepts.
        refused: runs in a room that it refuses.
        hung: how many of these hung.
        faults: what must not be.
    """

    plans: set[str] = field(default_factory=set)
    accepted: int = 0
    refused: int = 0
    hung: int = 0
    faults: list[str] = field(default_factory=list)

    def add(self, drawn: Drawn) -> None:
        """Runs a step on all ranks, and counts."""
        observed = observe(runs, drawn, world=drawn.layout.num_ranks)
        self.plans.add(observed[0].result[0])
        for each in observed:
            self.faults += [f"{text}: {drawn}" for text in each.races + each.errors]
        for of_ranks in zip(*(each.result[1] for each in observed), strict=True):
            accepted, hung = of_ranks[0].accepted, any(run.hung for run in of_ranks)
            self.accepted += accepted
            self.refused += not accepted
            self.hung += hung and not accepted
            if accepted and hung:
                self.faults.append(f"hangs with room for {of_ranks[0].room}, which check accepts: {drawn}")
            if not accepted and of_ranks[0].room >= (drawn.policy.communicators or 0):
                self.faults.append(f"check refuses room for {of_ranks[0].room}, for which it was planned: {drawn}")
            if not all(run.same_bits for run in of_ranks):
                self.faults.append(f"has other bits with room for {of_ranks[0].room}: {drawn}")

    def __str__(self) -> str:
        return (
            f"{len(self.plans)} plans; accepted: {self.accepted} runs, of which none hung; "
            f"refused: {self.refused} runs, of which {self.hung} hung; {len(self.faults)} faults"
        )


def tally(
    count: int, start: int, seconds: float = float("inf"), say: Callable[[str], Any] = lambda text: None
) -> Tally:
    """Returns what happens with so many random steps, or with as many as there is time for."""
    total, end, done = Tally(), time.monotonic() + seconds, 0

    @seed(start)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn_steps())
    def draw(drawn: Drawn) -> None:
        nonlocal done
        if time.monotonic() < end:
            try:
                total.add(drawn)
            except RankError as error:  # not for hypothesis, which would run it again, without the timing
                total.faults.append(f"{error}: {drawn}")
            done += 1
            if done % 50 == 0:
                say(f"{done} steps: {total}")

    draw()
    say(f"{done} steps: {total}")
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="how many random steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no step after so long")
    args = parser.parse_args()
    simulated.build()
    total = tally(args.count, args.seed, args.seconds, lambda text: print(text, flush=True))
    print("\n".join(total.faults[:20]))
    stop_all()
    return bool(total.faults)


if __name__ == "__main__":
    sys.exit(main())
