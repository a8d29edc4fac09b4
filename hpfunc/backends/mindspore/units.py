"""Calls of units on MindSpore: what autograd keeps of them, and what they may not do with whole weights.

# Note [Views of weights]
`linear` and similar operators save the weight itself, which the pack hook recognises by its address. A view of a weight
(``w.T``, a reshape) is saved as a copy, which it cannot recognise: the copy stays alive until backward. The first calls
of a unit look for saved tensors with the values of a weight, and warn.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import mindspore
import numpy as np
import optree
from mindspore import ops

from ..._errors import HpfuncWarning, UsageError, message
from ..unit_rules import refuse_escaped, refusing_writes, taken_apart
from ..unit_use import UnitUse

Tensor = Any
UNIT = "hpfunc.unit"


@dataclass(frozen=True, slots=True)
class Bridge:
    """Functions that differ between devices: conversions of tensors between runtime and caller, and `drain`."""

    hold: Callable[[Tensor], Tensor]
    give: Callable[[Tensor], Tensor]
    drain: Callable[[], None]


def dtype_of(name: str) -> Any:
    """Returns MindSpore's dtype of this name."""
    return mindspore.bool_ if name == "bool" else getattr(mindspore, name)


def is_tensor(value: Any) -> bool:
    """See `Memory`."""
    return isinstance(value, mindspore.Tensor)


@contextmanager
def explaining(names: Sequence[str]) -> Iterator[None]:
    """Explains the error of an operator that lacks a dtype: MindSpore's own text lists the dtypes that it has."""
    try:
        yield
    except TypeError as error:
        if not str(error).startswith("Select CPU operator"):
            raise
        rule = f"an operator of the unit does not exist on the CPU in this dtype: {str(error).splitlines()[0]}"
        hint = "on the CPU bfloat16 only stores and casts; compute in float32, and set Numerics.reduce_dtype alone"
        raise UsageError(message(UNIT, rule, names, hint=hint)) from error


def refuse_escapes(wholes: Sequence[Tensor], outputs: Any, names: Sequence[str]) -> None:
    """Raises UsageError naming every whole weight of which an output is a view."""
    spans = [(whole.data_ptr(), whole.data_ptr() + whole.nbytes) for whole in wholes]
    places = [leaf.data_ptr() for leaf in optree.tree_leaves(outputs) if is_tensor(leaf) and leaf.size]
    escaped = [n for n, (a, b) in zip(names, spans, strict=True) if any(a <= place < b for place in places)]
    refuse_escaped(escaped, "w.copy()")


def use_plain(
    bridge: Bridge, fn: Callable[..., Any], wholes: Sequence[Tensor], names: Sequence[str], *args: Any, **kwargs: Any
) -> Any:
    """Calls ``fn(wholes, ...)`` without hooks, drains the queue, and refuses writes into the weights and escapes."""
    given = [bridge.give(whole) for whole in wholes]
    with explaining(names), refusing_writes(given, names):
        outputs = fn(given, *args, **kwargs)
        bridge.drain()
    refuse_escapes(given, outputs, names)
    return outputs


class UnitCall:
    """One call of a unit with a backward: what its nodes hold."""

    def __init__(self, tape: Any, use: UnitUse, wholes: Sequence[Tensor]) -> None:
        self.tape, self.use = tape, use
        self.wholes = [tape.bridge.give(whole) for whole in wholes]
        self.key = tape.num_uses, tuple(use.names)  # the same in every step, and no two units of a step alike

    @property
    def trainable(self) -> list[Tensor]:
        """The weights that are outputs of the node."""
        return [whole for whole, trains in zip(self.wholes, self.use.trainable, strict=True) if trains]

    def weights(self, outputs: Iterable[Tensor]) -> list[Tensor]:
        """Returns all weights, of which `outputs` are the trainable ones."""
        left = iter(outputs)
        return [next(left) if trains else w for w, trains in zip(self.wholes, self.use.trainable, strict=True)]

    def wholes_again(self) -> list[Tensor]:
        """Returns the current whole weights, for a computation that saves the same tensors as the first one."""
        wholes = [self.tape.bridge.give(self.use.whole(i)) for i in range(len(self.use.names))]
        for whole, trains in zip(wholes, self.use.trainable, strict=True):
            if trains:
                whole.requires_grad_()
        return wholes

    def forget(self) -> None:
        """Releases the whole weights, which the nodes do not need any more."""
        self.wholes = []

    def after_backward(self, gradients: Sequence[Tensor | None]) -> None:
        """Passes the gradients to the run, once they are computed."""
        left, hold = iter(gradients), self.tape.bridge.hold
        found = [next(left) if trains else None for trains in self.use.trainable]
        self.use.after_backward([None if gradient is None else hold(gradient) for gradient in found])


