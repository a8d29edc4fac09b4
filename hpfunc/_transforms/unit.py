"""`unit`: a function of whole weights that is called with sharded weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import optree

from .. import backends
from .._errors import LeafError, MeshError, UsageError, message
from .._running.context import current_run, current_session, unit_label
from .._running.differentiation import Run
from .._running.eager import Eager
from .._running.session import Session
from .._running.use import Use
from .._values.array import ShardedArray, check_gatherable, check_one_mesh, describe, is_sharded
from .._values.mesh import AxisNames, as_axes
from .._values.numerics import Numerics
from .._values.tree import flatten, paths, unflatten
from ..backends import Backend, Inside, uncompiled
from .unshard import unshard_array

Tensor = Any
Names = Callable[[], list[str]]
Axes = tuple[str, ...]
_NAME = "hpfunc.unit"


def unit(
    fn: Callable[..., Any], *, name: str | None = None, remat: bool = False, axes: AxisNames | None = None
) -> Callable[..., Any]:
    """Returns `fn` as a unit of sharding: its weights are gathered together, used, and dropped.

    ``fn(weights, *args, **kwargs)`` gets whole tensors in the place of the `ShardedArray` leaves of its first argument.
    Inside `value_and_grad` they are dropped after forward and gathered again for backward, and their gradients are
    reduced. Inside a `sharded` step all of this is scheduled ahead.

    Args:
        fn: must not return its weights or write into them.
        name: for schedules and messages; default: the name of the function.
        remat: keep only the tensors among ``args`` from forward to backward, and run `fn` again in backward, with the
            same random numbers. This run uses the weights that are gathered for backward anyway. No bit of the result
            changes.
        axes: gather the weights over these data axes only; default: all data axes. A weight that another data axis cuts
            stays cut by it inside of the unit, and its gradient is not reduced over that axis: `fn` must move the data
            of these ranks to it (`all_to_all`). The mean still divides by the ranks along all data axes. This is expert
            parallelism: each rank along ``"ep"`` has its own data and its own experts.

    Raises:
        LeafError: the first argument has plain tensors, or another one has sharded arrays.
        UsageError: a weight escapes or is written to, or two units gather it over different `axes`; a tensor that was
            saved for backward is written to; the unit runs inside of another one or under reentrant checkpointing; or,
            with `remat`, something else than `value_and_grad` differentiates it.
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
    fn: Callable[..., Any],
    label: str,
    how: tuple[bool, Inside | None],
    given: Axes | None,
    params: Any,
    args: Any,
    kwargs: Any,
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
        token = unit_label.set(label)
        try:
            return fn(unflatten(treedef, filled), *args, **kwargs)
        finally:
            unit_label.reset(token)

    def names() -> list[str]:
        every = paths(params, "params", is_sharded)
        return [every[i] for i in places]

    mesh = arrays[0].mesh
    check_one_mesh(_NAME, arrays, mesh, names)
    mesh.check_data_axes(_NAME)
    over = mesh.data_axes if given is None else _check_axes(given, arrays, names)
    return _call(label, body, arrays, over, names, how, args, kwargs)


def _check(label: str, params: Any, leaves: Sequence[Any], arrays: Sequence[ShardedArray], rest: Sequence[Any]) -> None:
    if len(arrays) != len(leaves):
        backend = backends.of(_NAME, leaves)
        if any(backend.is_tensor(leaf) for leaf in leaves):
            names = paths(params, "params", is_sharded)
            bad = [f"{n}: {describe(x)}" for n, x in zip(names, leaves, strict=True) if backend.is_tensor(x)]
            hint = "shard them (hpfunc.shard), or pass them as another argument"
            raise LeafError(message(_NAME, f"the weights of {label!r} have plain tensors", bad, hint=hint))
    is_tensor = backends.get(arrays[0].layout.mesh.framework).is_tensor if arrays else lambda arg: False
    trees = [arg for arg in rest if not is_tensor(arg)]
    others = (
        [describe(x) for x in optree.tree_leaves(cast(Any, trees), is_leaf=is_sharded) if is_sharded(x)]
        if trees
        else []
    )
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


def _call(
    label: str,
    body: Callable[..., Any],
    arrays: Sequence[ShardedArray],
    axes: Axes,
    names: Names,
    options: tuple[bool, Inside | None],
    args: Any,
    kwargs: Any,
) -> Any:
    remat, inside = options
    # Only a run tracks arrays. An array that an ended run has left behind is a constant now.
    tracking = [a._tracker for a in arrays if a._tracker is not None and a._tracker.state != "done"]
    run = cast(Run, tracking[0]) if tracking else current_run()
    backend = backends.get(arrays[0].mesh.framework)
    if backend.is_transformed(() if run is not None else _inputs(backend, arrays, args, kwargs)):
        if run is not None:
            hint = "let torch.func differentiate the function itself, without value_and_grad"
            raise UsageError(message(_NAME, f"{label!r} runs under torch.func inside value_and_grad", hint=hint))
        if remat:
            hint = "make the unit without remat for it; there its weights are kept from forward to backward"
            rule = f"{label!r} has remat=True, and something else than hpfunc.value_and_grad differentiates it"
            raise UsageError(message(_NAME, rule, hint=hint))
        return body([unshard_array(_NAME, a, axes) for a in arrays], *args, **kwargs)  # the leaf form
    if (outer := unit_label.get()) is not None:  # no plan can follow events inside of another unit's
        hint = "call one after the other, or give the outer unit all the weights and call the inner function itself"
        raise UsageError(message(_NAME, f"{label!r} is called inside of the unit {outer!r}", hint=hint))
    if run is not None:
        body = _casting(body, run.numerics, backend)
    if run is None or run.state == "done":
        return _forward_only(label, body, arrays, axes, names, None, args, kwargs)
    if run.state == "backward":
        return _recompute(label, body, arrays, axes, run, options, args, kwargs)
    if not run.tape.is_grad_enabled():
        run.tape.refuse_reentrant()
        return _forward_only(label, body, arrays, axes, names, run, args, kwargs)
    _refuse_computed(label, arrays, names, backend)
    use = _use(run.session, label, arrays, run, axes)
    use.remat, use.inside = remat, inside
    outputs = run.tape.use_unit(body, use, *args, **kwargs)
    use.after_forward()
    return outputs


