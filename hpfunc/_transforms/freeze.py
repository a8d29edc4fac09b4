"""Frozen arrays: weights that `value_and_grad` does not differentiate and optimizers do not change.

# Note [Who says that an array is frozen]
A framework's own parameters say whether they train (``requires_grad``), and programs freeze parts of a model by that.
An array takes the mark from the tensor that it is cut from: a parameter without gradient becomes a frozen array. Any
other tensor sets no mark, because most tensors that a program makes do not require a gradient but are still meant to be
trained. The mark stays with the array through steps, `reshard`, checkpoints and ``optree.tree_map``. See the design
note "Frozen arrays".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import backends
from .._values.array import ShardedArray, check_sharded, is_sharded
from .._values.partition import Where, selector
from .._values.tree import dotted_paths, flatten, unflatten


def marks_of(function: str, leaves: Sequence[Any]) -> list[bool | None]:
    """Returns whether each leaf trains, None without a mark. See Note [Who says that an array is frozen]."""
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
    """Returns whether a leaf is not frozen, so that `value_and_grad` differentiates it.

    Meant for `partition`, to separate the frozen leaves of a tree.

    Args:
        path: ignored.
        leaf: a `ShardedArray`, a tensor, or anything else.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(1, 1)).requires_grad_(False)
    >>> params = hpfunc.from_module(model)[1]
    >>> [path for path, leaf in params.items() if hpfunc.is_trainable(path, leaf)]
    []
    """
    return marks_of("hpfunc.is_trainable", [leaf])[0] is not False


def freeze(tree: Any, where: Where | None = None) -> Any:
    """Returns the tree with selected arrays marked as frozen, in the same memory.

    The gradient of a frozen array is None in `value_and_grad`. Optimizers do not change a bit of it and keep no state
    for it. Units gather it like any other array. `shard`, `init` and `init_module` return a frozen array for a module's
    parameter without gradient.

    Args:
        tree: pytree of `ShardedArray`.
        where: which arrays, as for `partition`; None: all.

    Raises:
        LeafError: a leaf is not a `ShardedArray`.
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
    """Returns the tree with selected arrays marked as not frozen, in the same memory. The inverse of `freeze`.

    An optimizer has state only for the arrays that train: call its `init` again. Args and errors: as `freeze`.

    Communication: none.

    >>> import torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> w = hpfunc.freeze(hpfunc.shard(torch.ones(2), mesh, hpfunc.P("shard")))
    >>> w, hpfunc.unfreeze(w)
    (ShardedArray(shape=(2,), dtype=torch.float32, spec=P('shard'), frozen), ShardedArray(shape=(2,), dtype=torch.float32, spec=P('shard')))
    """  # noqa: E501 - printed output
    return _mark("hpfunc.unfreeze", tree, where, trains=True)


def _mark(function: str, tree: Any, where: Where | None, *, trains: bool) -> Any:
    check_sharded(function, "tree", tree, "shard it first: hpfunc.shard(tree, mesh, specs)")
    leaves, treedef = flatten(tree, is_sharded)
    names = dotted_paths(tree, is_sharded)
    selects = (lambda name, leaf: True) if where is None else selector(function, where, names)
    pairs = zip(names, leaves, strict=True)
    marked: list[ShardedArray] = [leaf._marked(trains) if selects(name, leaf) else leaf for name, leaf in pairs]
    return unflatten(treedef, marked)
