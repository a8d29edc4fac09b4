"""`value_and_grad` and `grad`: one differentiation, with gradients reduced over the data axes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast

import optree

from .._errors import LeafError, MeshError, UsageError, message
from .._running.comparisons import compare_gradients
from .._running.context import current_run, current_session, differentiating, mesh_in_use, use_mesh
from .._running.differentiation import Run
from .._running.eager import session_on
from .._running.session import Session
from .._running.use import Backwards
from .._running.writes import refuse_written
from .._values.argument_names import check_function, check_indices, check_kind
from .._values.array import check_gatherable, check_one_mesh, describe, is_sharded
from .._values.mesh import Mesh
from .._values.not_a_tensor import named
from .._values.numerics import Numerics, has_sums
from .._values.tree import flatten, paths, unflatten
from ..backends import uncompiled
from .freeze import marks_of

Params = ParamSpec("Params")
Result = TypeVar("Result")

Tensor = Any
_NAME = "hpfunc.value_and_grad"


def value_and_grad(
    fun: Callable[Params, Result],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    numerics: Numerics | None = None,
) -> Callable[Params, tuple[Result, Any]]:
    """Returns a function that computes `fun` and its gradient, reduced over the data axes.

    ``no_grad`` or ``inference_mode`` around the call have no effect, as in ``torch.func.grad``; inside of `fun` they
    have.

    Args:
        fun: returns a scalar, this rank's own loss on its own data. With `has_aux`, a pair of the loss and anything.
        argnums: which positional arguments to differentiate: pytrees of `ShardedArray` (and of plain tensors, whose
            gradient is this rank's own and is not reduced).
        has_aux: `fun` returns ``(loss, aux)``.
        numerics: dtypes, and ``"mean"`` or ``"sum"`` over the data axes.

    Returns:
        ``(loss, gradients)``, or ``((loss, aux), gradients)``. The loss is this rank's own. Gradients have the tree,
        shapes and specs of the arguments, and their dtypes or `Numerics.accum_dtype`. Weights that the loss does not
        depend on get zeros, if it depends on at least one weight. The gradient of a frozen leaf (see `freeze`) is None.

    Raises:
        LeafError: a leaf is not floating, its gradient would be added up in 8 bits, or the loss is not a scalar.
        SpecError: arrays are on different meshes, or one cannot be gathered over the data axes.
        MeshError: a mesh of more than one rank has no data axes, and ``data_axes=()`` was not given.
        UsageError: calls are nested, a tensor of an ended call is differentiated, every leaf is frozen, or the loss
            depends on none of the leaves that are to be differentiated.

    Communication: for each use of a `unit` one gather in forward and one in backward; for each array one reduce-scatter
        over the data axes that cut it and one all-reduce over the others.

    >>> import torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> params = hpfunc.shard({"w": torch.tensor([1.0, 2.0])}, mesh, hpfunc.P("shard"))
    >>> square = hpfunc.unit(lambda p: (p["w"] ** 2).sum())
    >>> loss, grads = hpfunc.value_and_grad(square)(params)
    >>> loss, grads["w"].local
    (tensor(5.), tensor([2., 4.]))
    """
    return GradFunction(fun, argnums, has_aux, numerics or Numerics(), with_value=True)


def grad(
    fun: Callable[Params, Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    numerics: Numerics | None = None,
) -> Callable[Params, Any]:
    """Returns a function that computes the gradient only: `value_and_grad` without the value.

    With `has_aux` it returns ``(gradients, aux)``. Arguments, errors and communication: as `value_and_grad`.

    >>> import torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> w = hpfunc.shard(torch.tensor([3.0]), mesh, hpfunc.P("shard"))
    >>> hpfunc.grad(hpfunc.unit(lambda w: (w**2).sum()))(w).local
    tensor([6.])
    """
    return GradFunction(fun, argnums, has_aux, numerics or Numerics(), with_value=False)


@dataclass(frozen=True, slots=True)
class _Picked:
    """The differentiated arguments, flattened.

    Attributes:
        tree: the arguments.
        leaves: all leaves, including frozen ones; `treedef` is their structure.
        places: indices in `leaves` of those that are not frozen.
    """

    tree: tuple[Any, ...]
    leaves: list[Any]
    treedef: optree.PyTreeSpec
    places: list[int]

    @classmethod
    def of(cls, tree: tuple[Any, ...]) -> _Picked:
        """Flattens arguments."""
        leaves, treedef = flatten(tree, is_sharded)
        marks = marks_of(_NAME, leaves)
        return cls(tree, leaves, treedef, [i for i, trains in enumerate(marks) if trains is not False])

    def trained(self, items: Sequence[Any]) -> list[Any]:
        """Returns the items of leaves that are not frozen. `items` has one item for each leaf."""
        return [items[place] for place in self.places]

    def filled(self, trained: Sequence[Any], leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the tree with the values `trained` in the place of leaves that are not frozen, else `leaves`."""
        filled = list(leaves)
        for place, value in zip(self.places, trained, strict=True):
            filled[place] = value
        return unflatten(self.treedef, filled)


def _check_leaves(picked: _Picked, session: Session, numerics: Numerics) -> None:
    backend, every = session.backend, paths(picked.tree, "args", is_sharded)
    if picked.leaves and not picked.places:
        frozen = [f"{name}: {describe(leaf)}" for name, leaf in zip(every, picked.leaves, strict=True)]
        hint = "hpfunc.unfreeze(tree, where) makes arrays trainable; evaluate without value_and_grad"
        raise UsageError(message(_NAME, "all that is to be differentiated is frozen", frozen, hint=hint))
    names, leaves = picked.trained(every), picked.trained(picked.leaves)
    bad, kinds = [], []
    for name, leaf in zip(names, leaves, strict=True):
        tensor = leaf._value if is_sharded(leaf) else leaf
        kinds.append(backend.dtype_name(tensor) if backend.is_tensor(tensor) else type(tensor).__name__)
        if not backend.is_tensor(tensor) or not backend.is_floating(kinds[-1]):
            bad.append(f"{name}: {describe(leaf)}, {kinds[-1]}")
    if bad:
        hint = "split them off with hpfunc.partition(tree, hpfunc.is_floating), and pass them in another argument"
        if any("complex" in leaf for leaf in bad):
            hint += "; complex weights train as real ones: keep torch.view_as_real(w), and use torch.view_as_complex "
            hint += "of it inside of the unit"
        raise LeafError(message(_NAME, "only floating tensors can be differentiated", bad, hint=hint))
    _check_reduced(names, leaves, kinds, numerics)
    arrays = {n: leaf for n, leaf in zip(names, leaves, strict=True) if is_sharded(leaf)}
    check_gatherable(_NAME, list(arrays.items()))
    made = {n: leaf for n, leaf in arrays.items() if session.origin_of(leaf) is None}  # a step checks its arguments
    refuse_written(_NAME, made.values(), lambda: list(made))


def _check_reduced(names: Sequence[str], leaves: Sequence[Any], kinds: Sequence[str], numerics: Numerics) -> None:
    """Raises LeafError naming every leaf whose gradient would be added up in a dtype without addition."""
    reduced, accumulated = numerics.reduce_dtype or numerics.param_dtype, numerics.accum_dtype
    without = {kind for kind in set(kinds) if not (has_sums(reduced or kind) and has_sums(accumulated or kind))}
    bad = [
        f"{name}: {describe(leaf)}, reduced in {reduced or kind}, accumulated in {accumulated or kind}"
        for name, leaf, kind in zip(names, leaves, kinds, strict=True)
        if kind in without
    ]
    if bad:
        hint = "give Numerics(reduce_dtype='float32', accum_dtype='float32')"
        raise LeafError(message(_NAME, "gradients cannot be added up in this dtype", bad, hint=hint))


class GradFunction:
    """The function that `value_and_grad` and `grad` return."""

    def __init__(
        self,
        fun: Callable[..., Any],
        argnums: int | Sequence[int],
        has_aux: bool,
        numerics: Numerics,
        *,
        with_value: bool,
    ) -> None:
        name = f"hpfunc.{'value_and_grad' if with_value else 'grad'}"
        check_function(name, "fun", fun, f"the loss itself; what comes back is called: {name}(loss_fn)(params, batch)")
        check_indices(name, "argnums", argnums)
        check_kind(name, "numerics", numerics, Numerics, "hpfunc.Numerics(param_dtype='bfloat16', cast_inputs=True)")
        functools.update_wrapper(self, fun)
        self._fun, self._has_aux, self.numerics, self._with_value = fun, has_aux, numerics, with_value
        self._given = argnums
        self.argnums: tuple[int, ...] = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def __repr__(self) -> str:
        kind = "value_and_grad" if self._with_value else "grad"
        options = [f"argnums={self._given}"] if self._given != 0 else []
        options += ["has_aux=True"] * self._has_aux + [repr(self.numerics)] * (self.numerics != Numerics())
        return f"hpfunc.{kind}({', '.join([named(self._fun), *options])})"

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.result(*self.run(args, kwargs, Backwards()))

    def result(self, loss: Tensor, aux: Any, gradients: tuple[Any, ...] | None) -> Any:
        """Returns the result in the form that the caller asked for."""
        found = gradients[0] if isinstance(self._given, int) and gradients is not None else gradients
        if self._with_value:
            return ((loss, aux) if self._has_aux else loss), found
        return (found, aux) if self._has_aux else found

    def mesh_of(self, args: Sequence[Any]) -> Mesh:
        """Returns the mesh of the arguments."""
        if any(not 0 <= n < len(args) for n in self.argnums):
            rule = f"argnums={self._given}, but there are {len(args)} positional arguments"
            raise UsageError(message(_NAME, rule))
        picked, session = tuple(args[n] for n in self.argnums), current_session()
        leaves = flatten(picked, is_sharded)[0]
        arrays = [leaf for leaf in leaves if is_sharded(leaf)]

        def names() -> list[str]:
            every = paths(picked, "args", is_sharded)
            return [name for name, leaf in zip(every, leaves, strict=True) if is_sharded(leaf)]

        mesh = session.mesh if session else arrays[0].mesh if arrays else mesh_in_use() or _mesh_among(args)
        check_one_mesh(_NAME, arrays, mesh, names)
        mesh.check_data_axes(_NAME)
        return mesh

    def run(
        self, args: Sequence[Any], kwargs: dict[str, Any], backwards: Backwards
    ) -> tuple[Tensor, Any, tuple[Any, ...] | None]:
        """Returns loss, aux and gradients. Gradients are None if this backward carries them to the next one."""
        if current_run() is not None:
            rule = "value_and_grad is called inside a function that is being differentiated"
            hint = "for second order differentiate `hpfunc.unshard` with torch.func; else call it before or after"
            raise UsageError(message(_NAME, rule, hint=hint))
        mesh = self.mesh_of(args)
        picked = _Picked.of(tuple(args[n] for n in self.argnums))
        with session_on(mesh) as session:
            _check_leaves(picked, session, self.numerics)
            with session.backend.ordinary() as convert, closing(Run(session, self.numerics, backwards)) as run:
                if convert is not None:
                    every = cast(Any, (tuple(args), kwargs))
                    args, kwargs = cast(Any, optree.tree_map(convert, every, is_leaf=is_sharded))
                return self._differentiate(run, args, kwargs, picked)

    def _differentiate(
        self, run: Run, args: Sequence[Any], kwargs: dict[str, Any], picked: _Picked
    ) -> tuple[Tensor, Any, tuple[Any, ...] | None]:
        session = run.session
        tracked: list[Any] = []
        loss = aux = None

        def forward() -> Tensor:
            nonlocal loss, aux
            tracked.extend(run.track(leaf, place) for place, leaf in enumerate(picked.trained(picked.leaves)))
            if any(is_sharded(x) and session.origin_of(x) is None for x in tracked):
                names = picked.trained(paths(picked.tree, "args", is_sharded))
                session.paths.update((x._owner, n) for n, x in zip(names, tracked, strict=True) if is_sharded(x))
            filled = list(args)
            for n, tree in zip(self.argnums, picked.filled(tracked, picked.leaves), strict=True):
                filled[n] = tree
            with use_mesh(session.mesh):
                loss, aux = _split(self._fun(*filled, **kwargs), self._has_aux)
            return loss

        try:
            with differentiating(run):
                run.differentiate(forward, tracked)
        finally:
            run.state = "done"
            run.tape.close()
        loss, aux = _untrack(session, loss), _untrack(session, aux)
        if run.carry:
            return loss, aux, None
        gradients = [run.gradient(leaf, place) for place, leaf in enumerate(tracked)]
        compare_gradients(session, tracked, gradients)
        return loss, aux, picked.filled(gradients, [None] * len(picked.leaves))


def _mesh_among(args: Sequence[Any]) -> Mesh:
    """Returns the mesh of the first array among arguments of which no differentiated one has any."""
    found = next((leaf.mesh for leaf in flatten(tuple(args), is_sharded)[0] if is_sharded(leaf)), None)
    if found is None:
        hint = (
            "params = hpfunc.shard(params, mesh, hpfunc.P('shard')) before; or, for a gradient of plain tensors, call "
        )
        hint += "it inside a hpfunc.sharded step or `with hpfunc.use_mesh(mesh)`"
        raise MeshError(message(_NAME, "no argument is a sharded array, and no mesh is in use", hint=hint))
    return found


def _split(result: Any, has_aux: bool) -> tuple[Tensor, Any]:
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        rule = f"with has_aux the function returns a pair (loss, aux), got {type(result).__name__}"
        raise LeafError(message(_NAME, rule))
    return result if has_aux else (result, None)


def _untrack(session: Session, tree: Any) -> Any:
    def strip(leaf: Any) -> Any:
        if is_sharded(leaf):
            return leaf._handle(origin=leaf._origin, donated=leaf.is_donated)
        return session.backend.give(session.backend.detach(leaf)) if session.backend.is_tensor(leaf) else leaf

    return optree.tree_map(strip, tree, is_leaf=is_sharded)