def _refuse_computed(label: str, arrays: Sequence[ShardedArray], names: Names, backend: Backend) -> None:
    """Raises UsageError naming every array whose local part was computed from differentiated values."""
    untracked = [array._value for array in arrays if array._tracker is None]
    if not untracked or not backend.is_transformed(untracked):
        return
    rows = zip(names(), arrays, strict=True)
    bad = [f"{n}: {describe(a)}" for n, a in rows if a._tracker is None and backend.is_transformed([a._value])]
    rule = f"the weights of {label!r} are computed within the loss, whose gradient would not pass through the unit"
    hint = (
        "compute them inside of the unit, from the arrays that are differentiated; or before value_and_grad; or detach "
        "what is to be a constant"
    )
    raise UsageError(message(_NAME, rule, bad, hint=hint))


def _inputs(backend: Backend, arrays: Sequence[ShardedArray], args: Any, kwargs: Any) -> list[Tensor]:
    """Returns all tensors that a call of a unit depends on."""
    leaves = optree.tree_leaves(cast(Any, [args, kwargs]))
    return [array._value for array in arrays] + [leaf for leaf in leaves if backend.is_tensor(leaf)]


def _casting(body: Callable[..., Any], numerics: Numerics, backend: Backend) -> Callable[..., Any]:
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


def _use(session: Session, label: str, arrays: Sequence[ShardedArray], run: Run | None, axes: Axes) -> Use:
    if arrays[0].mesh is not session.mesh and arrays[0].mesh != session.mesh:  # they were captured, not passed
        within = "step" if run is None else "differentiation"
        hint = f"the arrays that a {within} uses lie on its mesh: shard them on that, and pass them as arguments"
        check_one_mesh(_NAME, arrays, session.mesh, lambda: [f"{label!r}, {describe(a)}" for a in arrays], hint)
    use = session.use(label, arrays, run, axes)
    if any(session.gathers[w] is not a.layout.gather(axes) for w, a in zip(use.weights, arrays, strict=True)):
        _check_same_axes(use, arrays, axes)
    return use


def _check_same_axes(use: Use, arrays: Sequence[ShardedArray], axes: Axes) -> None:
    session = use.session
    pairs = [(w, session.gathers[w], a.layout.gather(axes)) for w, a in zip(use.weights, arrays, strict=True)]
    bad = [
        f"{session.weights[w].name}: spec {wanted.layout.spec}, over {known.axes} and {wanted.axes}"
        for w, known, wanted in pairs
        if known.axes != wanted.axes
    ]
    if bad:
        rule, hint = "an array is gathered over different axes", "give all units that use it the same axes"
        raise UsageError(message(_NAME, rule, bad, mesh=session.mesh, hint=hint))


def _forward_only(
    label: str,
    body: Callable[..., Any],
    arrays: Sequence[ShardedArray],
    axes: Axes,
    names: Names,
    run: Run | None,
    args: Any,
    kwargs: Any,
) -> Any:
    owned = current_session() if run is None else run.session
    session = owned or Session(arrays[0].mesh, Eager)
    try:
        if owned is None:  # the arguments of a step have names already
            session.paths.update((array._owner, name) for name, array in zip(names(), arrays, strict=True))
        check_gatherable(_NAME, [(session.paths.get(a._owner, label), a) for a in arrays], axes)
        use = _use(session, label, arrays, run, axes)
        wholes = use.before_forward()
        outputs = session.backend.use_plain(body, wholes, use.names, *args, **kwargs)
        use.after_forward()
    except BaseException as error:
        if owned is None:
            session.control.fail(error)
        raise
    finally:
        if owned is None:
            session.close()
    return outputs


def _recompute(
    label: str,
    body: Callable[..., Any],
    arrays: Sequence[ShardedArray],
    axes: Axes,
    run: Run,
    options: tuple[bool, Inside | None],
    args: Any,
    kwargs: Any,
) -> Any:
    # Activation checkpointing calls the unit again, before its backward begins.
    run.tape.refuse_reentrant()
    use = _use(run.session, label, arrays, run, axes)
    use.remat, use.inside = options
    run.repeats(use)
    return run.tape.recompute_unit(body, use, *args, **kwargs)
