"""`sharded`: records a step once, plans and checks it, and then runs it by its plan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from .. import backends
from .._errors import ArgumentError, SpecError, UsageError, message
from .._running.context import stepping
from .._running.eager import Eager
from .._running.planned import Planned
from .._running.replicas import compare_arguments
from .._running.session import Session
from .._running.writes import refuse_written
from .._values.argument_names import check_function, check_indices, check_kind, check_mesh
from .._values.array import is_sharded
from .._values.foreign_names import STEP, missing
from .._values.mesh import Mesh, PartitionSpec
from .._values.not_a_tensor import named, shortened
from .._values.tree import flatten, unflatten
from ..backends import Counters, uncompiled
from ..planning.policy import Policy
from ..planning.program import Program
from ..planning.schedule import Schedule
from .arguments import Arguments, warn_of_uneven
from .made_anew import note_first_call
from .plans import Plans
from .unused_result import FirstCalls

Params = ParamSpec("Params")
Result = TypeVar("Result")

_NAME = "hpfunc.sharded"


@dataclass(frozen=True, slots=True)
class Lowered:
    """The program and the plan of a step, found without running it.

    Attributes:
        program: the uses of units, in order.
        schedule: the plan of the program.
    """

    program: Program
    schedule: Schedule


class ShardedStep(Generic[Params, Result]):
    """A step function that runs by a plan. Made by `sharded`.

    Attributes:
        last_schedule: the plan that the last call followed, or that was made from it; None before the first call.
        last_counters: what the last call sent, copied and waited for.
        followed_plan: whether the last call followed a plan from beginning to end.
    """

    def __init__(
        self,
        fn: Callable[Params, Result],
        mesh: Mesh,
        in_specs: Any,
        out_specs: Any,
        policy: Policy,
        donate_argnums: tuple[int, ...],
        debug: bool,
    ) -> None:
        functools.update_wrapper(self, fn)
        self._fn: Callable[..., Any] = fn
        self.mesh, self._debug = mesh, debug
        self._is_new, self._first_calls = True, FirstCalls()
        self._arguments = Arguments(fn, mesh, in_specs, out_specs, donate_argnums)
        self._plans = Plans(mesh, policy)
        self._backend = backends.get(mesh.framework)
        self.last_schedule: Schedule | None = None
        self.last_counters: Counters | None = None
        self.followed_plan = False

    if not TYPE_CHECKING:  # a type checker should find a wrong name by itself

        def __getattr__(self, name: str) -> Any:
            raise missing("hpfunc.ShardedStep", name, STEP, dir(type(self)))

    def __repr__(self) -> str:
        options = [f"donate_argnums={self._arguments.donate}"] if self._arguments.donate else []
        options += ["debug=True"] * self._debug
        plans = f"{len(self._plans.kept)} plan{'s' * (len(self._plans.kept) != 1)}"
        return f"<hpfunc.sharded({', '.join([named(self._fn), repr(self.mesh), *options])}), {plans}>"

    @property
    def policy(self) -> Policy:
        """The policy by which the step is scheduled."""
        return self._plans.policy

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """The kept plans: those of the last 64 different programs, in the order of their last use."""
        return tuple(prepared.schedule for prepared in self._plans.kept.values())

    @uncompiled
    def __call__(self, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        """Runs the step.

        Raises:
            SpecError, LeafError, DonatedError: arguments do not fit; raised on all ranks before anything is sent.
            UsageError: an array among the arguments was written into, before the step or in it.
            PolicyError: the policy does not fit the program; raised before anything is updated.
            LeafError: ranks hold different values of one part of an argument (a call that records, or ``debug=True``).
            AgreementError: ranks run different programs, or pass different arrays.
            PeerError: another rank failed or did not answer.

        Communication: that of the schedule. A call that records also sends a digest before each event, and with
            ``Policy(pack_below_bytes=None)`` the messages of `probe`, if it has not measured yet.
        """
        counted = self._backend.counters.copy()
        session = self._session(measures=True)
        leaves, treedef = flatten((args, kwargs), is_sharded)
        known = self._arguments.known(session, args, kwargs, leaves, treedef)
        filled, arrays = self._arguments.fill(session.step, leaves, known)
        session.names = known.names
        expected = self._plans.expect(session.control, self._arguments.histories, known.history)
        prepared = self._plans.kept.get(expected)
        if self._debug or prepared is None:
            compare_arguments(_NAME, [(known.names[i], array) for i, array in arrays.items()], self.mesh)
        if prepared is not None:
            session.follow(prepared.schedule.program, Planned(session, prepared, arrays, poison=self._debug))
        new_args, new_kwargs = unflatten(treedef, filled)
        kept = {i: array for i, array in arrays.items() if not array.is_donated}
        with session.running():
            refuse_written(_NAME, arrays.values(), lambda: [known.names[i] for i in arrays])
            with stepping(session):
                outputs = self._fn(*new_args, **new_kwargs)
                session.end()
            refuse_written(_NAME, kept.values(), lambda: [known.names[i] for i in kept])
            if self._arguments.uneven:
                warn_of_uneven(self._arguments.uneven, session)
            if self._is_new:
                self._is_new = False
                note_first_call(self._fn, self._arguments.structures, self.mesh)
            self.followed_plan = session.plan is not None
            self.last_schedule = self._plans.learn(session, known.history, expected)
            outputs = self._arguments.finish(outputs, arrays)
            self._first_calls.note(self._fn, session, arrays.values(), outputs)
        self.last_counters = self._backend.counters.since(counted)
        return outputs

    @uncompiled
    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Records and plans the step on abstract arrays. Nothing is computed, sent or changed.

        Raises:
            LoweringError: the step needs the value of a tensor.
            SpecError, LeafError: as in a call.

        Communication: none. With ``Policy(pack_below_bytes=None)`` it plans with the size that this process has
            measured (`probe`), else with 65536.
        """
        leaves, treedef = flatten((args, kwargs), is_sharded)
        with self._backend.abstract() as convert:
            session = self._session(measures=False, is_abstract=True)
            known = self._arguments.known(session, args, kwargs, leaves, treedef)
            session.names = known.names
            filled, _ = self._arguments.fill(session.step, [_abstract(leaf, convert) for leaf in leaves], known)
            new_args, new_kwargs = unflatten(treedef, filled)
            with stepping(session):
                self._fn(*new_args, **new_kwargs)
            session.end()
        return Lowered(session.program, self._plans.make(session.program, measures=False))

    def _session(self, *, measures: bool, is_abstract: bool = False) -> Session:
        reference = functools.partial(Eager, review=functools.partial(self._plans.review, measures=measures))
        return Session(self.mesh, reference, is_abstract=is_abstract, debug=self._debug)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedStep:
        """Returns itself, as for any function: its only state is plans."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        hint = "make it there anew: hpfunc.sharded(step_fn, mesh)"
        raise UsageError(message(_NAME, "a step cannot be pickled: its mesh is that of this process", hint=hint))


def _abstract(leaf: Any, convert: Callable[[Any], Any]) -> Any:
    return leaf.with_local(convert(leaf._value)) if is_sharded(leaf) else convert(leaf)


def _check_given(step_fn: object, mesh: object, in_specs: object) -> None:
    check_mesh(_NAME, mesh, "hpfunc.sharded(step_fn, mesh)")
    if step_fn is not None:
        check_function(_NAME, "step_fn", step_fn, "hpfunc.sharded(step_fn, mesh)")
    if in_specs is not None and not isinstance(in_specs, (PartitionSpec, tuple, list)):
        rule = f"in_specs must be one P, or a tuple with an entry for each argument, got {shortened(repr(in_specs))}"
        hint = "hpfunc.sharded(step_fn, mesh, in_specs=(None, hpfunc.P('shard')))"
        raise ArgumentError(message(_NAME, rule, hint=hint))


@overload
def sharded(
    step_fn: Callable[Params, Result],
    mesh: Mesh,
    *,
    in_specs: Any = None,
    out_specs: Any = None,
    policy: Policy | None = None,
    donate_argnums: int | Sequence[int] = (),
    debug: bool = False,
) -> ShardedStep[Params, Result]: ...


@overload
def sharded(
    step_fn: Mesh | None = None,
    mesh: Mesh | None = None,
    *,
    in_specs: Any = None,
    out_specs: Any = None,
    policy: Policy | None = None,
    donate_argnums: int | Sequence[int] = (),
    debug: bool = False,
) -> Callable[[Callable[Params, Result]], ShardedStep[Params, Result]]: ...


def sharded(
    step_fn: Callable[..., Any] | Mesh | None = None,
    mesh: Mesh | None = None,
    *,
    in_specs: Any = None,
    out_specs: Any = None,
    policy: Policy | None = None,
    donate_argnums: int | Sequence[int] = (),
    debug: bool = False,
) -> Any:
    """Returns a step that runs by a plan.

    The first call runs the units one after another (the reference), and records which units the step uses in which
    order. From that a schedule is planned and checked. The next calls follow it: gathers and reductions then overlap
    with compute. A call that leaves its plan continues without one, and is planned anew. For a step with several
    programs, the plan is predicted from the history of its calls. No bit of the result depends on any of this.

    Args:
        step_fn: the step; None (or the mesh in its place) makes a decorator.
        mesh: the mesh of its arrays.
        in_specs: a prefix of the positional arguments: plain tensors under a `P` are global values, and the step gets
            this rank's part of them. None leaves them unchanged. One `P` is for all arguments; arrays are not cut.
        out_specs: a prefix of the result: plain tensors under a `P` are this rank's part, and are returned as
            `ShardedArray`.
        policy: how to schedule.
        donate_argnums: positional arguments whose arrays may be updated in place. Their handles are consumed by
            the first such update, at the latest when the step returns, and then raise `DonatedError`.
        debug: look for mistakes, which takes time. Every call compares its arguments before it uses them, as the first
            call does: which arrays they are, and parts that several ranks hold (`hpfunc.debug.check_replicas`).
            Freed buffers are filled with NaN. The cotangent of each `psum` and the argument of each `pvary` are
            compared along their axes, and gradients along the axes that are not data axes and do not cut them, with 8
            bytes from each rank each time. Different bits raise `UsageError` on all ranks.

    Returns:
        A `ShardedStep`, called like `step_fn`.

    >>> import torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> w = hpfunc.shard(torch.ones(2), mesh, hpfunc.P("shard"))
    >>> @hpfunc.sharded(mesh=mesh)
    ... def step(w):
    ...     loss, g = hpfunc.value_and_grad(hpfunc.unit(lambda w: (w**2).sum()))(w)
    ...     return w.with_local(w.local - 0.5 * g.local), loss
    >>> step(w)[0].local
    tensor([0., 0.])
    """
    if isinstance(step_fn, Mesh):  # the decorator; or the two in another order, and then `mesh` is not one
        step_fn, mesh = None, step_fn if mesh is None else mesh
    if mesh is None:
        raise SpecError(message(_NAME, "no mesh is given", hint="hpfunc.sharded(step_fn, mesh)"))
    _check_given(step_fn, mesh, in_specs)
    check_kind(_NAME, "policy", policy, Policy, "hpfunc.Policy(prefetch=1), hpfunc.Policy.zero3()")
    check_indices(_NAME, "donate_argnums", donate_argnums)
    numbers = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)

    def wrap(fn: Callable[..., Any]) -> ShardedStep:
        return ShardedStep(fn, mesh, in_specs, out_specs, policy or Policy(), numbers, debug)

    return wrap if step_fn is None else wrap(step_fn)
