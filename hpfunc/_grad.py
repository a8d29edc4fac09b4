"""`value_and_grad` and `grad`: one differentiation, its gradients reduced over the data axes."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import optree

from ._array import ShardedArray, check_gatherable, describe, is_sharded
from ._comm import comm
from ._errors import LeafError, SpecError, UsageError, message
from ._mesh import Mesh
from ._named import mean_axes
from ._numerics import Numerics
from ._program import Event
from ._run import Session, Use, current_session
from ._tree import flatten, paths, unflatten
from ._world import current_mesh, use_mesh

Tensor = Any
current_run: ContextVar[Run | None] = ContextVar("hpfunc_run", default=None)


class Run:
    """One differentiation. The tracked handles that its function receives, and its VJP nodes, hold it.

    Attributes:
        state: ``"forward"``, ``"backward"`` or ``"done"``.
        uses_left: for each weight, how many uses still have their backward before them.
        open_uses: by unit, the use whose backward has begun and not ended.
    """

    def __init__(self, session: Session, numerics: Numerics, number: int) -> None:
        self.session, self.numerics, self.number = session, numerics, number
        self.tape = session.backend.tape(session.mesh.device)
        self.state = "forward"
        self.uses_left: dict[int, int] = defaultdict(int)
        self.open_uses: dict[int, Use] = {}
        self._aliases: dict[int, tuple[int, Tensor]] = {}

    def local(self, array: ShardedArray) -> Tensor:
        """See `Tracker`."""
        if self.state == "done":
            return array._value
        key = id(array._owner)
        if key not in self._aliases:
            if self.state == "backward":
                rule = "an array's local part is used for the first time during backward"
                raise UsageError(message("hpfunc.value_and_grad", rule, [describe(array)]))
            alias = self.tape.leaf(array._value)
            self._aliases[key] = len(self.tape.leaves) - 1, alias
        return self._aliases[key][1]

    def check_alive(self) -> None:
        """Raises UsageError if the run's graph is used outside of its backward."""
        if self.state != "backward":
            hint = "do not keep the loss, or tensors computed from it, for a later backward"
            raise UsageError(
                message("hpfunc.value_and_grad", "the graph of an ended call is differentiated", hint=hint)
            )

    def expect(self, use: Use) -> None:
        """A use will have a backward."""
        for weight, trainable in zip(use.weights, use.trainable, strict=True):
            if trainable:
                self.uses_left[weight] += 1

    def settle(self, use: Use) -> None:
        """A use has had its backward."""
        self.open_uses.pop(use.unit, None)
        for weight, trainable in zip(use.weights, use.trainable, strict=True):
            if trainable:
                self.uses_left[weight] -= 1

    def collect(self, array: ShardedArray, leaf_gradients: Sequence[Tensor | None]) -> ShardedArray:
        """Returns the reduced gradient of one array: what its units delivered plus what its local part received.

        Communication: for an array whose local part was used, an all-reduce over the data axes that do not cut it.
        """
        session, backend = self.session, self.session.backend
        weight = session._weight_index.get((id(array._owner), self.number))
        total = session.gradients.pop(weight, None) if weight is not None else None
        alias = self._aliases.get(id(array._owner))
        if alias is not None:
            direct = self._reduce_leaf(array, leaf_gradients[alias[0]])
            total = direct if total is None else backend.add(total, direct)
        return array.with_local(zeros_like(session, array._value) if total is None else total)

    def _reduce_leaf(self, array: ShardedArray, gradient: Tensor | None) -> Tensor:
        backend, mesh, axes = self.session.backend, array.mesh, array.layout.reduce_axes
        total = zeros_like(self.session, array._value) if gradient is None else gradient
        if mesh.axis_size(axes) > 1:
            total = comm(mesh, axes, "all_reduce").all_reduce(total)
        if self.numerics.reduce_op == "mean":
            total = total / mesh.axis_size(mesh.data_axes)
        return backend.detach(total)


