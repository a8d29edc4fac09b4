"""Any class of `torch.optim` as a pair of pure functions, run on each rank's own parts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree

from .. import backends
from .._errors import LeafError, PolicyError, SpecError, UsageError, message
from .._values.array import describe, is_sharded
from .._values.partition import Where, selector
from .._values.tree import dotted_paths, unflatten
from ..backends.foreach import Foreach
from ._leaves import Leaves, by_groups, check_state, leaves_of, like, needed, pick, writable
from ._optimizer import Optimizer

Tensor = Any
Options = dict[str, Any]
Groups = Sequence[tuple[Where, Mapping[str, Any]]]
_NAME = "hpfunc.optim.from_torch"

# Note [Element-wise optimizers]
# An optimizer is element-wise if it computes each element of a weight from that element, its gradient and numbers such
# as the step. It then does on a part of a weight what it does on the whole. These classes of torch are element-wise.
# Muon (orthogonal matrices), Adafactor (means of rows and columns) and LBFGS (dot products over all weights) are not:
# on a part they compute something else, without an error. Of a class that is not named here this is not known.
_NAMES = ["Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
ELEMENTWISE = frozenset(f"torch.optim.{name.lower()}.{name}" for name in _NAMES)
# State that is a number for the whole weight. A weight without dims has the same shape.
_NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})


class TorchState(NamedTuple):
    """State of an optimizer made by `from_torch`.

    Attributes:
        step: number of updates so far, an int.
        slots: what torch keeps for each weight, by its name (``"exp_avg"``): trees like the weights, of arrays that are
            cut like them, or of 0-d tensors (``"step"``); None where a weight has no such state. Empty before the
            first update, as in torch.
    """

    step: int
    slots: dict[str, Any]


def from_torch(cls: Any, *, groups: Groups = (), elementwise: bool | None = None, **options: Any) -> Optimizer:
    """Returns a class of `torch.optim` as an `Optimizer`: torch's own step, on this rank's parts.

    The first update makes the arrays of the state, so the first two calls of a `sharded` step are recorded, not one.
    In `ShardedStep.lower` an update is zero and makes no state. Weights of 16 bits are updated in float32, as in all
    optimizers here; `apply_updates` rounds once.

    Args:
        cls: a subclass of `torch.optim.Optimizer`, such as ``torch.optim.AdamW``.
        groups: pairs ``(where, options)``, such as ``[("*.bias", {"weight_decay": 0.0})]``: weights that `where`
            selects (a pattern, several, or a function, as in `partition`) have these options instead. The first pair
            that selects a weight counts.
        elementwise: whether a step on parts of the weights gives parts of the step. None: known for the classes
            of torch (see below), False for others, which are accepted for weights that no axis cuts.
        **options: options of `cls`. A function (``lr=warmup_cosine(...)``) is called with the step; the first is 0.

    Element-wise are Adadelta, Adagrad, Adam, Adamax, AdamW, ASGD, NAdam, RAdam, RMSprop, Rprop and SGD. Muon and
    Adafactor are not; LBFGS, which calls the loss itself, is refused.

    Raises:
        LeafError: `cls` is not an optimizer class of torch.
        PolicyError: an option is refused by torch, or unknown.
        UsageError: `cls` needs a closure; or `update` is called without params.
        SpecError: a pattern selects no weight, or a weight is cut and `cls` is not element-wise (in `init`).

    Communication: none.

    >>> import torch
    >>> optimizer = hpfunc.optim.from_torch(torch.optim.SGD, lr=0.5, momentum=0.9)
    >>> weights = torch.zeros(2)
    >>> optimizer.update(torch.ones(2), optimizer.init(weights), weights)
    (tensor([-0.5000, -0.5000]), TorchState(step=1, slots={'momentum_buffer': tensor([1., 1.])}))
    """
    groups = [(where, dict(changed)) for where, changed in groups]
    _check(cls, groups, options)
    known = f"{cls.__module__}.{cls.__qualname__}" in ELEMENTWISE
    stepper = _Stepper(cls, groups, options, known, known if elementwise is None else elementwise)
    return Optimizer(stepper.init, stepper.update)


@dataclass(frozen=True, slots=True)
class _Stepper:
    """The two functions of an optimizer, and what they know.

    Attributes:
        is_known: whether the class is one of `ELEMENTWISE`.
        takes_parts: whether weights may be cut.
    """

    cls: Any
    groups: Sequence[tuple[Where, Options]]
    options: Options
    is_known: bool
    takes_parts: bool

    def init(self, params: Any) -> TorchState:
        self._places(leaves_of(_NAME, "params", params)[0])
        return TorchState(0, {})

    def update(self, grads: Any, state: TorchState, params: Any = None) -> tuple[Any, TorchState]:
        gradients, ops = leaves_of(_NAME, "grads", grads)
        weights = like(_NAME, "params", needed(_NAME, params, "torch's step reads them"), gradients)
        check_state(_NAME, state, TorchState)
        places, olds = self._places(weights), ops.widened(weights.locals)
        if not olds or backends.get("torch").is_abstract(olds[0]):
            return gradients.wrap(ops.zeros(olds)), TorchState(state.step + 1, state.slots)
        slots = taken(_NAME, state.slots, weights, ops)
        news, changes = ops.copy(olds), ops.cast(gradients.locals, olds)
        if self._writes_gradients():
            changes = ops.copy(changes)
        optimizer = self._optimizer(news, places, state.step)
        for new, change, slot in zip(news, changes, slots, strict=True):
            new.grad = change.detach()
            optimizer.state[new].update(slot)
        optimizer.step()
        kept = slots_of([optimizer.state[new] for new in news], weights)
        updates = by_groups(ops, news, lambda chosen: ops.added(pick(news, chosen), pick(olds, chosen), -1.0))
        return gradients.wrap(updates), TorchState(state.step + 1, kept)

    def _optimizer(self, news: list[Tensor], places: Sequence[list[int]], step: int) -> Any:
        settings = [*(changed for _, changed in self.groups), {}]
        pairs = zip(places, settings, strict=True)
        filled = [{"params": pick(news, chosen), **_at(step, setting)} for chosen, setting in pairs if chosen]
        return self.cls(filled, **_at(step, self.options))

    def _writes_gradients(self) -> bool:
        """Returns whether the step may write into gradients: of the known classes, SGD with `nesterov` does."""
        return not self.is_known or any(x.get("nesterov") for x in (self.options, *(x for _, x in self.groups)))

    def _places(self, weights: Leaves) -> list[list[int]]:
        """Returns the places of the weights of each group; the last entry has the weights that are in no group."""
        if not self.takes_parts:
            _refuse_cut(self.cls, weights)
        found: list[list[int]] = [[] for _ in range(len(self.groups) + 1)]
        names = dotted_paths(weights.tree, is_sharded) if self.groups else [""] * len(weights.leaves)
        every = dotted_paths(weights.whole, is_sharded) if self.groups else []  # a pattern may select frozen weights
        tests = [selector(_NAME, where, every) for where, _ in self.groups]
        for place, (name, leaf) in enumerate(zip(names, weights.leaves, strict=True)):
            chosen = next((i for i, selects in enumerate(tests) if selects(name, leaf)), len(tests))
            found[chosen].append(place)
        return found


# --- options --------------------------------------------------------------------------------------------------------
def _check(cls: Any, groups: Sequence[tuple[Where, Options]], options: Options) -> None:
    import torch

    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        hint = "from_torch(torch.optim.AdamW, lr=1e-3): the class, and its options"
        raise LeafError(message(_NAME, f"the argument is not a class of torch.optim but {cls!r}", hint=hint))
    refuse_closure(_NAME, cls)
    try:
        made = cls([torch.zeros(1, 1)], **_at(0, options))  # Muon takes matrices only
        for _, changed in groups:
            cls([torch.zeros(1, 1)], **_at(0, options | changed))
    except (TypeError, ValueError, RuntimeError) as error:
        raise PolicyError(message(_NAME, f"{cls.__name__} refuses its options: {error}")) from error
    unknown = [f"{key!r}" for _, changed in groups for key in changed if key not in made.defaults]
    if unknown:
        hint = f"it has {', '.join(made.defaults)}"
        raise PolicyError(message(_NAME, f"{cls.__name__} has no option of a group", unknown, hint=hint))


def _at(step: int, options: Options) -> Options:
    return {key: value(step) if callable(value) else value for key, value in options.items()}


def refuse_closure(function: str, cls: Any) -> None:
    """Raises UsageError if a class of optimizers calls the loss itself."""
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        rule = f"{cls.__name__} calls the loss itself, several times in a step"
        raise UsageError(message(function, rule, hint="a step has one gradient here; take another optimizer"))


def _refuse_cut(cls: Any, weights: Leaves) -> None:
    pairs = zip(weights.paths(), weights.leaves, strict=True)
    bad = [f"{p}: {describe(x)}" for p, x in pairs if is_sharded(x) and x.mesh.axis_size(x.spec.axes) > 1]
    if bad:
        rule = f"{cls.__name__} is not known to be element-wise, and weights are cut"
        hint = "leave them whole (hpfunc.P()); or give elementwise=True, if its step on a part is the part of its step"
        raise SpecError(message(_NAME, rule, bad, hint=hint))


# --- state ----------------------------------------------------------------------------------------------------------
def _flat(tree: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    return optree.tree_flatten(tree, is_leaf=is_sharded, none_is_leaf=True)


def taken(function: str, slots: Mapping[str, Any], weights: Leaves, ops: Foreach) -> list[dict[str, Any]]:
    """Returns the state of each weight, in memory that may be written to.

    Raises:
        SpecError: the state does not fit the weights.
    """
    leaves, structure = _flat(weights.tree)
    here = [i for i, leaf in enumerate(leaves) if leaf is not None]
    bad, found = [], []  # (place, name, value)
    for name, tree in slots.items():
        values, its = _flat(tree)
        if its != structure:
            bad.append(f"state.slots[{name!r}]: another tree")
            continue
        found += [(k, name, values[i]) for k, i in enumerate(here) if values[i] is not None]
    bad += [
        f"state.slots[{name!r}] of {weights.paths()[k]}: {describe(x)}, but the weight: {describe(weights.leaves[k])}"
        for k, name, x in found
        if not _fits(x, weights.leaves[k])
    ]
    if bad:
        hint = "state and params come from the same weights; call init again after these have changed"
        raise SpecError(message(function, "the state does not fit params", bad, hint=hint))
    is_tensor = backends.get("torch").is_tensor
    arrays = [(k, name, x) for k, name, x in found if is_sharded(x) or is_tensor(x)]
    memory = writable(function, Leaves.of(function, "state", [x for *_, x in arrays], frozen=True), ops)
    states: list[dict[str, Any]] = [{} for _ in weights.leaves]
    for k, name, x in found:
        states[k][name] = x
    for (k, name, _), tensor in zip(arrays, memory, strict=True):
        states[k][name] = tensor
    return states


def _fits(value: Any, weight: Any) -> bool:
    return not is_sharded(value) or (is_sharded(weight) and value.layout == weight.layout)


def slots_of(states: Sequence[Mapping[str, Any]], weights: Leaves) -> dict[str, Any]:
    """Returns what an optimizer keeps for each weight, by its name: trees like the weights, as in `TorchState`."""
    names = dict.fromkeys(name for state in states for name in state)
    values = {
        name: [_kept(name, s.get(name), x) for s, x in zip(states, weights.leaves, strict=True)] for name in names
    }
    some = {name: row for name, row in values.items() if any(value is not None for value in row)}
    return {name: unflatten(weights.treedef, row) for name, row in some.items()}


def _kept(name: str, value: Any, weight: Any) -> Any:
    is_like = getattr(value, "shape", None) == (weight._value.shape if is_sharded(weight) else None)
    return weight.with_local(value) if is_like and (value.shape or name not in _NUMBERS) else value
