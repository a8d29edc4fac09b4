"""`unit`: a function of whole weights that is called with sharded weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import optree

from .. import backends
from .._errors import LeafError, MeshError, UsageError, message
from .._running.context import current_run, current_session, holding, unit_label
from .._running.differentiation import Run
from .._running.eager import session_on
from .._running.session import Session
from .._running.use import Use
from .._values.array import ShardedArray, check_gatherable, check_one_mesh, describe, is_sharded
from .._values.layout import Gather
from .._values.mesh import AxisNames, as_axes
from .._values.numerics import Numerics
from .._values.tree import flatten, paths, unflatten
from ..backends import Backend, Inside, uncompiled
from .unit_errors import check_function, explain, refuse_nested
from .unshard import unshard_array

Params = ParamSpec("Params")
Result = TypeVar("Result")

Tensor = Any
Names = Callable[[], list[str]]
Axes = tuple[str, ...]
How = tuple[bool, Inside | None]  # `remat` and `inside` of a `_Call`
Body = Callable[..., Any]  # from whole weights and arguments to results
_NAME = "hpfunc.unit"


def unit(
    fn: Callable[Concatenate[Any, Params], Result],
    *,
    name: str | None = None,
    remat: bool = False,
    axes: AxisNames | None = None,
) -> Callable[Concatenate[Any, Params], Result]:
    """Returns `fn` as a unit of sharding: its weights are gathered together, used, and dropped.

    ``fn(weights, *args, **kwargs)`` gets whole tensors in the place of the `ShardedArray` leaves of its first argument.
    Inside `value_and_grad` they are dropped after forward and gathered again for backward, and their gradients are
    reduced. Inside a `sharded` step all of this is scheduled ahead.

    Args:
        fn: must not return its weights or write into them.
        name: for schedules and messages; default: the name of the function.
        remat: keep only the tensors among ``args`` from forward to backward, and run `fn` again in backward, with the
            same random numbers. Other objects among ``args`` are given their contents of the call for it: a cache that
            `fn` fills is filled once. This run uses the weights that are gathered for backward anyway. No bit of the
            result changes.
        axes: gather the weights over these data axes only; default: all data axes. A weight that another data axis cuts
            stays cut by it inside of the unit, and its gradient is not reduced over that axis: `fn` must move the data
            of these ranks to it (`all_to_all`). The mean still divides by the ranks along all data axes. This is expert
            parallelism: each rank along ``"ep"`` has its own data and its own experts.

    Raises:
        ArgumentError: `fn` is a module with weights of its own; it is a UsageError, and a TypeError.
        LeafError: the first argument has plain tensors, or another one has sharded arrays; or `fn` fails with weights
            and arguments of different dtypes.
        UsageError: `fn` uses an array that is not among its weights; a weight escapes or is written to, or two units
            gather it over different `axes`; a tensor that was saved for backward is written to; the unit runs inside of
            another one or under reentrant checkpointing; or, with `remat`, something else than `value_and_grad`
            differentiates it.
        SpecError: an array cannot be gathered over these axes alone, or lies on another mesh than the others.
        MeshError: one of `axes` is not a data axis, or it is not known which axes are.

    Communication: an all-gather over those of `axes` that cut the weights, again in backward, which also reduces the
        gradients. With `remat` also the collectives that `fn` calls, again in backward.

    >>> import torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> w = hpfunc.shard(torch.eye(2), mesh, hpfunc.P("shard"))
    >>> hpfunc.unit(lambda w, x: x @ w)(w, torch.ones(1, 2))
    tensor([[1., 1.]])
    """
    check_function(fn)
    label = name or getattr(fn, "__name__", type(fn).__name__).strip("<>")
    return unit_around(fn, label, remat, None if axes is None else as_axes(axes))


def unit_around(
    fn: Callable[..., Any], label: str, remat: bool, given: Axes | None = None, inside: Inside | None = None
) -> Callable[..., Any]:
    """Returns `fn` as a unit, see `unit`. `inside` is notified of its backwards."""

    @functools.wraps(fn)
    def call(params: Any, /, *args: Any, **kwargs: Any) -> Any:
        return _use_unit(fn, label, (remat, inside), given, params, args, kwargs)

    return call


@uncompiled
def _use_unit(
    fn: Callable[..., Any], label: str, how: How, given: Axes | None, params: Any, args: Any, kwargs: Any
) -> Any:
    leaves, treedef = flatten(params, is_sharded)
    places = [i for i, leaf in enumerate(leaves) if is_sharded(leaf)]
    arrays = [leaves[i] for i in places]
    _check(label, params, leaves, arrays, (*args, *kwargs.values()))
    if not arrays:
        return fn(params, *args, **kwargs)

    def body(wholes: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        filled = list(leaves)
        for i, whole in zip(places, wholes, strict=True):
            filled[i] = whole
        with holding(unit_label, label):
            try:
                return fn(unflatten(treedef, filled), *args, **kwargs)
            except Exception as error:
                explain(label, error, wholes, names, args, kwargs)
                raise

    def names() -> list[str]:
        every = paths(params, "params", is_sharded)
        return [every[i] for i in places]

    mesh = arrays[0].mesh
    check_one_mesh(_NAME, arrays, mesh, names)
    mesh.check_data_axes(_NAME)
    over = mesh.data_axes if given is None else _check_axes(given, arrays, names)
    return _Call(label, arrays, over, names, *how).run(body, args, kwargs)


def _check(label: str, params: Any, leaves: Sequence[Any], arrays: Sequence[ShardedArray], rest: Sequence[Any]) -> None:
    if len(arrays) != len(leaves):
        backend = backends.of(_NAME, leaves)
        if any(backend.is_tensor(leaf) for leaf in leaves):
            if (outer := unit_label.get()) is not None:
                refuse_nested(label, outer)
            names = paths(params, "params", is_sharded)
            bad = [f"{n}: {describe(x)}" for n, x in zip(names, leaves, strict=True) if backend.is_tensor(x)]
            hint = "shard them (hpfunc.shard), or pass them as another argument"
            raise LeafError(message(_NAME, f"the weights of {label!r} have plain tensors", bad, hint=hint))
    is_tensor = backends.get(arrays[0].layout.mesh.framework).is_tensor if arrays else lambda arg: False
    trees = [arg for arg in rest if not is_tensor(arg)]
    others = [describe(x) for x in optree.tree_leaves(cast(Any, trees), is_leaf=is_sharded) if is_sharded(x)]
    if others:
        hint = "weights belong into the first argument"
        raise LeafError(message(_NAME, f"{label!r} gets sharded arrays beside its weights", others, hint=hint))


def _check_axes(axes: Axes, arrays: Sequence[ShardedArray], names: Names) -> Axes:
    mesh = arrays[0].mesh
    mesh.check_axes(_NAME, axes)
    others = [axis for axis in axes if axis not in mesh.data_axes]
    if others:
        rule = f"axes={axes}, but {others[0]!r} is not a data axis: gradients would not be reduced over it"
        hint = f"the data axes are {mesh.data_axes}; for other axes use hpfunc.all_gather and hpfunc.psum_scatter"
        raise MeshError(message(_NAME, rule, mesh=mesh, hint=hint))
    if any(array.layout.misplaced(axes) is not None for array in arrays):
        check_gatherable(_NAME, list(zip(names(), arrays, strict=True)), axes)
    return axes


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a unit.

    Attributes:
        axes: the axes over which its arrays are gathered.
        names: returns the paths of the arrays.
        inside: is notified of its backwards.
    """

    label: str
    arrays: Sequence[ShardedArray]
    axes: Axes
    names: Names
    remat: bool
    inside: Inside | None

    def run(self, body: Body, args: Any, kwargs: Any) -> Any:
        """Calls `body` with whole weights."""
        label, arrays = self.label, self.arrays
        # Only a run tracks arrays. An array that an ended run has left behind is a constant now.
        tracking = [a._tracker for a in arrays if a._tracker is not None and a._tracker.state != "done"]
        run = cast(Run, tracking[0]) if tracking else current_run()
        backend = backends.get(arrays[0].mesh.framework)
        if backend.is_transformed(() if run is not None else _inputs(backend, arrays, args, kwargs)):
            if run is not None:
                hint = "let torch.func differentiate the function itself, without value_and_grad"
                raise UsageError(message(_NAME, f"{label!r} runs under torch.func inside value_and_grad", hint=hint))
            if self.remat:
                hint = "make the unit without remat for it; there its weights are kept from forward to backward"
                rule = f"{label!r} has remat=True, and something else than hpfunc.value_and_grad differentiates it"
                raise UsageError(message(_NAME, rule, hint=hint))
            return body([unshard_array(_NAME, a, self.axes) for a in arrays], *args, **kwargs)  # the leaf form
        if (outer := unit_label.get()) is not None:
            refuse_nested(label, outer)
        if run is not None:
            body = _casting(body, run.numerics, backend)
        if run is None or run.state == "done":
            return self._forward_only(body, None, args, kwargs)
        if run.state == "backward":
            return self._recompute(body, run, args, kwargs)
        if not run.tape.is_grad_enabled():
            run.tape.refuse_reentrant()
            return self._forward_only(body, run, args, kwargs)
        self._refuse_computed(backend)
        use = self._use(run.session, run)
        outputs = run.tape.use_unit(body, use, *args, **kwargs)
        use.after_forward()
        return outputs

    def _refuse_computed(self, backend: Backend) -> None:
        """Raises UsageError naming every array whose local part was computed from differentiated values."""
        untracked = [array._value for array in self.arrays if array._tracker is None]
        if not untracked or not backend.is_transformed(untracked):
            return
        rows = zip(self.names(), self.arrays, strict=True)
        bad = [f"{n}: {describe(a)}" for n, a in rows if a._tracker is None and backend.is_transformed([a._value])]
        rule = f"the weights of {self.label!r} are computed within the loss"
        rule += ", whose gradient would not pass through the unit"
        hint = (
            "compute them inside of the unit, from the arrays that are differentiated; or before value_and_grad; or "
            "detach what is to be a constant"
        )
        raise UsageError(message(_NAME, rule, bad, hint=hint))

    def _use(self, session: Session, run: Run | None) -> Use:
        mesh = self.arrays[0].mesh
        if mesh is not session.mesh and mesh != session.mesh:  # they were captured, not passed
            within = "step" if run is None else "differentiation"
            hint = f"the arrays that a {within} uses lie on its mesh: shard them on that, and pass them as arguments"
            names = [f"{self.label!r}, {describe(array)}" for array in self.arrays]
            check_one_mesh(_NAME, self.arrays, session.mesh, lambda: names, hint)
        use = session.use(self.label, self.arrays, run, self.axes)
        use.remat, use.inside = self.remat, self.inside
        gathers = [array.layout.gather(self.axes) for array in self.arrays]
        if any(session.gathers[w] is not gather for w, gather in zip(use.weights, gathers, strict=True)):
            _check_same_axes(session, use.weights, gathers)
        return use

    def _forward_only(self, body: Body, run: Run | None, args: Any, kwargs: Any) -> Any:
        with session_on(self.arrays[0].mesh, run.session if run else None) as session:
            if run is None and session is not current_session():  # the arguments of a step have names already
                session.paths.update((array._owner, n) for n, array in zip(self.names(), self.arrays, strict=True))
            named = [(session.paths.get(array._owner, self.label), array) for array in self.arrays]
            check_gatherable(_NAME, named, self.axes)
            use = self._use(session, run)
            wholes = use.before_forward()
            outputs = session.backend.use_plain(body, wholes, use, *args, **kwargs)
            use.after_forward()
        return outputs

    def _recompute(self, body: Body, run: Run, args: Any, kwargs: Any) -> Any:
        # Activation checkpointing calls the unit again, before its backward begins.
        run.tape.refuse_reentrant()
        use = self._use(run.session, run)
        run.repeats(use)
        return run.tape.recompute_unit(body, use, *args, **kwargs)


