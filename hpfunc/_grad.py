"""`value_and_grad` and `grad`: one differentiation, its gradients reduced over the data axes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import optree

from ._array import check_gatherable, describe, is_sharded
from ._debug import compare_gradients
from ._differentiation import Backwards, Run, current_run
from ._errors import LeafError, SpecError, UsageError, message
from ._mesh import Mesh
from ._named import mean_axes
from ._numerics import Numerics
from ._run import Session, current_session
from ._tree import flatten, paths, unflatten
from ._world import current_mesh, use_mesh

Tensor = Any
_NAME = "hpfunc.value_and_grad"


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    numerics: Numerics | None = None,
) -> Callable[..., Any]:
    """Returns a function that computes `fun` and its gradient, reduced over the data axes.

    Args:
        fun: returns a scalar: this rank's own loss, of its own data. With `has_aux` a pair of it and anything else.
        argnums: which positional arguments to differentiate: pytrees of `ShardedArray` (and of plain tensors, whose
            gradient is this rank's own and is not reduced).
        has_aux: `fun` returns ``(loss, aux)``.
        numerics: dtypes, and ``"mean"`` or ``"sum"`` over the data axes.

    Returns:
        ``(loss, gradients)``, or ``((loss, aux), gradients)``. The loss is this rank's own. Gradients have the tree,
        shapes and specs of the arguments, and their dtypes or `Numerics.accum_dtype`; weights that the loss does not
        depend on have zeros.

    Raises:
        LeafError: a leaf is not floating, or the loss is no scalar.
        SpecError: arrays on different meshes, or one that cannot be gathered over the data axes.
        UsageError: nested calls, or a tensor of an ended call is differentiated.

    Communication: for each use of a `unit` a gather in forward and one in backward; for each array one reduce-scatter
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
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    numerics: Numerics | None = None,
) -> Callable[..., Any]:
    """Returns a function that computes the gradient only: `value_and_grad` without the value.

    With `has_aux` it returns ``(gradients, aux)``. Arguments, errors and communication: as `value_and_grad`.

    >>> import torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> w = hpfunc.shard(torch.tensor([3.0]), mesh, hpfunc.P("shard"))
    >>> hpfunc.grad(hpfunc.unit(lambda w: (w**2).sum()))(w).local
    tensor([6.])
    """
    return GradFunction(fun, argnums, has_aux, numerics or Numerics(), with_value=False)


def _mesh_of(function: str, picked: Any, leaves: Sequence[Any]) -> Mesh:
    arrays = [leaf for leaf in leaves if is_sharded(leaf)]
    if not arrays:
        return current_mesh(function)
    if any(array.mesh != arrays[0].mesh for array in arrays):
        names = paths(picked, "args", is_sharded)
        bad = [f"{n}: on {a.mesh}" for n, a in zip(names, leaves, strict=True) if is_sharded(a)]
        raise SpecError(message(function, "arrays lie on different meshes", bad))
    return arrays[0].mesh


def _check_leaves(function: str, picked: Any, leaves: Sequence[Any], session: Session) -> None:
    backend, names = session.backend, paths(picked, "args", is_sharded)
    bad = []
    for name, leaf in zip(names, leaves, strict=True):
        tensor = leaf._value if is_sharded(leaf) else leaf
        if not backend.is_tensor(tensor) or not backend.is_floating(backend.dtype_name(tensor)):
            kind = backend.dtype_name(tensor) if backend.is_tensor(tensor) else type(tensor).__name__
            bad.append(f"{name}: {describe(leaf)}, {kind}")
    if bad:
        hint = "split them off with hpfunc.partition(tree, hpfunc.is_floating), and pass them in another argument"
        if any("complex" in leaf for leaf in bad):
            hint += (
                "; complex weights train as real ones: keep torch.view_as_real(w), and use torch.view_as_complex of it"
            )
            hint += " inside of the unit"
        raise LeafError(message(function, "only floating tensors can be differentiated", bad, hint=hint))
    check_gatherable(function, [(n, leaf) for n, leaf in zip(names, leaves, strict=True) if is_sharded(leaf)])


