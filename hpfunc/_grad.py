"""`value_and_grad` and `grad`: one differentiation, its gradients reduced over the data axes."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import optree

from ._array import ShardedArray, check_gatherable, describe, is_sharded
from ._comm import comm
from ._debug import compare_gradients
from ._errors import LeafError, SpecError, UsageError, message
from ._mesh import Mesh
from ._named import mean_axes
from ._numerics import Numerics
from ._program import Carry, Event
from ._run import Session, Use, current_session
from ._tree import flatten, paths, unflatten
from ._world import current_mesh, use_mesh

Tensor = Any
_NAME = "hpfunc.value_and_grad"
current_run: ContextVar[Run | None] = ContextVar("hpfunc_run", default=None)


@dataclass(slots=True)
class Backwards:
    """The backwards that make one gradient: a single one, or those of `accumulate`. See Note [Carried gradients].

    Attributes:
        count: how many.
        carry: what all but the last leave to the next.
        left: how many are to come, with the present one.
        first_run: number of the first run.
        direct: sums of the gradients of local parts and plain tensors, by place among the differentiated leaves.
    """

    count: int = 1
    carry: Carry = ""
    left: int = 1
    first_run: int | None = None
    direct: dict[int, Tensor] = field(default_factory=dict)


class Run:
    """One differentiation. The tracked handles that its function receives, and its VJP nodes, hold it.

    Attributes:
        state: ``"forward"``, ``"backward"`` or ``"done"``.
        carry: what its backward leaves to the next.
        uses_left: for each weight, how many uses still have their backward before them.
        weights: the weights that an array became, by the id of its owner: itself (), or rows of it.
    """

    def __init__(self, session: Session, numerics: Numerics, backwards: Backwards) -> None:
        self.session, self.numerics, self.backwards = session, numerics, backwards
        self.number = session.new_run()
        if backwards.first_run is None:
            backwards.first_run = self.number
        self.carry: Carry = backwards.carry if backwards.left > 1 else ""
        self.tape = session.backend.tape(session.mesh.device)
        self.state = "forward"
        self.uses_left: dict[int, int] = defaultdict(int)
        self.weights: dict[int, dict[tuple[int, ...], int]] = defaultdict(dict)
        self._places: dict[int, int] = {}
        self._repeatable: dict[int, list[Use]] = defaultdict(list)
        self._aliases: dict[int, tuple[int, Tensor]] = {}

    def track(self, leaf: Any, place: int) -> Any:
        """Returns a leaf as the differentiated function sees it."""
        if not is_sharded(leaf):
            return self.tape.leaf(leaf)
        # A new owner for each leaf: one array that stands at two places of the tree has two gradients, as in JAX.
        handle = leaf.with_local(leaf._value)
        self._places[id(handle._owner)] = place
        return handle._handle(tracker=self, origin=leaf._origin)

    def key(self, array: ShardedArray, rows: tuple[int, ...], source: object) -> object:
        """Returns what makes an array, or a row of it, another weight of the program than any other."""
        place = self._places.get(id(array._owner)) if array._tracker is self else None
        if place is not None and array._origin is None:
            source = ("made", self.backwards.first_run)
        return source, rows, place, self.numerics, self.backwards.count

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
        if use.scope is not None:
            self._repeatable[use.unit].append(use)
        for weight, trainable in zip(use.weights, use.trainable, strict=True):
            if trainable:
                self.uses_left[weight] += 1

    def settle(self, use: Use) -> None:
        """A use has had its backward."""
        if use.scope is not None:
            self._repeatable[use.unit].remove(use)
        for weight, trainable in zip(use.weights, use.trainable, strict=True):
            if trainable:
                self.uses_left[weight] -= 1

    def repeated(self, unit: int) -> int:
        """Returns the number of the use that a call of its unit in backward repeats.

        Backward goes from the last use to the first, so it is one of those that are called again together with the last
        use that still has its backward before it: the next one of them in order.
        """
        waiting = self._repeatable[unit]
        if not waiting:
            return self.session.last_use(unit)
        together = [use for use in waiting if use.scope == waiting[-1].scope]
        use = min(together, key=lambda use: use.num_recomputes)
        use.num_recomputes += 1
        return use.number

    def backward(self, loss: Tensor, tracked: Sequence[Any], num_plain: int) -> None:
        """Runs the backward, and adds up the gradients that are none of a unit's."""
        self.state = "backward"
        leaf_gradients = self.tape.backward(loss)
        index = self.session.emit(Event("end_backward", carry=self.carry))  # it may replace the driver
        self.session.driver.end_backward(index)
        plain = iter(range(num_plain))
        for place, leaf in enumerate(tracked):
            if not is_sharded(leaf):
                self._add_direct(place, leaf, leaf_gradients[next(plain)])
            elif alias := self._aliases.get(id(leaf._owner)):
                self._add_direct(place, leaf, leaf_gradients[alias[0]])

    def _add_direct(self, place: int, leaf: Any, gradient: Tensor | None) -> None:
        backend, sums = self.session.backend, self.backwards.direct
        if gradient is None:
            gradient = zeros_like(self.session, leaf)
        if place in sums:
            gradient = backend.add(sums[place], gradient, self.accum_dtype(leaf))
        sums[place] = gradient

    def accum_dtype(self, leaf: Any) -> str:
        """Returns the dtype of the gradient of a leaf."""
        tensor = leaf._value if is_sharded(leaf) else leaf
        return self.numerics.accum_dtype or self.session.backend.dtype_name(tensor)

    def gradient(self, leaf: Any, place: int) -> Any:
        """Returns the gradient of a leaf: what its units delivered plus what it, or its local part, received directly.

        Communication: for an array whose local part was used, an all-reduce over the data axes that do not cut it.
        """
        backend, direct = self.session.backend, self.backwards.direct.get(place)
        if not is_sharded(leaf):
            assert direct is not None, "a plain tensor has a gradient, if only of zeros"
            if self.numerics.reduce_op == "mean" and self.backwards.count > 1:
                direct = direct / self.backwards.count
            return backend.cast(direct, self.accum_dtype(leaf))
        total = self._delivered(leaf)
        if direct is not None:
            direct = self._reduce_direct(leaf, direct)
            total = direct if total is None else backend.add(total, direct, self.accum_dtype(leaf))
        if total is None:
            total = zeros_like(self.session, leaf, self.accum_dtype(leaf))
        return leaf.with_local(total)

    def _delivered(self, array: ShardedArray) -> Tensor | None:
        """Returns what units delivered for an array and its rows."""
        session, weights = self.session, self.weights.get(id(array._owner), {})
        found = [(rows, session.gradients.pop(w)) for rows, w in weights.items() if w in session.gradients]
        if not found or found[0][0] == () == found[-1][0]:
            return found[0][1] if found else None
        total = zeros_like(session, array, self.accum_dtype(array))
        for rows, gradient in found:
            session.backend.accumulate(total[rows], gradient)
        return total

    def _reduce_direct(self, array: ShardedArray, total: Tensor) -> Tensor:
        mesh, axes = array.mesh, array.layout.reduce_axes
        if mesh.axis_size(axes) > 1:
            total = comm(mesh, axes, "all_reduce").all_reduce(total)
        if self.numerics.reduce_op == "mean":
            total = total / (mesh.axis_size(mesh.data_axes) * self.backwards.count)
        return self.session.backend.cast(self.session.backend.detach(total), self.accum_dtype(array))