def _inputs(backend: Backend, arrays: Sequence[ShardedArray], args: Any, kwargs: Any) -> list[Tensor]:
    """Returns all tensors that a call of a unit depends on."""
    leaves = optree.tree_leaves(cast(Any, [args, kwargs]))
    return [array._value for array in arrays] + [leaf for leaf in leaves if backend.is_tensor(leaf)]


def _casting(body: Body, numerics: Numerics, backend: Backend) -> Body:
    """Returns `body` with the casts of inputs and outputs that `numerics` asks for."""
    if not numerics.cast_inputs and numerics.output_dtype is None:
        return body

    def cast(tree: Any, dtype: str) -> Any:
        def cast_leaf(x: Any) -> Any:
            return backend.cast(x, dtype) if backend.is_tensor(x) and backend.is_floating(backend.dtype_name(x)) else x

        return optree.tree_map(cast_leaf, tree)

    def call(wholes: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        if numerics.cast_inputs:
            args, kwargs = cast((args, kwargs), numerics.param_dtype)
        outputs = body(wholes, *args, **kwargs)
        return outputs if numerics.output_dtype is None else cast(outputs, numerics.output_dtype)

    return call


def _check_same_axes(session: Session, weights: Sequence[int], gathers: Sequence[Gather]) -> None:
    pairs = [(w, session.gathers[w], wanted) for w, wanted in zip(weights, gathers, strict=True)]
    bad = [
        f"{session.weights[w].name}: spec {wanted.layout.spec}, over {known.axes} and {wanted.axes}"
        for w, known, wanted in pairs
        if known.axes != wanted.axes
    ]
    if bad:
        rule, hint = "an array is gathered over different axes", "give all units that use it the same axes"
        raise UsageError(message(_NAME, rule, bad, mesh=session.mesh, hint=hint))
