"""`sharded`: a step that is recorded once, planned, checked, and then run by its plan."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import backends
from ._agree import agreeing
from ._array import ShardedArray, describe, is_sharded, layout_of
from ._arrays import leaf_specs
from ._check import check
from ._errors import DonatedError, HpfuncWarning, SpecError, message
from ._execute import Planned
from ._mesh import Mesh, PartitionSpec
from ._plan import Traits, plan
from ._policy import Policy
from ._program import Event, Program
from ._run import Session, session_scope
from ._schedule import Schedule
from ._tree import flatten, paths, unflatten
from ._world import use_mesh
from .backends import Counters

_NAME = "hpfunc.sharded"


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
        self._plans: dict[Program, Schedule] = {}
        self._latest: dict[object, Program] = {}
        self._backend = backends.get(mesh.framework)
        self.last_schedule: Schedule | None = None
        self.last_counters: Counters | None = None
        self.followed_plan = False

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """Every plan so far, in the order in which they were made."""
        return tuple(self._plans.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step.

        Raises:
            SpecError, LeafError, DonatedError: arguments do not fit; on all ranks, before anything is sent.
            AgreementError: ranks run different programs.
            PeerError: another rank failed or did not answer.

        Communication: as the schedule says; on a call that records, a digest before each event.
        """
        counted = self._backend.counters.copy()
        call = self._prepare(args, kwargs, abstract=False)
        session = Session(self.mesh)
        session.names = call.names
        program = self._latest.get(call.signature)
        if program is not None:
            session.follow(program, Planned(session, self._plans[program], call.arrays, poison=self._debug))
        try:
            with session_scope(session), use_mesh(self.mesh):
                outputs = self._fn(*call.args, **call.kwargs)
                session.driver.end_step(session.emit(Event("end_step")))
            self._learn(session, call.signature)
            outputs = self._finish(outputs, call)
        except BaseException as error:
            session.abandon()
            session.control.fail(error)
            raise
        self.last_counters = self._backend.counters.since(counted)
        return outputs

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Records and plans the step on abstract arrays: nothing is computed, sent or changed.

        Raises:
            LoweringError: the step needs the value of a tensor.
            SpecError, LeafError: as a call.

        Communication: none.
        """
        call = self._prepare(args, kwargs, abstract=True)
        with self._backend.abstract() as convert:
            session = Session(self.mesh, is_abstract=True)
            session.names = call.names
            with session_scope(session), use_mesh(self.mesh):
                self._fn(*_abstract(call.args, convert), **_abstract(call.kwargs, convert))
            session.driver.end_step(session.emit(Event("end_step")))
        return Lowered(session.program, self._plan(session.program))

    # --- planning ---------------------------------------------------------------------------------------------------
    def _plan(self, program: Program) -> Schedule:
        traits = Traits(ordered_sums=self._backend.ordered_sums(self.mesh.device))
        schedule = plan(program, self.policy, traits)
        check(schedule)
        return schedule

    def _learn(self, session: Session, signature: object) -> None:
        self.followed_plan = session.plan is not None
        program = session.plan or session.program
        if program not in self._plans:
            schedule = self._plan(program)
            session.control.agree(_NAME, lambda: f"plan {schedule.fingerprint} of program {program.fingerprint}")
            self._plans[program] = schedule
            _warn_about(schedule, session)
        self._latest[signature] = program
        self.last_schedule = self._plans[program]

    # --- arguments --------------------------------------------------------------------------------------------------
    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, abstract: bool) -> _Call:
        leaves, treedef = flatten((args, kwargs), is_sharded)
        if (
            not abstract
            and self._latest
            and self._signature(leaves, treedef) in self._latest
            and self._in_specs is None
        ):
            return self._call(args, kwargs, leaves, treedef)  # checked when it was recorded
        names = self._names(args, kwargs)
        check_all = lambda: self._check(args, names, leaves)  # noqa: E731 - said once, called at two places
        if abstract:
            check_all()
        else:
            facts = lambda: "\n".join(
                f"{n}: {describe(x)}" for n, x in zip(names, leaves, strict=True) if is_sharded(x)
            )  # noqa: E731
            with agreeing(self.mesh, _NAME, facts):
                check_all()
        return self._call(args, kwargs, leaves, treedef)

    def _names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        code = getattr(self._fn, "__code__", None)
        known = code.co_varnames[: code.co_argcount] if code is not None else ()
        labels = [known[i] if i < len(known) else f"args[{i}]" for i in range(len(args))]
        named = [path for label, arg in zip(labels, args, strict=True) for path in paths(arg, label, is_sharded)]
        return named + [path for key in sorted(kwargs) for path in paths(kwargs[key], key, is_sharded)]

    def _check(self, args: tuple[Any, ...], names: Sequence[str], leaves: Sequence[Any]) -> None:
        gone = [n for n, x in zip(names, leaves, strict=True) if is_sharded(x) and x._owner.consumed_by is not None]
        if gone:
            hint = "use what the step returned, or leave the argument out of donate_argnums"
            raise DonatedError(message(_NAME, "an argument was donated before", gone, hint=hint))
        foreign = [
            f"{n}: on {x.mesh}" for n, x in zip(names, leaves, strict=True) if is_sharded(x) and x.mesh != self.mesh
        ]
        if foreign:
            raise SpecError(message(_NAME, "an argument lies on another mesh", foreign, mesh=self.mesh))
        if any(not 0 <= n < len(args) for n in self._donate):
            rule = f"donate_argnums={self._donate}, but there are {len(args)} positional arguments"
            raise SpecError(message(_NAME, rule))
        if self._in_specs is not None:
            leaf_specs(_NAME, args, "args", tuple(self._in_specs), self.mesh)

    def _signature(self, leaves: Sequence[Any], treedef: Any) -> object:
        return treedef, tuple((x.layout, x.dtype) if is_sharded(x) else None for x in leaves)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any], treedef: Any) -> _Call:
        donated_leaves = {id(x) for n in self._donate for x in flatten(args[n], is_sharded)[0]}
        filled: list[Any] = list(leaves)
        specs = [None] * len(leaves)
        if self._in_specs is not None:
            specs = [*leaf_specs(_NAME, args, "args", tuple(self._in_specs), self.mesh), *specs][: len(leaves)]
        arrays, names = {}, {}
        paths_ = self._names(args, kwargs)
        for i, leaf in enumerate(leaves):
            if is_sharded(leaf):
                arrays[i] = filled[i] = leaf._handle(origin=i, donated=id(leaf) in donated_leaves)
                names[i] = paths_[i]
            elif specs[i] is not None and self._backend.is_tensor(leaf):
                filled[i] = leaf[layout_of(tuple(leaf.shape), specs[i], self.mesh).local_slices(self.mesh.coordinate)]
        new_args, new_kwargs = unflatten(treedef, filled)
        return _Call(new_args, new_kwargs, self._signature(leaves, treedef), arrays, names)

    def _finish(self, outputs: Any, call: _Call) -> Any:
        """Wraps plain outputs as `out_specs` say, and ends the life of donated handles."""
        leaves, treedef = flatten(outputs, is_sharded)
        specs = [None] * len(leaves)
        if self._out_specs is not None:
            specs = leaf_specs(_NAME, outputs, "outputs", self._out_specs, self.mesh)
        kept = [self._wrap(x, s) for x, s in zip(leaves, specs, strict=True)]
        for array in call.arrays.values():
            if array.is_donated and array._owner.consumed_by is None:
                array._consume(f"{_NAME}({getattr(self._fn, '__name__', 'step')})")
        return unflatten(treedef, kept)

    def _wrap(self, leaf: Any, spec: PartitionSpec | None) -> Any:
        if is_sharded(leaf):
            return ShardedArray(leaf._value, leaf.shape, leaf.spec, leaf.mesh)
        if spec is None or not self._backend.is_tensor(leaf):
            return leaf
        shape = tuple(n * self.mesh.axis_size(spec.dim_axes(dim)) for dim, n in enumerate(leaf.shape))
        return ShardedArray(leaf, shape, spec, self.mesh)


@dataclass(slots=True)
class _Call:
    """The arguments of one call, as the step sees them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    signature: object
    arrays: dict[int, ShardedArray]
    names: dict[int, str]


