"""Trees: the few operations on pytrees that hpfunc needs, all by optree."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import optree
from optree.registry import __GLOBAL_NAMESPACE as GLOBAL_NAMESPACE

from .._errors import SpecError, UsageError, message

T = TypeVar("T")
IsLeaf = Callable[[Any], bool]


def flatten(tree: Any, is_leaf: IsLeaf | None = None) -> tuple[list[Any], optree.PyTreeSpec]:
    """Returns the leaves of `tree` and its structure.

    >>> flatten({"b": 1, "a": [2, None]})[0]
    [2, 1]
    """
    leaves, treedef = optree.tree_flatten(tree, is_leaf=is_leaf)
    return leaves, treedef


def paths(tree: Any, name: str, is_leaf: IsLeaf | None = None) -> list[str]:
    """Returns the path of every leaf as source text.

    >>> paths({"layers": [{"w": 1}]}, "params")
    ["params['layers'][0]['w']"]
    """
    return [accessor.codify(name) for accessor in optree.tree_accessors(tree, is_leaf=is_leaf)]


def dotted(accessor: optree.PyTreeAccessor) -> str:
    """Returns a path in its short form: keys, indices and field names with a dot between them; "" is the tree itself.

    >>> dotted(optree.tree_accessors({"layers": [{"w": 1}]})[0])
    'layers.0.w'
    """
    return ".".join(map(_step, accessor))


def _step(entry: optree.PyTreeEntry) -> str:
    return str(entry.field) if isinstance(entry, optree.NamedTupleEntry) else str(entry.entry)


def dotted_paths(tree: Any, is_leaf: IsLeaf | None = None) -> list[str]:
    """Returns the dotted path of every leaf.

    >>> dotted_paths({"layers": [{"w": 1, "b": 2}], "none": None})
    ['layers.0.b', 'layers.0.w']
    """
    return [dotted(accessor) for accessor in optree.tree_accessors(tree, is_leaf=is_leaf)]


def broadcast_prefix(
    function: str, prefix: Any, tree: Any, *, argument: str, name: str, is_prefix_leaf: IsLeaf, is_leaf: IsLeaf
) -> list[tuple[Any, bool]]:
    """Returns, for every leaf of `tree`, the leaf of `prefix` above it, and whether both are at the same place.

    Raises:
        SpecError: `prefix` is not a tree prefix of `tree`.
    """
    found: list[tuple[Any, bool]] = []

    def spread(leaf: Any, subtree: Any) -> None:
        here = is_leaf(subtree) or optree.treespec_is_leaf(optree.tree_structure(subtree, is_leaf=is_leaf))
        found.extend([(leaf, here)] * len(optree.tree_leaves(subtree, is_leaf=is_leaf)))

    try:
        optree.tree_map_(spread, prefix, tree, is_leaf=is_prefix_leaf)
    except (ValueError, TypeError):
        errors = [make(argument) for make in optree.prefix_errors(prefix, tree, is_leaf=is_prefix_leaf)]
        shown = [line for error in errors for line in _sentences(str(error))]
        raise SpecError(
            message(
                function,
                f"{argument} is not a tree prefix of {name}",
                [f"{argument}: {optree.tree_structure(prefix, is_leaf=is_prefix_leaf)}", *shown],
                hint=f"{argument} may be one P for all, or a tree whose leaves stand at or above those of {name}",
            )
        ) from None
    return found


def _sentences(error: str) -> list[str]:
    """Returns the parts of an error of optree, a line each."""
    text = " ".join(error.removeprefix("pytree structure error: ").split())
    return [part.strip(" ,") for part in re.split("At that key path,|,? but at the same key path", text)]


def unflatten(treedef: optree.PyTreeSpec, leaves: Sequence[Any]) -> Any:
    """Returns the tree of this structure with these leaves."""
    return optree.tree_unflatten(treedef, leaves)


def register_dataclass(cls: type[T], *, meta_fields: Sequence[str] = ()) -> type[T]:
    """Makes a class a pytree node, so that trees may hold its objects. Returns the class: it is also a decorator.

    Args:
        cls: a dataclass or a class of attrs; so also a module in the style of Equinox.
        meta_fields: fields that are not children: what they hold is a constant of the tree, and must be equal on all
            ranks. Fields with ``metadata={"static": True}`` are among them.

    Raises:
        UsageError: the class has no fields, `meta_fields` names others, or it is a node already.

    Source: `jax.tree_util.register_dataclass`.

    >>> import dataclasses, torch
    >>> @hpfunc.register_dataclass
    ... @dataclasses.dataclass(frozen=True)
    ... class Linear:
    ...     weight: torch.Tensor
    ...     bias: torch.Tensor
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> layer = hpfunc.shard(Linear(torch.ones(2, 2), torch.ones(2)), mesh, hpfunc.P("shard"))
    >>> type(layer).__name__, layer.bias.shape
    ('Linear', (2,))
    """
    name, described = "hpfunc.register_dataclass", getattr(cls, "__name__", repr(cls))
    fields = _fields_of(cls)
    if fields is None:
        hint = "decorate the class with dataclasses.dataclass or attrs.define first, and give the class, not an object"
        raise UsageError(message(name, f"{described} is not a dataclass, nor a class of attrs", hint=hint))
    if unknown := [field for field in meta_fields if field not in fields]:
        raise UsageError(message(name, f"{described} has no fields {unknown}", [f"its fields: {', '.join(fields)}"]))
    meta = tuple(field for field, is_static in fields.items() if is_static or field in meta_fields)
    children = tuple(field for field in fields if field not in meta)

    def flatten_object(value: Any) -> tuple[list[Any], tuple[Any, ...], tuple[str, ...]]:
        return [getattr(value, field) for field in children], tuple(getattr(value, field) for field in meta), children

    def unflatten_object(constants: tuple[Any, ...], values: Any) -> Any:
        made = object.__new__(cls)  # `__init__` may compute, and check, what was computed and checked before
        for field, value in zip((*children, *meta), (*values, *constants), strict=True):
            object.__setattr__(made, field, value)
        return made

    try:
        cast(Any, optree.register_pytree_node)(
            cls, flatten_object, unflatten_object, path_entry_type=optree.GetAttrEntry, namespace=GLOBAL_NAMESPACE
        )
    except ValueError as error:
        raise UsageError(message(name, f"{described} is a pytree node already")) from error
    return cls


def _fields_of(cls: Any) -> dict[str, bool] | None:
    """Returns the fields of a class, and whether each is marked as static; None if it has none that can be read."""
    if not isinstance(cls, type):
        return None
    if dataclasses.is_dataclass(cls):
        found: Any = dataclasses.fields(cls)
    elif (found := getattr(cls, "__attrs_attrs__", None)) is None:
        return None
    return {field.name: bool(field.metadata.get("static")) for field in found}
