"""Agreement between ranks: they compare what they are about to do, and detect each other's failures.

# Note [Agreement]
If one rank does not issue the same collectives as its peers, they hang. So before each collective of a recorded step or
of eager code, ranks compare a digest of (where, what) on a control group. A step that follows its plan compares
nothing: the plan itself was compared. A rank that leaves its plan, or fails, writes a note on a board in the store. A
rank that waits for longer than a moment reads the board, and raises an error that names rank and collective. After a
failure the groups may hold half-matched collectives; they are dropped, and made again on next use.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from .. import backends
from .._errors import AgreementError, HpfuncError, PeerError, message
from .._values.mesh import Mesh

GRACE_S = 1.0


@dataclass(slots=True)
class Standing:
    """The state of one process's agreement with a fixed set of ranks. All meshes over these ranks share it.

    Attributes:
        step: number of steps begun since the last failure.
        position: the event within the step. Notes on the board give both as a place.
        generation: number of failures. All ranks know it when they communicate again.
        is_broken: whether the last joint operation of these ranks failed.
        num_arrays: number of arrays made together since the last failure.
        left: the last few places at which this rank left a plan: a slow peer may still show the note of an earlier one.
    """

    step: int = 0
    position: int = 0
    generation: int = 0
    is_broken: bool = False
    num_arrays: int = 0
    left: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=8))


class Control:
    """Agreement with a fixed set of ranks, with the timeout of one mesh.

    Attributes:
        standing: the state that all meshes over these ranks share.
    """

    def __init__(self, framework: str, ranks: tuple[int, ...], rank: int, timeout_s: float) -> None:
        self.backend = backends.get(framework)
        self.ranks, self.rank, self.timeout_s = ranks, rank, timeout_s
        self.standing = _standing(framework, ranks, rank)

    # --- comparing --------------------------------------------------------------------------------------------------
    def agree(self, where: str, facts: Callable[[], str], error: BaseException | None = None) -> None:
        """Compares `facts` with all ranks.

        Args:
            where: public function, for the message.
            facts: what this rank is about to do, one fact per line.
            error: the error for which this rank stops, if any. The other ranks then stop, too.

        Raises:
            AgreementError: facts differ, or another rank has an error. Raised on all ranks.

        Communication: 16 bytes from each rank; the texts only if they differ.
        """
        if len(self.ranks) == 1:
            return
        text = f"error: {error}" if error is not None else facts()
        numbers = self.exchange(f"agreement in {where}", [int(error is not None), digest_of_text(text)])
        if all(other == numbers[0] for other in numbers) and not numbers[0][0]:
            return
        texts = self.exchange_text(f"agreement in {where}", text)
        if error is None:
            raise AgreementError(_difference(where, self.ranks, texts))

    def exchange(self, label: str, numbers: Sequence[int]) -> list[list[int]]:
        """Returns the numbers of every rank, the same on all ranks. Ranks must have agreed on the exchange before.

        Raises:
            PeerError: another rank failed, or did not arrive within the timeout.

        Communication: 8 bytes per number from each rank.
        """
        self._recover()
        return self.backend.exchange(self._group(), numbers, label, self.poll)

    def exchange_text(self, label: str, text: str) -> list[str]:
        """Returns the text of every rank, the same on all ranks. See `exchange`."""
        self._recover()
        try:
            return self.backend.exchange_text(self._group(), text)
        except RuntimeError as error:  # of the framework: this exchange does not read the board itself
            self.poll(label, error)
            raise

    def _group(self) -> Any:
        return self.backend.group(self.ranks, "control", "cpu", self.timeout_s)

    # --- the board --------------------------------------------------------------------------------------------------
    def _key(self, rank: int) -> str:
        return f"{self.standing.generation}/{hash(self.ranks)}/{rank}"

    def note(self, kind: str, text: str) -> None:
        """Writes this rank's place and state on the board."""
        self.backend.post(self._key(self.rank), f"{kind}|{self.standing.step}|{self.standing.position}|{text}")

    def notes(self) -> dict[int, tuple[str, int, int, str]]:
        """Returns the notes of the other ranks."""
        keys = {self._key(rank): rank for rank in self.ranks if rank != self.rank}
        found = {}
        for key, value in self.backend.read(list(keys)).items():
            kind, step, position, text = value.split("|", 3)
            found[keys[key]] = (kind, int(step), int(position), text)
        return found

    def begin_step(self) -> None:
        """Counts a step. After a failure it drops the groups, because a planned step does not call `agree`."""
        self._recover()
        self.standing.step += 1
        self.standing.position = 0

    def births(self, count: int) -> list[tuple[int, int]]:
        """Returns the births of `count` arrays that all ranks make together. Call it after they have agreed."""
        first = self.standing.num_arrays
        self.standing.num_arrays += count
        return [(self.standing.generation, first + i) for i in range(count)]

    def leave(self, text: str) -> None:
        """Writes on the board that this rank leaves its plan here."""
        self.standing.left.append((self.standing.step, self.standing.position))
        self.note("left", text)

    def fail(self, error: BaseException) -> None:
        """Writes on the board that this rank's step raised. The groups are made again on next use."""
        if len(self.ranks) > 1 and not self.standing.is_broken:
            self.standing.is_broken = True
            self.note("failed", f"{type(error).__name__}: {error}")
            self.backend.fail()

    def _recover(self) -> None:
        if (standing := self.standing).is_broken:
            self.backend.abort()
            standing.generation += 1
            standing.is_broken = False
            # A rank that learned of the failure late has begun more steps: all restart the count.
            standing.step, standing.position, standing.num_arrays = 0, 0, 0
            standing.left.clear()

    def poll(self, label: str, waited: float | Exception) -> None:
        """Called while this rank waits for `label`. Raises if the wait cannot succeed.

        Args:
            label: what this rank waits for.
            waited: the seconds so far, or the error of the framework that has ended the wait.

        Raises:
            PeerError: another rank failed, or did not arrive within the timeout.
            AgreementError: another rank left the plan at a point that this rank has passed.
        """
        try:
            self._look(label, waited)
        except HpfuncError as error:
            self.fail(error)  # the collective that this rank waited for is incomplete
            raise

    def _look(self, label: str, waited: float | Exception) -> None:
        notes, standing = self.notes(), self.standing
        self._look_for_failures(label, notes)
        passed = standing.step, standing.position
        for rank, (kind, step, position, text) in notes.items():
            if kind == "left" and (step, position) not in standing.left and (step, position) <= passed:
                rule = "ranks run different programs"
                leaves = [f"rank {rank}: {text}", f"rank {self.rank}: went on with its plan, and waits for {label!r}"]
                raise AgreementError(message("hpfunc.sharded", rule, leaves))
        if isinstance(waited, Exception):
            self._give_up(label, f"{label}: {waited}", "the connection to a rank was lost")
        elif waited > self.timeout_s:
            self._give_up(label, label, f"no answer within {self.timeout_s:g} s")

    def _look_for_failures(self, label: str, notes: dict[int, tuple[str, int, int, str]]) -> None:
        failed = {rank: text for rank, (kind, _, _, text) in notes.items() if kind == "failed"}
        # A rank that stopped because of another one is not the cause: look for a rank that failed by itself.
        first = sorted(failed, key=lambda rank: (failed[rank].startswith(PeerError.__name__), rank))
        if first:
            rule = f"rank {first[0]} failed while rank {self.rank} waited for {label!r}"
            raise PeerError(message("hpfunc", rule, [f"rank {first[0]}: {failed[first[0]]}"]))

    def _give_up(self, label: str, shown: str, rule: str) -> None:
        self.note("waiting", shown)
        time.sleep(GRACE_S)
        notes = self.notes()
        self._look_for_failures(label, notes)
        silent = [rank for rank in self.ranks if rank != self.rank and rank not in notes]
        leaves = [f"rank {self.rank}: waits for {shown!r}"]
        leaves += [f"rank {rank}: {kind} {text!r}" for rank, (kind, _, _, text) in notes.items()]
        leaves += [f"rank {rank}: no answer" for rank in silent]
        raise PeerError(message("hpfunc", rule, leaves, hint="look at the log of the silent ranks first"))


