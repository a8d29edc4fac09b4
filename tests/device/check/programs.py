"""The programs of `tests.device.cases` on ranks of the device and on CPUs, and how far their numbers are apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from tests.device import cases, cuda
from tests.device.all_cases import CASES
from tests.device.harness import Conditions, Observed, has_device, observe, on_host
from tests.helpers.ranks import RankError

from .found import Skip, Task, Wrong
from .row import short

PLANTED = 1e-6  # by this part the data of a planted fault is larger
# A GPU has other kernels than a CPU, so the last bits differ. In float64 what is left of that is far below this bound,
# which no stale or torn weight meets. bfloat16 is rounded a thousand times more coarsely than a planted fault.
NEAR = {"bf16": 0.05, "loss_scaled": 0.05, "reduced_in_half": 0.05}
NEAR_BY_DEFAULT = 1e-9
FIRST = {2: "plain", 4: "hybrid"}  # by the number of ranks, the program that shows whether they can train at all


def on_ranks(task: Task, name: str, world: int, conditions: Conditions | None = None) -> list[Observed]:
    """Returns what a program did on the device."""
    perturbs = task.is_planted and conditions is None
    return observe(
        program,
        name,
        task.device == "cuda",
        perturbs,
        conditions=conditions,
        world=world,
        framework=task.framework,
    )


def on_cpus(task: Task, name: str, world: int) -> list[list[torch.Tensor]]:
    """Returns what a program returns on CPUs."""
    return on_host(program, name, task.device == "cuda", False, world=world)


def program(rank: int, name: str, is_wide: bool, perturbs: bool) -> list[torch.Tensor]:
    """Runs a program, in float64 if `is_wide`; the device has slightly other data if `perturbs`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if is_wide else before)
    try:
        with perturbed() if perturbs and has_device() else nullcontext():
            return CASES[name][0](rank)
    finally:
        torch.set_default_dtype(before)


@contextmanager
def perturbed() -> Iterator[None]:
    """Within it the data of all programs is a little larger."""
    batch = cases.batch
    cases.batch = lambda *args: batch(*args) * (1 + PLANTED)
    try:
        yield
    finally:
        cases.batch = batch


def distance(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """Returns the largest difference, as a part of the largest number of its tensor; infinite for other shapes."""
    if not want or [(x.dtype, x.shape) for x in got] != [(x.dtype, x.shape) for x in want]:
        return float("inf")
    return max((_distance(a, b) for a, b in zip(got, want, strict=True)), default=0.0)


def farthest_rank(got: Sequence[Sequence[torch.Tensor]], want: Sequence[Sequence[torch.Tensor]]) -> float:
    """Returns the largest distance of all ranks."""
    return max(distance(mine, right) for mine, right in zip(got, want, strict=True))


def _distance(got: torch.Tensor, want: torch.Tensor) -> float:
    if torch.equal(got, want):
        return 0.0
    found = (got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-30)
    return float("inf") if found.isnan() else float(found)


def bound(task: Task, name: str) -> float:
    """Returns how far the numbers of a program may be from the CPU's: the simulated device has the same kernels."""
    return NEAR.get(name, NEAR_BY_DEFAULT) if task.device == "cuda" else 0.0


def compare(task: Task, names: Sequence[str], world: int) -> tuple[int, float, list[str]]:
    """Runs programs on the device and on CPUs. Returns how many ran, the largest distance, and what is wrong."""
    farthest, wrong, slowest_s = 0.0, [], 0.0
    for number, name in enumerate(names):
        before_s = task.left_s()
        if before_s < 2 * slowest_s + 5:
            return number, farthest, wrong
        task.note(f"{name} on {world} ranks")
        try:
            got = [each.result for each in on_ranks(task, name, world)]
            far = farthest_rank(got, on_cpus(task, name, world))
        except RankError as error:
            wrong.append(f"{name}: {short(error)}")
        else:
            if far > bound(task, name):
                wrong.append(f"{name} is {far:.1e} off")
            farthest = max(farthest, far if name not in NEAR else 0.0)
        if len(wrong) == 3:  # ranks that failed start anew, which takes long
            return number + 1, farthest, wrong
        slowest_s = max(slowest_s, before_s - task.left_s() if number else 0.0)
    return len(names), farthest, wrong


def group_of(task: Task, world: int) -> str:
    """Returns by what ranks of the device communicate, once they can train.

    Raises:
        Skip: ranks of this machine cannot share its GPU.
    """
    if task.device == "sim":
        return "simulated group"
    library, version = cuda.library(world), ".".join(map(str, cuda.nccl_version()))
    try:
        on_ranks(task, FIRST[world], world, Conditions())
    except RankError as error:
        if library == "nccl":
            raise Wrong(f"{world} ranks by NCCL {version}: {short(error)}") from None
        needs = ".".join(map(str, cuda.SHARING_NCCL))
        raise Skip(f"{world} ranks need NCCL {needs} to share a GPU, here is {version}; gloo: {short(error)}") from None
    return "NCCL" if library == "nccl" else "gloo, by copies to the host"
