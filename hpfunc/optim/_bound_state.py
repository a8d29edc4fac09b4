"""The state of a torch optimizer of bound weights, as a tree that a checkpoint saves, and loads on any mesh."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optree

from .. import backends
from .._errors import LeafError, SpecError, UsageError, message
from .._running.writes import share
from .._values.array import is_sharded
from .._values.tree import flatten
from ._from_torch import refuse_closure, slots_of, taken
from ._leaves import leaves_of, like

Tensor = Any
State = dict[str, Any]
_NAME = "hpfunc.optim.bind"
_KEYS = ("params", "slots", "groups")


@dataclass(frozen=True, slots=True)
class BoundState:
    """Weights that are bound, their parameters and paths, and an optimizer of these parameters."""

    params: Any
    parameters: Sequence[Tensor]
    names: Sequence[str]
    optimizer: Any

    def check(self, function: str) -> None:
        """Refuses optimizers that have other parameters, or that call the loss."""
        refuse_closure(function, type(self.optimizer))
        bound = {id(x) for x in self.parameters}
        groups = enumerate(self.optimizer.param_groups)
        bad = [
            f"param_groups[{i}]['params'][{k}]: shape {tuple(x.shape)}"
            for i, group in groups
            for k, x in enumerate(group["params"])
            if id(x) not in bound
        ]
        if bad:
            hint = "make the optimizer of bound.parameters, and another one of other parameters"
            raise UsageError(message(function, "the optimizer has parameters that are not bound", bad, hint=hint))

    def now(self, function: str) -> State:
        """Returns the state in the memory that the optimizer writes to."""
        self.check(function)
        weights, _ = leaves_of(function, "params", self.params)
        states = [self.optimizer.state.get(x, {}) for x in self.parameters]
        _refuse_other_shapes(function, self.names, self.parameters, states)
        slots = slots_of(states, weights)
        for leaf in flatten(slots, is_sharded)[0]:
            if is_sharded(leaf):
                share(leaf)
        return {"params": weights.tree, "slots": slots, "groups": self._groups(function)}

    def after_a_step(self, function: str) -> State:
        """Returns a state with the structure, shapes and dtypes of that after the first step; its values mean nothing.

        The step is one of a copy of the optimizer, on a small tensor in the place of each parameter: a rank may have no
        memory to spare for copies of its weights. Each dim has two elements, so that state for the whole weight, for
        its rows and for its elements differ in shape.
        """
        self.check(function)
        if any(self.optimizer.state.values()):
            return self.now(function)
        import torch

        small = [
            torch.nn.Parameter(torch.zeros((2,) * x.dim(), dtype=x.dtype, device=x.device)) for x in self.parameters
        ]
        memo: dict[int, Any] = {id(x): y for x, y in zip(self.parameters, small, strict=True)}
        stepper = copy.deepcopy(self.optimizer, memo | {id(self.optimizer.state): defaultdict(dict)})
        for x in small:
            x.grad = torch.zeros_like(x)
        stepper.step()
        states = [stepper.state.get(x, {}) for x in small]
        _refuse_other_shapes(function, self.names, small, states)
        weights, _ = leaves_of(function, "params", self.params)
        grown = [
            {name: _grown(value, one, x) for name, value in state.items()}
            for state, one, x in zip(states, small, self.parameters, strict=True)
        ]
        return {"params": weights.tree, "slots": slots_of(grown, weights), "groups": self._groups(function)}

    def load(self, function: str, state: Any) -> None:
        """Writes a state into the parameters and the optimizer."""
        self.check(function)
        if not isinstance(state, Mapping) or set(state) != set(_KEYS):
            has = f"the keys {sorted(state)}" if isinstance(state, Mapping) else f"a {type(state).__name__}"
            hint = "bound.state(optimizer) returns one, and hpfunc.checkpoint.load reads one"
            raise LeafError(message(function, f"a state is a dict of {', '.join(_KEYS)}, got {has}", hint=hint))
        weights, ops = leaves_of(function, "params", self.params)
        new = like(function, "state['params']", state["params"], weights)
        self._check_groups(function, state["groups"])
        states = taken(function, state["slots"], weights, ops)
        detach = backends.get("torch").detach
        for parameter, value, slots in zip(self.parameters, new.locals, states, strict=True):
            detach(parameter).copy_(detach(value))
            if slots:
                self.optimizer.state[parameter] = slots
            else:
                self.optimizer.state.pop(parameter, None)
        for group, saved in zip(self.optimizer.param_groups, state["groups"], strict=True):
            group.update({key: _apart(value) for key, value in saved.items() if key != "names"})

    def _groups(self, function: str) -> list[State]:
        """Returns the options of each group, and the paths of its weights."""
        name_of = {id(x): name for x, name in zip(self.parameters, self.names, strict=True)}
        groups, bad = [], []
        for i, group in enumerate(self.optimizer.param_groups):
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            bad += [f"param_groups[{i}][{key!r}]: {value!r}" for key, value in options.items() if not _is_plain(value)]
            groups.append({"names": [name_of[id(x)] for x in group["params"]], **options})
        if bad:
            hint = "numbers, strings and tensors can be saved; set other things anew when the optimizer is made"
            raise LeafError(message(function, "options of the optimizer cannot stand in a checkpoint", bad, hint=hint))
        return groups

    def _check_groups(self, function: str, saved: Sequence[Mapping[str, Any]]) -> None:
        """Refuses a state whose groups have other weights, which would get each other's options."""
        here, there = ([tuple(group["names"]) for group in groups] for groups in (self._groups(function), saved))
        if here != there:
            bad = [f"optimizer: {_counts(here)}", f"state: {_counts(there)}"]
            hint = "make the groups of the optimizer as they were when it was saved"
            raise SpecError(message(function, "the groups of the optimizer have other weights", bad, hint=hint))