class GradFunction:
    """What `value_and_grad` and `grad` return: called like their function."""

    def __init__(
        self,
        fun: Callable[..., Any],
        argnums: int | Sequence[int],
        has_aux: bool,
        numerics: Numerics,
        *,
        with_value: bool,
    ) -> None:
        functools.update_wrapper(self, fun)
        self._fun, self._has_aux, self.numerics, self._with_value = fun, has_aux, numerics, with_value
        self._given = argnums
        self.argnums: tuple[int, ...] = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.result(*self.run(args, kwargs, Backwards()))

    def result(self, loss: Tensor, aux: Any, gradients: tuple[Any, ...] | None) -> Any:
        """Returns the parts of a result as the caller wants them."""
        found = gradients[0] if isinstance(self._given, int) and gradients is not None else gradients
        if self._with_value:
            return ((loss, aux) if self._has_aux else loss), found
        return (found, aux) if self._has_aux else found

    def mesh_of(self, args: Sequence[Any]) -> Mesh:
        """Returns the mesh of the arguments."""
        if any(not 0 <= n < len(args) for n in self.argnums):
            rule = f"argnums={self._given}, but there are {len(args)} positional arguments"
            raise UsageError(message(_NAME, rule))
        picked = tuple(args[n] for n in self.argnums)
        return _mesh_of(_NAME, picked, flatten(picked, is_sharded)[0])

    def run(
        self, args: Sequence[Any], kwargs: dict[str, Any], backwards: Backwards
    ) -> tuple[Tensor, Any, tuple[Any, ...] | None]:
        """Returns loss, aux and gradients; gradients are None if this backward carries them on."""
        if current_run.get() is not None:
            rule = "value_and_grad is called inside a function that is being differentiated"
            hint = "for second order differentiate `hpfunc.unshard` with torch.func; else call it before or after"
            raise UsageError(message(_NAME, rule, hint=hint))
        mesh = self.mesh_of(args)
        picked = tuple(args[n] for n in self.argnums)
        leaves, treedef = flatten(picked, is_sharded)
        owned = current_session()
        session = owned or Session(mesh)
        try:
            _check_leaves(_NAME, picked, leaves, session)
            run = Run(session, self.numerics, backwards)
            return self._differentiate(run, args, kwargs, leaves, treedef)
        except BaseException as error:
            if owned is None:
                session.control.fail(error)
            raise

    def _differentiate(
        self, run: Run, args: Sequence[Any], kwargs: dict[str, Any], leaves: Sequence[Any], treedef: optree.PyTreeSpec
    ) -> tuple[Tensor, Any, tuple[Any, ...] | None]:
        session = run.session
        tracked: list[Any] = []
        loss = aux = None

        def forward() -> Tensor:
            nonlocal loss, aux
            tracked.extend(run.track(leaf, place) for place, leaf in enumerate(leaves))
            if any(is_sharded(x) and x._origin is None for x in tracked):
                names = paths(unflatten(treedef, leaves), "args", is_sharded)
                session.paths |= {id(x._owner): n for n, x in zip(names, tracked, strict=True) if is_sharded(x)}
            filled = list(args)
            for n, tree in zip(self.argnums, unflatten(treedef, tracked), strict=True):
                filled[n] = tree
            with use_mesh(session.mesh):
                loss, aux = _split(self._fun(*filled, **kwargs), self._has_aux)
            return loss

        mean = frozenset(session.mesh.data_axes) if self.numerics.reduce_op == "mean" else frozenset()
        tokens = current_run.set(run), mean_axes.set(mean)
        try:
            run.differentiate(forward, tracked)
        finally:
            run.state = "done"
            run.tape.close()
            current_run.reset(tokens[0])
            mean_axes.reset(tokens[1])
        loss, aux = _untrack(session, loss), _untrack(session, aux)
        if run.carry:
            return loss, aux, None
        gradients = [run.gradient(leaf, place) for place, leaf in enumerate(tracked)]
        compare_gradients(session, tracked, gradients)
        return loss, aux, unflatten(treedef, gradients)


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
