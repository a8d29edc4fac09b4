"""Local parts from and to numpy, and every library that speaks DLPack."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from .. import backends
from .._errors import LeafError, SpecError, message
from .._running.agreement import agreeing
from .._running.writes import share
from .._transforms.shard import leaf_specs
from .._values.array import ShardedArray, check_sharded, describe, is_sharded, layout_of
from .._values.mesh import Mesh, PartitionSpec
from .._values.tree import flatten, paths, unflatten

_FROM, _TO = "hpfunc.interop.from_local", "hpfunc.interop.to_numpy"


def from_local(local: Any, shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> ShardedArray:
    """Returns the array of which `local` is this rank's part, in the same memory.

    Args:
        local: a tensor of the mesh's framework, a numpy array, or anything with ``__dlpack__``; on the mesh's device.
            On MindSpore, one of torch, too; on torch, ``mindspore.utils.to_dlpack(x)`` of a tensor of MindSpore.
        shape: of the whole array.
        spec: how it is cut; every cut dim of size n over c ranks into parts of ceil(n / c), the last ones shorter or
            empty. It may be unreduced.
        mesh: where it lies.

    Raises:
        SpecError: the spec does not fit the shape or the mesh, or a part has another shape than it should.
        LeafError: the memory of `local` cannot be shared, or is on another device.
        AgreementError: ranks disagree on shape, spec or dtype, or one of them refuses.

    Communication: a digest.

    >>> import numpy as np
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> part = np.zeros((4, 2), np.float32)
    >>> array = hpfunc.interop.from_local(part, (4, 2), hpfunc.P("shard"), mesh)
    >>> part[0] = 1.0
    >>> array.local[0]
    tensor([1., 1.])
    """
    facts: list[str] = []
    with agreeing(mesh, _FROM, lambda: "".join(facts)):
        tensor = _shared(local, mesh)
        whole = SimpleNamespace(shape=tuple(shape))
        leaf_specs(_FROM, whole, "local", spec, mesh, allow_unreduced=True)
        layout = layout_of(whole.shape, spec, mesh)
        wanted = layout.local_shape(mesh.coordinate)
        if tuple(tensor.shape) != wanted:
            rule = f"the part of rank {mesh.rank} has shape {tuple(tensor.shape)}, and should have {wanted}"
            leaf = f"local: of an array of shape {whole.shape}, spec {spec!r}"
            raise SpecError(message(_FROM, rule, [leaf], mesh=mesh))
        facts.append(f"shape {whole.shape}, spec {spec!r}, {tensor.dtype}")
    return share(ShardedArray(tensor, whole.shape, spec, mesh))


def _shared(local: Any, mesh: Mesh) -> Any:
    try:
        tensor = backends.get(mesh.framework).as_tensor(local)
    except (AttributeError, BufferError, RuntimeError, TypeError) as error:
        hint = "a tensor, a numpy array that may be written to, or what has __dlpack__"
        rule = f"the memory of a {type(local).__name__} cannot be shared: {error}"
        raise LeafError(message(_FROM, rule, hint=hint)) from error
    device = backends.get(mesh.framework).device_of(tensor)
    if device not in (mesh.device, mesh.device.partition(":")[0]):
        rule = f"the part lies on {device}, and the mesh on {mesh.device}"
        raise LeafError(message(_FROM, rule, mesh=mesh, hint="move it there first"))
    return tensor


def to_numpy(tree: Any) -> Any:
    """Returns a tree with this rank's part of each `ShardedArray` as a numpy array, in the same memory.

    For whole arrays unshard first, then ``numpy.asarray(whole)`` on each tensor. Other libraries take a part by DLPack,
    ``jax.dlpack.from_dlpack(array.local)``; `from_local` is the inverse for all of them.

    Raises:
        LeafError: a leaf is not a `ShardedArray`, lies on an accelerator, or has a dtype that numpy lacks (bfloat16).

    Communication: none.

    >>> import torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> hpfunc.interop.to_numpy(hpfunc.shard({"w": torch.ones(2)}, mesh, hpfunc.P("shard")))
    {'w': array([1., 1.], dtype=float32)}
    """
    check_sharded(_TO, "tree", tree, "numpy.asarray(tensor) is for tensors")
    leaves, treedef = flatten(tree, is_sharded)
    parts, bad = [], []
    for name, leaf in zip(paths(tree, "tree", is_sharded), leaves, strict=True):
        try:
            parts.append(backends.get(leaf.mesh.framework).as_numpy(leaf._value))
        except TypeError:
            bad.append(f"{name}: {describe(leaf)}, {leaf.dtype} on {leaf.mesh.device}")
    if bad:
        hint = "cast it to float32, or move it to the host, first"
        raise LeafError(message(_TO, "numpy cannot share the memory of a part", bad, hint=hint))
    return unflatten(treedef, parts)
