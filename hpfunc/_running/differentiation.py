"""`Run`: one differentiation, from the handles that its function receives to the gradients of its leaves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from .._errors import UsageError, message
from .._values.array import Owner, ShardedArray, describe, is_sharded
from .._values.numerics import Numerics, has_sums
from .._values.reduction_axes import divisor, mean_axes, reduce_axes
from ..backends import uncompiled
from ..planning.program import Carry, Event
from .channel import comm
from .session import Session
from .use import Backwards, Use
from .warn_once import warn_once

Tensor = Any
_NAME = "hpfunc.value_and_grad"


class Run:
    """One differentiation: see `Differentiating`. Its tracked handles (see `Tracker`) and VJP nodes refer to it.

    Attributes:
        is_reached: whether autograd has reached a weight.
    """

    def __init__(self, session: Session, numerics: Numerics, backwards: Backwards) -> None:
        self.session, self.numerics, self.backwards = session, numerics, backwards
        if backwards.first_run is None:
            backwards.first_run = next(session.run_numbers)
        self.carry: Carry = backwards.carry if backwards.left > 1 else ""
        self.tape = session.backend.tape(session.mesh.device)
        self.state = "forward"
        self.is_reached = False
        self.uses_left: dict[int, int] = defaultdict(int)
        self.weights: dict[Owner, dict[tuple[int, ...], int]] = defaultdict(dict)
        self._places: dict[Owner, int] = {}
        self._repeatable: dict[int, list[Use]] = defaultdict(list)
        self._aliases: dict[Owner, tuple[int, Tensor]] = {}
        self._reduced: dict[int, Tensor] = {}

    def track(self, leaf: Any, place: int) -> Any:
        """Returns the leaf that the differentiated function gets."""
        if not is_sharded(leaf):
            return self.tape.leaf(leaf)
        handle = leaf._tracked(self)
        self._places[handle._owner] = place
        return handle

    def key(self, array: ShardedArray, rows: tuple[int, ...], origin: int | None) -> object:
        place = self._places.get(array._owner) if array._tracker is self else None
        source: object = origin
        if origin is None:
            source = array._owner if place is None else ("made", self.backwards.first_run)
        return source, rows, place, self.numerics, self.backwards.count

    @uncompiled
    def local(self, array: ShardedArray) -> Tensor:
        if self.state == "done":
            return array._value
        key = array._owner
        if key not in self._aliases:
            if self.state == "backward":
                rule = "an array's local part is used for the first time during backward"
                raise UsageError(message(_NAME, rule, [describe(array)]))
            alias = self.tape.leaf(array._value)
            self._aliases[key] = len(self.tape.leaves) - 1, alias
        return self._aliases[key][1]

    def close(self) -> None:
        """Releases arrays and gradients, so that a handle that outlives the run keeps nothing else alive."""
        for held in (self.weights, self._places, self._aliases, self._reduced):
            held.clear()

    def check_alive(self) -> None:
        if self.state == "forward":
            rule = "weights are differentiated inside of the function that value_and_grad differentiates"
            hint = (
                "there call torch.autograd.grad(outputs, inputs) for inputs alone, not backward(), and not for weights"
            )
            raise UsageError(message(_NAME, rule, hint=hint))
        if self.state != "backward":
            hint = "do not keep the loss, or tensors computed from it, for a later backward"
            raise UsageError(message(_NAME, "the graph of an ended call is differentiated", hint=hint))

    def expect(self, use: Use) -> None:
        if use.scope is not None:
            self._repeatable[use.unit].append(use)
        for weight in use.trained:
            self.uses_left[weight] += 1

    def settle(self, use: Use, gradients: Sequence[Tensor | None]) -> None:
        self.is_reached = self.is_reached or any(gradient is not None for gradient in gradients)
        if use.scope is not None:
            self._repeatable[use.unit].remove(use)
        for weight in use.trained:
            self.uses_left[weight] -= 1

    def repeats(self, use: Use) -> None:
        """Gives a call of a unit in backward the number and the changed arguments of the use that it repeats.

        Backward goes from the last use to the first. So the call repeats a use in the scope (see `UnitUse`) of the last
        use whose backward has not run yet: the next one of that scope in order.
        """
        waiting = self._repeatable[use.unit]
        if not waiting:
            use.number = self.session.last_use(use.unit)
            return
        together = [first for first in waiting if first.scope == waiting[-1].scope]
        first = min(together, key=lambda first: first.num_recomputes)
        first.num_recomputes += 1
        use.number, use.changed = first.number, first.changed

    def differentiate(self, forward: Callable[[], Tensor], tracked: Sequence[Any]) -> None:
        """Calls `forward`, runs the backward of its loss, and adds up the gradients that do not come from units.

        `forward` fills `tracked` before it computes.
        """

        def begin_backward() -> Tensor:
            loss = forward()
            if tracked:
                self._check_dependence(loss)
            self.state = "backward"
            return loss

        leaf_gradients = self.tape.differentiate(begin_backward)
        if tracked and not self.is_reached and all(gradient is None for gradient in leaf_gradients):
            raise UsageError(_independent())
        index = self.session.emit(Event("end_backward", carry=self.carry))  # it may replace the driver
        self._reduced = self.session.driver.end_backward(index)
        plain = iter(leaf_gradients)  # tracked first, so they are the tape's first leaves
        for place, leaf in enumerate(tracked):
            if not is_sharded(leaf):
                self._add_direct(place, leaf, next(plain))
            elif alias := self._aliases.get(leaf._owner):
                self._add_direct(place, leaf, leaf_gradients[alias[0]])

    def _check_dependence(self, loss: Tensor) -> None:
        """Raises UsageError if autograd has no record of how the loss was computed."""
        backend = self.session.backend
        if not backend.is_tensor(loss) or not backend.is_floating(backend.dtype_name(loss)):
            return  # it is not a loss; the tape raises
        if not backend.is_transformed([loss]):
            raise UsageError(_independent())

    def _add_direct(self, place: int, leaf: Any, gradient: Tensor | None) -> None:
        backend, sums = self.session.backend, self.backwards.direct
        if place in sums:
            if gradient is not None:
                sums[place] = backend.add(sums[place], gradient, self.accum_dtype(leaf))
            return
        sums[place] = zeros_like(self.session, leaf)
        if gradient is not None:  # borrowed: another leaf may have the same tensor
            backend.copy(sums[place], gradient)

    def accum_dtype(self, leaf: Any) -> str:
        """Returns the dtype of the gradient of a leaf."""
        tensor = leaf._value if is_sharded(leaf) else leaf
        return self.numerics.accum_dtype or self.session.backend.dtype_name(tensor)

    def gradient(self, leaf: Any, place: int) -> Any:
        """Returns the gradient of a leaf: the sum from its units, plus what the leaf or its local part got directly.

        Communication: for an array whose local part was used, an all-reduce over the data axes that do not cut it.
        """
        backend, direct = self.session.backend, self.backwards.direct.get(place)
        if not is_sharded(leaf):
            assert direct is not None, "a plain tensor has a gradient, if only of zeros"
            if self.numerics.reduce_op == "mean" and self.backwards.count > 1:
                direct = direct / self.backwards.count
            return backend.give(backend.cast(direct, self.accum_dtype(leaf)))
        total = self._delivered(leaf)
        if direct is not None:
            direct = self._reduce_direct(leaf, direct)
            total = direct if total is None else backend.add(total, direct, self.accum_dtype(leaf))
        if total is None:
            total = zeros_like(self.session, leaf, self.accum_dtype(leaf))
        return leaf.with_local(backend.give(total))

    def _delivered(self, array: ShardedArray) -> Tensor | None:
        """Returns the gradient that units delivered for an array and its rows."""
        session, weights = self.session, self.weights.get(array._owner, {})
        found = [(rows, self._reduced.pop(w)) for rows, w in weights.items() if w in self._reduced]
        if not found or found[0][0] == () == found[-1][0]:
            return found[0][1] if found else None
        total = zeros_like(session, array, self.accum_dtype(array))
        for rows, gradient in found:
            session.backend.accumulate(total[rows], gradient)
        return total

    def _reduce_direct(self, array: ShardedArray, total: Tensor) -> Tensor:
        mesh, axes, numerics = array.mesh, reduce_axes(array.layout), self.numerics
        cut = [axis for axis in mean_axes(mesh, numerics) if axis in array.spec.axes]
        if mesh.axis_size(cut) > 1:
            self._warn_of_part(array, mesh.axis_size(cut))
        if numerics.reduce_dtype and not has_sums(self.session.backend.dtype_name(total)):
            total = self.session.backend.cast(total, numerics.reduce_dtype)
        if mesh.axis_size(axes) > 1:
            total = comm(mesh, axes, "all_reduce").all_reduce(total)
        if numerics.reduce_op == "mean":
            total = total / divisor(mesh, numerics, self.backwards.count)
        return self.session.backend.cast(self.session.backend.detach(total), self.accum_dtype(array))

    def _warn_of_part(self, array: ShardedArray, count: int) -> None:
        rule = f"the loss uses `.local`, one of {count} parts, so in the mean over ranks it counts 1/{count}"
        hint = "use the array in a unit, where it is whole; or, for a sum over all elements such as a penalty, give "
        hint += f"{count} times that of the part"
        name = self.session.name_of(array) or "an array"
        warn_once(message(_NAME, rule, [f"{name}: {describe(array)}"], mesh=array.mesh, hint=hint), array.mesh)


def _independent() -> str:
    rule = "the loss does not depend on what is differentiated, so there is no gradient"
    hint = (
        "look for .detach(), .item(), no_grad or integers between the weights and the loss, and for other weights than "
        "those of argnums; a loss that is zero this time is 0 times something made of the weights"
    )
    return message(_NAME, rule, hint=hint)


def zeros_like(session: Session, leaf: Any, dtype: str | None = None) -> Tensor:
    """Returns zeros with the local shape and the device of a leaf, in `dtype` or the dtype of the leaf."""
    backend, tensor = session.backend, leaf._value if is_sharded(leaf) else leaf
    dtype = dtype or backend.dtype_name(tensor)
    return backend.empty(tuple(tensor.shape), dtype, backend.device_of(tensor), zero=True)
