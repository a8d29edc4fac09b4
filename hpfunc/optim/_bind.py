"""Weights as torch parameters, for a loop that stays imperative: ``.grad``, ``optimizer.step()``, `GradScaler`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import backends
from .._errors import LeafError, UsageError, message
from .._running.writes import share
from .._transforms.collectives import pmax
from .._values.array import describe, is_sharded
from .._values.foreign_names import BOUND, missing
from .._values.tree import dotted_paths, flatten
from ._bound_state import BoundState
from ._leaves import Leaves, leaves_of, like, refuse_partial_sums

_NAME = "hpfunc.optim.bind"


@dataclass(frozen=True, slots=True)
class Bound:
    """Weights, and torch parameters in the same memory. Made by `bind`.

    Attributes:
        params: the weights, a pytree of `ShardedArray`. Unlike all other arrays, these change when torch writes to the
            parameters. Frozen ones (see `freeze`) are among them, and do not change.
        parameters: a `torch.nn.Parameter` for each that is not frozen, in the order of the tree: this rank's part. Give
            them to an optimizer.
        names: the dotted path of each.
    """

    params: Any
    parameters: tuple[Any, ...]
    names: tuple[str, ...]

    if not TYPE_CHECKING:  # a type checker should find a wrong name by itself

        def __getattr__(self, name: str) -> Any:
            raise missing("hpfunc.optim.Bound", name, BOUND, dir(type(self)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Bound:
        hint = "hpfunc.optim.bind(copy.deepcopy(bound.params)) gives parameters to the copy"
        raise UsageError(message(_NAME, "copies of weights and of parameters would share no memory", hint=hint))

    @property
    def named_parameters(self) -> tuple[tuple[str, Any], ...]:
        """Pairs of path and parameter, which optimizers of torch accept too."""
        return tuple(zip(self.names, self.parameters, strict=True))

    def set_grads(self, grads: Any) -> None:
        """Makes gradients the ``.grad`` of the parameters, without a copy where the dtypes are equal.

        A torch optimizer may write into a ``.grad``, so do not use the gradients afterwards. Where weights are cut,
        the step of an optimizer raises UsageError if something else has changed a ``.grad`` since, such as torch's
        clipping, which takes the norm of this rank's part.

        Args:
            grads: a tree like `params`, as `value_and_grad` returns it.

        Raises:
            SpecError: tree, shapes or specs differ from those of `params`, or an array is still a partial sum.
            LeafError: a leaf is not a floating array.

        Communication: none.
        """
        name = f"{_NAME}.set_grads"
        weights, ops = leaves_of(name, "params", self.params)
        gradients = like(name, "grads", grads, weights)
        values = ops.writable(ops.cast(gradients.locals, list(self.parameters)))  # torch may write into them
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.grad = value.detach()
        self.note_gradients()

    def note_gradients(self, *, is_unscaled: bool = False) -> None:
        """Says that the ``.grad`` of the parameters are right as they are: an optimizer's step refuses others.

        `set_grads` and `unscale` do so. What else changes a ``.grad`` sees this rank's part alone: call this after it,
        if each element is what it would be in one process.

        Args:
            is_unscaled: whether a `GradScaler` has looked at them, and all ranks know what it found.

        Communication: none.
        """
        from ..backends.torch.optimizer_steps import note_gradients

        leaves = leaves_of(_NAME, "params", self.params)[0].leaves
        if any(leaf.mesh.axis_size(leaf.spec.axes) > 1 for leaf in leaves):
            note_gradients(self.parameters, self.names, is_unscaled=is_unscaled)

    def unscale(self, scaler: Any, optimizer: Any) -> None:
        """Calls ``scaler.unscale_(optimizer)`` and tells all ranks if one of them found an overflow.

        Then ``scaler.step(optimizer)`` skips on all ranks or on none, and ``scaler.update()`` keeps one scale.

        Args:
            scaler: a `torch.amp.GradScaler`; one that is not enabled does nothing.
            optimizer: of these parameters.

        Communication: one all-reduce of one number, over all axes of the mesh.
        """
        from ..backends.torch import private

        if not scaler.is_enabled():
            return
        scaler.unscale_(optimizer)
        mesh = leaves_of(_NAME, "params", self.params)[0].leaves[0].mesh
        for found in private.found_inf(scaler, optimizer).values():
            found.copy_(pmax(found, mesh.axis_names, mesh=mesh))
        self.note_gradients(is_unscaled=True)

    def state(self, optimizer: Any) -> dict[str, Any]:
        """Returns what a checkpoint of this training has to hold, as a tree for `hpfunc.checkpoint.save`.

        Args:
            optimizer: a `torch.optim.Optimizer` of these parameters. Its state must be element-wise, or numbers.

        Returns:
            A dict of ``"params"``, the weights that are not frozen; ``"slots"``, what the optimizer keeps for each, by
            its name (``"exp_avg"``), as in `TorchState`; and ``"groups"``, the options of each group and the paths of
            its weights. Arrays and tensors are in the memory that the next step changes.

        Raises:
            UsageError: the optimizer has other parameters, keeps what is not cut like its weight, or calls the loss.
            LeafError: an option of a group is not a number, string or tensor.

        Communication: none.

        >>> import torch
        >>> mesh = hpfunc.make_mesh((1,), ("shard",))
        >>> bound = hpfunc.optim.bind(hpfunc.shard({"w": torch.ones(2)}, mesh, hpfunc.P("shard")))
        >>> optimizer = torch.optim.SGD(bound.parameters, lr=0.5, momentum=0.9)
        >>> bound.set_grads(hpfunc.shard({"w": torch.ones(2)}, mesh, hpfunc.P("shard")))
        >>> optimizer.step()
        >>> bound.state(optimizer)["slots"]
        {'momentum_buffer': {'w': ShardedArray(shape=(2,), dtype=torch.float32, spec=P('shard'))}}
        """
        return self._with(optimizer).now(f"{_NAME}.state")

    def state_like(self, optimizer: Any) -> dict[str, Any]:
        """Returns the `state` of an optimizer that may not have stepped yet: the `like` of `hpfunc.checkpoint.load`.

        torch makes the state of an optimizer in its first step. Before it the arrays of this tree have the shapes and
        dtypes of that state, and no values. A state that was saved before the first step is loaded like `state`.

        Args:
            optimizer: a `torch.optim.Optimizer` of these parameters; it is not changed.

        Raises:
            UsageError, LeafError: as `state`.

        Communication: none.

        >>> import torch
        >>> mesh = hpfunc.make_mesh((1,), ("shard",))
        >>> bound = hpfunc.optim.bind(hpfunc.shard({"w": torch.ones(2)}, mesh, hpfunc.P("shard")))
        >>> optimizer = torch.optim.Adam(bound.parameters)
        >>> sorted(bound.state(optimizer)["slots"]), sorted(bound.state_like(optimizer)["slots"])
        ([], ['exp_avg', 'exp_avg_sq', 'step'])
        """
        return self._with(optimizer).after_a_step(f"{_NAME}.state_like")

    def load_state(self, optimizer: Any, state: Any) -> None:
        """Writes a `state`, such as one that `hpfunc.checkpoint.load` has read, into weights and optimizer.

        Args:
            optimizer: a `torch.optim.Optimizer` of these parameters, with the groups that it had when it was saved. The
                options of its groups are those of the state afterwards.
            state: what `state` returns. It is copied.

        Raises:
            SpecError: tree, shapes or specs differ from those of `params`, or groups have other weights.
            UsageError, LeafError: as `state`; or the state is something else.

        Communication: none.

        >>> import torch
        >>> mesh = hpfunc.make_mesh((1,), ("shard",))
        >>> bound = hpfunc.optim.bind(hpfunc.shard({"w": torch.ones(2)}, mesh, hpfunc.P("shard")))
        >>> optimizer = torch.optim.SGD(bound.parameters, lr=0.5)
        >>> state = bound.state(optimizer)
        >>> state["groups"][0]["lr"] = 0.25
        >>> bound.load_state(optimizer, state)
        >>> optimizer.param_groups[0]["lr"]
        0.25
        """
        self._with(optimizer).load(f"{_NAME}.load_state", state)

    def _with(self, optimizer: Any) -> BoundState:
        return BoundState(self.params, self.parameters, self.names, optimizer)


def bind(params: Any) -> Bound:
    """Returns weights together with torch parameters in the same memory, without a copy (but of expanded tensors).

    The loop is then torch's own: `value_and_grad` of ``bound.params`` gives gradients, ``bound.set_grads`` hands them
    over, ``optimizer.step()`` changes the weights in place. Schedulers of torch need nothing else. Take element-wise
    optimizers only (see `from_torch`), and clip by `clip_by_global_norm`: torch's clipping sees this rank's part alone.

    Args:
        params: pytree of `ShardedArray`, all on one mesh. All but the frozen ones are consumed, as if donated.

    Raises:
        LeafError: a leaf is not a floating `ShardedArray` on the mesh of the first, is a row of one, or occurs twice;
            or all are frozen.

    Communication: none.

    >>> import torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> bound = hpfunc.optim.bind(hpfunc.shard({"w": torch.ones(2)}, mesh, hpfunc.P("shard")))
    >>> optimizer = torch.optim.SGD(bound.parameters, lr=0.5)
    >>> loss, grads = hpfunc.value_and_grad(hpfunc.unit(lambda p: p["w"].sum()))(bound.params)
    >>> bound.set_grads(grads)
    >>> optimizer.step()
    >>> bound.params["w"].local
    tensor([0.5000, 0.5000])
    """
    import torch

    weights, ops = leaves_of(_NAME, "params", params)
    _check(weights)
    refuse_partial_sums(_NAME, weights, "so they are not weights")
    names = tuple(dotted_paths(weights.tree, is_sharded))
    values = ops.writable([backends.get("torch").detach(leaf._consume(_NAME)) for leaf in weights.leaves])
    parameters = tuple(torch.nn.Parameter(value) for value in values)
    made = weights.restore(_NAME, values)
    for leaf in flatten(made, is_sharded)[0]:
        if is_sharded(leaf) and not leaf.is_frozen:
            share(leaf)
    return Bound(made, parameters, names)


def _check(weights: Leaves) -> None:
    hint = "get them from hpfunc.shard or hpfunc.init; other leaves stay outside, by hpfunc.partition"
    pairs = list(zip(weights.paths(), weights.leaves, strict=True))
    bad = [f"{path}: {describe(x)}" for path, x in pairs if not is_sharded(x)]
    if bad or not pairs:
        rule = "params has no leaf, or a leaf that is not a ShardedArray"
        if not bad and flatten(weights.whole, is_sharded)[0]:
            rule, hint = "every array of params is frozen", "hpfunc.unfreeze(params, where) makes arrays trainable"
        raise LeafError(message(_NAME, rule, bad, hint=hint))
    seen, mesh = Counter(x._owner for x in weights.leaves), weights.leaves[0].mesh
    faults = {
        "a weight lies on another mesh": lambda x: x.mesh != mesh,
        "a weight is a row of an array": lambda x: x._row is not None,
        "a weight stands at two places of the tree": lambda x: seen[x._owner] > 1,
    }
    for rule, is_fault in faults.items():
        if bad := [f"{path}: {describe(x)}" for path, x in pairs if is_fault(x)]:
            hint = "bind each array once, by itself, and use it at several places of the loss"
            raise LeafError(message(_NAME, rule, bad, mesh=mesh, hint=hint))