def digest_of_text(text: str) -> int:
    """Returns a number that tells texts apart, for `Control.exchange`."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def _difference(where: str, ranks: tuple[int, ...], texts: list[str]) -> str:
    failed = [i for i, text in enumerate(texts) if text.startswith("error: ")]
    if failed:
        first = failed[0]
        lines = [line for line in texts[first].removeprefix("error: ").splitlines() if line]
        return message(where, f"rank {ranks[first]} refuses to go on", lines)
    other = next(i for i, text in enumerate(texts) if text != texts[0])
    mine, theirs = texts[0].splitlines(), texts[other].splitlines()
    place = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))
    leaves = [
        f"rank {ranks[rank]}: {lines[place] if place < len(lines) else '(nothing more)'}"
        for rank, lines in ((0, mine), (other, theirs))
    ]
    hint = "every rank must call the same functions, in the same order, with arrays of the same global shapes"
    return message(where, "ranks disagree; the first difference is", leaves, hint=hint)


@cache
def _standing(framework: str, ranks: tuple[int, ...], rank: int) -> Standing:
    return Standing()


_control = cache(Control)


def control(mesh: Mesh, axes: tuple[str, ...] | None = None) -> Control:
    """Returns this process's agreement with all ranks of a mesh, or with those along `axes`."""
    ranks = mesh.ranks if axes is None else mesh.group(axes)
    return _control(mesh.framework, ranks, mesh.rank, mesh.timeout_s)


@contextmanager
def agreeing(mesh: Mesh, where: str, facts: Callable[[], str]) -> Iterator[None]:
    """Runs the body, in which ranks check their arguments, then compares `facts`. If one rank raises, all ranks do.

    Raises:
        AgreementError: facts differ, or another rank raised.
    """
    try:
        yield
    except Exception as error:
        with suppress(AgreementError, PeerError):  # this rank's own error says more
            control(mesh).agree(where, facts, error)
        raise
    control(mesh).agree(where, facts)
