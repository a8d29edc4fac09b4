"""The plans of a step: chooses the plan that a call follows, and makes plans from recorded calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from .. import backends
from .._errors import PolicyError, message
from .._running.agreement import Control
from .._running.link_probe import settle
from .._running.planned import Prepared, make_groups
from .._running.predict import predict
from .._running.session import Session
from .._running.warn_once import warn_once
from .._values.mesh import Mesh
from ..planning.checking.checker import Report, check
from ..planning.ops import itemsize
from ..planning.planner import Traits, plan
from ..planning.policy import Policy
from ..planning.program import Program, Unit, dotted
from ..planning.schedule import Schedule
from ..planning.windows import Windows, unmatched

_NAME = "hpfunc.sharded"
KEPT_PLANS = 64

# Note [Equal on all ranks]
# The choice of a plan, and the set of kept plans, depend only on what earlier calls did. That is equal on all ranks:
# they compared it, or followed a plan that they had compared. Only a rank that failed may have done one call less than
# the others. All ranks know of a failure when the next step begins (`Standing.generation`); then they drop all plans
# and histories, and record the next call.


class Plans:
    """The plans of one step.

    Attributes:
        kept: prepared plans by the fingerprint of their program, in the order of their last use.
    """

    def __init__(self, mesh: Mesh, policy: Policy) -> None:
        self.mesh, self.policy = mesh, policy
        self.kept: dict[str, Prepared] = {}
        self._generation = 0

    def review(self, program: Program, *, measures: bool) -> None:
        """Raises PolicyError for a policy that does not fit the program, before the step can update anything."""
        Windows(program, settle(self.policy, self.mesh, program, measures=measures)).check_budget()
        if self.kept:
            return  # a later program may lack a unit
        if patterns := unmatched(program, self.policy):
            names = [f"unit {unit.name!r} of {_weights_of(program, unit)}" for unit in program.units]
            rule = f"no unit fits the pattern {patterns[0]!r} of Policy.release_overrides; there are"
            hint = "a pattern is a glob for the name of a unit, or for the dotted path of one of its weights"
            raise PolicyError(message(_NAME, rule, names, hint=hint))

    def make(self, program: Program, *, measures: bool) -> Schedule:
        """Plans and checks a program."""
        backend, device = backends.get(self.mesh.framework), self.mesh.device
        traits = Traits(backend.ordered_sums(device), backend.communicators(device))
        schedule = plan(program, settle(self.policy, self.mesh, program, measures=measures), traits)
        report = check(schedule)
        if not self.kept:  # a rare program, such as that of an early exit, does not represent the model
            self._warn_about(schedule, report)
        return schedule

    def expect(self, control: Control, histories: Iterable[deque[str]], history: deque[str]) -> str:
        """Returns the fingerprint of the program that the step will probably run. See Note [Equal on all ranks].

        Args:
            control: the control channel of the step.
            histories: all histories; they are cleared after a failure.
            history: fingerprints of the programs that the step ran with such arguments.
        """
        if self._generation != control.standing.generation:
            self._generation = control.standing.generation
            self.kept.clear()
            for each in histories:
                each.clear()
        return predict(tuple(history)) or ""

    def learn(self, session: Session, history: deque[str], expected: str) -> Schedule:
        """Records the program that a call ran, and returns its plan. Makes the plan if there is none."""
        done = expected if session.plan is not None else session.program.fingerprint
        if done not in self.kept:
            schedule = self.make(session.program, measures=True)
            session.control.agree(_NAME, lambda: f"plan {schedule.fingerprint} of program {done}")
            make_groups(schedule, self.mesh)
            self.kept[done] = Prepared(schedule)
        history.append(done)
        self.kept[done] = self.kept.pop(done)
        if len(self.kept) > KEPT_PLANS:
            del self.kept[next(iter(self.kept))]
        return self.kept[done].schedule

    def _warn_about(self, schedule: Schedule, report: Report) -> None:
        program = schedule.program
        weights = [[program.weights[w] for w in unit.weights] for unit in program.units]
        sizes = [sum(weight.whole_numel * itemsize(weight.dtype) for weight in unit) for unit in weights]
        cut = any(weight.num_shards > 1 for weight in program.weights)
        hint = "make a unit of every layer"
        if cut and len(sizes) > 1 and max(sizes) > 0.75 * sum(sizes) and max(sizes) > 1 << 20:
            name = program.units[sizes.index(max(sizes))].name
            share = 100 * max(sizes) / sum(sizes)
            rule = f"unit {name!r} holds {share:.0f} % of the weights: nearly the whole model is gathered at once"
            warn_once(message(_NAME, rule, hint=hint), self.mesh)
        if cut and len(sizes) == 1:
            rule = "the whole model is one unit: nothing can be hidden, and all of it is gathered at once"
            warn_once(message(_NAME, rule, hint=hint), self.mesh)
        elif report.launches and not report.hidden_launches and schedule.policy.prefetch == 0:
            rule = f"nothing can be hidden in this step with {schedule.policy}"
            warn_once(message(_NAME, rule, hint="raise Policy.prefetch"), self.mesh)


def _weights_of(program: Program, unit: Unit) -> str:
    return ", ".join(dotted(program.weights[w].name) for w in unit.weights)