def zeros_like(session: Session, leaf: Any, dtype: str | None = None) -> Tensor:
    """Returns zeros of the local shape and the device of a leaf, and of its dtype unless another one is given."""
    backend, tensor = session.backend, leaf._value if is_sharded(leaf) else leaf
    dtype = dtype or backend.dtype_name(tensor)
    return backend.empty(tuple(tensor.shape), dtype, backend.device_of(tensor), zero=True)


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
    return Differentiation(fun, argnums, has_aux, numerics or Numerics(), with_value=True)


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
    return Differentiation(fun, argnums, has_aux, numerics or Numerics(), with_value=False)


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
        hint = "split them off with hpfunc.partition(tree, hpfunc.is_floating), and pass them in another argument"
        raise LeafError(message(function, "only floating tensors can be differentiated", bad, hint=hint))
    check_gatherable(function, [(n, leaf) for n, leaf in zip(names, leaves, strict=True) if is_sharded(leaf)])


class Differentiation:
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
        tracked = [run.track(leaf, place) for place, leaf in enumerate(leaves)]
        num_plain = len(run.tape.leaves)
        if any(is_sharded(x) and x._origin is None for x in tracked):
            names = paths(unflatten(treedef, leaves), "args", is_sharded)
            session.paths |= {id(x._owner): n for n, x in zip(names, tracked, strict=True) if is_sharded(x)}
        filled = list(args)
        for n, tree in zip(self.argnums, unflatten(treedef, tracked), strict=True):
            filled[n] = tree
        mean = frozenset(session.mesh.data_axes) if self.numerics.reduce_op == "mean" else frozenset()
        tokens = current_run.set(run), mean_axes.set(mean)
        try:
            with use_mesh(session.mesh):
                result = self._fun(*filled, **kwargs)
            loss, aux = _split(result, self._has_aux)
            run.backward(loss, tracked, num_plain)
        finally:
            run.state = "done"
            run.tape.close()
            current_run.reset(tokens[0])
            mean_axes.reset(tokens[1])
        loss, aux = session.backend.detach(loss), _untrack(session, aux)
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
        return session.backend.detach(leaf) if session.backend.is_tensor(leaf) else leaf

    return optree.tree_map(strip, tree, is_leaf=is_sharded)