def _counts(groups: Sequence[Sequence[str]]) -> str:
    return "; ".join(
        f"group {i} of {len(names)}: {', '.join(names[:3])}{', ...' * (len(names) > 3)}"
        for i, names in enumerate(groups)
    )


def _apart(value: Any) -> Any:
    is_tensor = backends.get("torch").is_tensor
    return optree.tree_map(lambda x: x.clone() if is_tensor(x) else x, value)


def _is_plain(value: Any) -> bool:
    leaves = optree.tree_leaves(value)
    return all(type(x) in (bool, int, float, str) or backends.get("torch").is_tensor(x) for x in leaves)


def _grown(value: Any, small: Tensor, parameter: Tensor) -> Any:
    """Returns a tensor like the parameter, all in one element of memory, for what is like the small one."""
    if not small.dim() or getattr(value, "shape", None) != small.shape:
        return value
    return value.new_zeros(()).expand(parameter.shape)


def _refuse_other_shapes(
    function: str, names: Sequence[str], parameters: Sequence[Tensor], states: Sequence[Mapping[str, Any]]
) -> None:
    """Refuses state that is neither a number nor like its weight: it is not known how another mesh would cut it."""
    bad = [
        f"{name}: {slot!r}, {f'shape {tuple(value.shape)}' if hasattr(value, 'shape') else type(value).__name__}"
        for name, parameter, state in zip(names, parameters, states, strict=True)
        for slot, value in state.items()
        if not (_is_number(value) or getattr(value, "shape", None) == parameter.shape)
    ]
    if bad:
        rule = "the optimizer keeps what is neither a number nor shaped like this rank's part of its weight"
        hint = "bind takes element-wise optimizers; see hpfunc.optim.from_torch for the classes of torch that are"
        raise UsageError(message(function, rule, bad, hint=hint))


def _is_number(value: Any) -> bool:
    return type(value) in (bool, int, float) or tuple(getattr(value, "shape", (0,))) in ((), (1,))
