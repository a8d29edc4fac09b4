"""Frozen arrays: what `value_and_grad` and optimizers leave as it is, though it stands among the weights.

# Note [Who says that an array is frozen]
A framework's own parameters say whether they train (``requires_grad``), and programs freeze parts of a model by that.
An array takes it over from the tensor that it is cut of: frozen is what a parameter without gradient becomes. A tensor
that is no parameter says nothing, as most tensors that a program makes do not want a gradient, and are to be trained
all the same. The mark stays with the array through steps, `reshard`, checkpoints and ``optree.tree_map``. See the
design note "Frozen arrays".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import backends
from .._values.array import ShardedArray, check_sharded, is_sharded
from .._values.partition import Where, selector
from .._values.tree import dotted_paths, flatten, unflatten


def marks_of(function: str, leaves: Sequence[Any]) -> list[bool | None]:
    """Returns of each leaf whether it trains, None if it does not say. See Note [Who says that an array is frozen]."""
    plain = [leaf for leaf in leaves if not is_sharded(leaf)]
    backend = backends.of(function, plain) if plain else None
    marks: list[bool | None] = []
    for leaf in leaves:
        if is_sharded(leaf):
            marks.append(leaf._trains)
        else:
            assert backend is not None
            marks.append(backend.trains(leaf) if backend.is_tensor(leaf) else None)
    return marks


def is_trainable(path: str, leaf: Any) -> bool:
    """Returns whether a leaf is not frozen: what `value_and_grad` differentiates.

    For `partition`, to see the frozen leaves of a tree by themselves.

    Args:
        path: is not looked at.
        leaf: a `ShardedArray`, a tensor, or anything else.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(1, 1)).requires_grad_(False)
    >>> params = hpfunc.from_module(model)[1]
    >>> [path for path, leaf in params.items() if hpfunc.is_trainable(path, leaf)]
    []
    """
    return marks_of("hpfunc.is_trainable", [leaf])[0] is not False


def freeze(tree: Any, where: Where | None = None) -> Any:
    """Returns a tree of arrays of which some are frozen: the same memory, marked.

    `value_and_grad` gives them no gradient (None stands in its place), and optimizers leave them as they are, bit for
    bit, without state. They are gathered in units like any other array. What `shard`, `init` and `init_module` make of
    a module's parameter without gradient is frozen from the start.

    Args:
        tree: pytree of `ShardedArray`.
        where: which, as for `partition`; None: all.

    Raises:
        LeafError: a leaf is no `ShardedArray`.
        SpecError, UsageError: as `partition`.

    Communication: none.

    >>> import torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> params = hpfunc.shard({"w": torch.ones(2), "b": torch.ones(2)}, mesh, hpfunc.P("shard"))
    >>> params = hpfunc.freeze(params, "b")
    >>> hpfunc.grad(hpfunc.unit(lambda p: (p["w"] * p["b"]).sum()))(params)["b"] is None
    True
    """
    return _mark("hpfunc.freeze", tree, where, trains=False)


def unfreeze(tree: Any, where: Where | None = None) -> Any:
    """Returns a tree of arrays of which some are frozen no longer: the same memory, marked. The inverse of `freeze`.

    State of an optimizer is made for the arrays that train: call its `init` again.

    Args:
        tree: pytree of `ShardedArray`.
        where: which, as for `partition`; None: all.

    Raises:
        LeafError: a leaf is no `ShardedArray`.
        SpecError, UsageError: as `partition`.

    Communication: none.

    >>> import torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> w = hpfunc.freeze(hpfunc.shard(torch.ones(2), mesh, hpfunc.P("shard")))
    >>> w, hpfunc.unfreeze(w)
    (ShardedArray(shape=(2,), dtype=torch.float32, spec=P('shard'), frozen), ShardedArray(shape=(2,), dtype=torch.float32, spec=P('shard')))
    """  # noqa: E501 - what it prints
    return _mark("hpfunc.unfreeze", tree, where, trains=True)


def _mark(function: str, tree: Any, where: Where | None, *, trains: bool) -> Any:
    check_sharded(function, "tree", tree, "shard it first: hpfunc.shard(tree, mesh, specs)")
    leaves, treedef = flatten(tree, is_sharded)
    names = dotted_paths(tree, is_sharded)
    selects = (lambda name, leaf: True) if where is None else selector(function, where, names)
    pairs = zip(names, leaves, strict=True)
    marked: list[ShardedArray] = [leaf._marked(trains) if selects(name, leaf) else leaf for name, leaf in pairs]
    return unflatten(treedef, marked)