def _abstract(tree: Any, convert: Callable[[Any], Any]) -> Any:
    leaves, treedef = flatten(tree, is_sharded)
    found = []
    for leaf in leaves:
        if is_sharded(leaf):
            new = ShardedArray(convert(leaf._value), leaf.shape, leaf.spec, leaf.mesh)
            found.append(new._handle(origin=leaf._origin, donated=leaf.is_donated))
        else:
            found.append(convert(leaf))
    return unflatten(treedef, found)


def _warn_about(schedule: Schedule, session: Session) -> None:
    program, backend = schedule.program, session.backend
    sizes = [
        sum(program.weights[w].whole_numel * backend.item_bytes(program.weights[w].dtype) for w in unit.weights)
        for unit in program.units
    ]
    cut = any(weight.num_shards > 1 for weight in program.weights)
    if cut and len(sizes) > 1 and max(sizes) > 0.75 * sum(sizes) and max(sizes) > 1 << 20:
        name = program.units[sizes.index(max(sizes))].name
        rule = f"unit {name!r} holds {100 * max(sizes) / sum(sizes):.0f} % of the weights, so that nearly the whole model is gathered at once"
        warnings.warn(message(_NAME, rule, hint="make a unit of every layer"), HpfuncWarning, stacklevel=4)
    if cut and len(sizes) == 1:
        rule = "the whole model is one unit: nothing can be hidden, and all of it is gathered at once"
        warnings.warn(message(_NAME, rule, hint="make a unit of every layer"), HpfuncWarning, stacklevel=4)


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

    The first call records which units the step uses, in which order, while it runs them one after another: the reference.
    From that a schedule is planned and checked, which the next calls follow: gathers and reductions then run behind
    compute. A call that does something else goes on without a plan, and is planned anew. No bit of the result
    depends on any of that.

    Args:
        step_fn: the step; None (or the mesh in its place) makes a decorator.
        mesh: the mesh of its arrays.
        in_specs: a prefix of the positional arguments: plain tensors under a `P` are global values, of which the step gets this
            rank's part. None leaves them alone.
        out_specs: a prefix of the result: plain tensors under a `P` are this rank's part, and come out as `ShardedArray`.
        policy: how to schedule.
        donate_argnums: positional arguments whose arrays may be updated in place. Their handles are consumed by
            the first such update, at the latest when the step returns, and then raise `DonatedError`.
        debug: fill freed buffers with NaN.

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
