"""`sharded`: a step that is recorded once, planned, checked, and then run by its plan."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import backends
from .._errors import DonatedError, HpfuncWarning, PolicyError, SpecError, UsageError, message
from .._running.agreement import agreeing
from .._running.link_probe import settle
from .._running.make_mesh import use_mesh
from .._running.planned import Planned, Prepared
from .._running.predict import predict
from .._running.replicas import compare_arguments
from .._running.session import Session, session_scope
from .._running.writes import refuse_written, renewed, watch
from .._values.array import ShardedArray, describe, is_sharded, layout_of
from .._values.mesh import Mesh, PartitionSpec
from .._values.tree import flatten, paths, unflatten
from ..backends import Counters, uncompiled
from ..planning.checking.checker import Report, check
from ..planning.ops import itemsize
from ..planning.planner import Traits, plan
from ..planning.policy import Policy
from ..planning.program import Program, Unit, dotted
from ..planning.schedule import Schedule
from ..planning.windows import check_policy, unmatched
from .shard import leaf_specs

_NAME = "hpfunc.sharded"
KEPT_PLANS = 64
KEPT_CALLS = 128

# Note [Equal on all ranks]
# Which plan a call follows, and which plans are kept, follows from what earlier calls did, and that is equal on all
# ranks: they compared it, or followed a plan that they had compared. Only a rank that failed may have done one call
# less than the others. So after a failure, of which all ranks know when the next step begins (`Control.generation`),
# everything is forgotten, and the next call is recorded.


@dataclass(frozen=True, slots=True)
class Lowered:
    """What a step would do, found without doing it.

    Attributes:
        program: the uses of units, in order.
        schedule: its plan.
    """

    program: Program
    schedule: Schedule


class ShardedStep:
    """A step function that runs by a plan. Made by `sharded`.

    Attributes:
        last_schedule: the plan that the last call followed, or that was made from it; None before the first call.
        last_counters: what the last call sent, copied and waited for.
        followed_plan: whether the last call ran by a plan from its beginning to its end.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: Mesh,
        in_specs: Any,
        out_specs: Any,
        policy: Policy,
        donate_argnums: tuple[int, ...],
        debug: bool,
    ) -> None:
        functools.update_wrapper(self, fn)
        self._fn, self.mesh, self.policy = fn, mesh, policy
        self._in_specs, self._out_specs, self._donate = in_specs, out_specs, donate_argnums
        self._debug = debug
        self._plans: dict[str, Prepared] = {}  # by the fingerprint of their program, that of the last call last
        self._known: dict[object, _Known] = {}
        self._generation = 0
        self._backend = backends.get(mesh.framework)
        self.last_schedule: Schedule | None = None
        self.last_counters: Counters | None = None
        self.followed_plan = False

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """The plans that are kept: those of the last 64 different programs, the one that was used last at the end."""
        return tuple(prepared.schedule for prepared in self._plans.values())

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step.

        Raises:
            SpecError, LeafError, DonatedError: arguments do not fit; on all ranks, before anything is sent.
            UsageError: an array among the arguments was written into, before the step or in it.
            PolicyError: the policy does not fit what the step does; before anything is updated.
            LeafError: ranks hold different values of one part of an argument (a call that records, or ``debug=True``).
            AgreementError: ranks run different programs, or pass different arrays.
            PeerError: another rank failed or did not answer.

        Communication: as the schedule says; on a call that records, a digest before each event, and for a
            ``Policy(pack_below_bytes=None)`` what `probe` sends, if it was not measured before.
        """
        counted = self._backend.counters.copy()
        session = Session(self.mesh, debug=self._debug)
        leaves, treedef = flatten((args, kwargs), is_sharded)
        signature = _signature(leaves, treedef)
        known = self._known.get(signature)
        if known is None:
            known = self._known[signature] = self._admit(session, args, kwargs, leaves)
        filled, arrays = self._fill(session, leaves, known)
        session.names = known.names
        session.review = functools.partial(self._review, measures=True)
        expected = self._expect(session, known)
        prepared = self._plans.get(expected)
        if self._debug or prepared is None:
            compare_arguments(_NAME, [(known.names[i], array) for i, array in arrays.items()], self.mesh)
        if prepared is not None:
            session.follow(prepared.schedule.program, Planned(session, prepared, arrays, poison=self._debug))
        new_args, new_kwargs = unflatten(treedef, filled)
        kept = {i: array for i, array in arrays.items() if not array.is_donated}
        try:
            refuse_written(_NAME, arrays.values(), lambda: [known.names[i] for i in arrays])
            with session_scope(session), use_mesh(self.mesh):
                outputs = self._fn(*new_args, **new_kwargs)
                session.end()
            refuse_written(_NAME, kept.values(), lambda: [known.names[i] for i in kept])
            self._learn(session, known, expected)
            outputs = self._finish(outputs, arrays)
        except BaseException as error:
            session.abandon()
            session.control.fail(error)
            raise
        finally:
            session.close()
        self.last_counters = self._backend.counters.since(counted)
        return outputs

    @uncompiled
    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Records and plans the step on abstract arrays: nothing is computed, sent or changed.

        Raises:
            LoweringError: the step needs the value of a tensor.
            SpecError, LeafError: as a call.

        Communication: none. With ``Policy(pack_below_bytes=None)`` it plans by what this process has measured already
            (`probe`), else by 65536.
        """
        leaves, treedef = flatten((args, kwargs), is_sharded)
        with self._backend.abstract() as convert:
            session = Session(self.mesh, is_abstract=True, debug=self._debug)
            session.review = functools.partial(self._review, measures=False)
            known = self._admit(session, args, kwargs, leaves)
            session.names = known.names
            filled, _ = self._fill(session, [_abstract(leaf, convert) for leaf in leaves], known)
            new_args, new_kwargs = unflatten(treedef, filled)
            with session_scope(session), use_mesh(self.mesh):
                self._fn(*new_args, **new_kwargs)
            session.end()
        return Lowered(session.program, self._plan(session.program, measures=False))

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedStep:
        """Returns itself, as for any function: what it knows is plans."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        hint = "make it there anew: hpfunc.sharded(step_fn, mesh)"
        raise UsageError(message(_NAME, "a step cannot be pickled: its mesh is that of this process", hint=hint))

    # --- planning ---------------------------------------------------------------------------------------------------
    def _review(self, program: Program, *, measures: bool) -> None:
        """Refuses a policy that does not fit the program, before the step can update anything."""
        check_policy(program, settle(self.policy, self.mesh, program, measures=measures))
        if self._plans:
            return  # a later program may well lack a unit
        if patterns := unmatched(program, self.policy):
            names = [f"unit {unit.name!r} of {_weights_of(program, unit)}" for unit in program.units]
            rule = f"no unit fits the pattern {patterns[0]!r} of Policy.release_overrides; there are"
            hint = "a pattern is a glob for the name of a unit, or for the dotted path of one of its weights"
            raise PolicyError(message(_NAME, rule, names, hint=hint))

    def _plan(self, program: Program, *, measures: bool) -> Schedule:
        traits = Traits(ordered_sums=self._backend.ordered_sums(self.mesh.device))
        schedule = plan(program, settle(self.policy, self.mesh, program, measures=measures), traits)
        report = check(schedule)
        if not self._plans:  # what a step does now and then, as an early exit, does not stand for the model
            _warn_about(schedule, report)
        return schedule

    def _expect(self, session: Session, known: _Known) -> str:
        """Returns the fingerprint of the program that the step will probably run. See Note [Equal on all ranks]."""
        if self._generation != session.control.generation:
            self._generation = session.control.generation
            self._plans.clear()
            for each in self._known.values():
                each.history.clear()
        return predict(tuple(known.history)) or ""

    def _learn(self, session: Session, known: _Known, expected: str) -> None:
        self.followed_plan = session.plan is not None
        done = expected if session.plan is not None else session.program.fingerprint
        if done not in self._plans:
            schedule = self._plan(session.program, measures=True)
            session.control.agree(_NAME, lambda: f"plan {schedule.fingerprint} of program {done}")
            self._plans[done] = Prepared(schedule)
        known.history.append(done)
        self._plans[done] = self._plans.pop(done)
        if len(self._plans) > KEPT_PLANS:
            del self._plans[next(iter(self._plans))]
        self.last_schedule = self._plans[done].schedule

    # --- arguments --------------------------------------------------------------------------------------------------
    def _admit(self, session: Session, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any]) -> _Known:
        """Checks arguments whose shapes and specs were not seen before, together with all ranks."""
        names = self._names(args, kwargs)
        described = [f"{n}: {describe(x)}" for n, x in zip(names, leaves, strict=True) if is_sharded(x)]
        if session.is_abstract:
            return self._check(args, names, leaves)
        if self._known:
            session.control.leave("it was called with arguments of other shapes, specs or structure than before")
        with agreeing(self.mesh, _NAME, lambda: "\n".join(described)):
            return self._check(args, names, leaves)

    def _names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        known = _positional_names(self._fn)
        labels = [known[i] if i < len(known) else f"args[{i}]" for i in range(len(args))]
        named = [path for label, arg in zip(labels, args, strict=True) for path in paths(arg, label, is_sharded)]
        return named + [path for key in sorted(kwargs) for path in paths(kwargs[key], key, is_sharded)]

    def _check(self, args: tuple[Any, ...], names: Sequence[str], leaves: Sequence[Any]) -> _Known:
        arrays = [(n, x) for n, x in zip(names, leaves, strict=True) if is_sharded(x)]
        gone = [n for n, x in arrays if x._owner.consumed_by is not None]
        if gone:
            hint = "use what the step returned, or leave the argument out of donate_argnums"
            raise DonatedError(message(_NAME, "an argument was donated before", gone, hint=hint))
        foreign = [(n, x.mesh) for n, x in arrays if x.mesh != self.mesh]
        if foreign:
            bad = [f"{name}: on {other.describe(self.mesh)}" for name, other in foreign]
            shown = self.mesh.describe(foreign[0][1])
            raise SpecError(message(_NAME, "an argument lies on another mesh", bad, mesh=shown))
        if any(not 0 <= n < len(args) for n in self._donate):
            rule = f"donate_argnums={self._donate}, but there are {len(args)} positional arguments"
            raise SpecError(message(_NAME, rule))
        specs: list[PartitionSpec | None] = []
        if self._in_specs is not None:
            specs = leaf_specs(_NAME, args, "args", tuple(self._in_specs), self.mesh)
        counts = [len(flatten(arg, is_sharded)[0]) for arg in args]
        donated = {i for n in self._donate for i in range(sum(counts[:n]), sum(counts[: n + 1]))}
        specs += [None] * (len(leaves) - len(specs))
        return _Known({i: n for i, n in enumerate(names) if is_sharded(leaves[i])}, specs, donated)

    def _fill(
        self, session: Session, leaves: Sequence[Any], known: _Known
    ) -> tuple[list[Any], dict[int, ShardedArray]]:
        """Returns the leaves as the step sees them: arrays know their origin, global tensors are cut."""
        filled, arrays = list(leaves), {}
        for i, (leaf, spec) in enumerate(zip(leaves, known.specs, strict=True)):
            if is_sharded(leaf):
                filled[i] = arrays[i] = leaf._handle(origin=(i, session.step), donated=i in known.donated)
            elif spec is not None and self._backend.is_tensor(leaf):
                filled[i] = leaf[layout_of(tuple(leaf.shape), spec, self.mesh).local_slices(self.mesh.coordinate)]
        return filled, arrays

    def _finish(self, outputs: Any, arrays: dict[int, ShardedArray]) -> Any:
        """Wraps plain outputs as `out_specs` say, and ends the life of donated handles."""
        leaves, treedef = flatten(outputs, is_sharded)
        specs: list[PartitionSpec | None] = [None] * len(leaves)
        if self._out_specs is not None:
            specs = leaf_specs(_NAME, outputs, "outputs", self._out_specs, self.mesh)
        kept = [self._wrap(x, s) for x, s in zip(leaves, specs, strict=True)]
        for array in arrays.values():
            if array.is_donated and array._owner.consumed_by is None:
                array._consume(f"{_NAME}({getattr(self._fn, '__name__', 'step')})")
        return unflatten(treedef, kept)

    def _wrap(self, leaf: Any, spec: PartitionSpec | None) -> Any:
        if is_sharded(leaf):
            return renewed(leaf)
        if spec is None or not self._backend.is_tensor(leaf):
            return leaf
        shape = tuple(n * self.mesh.axis_size(spec.dim_axes(dim)) for dim, n in enumerate(leaf.shape))
        return watch(ShardedArray(leaf, shape, spec, self.mesh))


@dataclass(slots=True)
class _Known:
    """What was found out about arguments of one structure.

    Attributes:
        names: the path of each sharded leaf.
        specs: the entry of `in_specs` for each leaf.
        donated: which leaves may be updated in place.
        history: fingerprints of the programs that the step ran with such arguments, the last one last.
    """

    names: dict[int, str]
    specs: list[PartitionSpec | None]
    donated: set[int]
    history: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_CALLS))


def _weights_of(program: Program, unit: Unit) -> str:
    return ", ".join(dotted(program.weights[w].name) for w in unit.weights)


def _positional_names(fn: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # a builtin may have none
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _signature(leaves: Sequence[Any], treedef: Any) -> object:
    return treedef, tuple((x.layout, x._held_dtype, x.is_frozen) if is_sharded(x) else None for x in leaves)


def _abstract(leaf: Any, convert: Callable[[Any], Any]) -> Any:
    return leaf.with_local(convert(leaf._value)) if is_sharded(leaf) else convert(leaf)


def _warn_about(schedule: Schedule, report: Report) -> None:
    program = schedule.program
    weights = [[program.weights[w] for w in unit.weights] for unit in program.units]
    sizes = [sum(weight.whole_numel * itemsize(weight.dtype) for weight in unit) for unit in weights]
    cut = any(weight.num_shards > 1 for weight in program.weights)
    if cut and len(sizes) > 1 and max(sizes) > 0.75 * sum(sizes) and max(sizes) > 1 << 20:
        name = program.units[sizes.index(max(sizes))].name
        share = 100 * max(sizes) / sum(sizes)
        rule = f"unit {name!r} holds {share:.0f} % of the weights: nearly the whole model is gathered at once"
        warnings.warn(message(_NAME, rule, hint="make a unit of every layer"), HpfuncWarning, stacklevel=5)
    if cut and len(sizes) == 1:
        rule = "the whole model is one unit: nothing can be hidden, and all of it is gathered at once"
        warnings.warn(message(_NAME, rule, hint="make a unit of every layer"), HpfuncWarning, stacklevel=5)
    elif report.launches and not report.hidden_launches and schedule.policy.prefetch == 0:
        rule = f"nothing can be hidden in this step with {schedule.policy}"
        warnings.warn(message(_NAME, rule, hint="raise Policy.prefetch"), HpfuncWarning, stacklevel=5)


def sharded(
    step_fn: Callable[..., Any] | None = None,
    mesh: Mesh | None = None,
    *,
    in_specs: Any = None,
    out_specs: Any = None,
    policy: Policy | None = None,
    donate_argnums: int | Sequence[int] = (),
    debug: bool = False,
) -> Any:
    """Returns a step that runs by a plan.

    The first call records which units the step uses, in which order, while it runs them one after another: the
    reference. From that a schedule is planned and checked, which the next calls follow: gathers and reductions then run
    behind compute. A call that does something else goes on without a plan, and is planned anew; of steps that change
    the plan is chosen by what followed in the past. No bit of the result depends on any of that.

    Args:
        step_fn: the step; None (or the mesh in its place) makes a decorator.
        mesh: the mesh of its arrays.
        in_specs: a prefix of the positional arguments: plain tensors under a `P` are global values, of which the step
            gets this rank's part. None leaves them alone.
        out_specs: a prefix of the result: plain tensors under a `P` are this rank's part, and come out as
            `ShardedArray`.
        policy: how to schedule.
        donate_argnums: positional arguments whose arrays may be updated in place. Their handles are consumed by
            the first such update, at the latest when the step returns, and then raise `DonatedError`.
        debug: look for mistakes, at the price of time. Arguments are compared before they are used, as the first call
            compares them: which arrays they are, and parts that several ranks hold alike
            (`hpfunc.debug.check_replicas`). Freed buffers are filled with NaN. The cotangent of each `psum`
            and the argument of each `pvary` are compared along their axes, and gradients along the axes without data
            that do not cut them; 8 bytes from each rank each time. Different bits are a `UsageError` on all ranks.

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
    if isinstance(step_fn, Mesh):
        step_fn, mesh = None, step_fn
    if mesh is None:
        raise SpecError(message(_NAME, "no mesh is given", hint="hpfunc.sharded(step_fn, mesh)"))
    numbers = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)

    def wrap(fn: Callable[..., Any]) -> ShardedStep:
        return ShardedStep(fn, mesh, in_specs, out_specs, policy or Policy(), numbers, debug)

    return wrap if step_fn is None else wrap(step_fn)