def recording(fn: Callable[..., Any], call: UnitCall, weights: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
    """Calls ``fn(weights, ...)``, which MindSpore records without keeping the whole weights."""
    with refusing_writes(call.wholes, call.use.names), mindspore.saved_tensors_hooks(*_release_hooks(call)):
        return fn(weights, *args, **kwargs)


def _release_hooks(call: UnitCall) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    use, give = call.use, call.tape.bridge.give
    # By shape first: asking a MindSpore tensor for its address drains the queue.
    place: dict[tuple[int, ...], dict[int, int]] = {}
    for i, whole in enumerate(call.wholes):
        if use.released[i]:
            place.setdefault(tuple(whole.shape), {})[whole.data_ptr()] = i
    watch = _Watch(call)

    def pack(tensor: Tensor) -> Any:
        alike = place.get(tuple(tensor.shape))
        index = alike.get(tensor.data_ptr()) if alike else None
        if index is not None and tensor.is_contiguous():
            return index
        watch.see(tensor)
        return ops.stop_gradient(tensor)

    def unpack(saved: Any) -> Tensor:
        return give(use.whole(saved)) if isinstance(saved, int) else saved

    return pack, unpack


class _Watch:
    """Looks for copies of whole weights in the first call of a unit. See Note [Views of weights]."""

    seen: ClassVar[set[object]] = set()

    def __init__(self, call: UnitCall) -> None:
        self._call = call
        self._sizes: dict[int, list[int]] = {}
        if call.key not in self.seen:
            self.seen.add(call.key)
            for i, whole in enumerate(call.wholes):
                if call.use.released[i] and whole.size > 1:
                    self._sizes.setdefault(whole.size, []).append(i)

    def see(self, tensor: Tensor) -> None:
        """Warns if a saved tensor has the values of a weight, in any order."""
        for i in self._sizes.get(tensor.size, ()):
            whole = self._call.wholes[i]
            if whole.dtype == tensor.dtype and _same_values(whole, tensor):
                rule = "autograd keeps a copy of a whole weight until backward"
                hint = "use it as it is (mint.nn.functional.linear, no transpose or reshape of it), or unit(remat=True)"
                warnings.warn(message(UNIT, rule, [self._call.use.names[i]], hint=hint), HpfuncWarning, stacklevel=3)


class _Repeats:
    """Compares the outputs of the first call of a unit with those of its recomputation.

    In MindSpore 2.10 a recomputation does not restore the state of random operators on a CPU. It has another dropout
    mask, so the gradient would silently be that of another function.
    """

    seen: ClassVar[set[object]] = set()

    def __init__(self, call: UnitCall) -> None:
        self._names = call.use.names
        self._is_new = call.key not in self.seen
        self._outputs: list[int] | None = None
        self.seen.add(call.key)

    def note(self, outputs: Any) -> None:
        """Remembers the outputs of the first call."""
        if self._is_new:
            self._outputs = _hashes(outputs)

    def compare(self, outputs: Any) -> None:
        """Raises UsageError if these outputs differ."""
        if self._outputs is not None and self._outputs != _hashes(outputs):
            rule = "a unit with remat=True computes something else when it is computed again"
            hint = (
                "MindSpore's random operators on the CPU cannot be repeated: keep dropout out of units with remat=True"
            )
            raise UsageError(message(UNIT, rule, self._names, hint=hint))


def _hashes(outputs: Any) -> list[int]:
    return [hash(leaf.asnumpy().tobytes()) for leaf in optree.tree_leaves(outputs) if is_tensor(leaf)]


def _same_values(whole: Tensor, tensor: Tensor) -> bool:
    first, second = (np.sort(x.asnumpy().reshape(-1).view(f"u{x.itemsize}")) for x in (whole, tensor))
    return first[0] != first[-1] and np.array_equal(first, second)  # all alike, as in a bias of zeros, says nothing


def forgetting(fn: Callable[..., Any], call: UnitCall, weights: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
    """The same, but only the arguments are kept. The rest is computed again in backward.

    MindSpore's own recomputation does this and restores the random state. It runs to the end of the function, because
    2.10 fails if it stops in a primitive, such as `ops.dropout` ("Stack input_args_info_stack_ is empty").
    """
    first, repeats = [weights], _Repeats(call)
    tensors, put_back = taken_apart((args, kwargs), is_tensor)

    def block(*tensors: Tensor) -> Any:
        args, kwargs = put_back(tensors)
        if not first:
            return repeat(args, kwargs)
        outputs = fn(first.pop(), *args, **kwargs)
        repeats.note(outputs)
        return outputs

    def repeat(args: Any, kwargs: Any) -> Any:
        wholes = call.wholes_again()
        with refusing_writes(wholes, call.use.names):
            outputs = fn(wholes, *args, **kwargs)
        refuse_escapes(wholes, outputs, call.use.names)
        repeats.compare(outputs)
        return outputs

    with refusing_writes(call.wholes, call.use.names):
        return mindspore.recompute(block, *tensors, use_reentrant=False, early_stop=False)
