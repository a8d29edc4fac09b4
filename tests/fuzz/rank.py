"""One case on one rank: judge, eager, recorded, planned."""

from __future__ import annotations

import functools
import gc
import re
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import hpfunc as hp
from tests.fuzz.build import random_seed
from tests.fuzz.cases import Case
from tests.fuzz.compare import Delivered, Find, memory, numbers, poison
from tests.fuzz.functions import KEPT
from tests.fuzz.judge import Judged, judge
from tests.fuzz.memory import copies, same_values
from tests.fuzz.reasons import checkpointing_raises, has_reason, recomputes
from tests.fuzz.step import Step

CALLS = 3
LARGE = 1e5
NEVER = (hp.AgreementError, hp.ScheduleError, hp.PeerError)
"""What no correct program may end with, though it is an error of hpfunc's own."""


CHECKED = re.compile("modified by an inplace operation|does not require grad|leaf Variable")
"""What torch checks, and we have to; other errors of its are lacks."""
WRITTEN = re.compile("modified by an inplace operation|written to in place")


@dataclass
class Outcome:
    """What a rank says of a case.

    Attributes:
        refused: the errors of hpfunc by which it was refused, as they stand.
        notes: features that only a run shows.
        status: where it ended; equal on all ranks, or something is wrong.
    """

    seed: int
    finds: list[Find] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    notes: set[str] = field(default_factory=set)
    status: str = ""


def run_cases(rank: int, cases: Sequence[Case]) -> list[Outcome]:
    """Returns the outcomes of as many cases as could be run by these processes."""
    outcomes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hpfunc warns of small models, and torch of what is drawn at random
        for number, case in enumerate(cases):
            outcome = run_case(rank, case)
            outcomes.append(outcome)
            if _differ(outcome, case.num_ranks) or outcome.status.startswith("raised"):
                break  # groups may hold half of something: others go on with new processes
            if number % 25 == 24:
                gc.collect()
    return outcomes


def _differ(outcome: Outcome, num_ranks: int) -> bool:
    import torch.distributed as dist

    statuses: list[Any] = [None] * num_ranks
    dist.all_gather_object(statuses, outcome.status)
    if len(set(statuses)) > 1:
        outcome.finds.append(Find("ranks end differently", "", " | ".join(map(str, statuses))))
        return True
    return False


def run_case(rank: int, case: Case) -> Outcome:
    """Returns the outcome of one case."""
    outcome = Outcome(case.seed)
    wanted: list[Judged] | Exception
    try:
        wanted = judge(case, CALLS)
        if not _is_finite(wanted[-1]):
            outcome.notes.add("numbers grow")
            return outcome
    except Exception as error:
        wanted = error
        if not CHECKED.search(str(error)):
            outcome.notes.add(f"plain torch cannot: {_rule(error)[:60]}")
            return outcome
        if recomputes(case) and not checkpointing_raises(case):
            outcome.notes.add("plain torch raises, but not if it checkpoints")
            return outcome
        outcome.notes.add("plain torch raises")
    try:
        _Trial(rank, case, wanted, outcome).run()
    except Exception as error:
        outcome.finds.append(_raw("set-up", error))
        outcome.status = "raised in set-up"
    return outcome


def _is_finite(judged: Judged) -> bool:
    """Returns whether numbers are such that rounding stays small."""
    tensors = [*judged.updated.values(), *(g for each in judged.gradients for g in each.values())]
    tensors += [loss for losses in judged.losses.values() for loss in losses]
    numbers = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    return all(bool((tensor.abs() < LARGE).all()) for tensor in numbers)