def zeros_like(session: Session, tensor: Tensor) -> Tensor:
    """Returns zeros of the shape, dtype and device of a tensor."""
    backend = session.backend
    return backend.empty(tuple(tensor.shape), backend.dtype_name(tensor), backend.device_of(tensor), zero=True)


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
        shapes, dtypes and specs of the arguments; weights that the loss does not depend on have zeros.

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
    name = "hpfunc.value_and_grad"
    numerics = numerics or Numerics()
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        if current_run.get() is not None:
            rule = "value_and_grad is called inside a function that is being differentiated"
            hint = "for second order differentiate `hpfunc.unshard` with torch.func; else call it before or after"
            raise UsageError(message(name, rule, hint=hint))
        if any(not 0 <= n < len(args) for n in numbers):
            raise UsageError(message(name, f"argnums={argnums}, but there are {len(args)} positional arguments"))
        picked = tuple(args[n] for n in numbers)
        leaves, treedef = flatten(picked, is_sharded)
        mesh = _mesh_of(name, picked, leaves)
        owned = current_session()
        session = owned or Session(mesh)
        try:
            _check_leaves(name, picked, leaves, session)
            result, gradients = _differentiate(fun, args, kwargs, numbers, leaves, treedef, session, has_aux, numerics)
        except BaseException as error:
            if owned is None:
                session.control.fail(error)
            raise
        return result, gradients[0] if isinstance(argnums, int) else gradients

    return call


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
    both = value_and_grad(fun, argnums, has_aux=has_aux, numerics=numerics)

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        result, gradients = both(*args, **kwargs)
        return (gradients, result[1]) if has_aux else gradients

    return call


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
            bad.append(f"{name}: {describe(leaf)}, {getattr(tensor, 'dtype', type(tensor).__name__)}")
    if bad:
        hint = "pass such leaves in another argument, or choose argnums"
        raise LeafError(message(function, "only floating tensors can be differentiated", bad, hint=hint))
    check_gatherable(function, [(n, leaf) for n, leaf in zip(names, leaves, strict=True) if is_sharded(leaf)])


def _differentiate(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    numbers: tuple[int, ...],
    leaves: Sequence[Any],
    treedef: optree.PyTreeSpec,
    session: Session,
    has_aux: bool,
    numerics: Numerics,
) -> tuple[Any, tuple[Any, ...]]:
    run = Run(session, numerics, session.new_run())
    tracked = [_track(x, run) if is_sharded(x) else run.tape.leaf(x) for x in leaves]
    plain = list(run.tape.leaves)
    if any(is_sharded(x) and x._origin is None for x in tracked):
        names = paths(unflatten(treedef, leaves), "args", is_sharded)
        session.paths |= {id(x._owner): n for n, x in zip(names, tracked, strict=True) if is_sharded(x)}
    filled = list(args)
    for n, tree in zip(numbers, unflatten(treedef, tracked), strict=True):
        filled[n] = tree
    mean = frozenset(session.mesh.data_axes) if numerics.reduce_op == "mean" else frozenset()
    tokens = current_run.set(run), mean_axes.set(mean)
    try:
        with use_mesh(session.mesh):
            result = fun(*filled, **kwargs)
        loss, aux = _split(result, has_aux)
        run.state = "backward"
        leaf_gradients = run.tape.backward(loss)
        session.driver.end_backward(session.emit(Event("end_backward")))
    finally:
        run.state = "done"
        run.tape.close()
        current_run.reset(tokens[0])
        mean_axes.reset(tokens[1])
    own = iter([zeros_like(session, x) if g is None else g for x, g in zip(plain, leaf_gradients, strict=False)])
    gradients = [run.collect(x, leaf_gradients) if is_sharded(x) else next(own) for x in tracked]
    loss = session.backend.detach(loss)
    return ((loss, _untrack(session, aux)) if has_aux else loss), unflatten(treedef, gradients)


def _track(array: ShardedArray, run: Run) -> ShardedArray:
    # A new owner for each leaf: one array that stands at two places of the tree has two gradients, as in JAX.
    handle = array.with_local(array._value)
    return handle._handle(tracker=run, origin=array._origin)


def _split(result: Any, has_aux: bool) -> tuple[Tensor, Any]:
    if not has_aux:
        return result, None
    if not isinstance(result, tuple) or len(result) != 2:
        rule = f"with has_aux the function returns a pair (loss, aux), got {type(result).__name__}"
        raise LeafError(message("hpfunc.value_and_grad", rule))
    return result


def _untrack(session: Session, tree: Any) -> Any:
    def strip(leaf: Any) -> Any:
        if is_sharded(leaf):
            return leaf._handle(origin=leaf._origin, donated=leaf.is_donated)
        return session.backend.detach(leaf) if session.backend.is_tensor(leaf) else leaf

    return optree.tree_map(strip, tree, is_leaf=is_sharded)