class _Trial:
    """The calls of one case."""

    def __init__(self, rank: int, case: Case, wanted: list[Judged] | Exception, outcome: Outcome) -> None:
        self.rank, self.case, self.wanted, self.outcome = rank, case, wanted, outcome
        self.step = Step(case, rank)
        self.index = case.grid.data_index(rank)
        self.eager_bits: list[list[torch.Tensor]] = []

    def run(self) -> None:
        eager = self.step.eager()
        count = CALLS if self.case.around.update else 1
        raised = self._stage("eager", eager, count)
        call, step = self.step.planned()
        stopped = self._stage("recorded", call, CALLS)
        if raised is not None and stopped is None:
            self._find("refused by eager only", "recorded", raised)
        if stopped is None and isinstance(self.wanted, list) and not step.followed_plan:
            self.outcome.notes.add("no plan followed")

    @functools.cached_property
    def _exact(self) -> list[Judged]:
        return judge(self.case, CALLS, casts=False)

    def _stage(self, name: str, call: Callable[..., Any], count: int) -> str | None:
        """Calls a step; returns how it was refused, if it was."""
        args, arguments = self.step.args, self.step.kept_arguments
        for turn in range(count):
            stage = name if name == "eager" or turn == 0 else "planned"
            before = copies(arguments)
            result, error = self._call(call, args)
            self._check_arguments(stage, arguments, before)
            if error is not None:
                return self._judge_error(stage, error)
            if isinstance(self.wanted, Exception):
                self._find("no error where plain torch raises", stage, str(self.wanted)[:300])
                return None
            got = Delivered(result)
            self._judge(stage, turn, got, arguments)
            if self.case.around.update:
                args = (result[1], *args[1:4], result[2])
                arguments = self.step.kept_arguments if not self.case.around.is_donated else []
        return None

    def _call(self, call: Callable[..., Any], args: Any) -> tuple[Any, Exception | None]:
        KEPT.clear()
        torch.manual_seed(random_seed(self.case, self.index))
        try:
            return call(*args), None
        except Exception as error:
            return None, error

    def _judge(self, stage: str, turn: int, got: Delivered, arguments: list[torch.Tensor]) -> None:
        assert isinstance(self.wanted, list)
        bits = got.bits()
        for kind, text in numbers(self.case, self.rank, got, self.wanted[turn], lambda: self._exact[turn]):
            self._find(kind, stage, text)
        if stage == "eager":
            self.eager_bits.append(bits)
        elif self.eager_bits:
            expected = self.eager_bits[min(turn, len(self.eager_bits) - 1)]
            names = [name for name, _ in got.named()] + ["aux"] * len(got.activations)
            wrong = [n for n, a, b in zip(names, bits, expected, strict=True) if not same_values(a, b)]
            if wrong:
                self._find("bits differ from eager", stage, ", ".join(wrong))
        donated = [] if self.case.around.is_donated and stage != "eager" else arguments
        for kind, text in memory(self.case, got, donated):
            self._find(kind, stage, text)
        before = copies(arguments)
        for kind, text in poison(got, turn):
            self._find(kind, stage, text)
        self._check_arguments(stage, arguments, before)

    def _check_arguments(self, stage: str, arguments: list[torch.Tensor], before: list[torch.Tensor]) -> None:
        if self.case.around.is_donated and stage != "eager":
            return
        if not all(same_values(a, b) for a, b in zip(arguments, before, strict=True)):
            self._find("written: an argument", stage, "")

    def _judge_error(self, stage: str, error: Exception) -> str:
        text = f"{type(error).__name__}: {error}"
        self.outcome.status = f"{self.outcome.status} {stage} {type(error).__name__}".strip()
        if isinstance(self.wanted, Exception):
            return text
        if WRITTEN.search(text) and recomputes(self.case) and checkpointing_raises(self.case):
            self.outcome.notes.add("plain torch raises if it checkpoints")
        elif isinstance(error, hp.HpfuncError) and not isinstance(error, NEVER):
            self._judge_refusal(stage, error, text)
        else:
            self.outcome.finds.append(_raw(stage, error))
        return text

    def _judge_refusal(self, stage: str, error: Exception, text: str) -> None:
        if stage == "planned":
            self._find(f"refused in a later call: {_rule(error)}", stage, text)
        if has_reason(text, self.case):
            self.outcome.refused.append(f"{type(error).__name__}: {_rule(error)}")
        else:
            self._find(f"refused without a reason: {type(error).__name__}: {_rule(error)}", stage, text)

    def _find(self, kind: str, stage: str, text: str) -> None:
        self.outcome.finds.append(Find(kind, stage, text))


def _rule(error: Exception) -> str:
    """Returns the first line of an error, without names and numbers."""
    return re.sub(r"'[^']*'|\d+|\[[^\]]*\]", "_", str(error).splitlines()[0] if str(error) else "")[:120]


def _raw(stage: str, error: Exception) -> Find:
    last = "".join(traceback.format_exception(error))[-1800:]
    return Find(f"raw {type(error).__name__}: {_rule(error)}", stage, last)
