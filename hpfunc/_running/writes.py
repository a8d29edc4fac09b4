"""Detects writes into the memory of arrays, which are immutable, when an array is used.

# Note [Noticing writes]
A framework counts the writes into a tensor. The count is kept when an array comes from `shard`, `init`, `load` or a
step, or else when the array is first used, and must be the same on every later use. Not watched are arrays whose memory
others may write to by contract (`optim.bind`, `interop`), parts of a larger tensor, all of which share one count, and
writes that no framework counts: into tensors of inference mode, by numpy, in MindSpore. The step may write into the
memory of a donated array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .. import backends
from .._errors import UsageError, message
from .._values.array import Owner, ShardedArray, describe
from ..backends import Backend

UNWATCHED = -1
HINT = (
    "array.with_local(new) makes an array with other values, and leaves this one as it is; "
    "hpfunc.optim.bind is for loops that write in place"
)


def watch(array: ShardedArray) -> ShardedArray:
    """Begins to watch a new array for writes, and returns it."""
    _begin(array._owner, backends.get(array.layout.mesh.framework))
    return array


def _begin(owner: Owner, backend: Backend) -> None:
    count = backend.num_writes(owner.local)
    owner.writes = UNWATCHED if count is None else count


def renewed(array: ShardedArray) -> ShardedArray:
    """Returns a new array in the memory of this one, watched unless this one is shared by contract."""
    made, is_shared = array.with_local(array._value), array._root()[0]._owner.writes == UNWATCHED
    return share(made) if is_shared else watch(made)


def share(array: ShardedArray) -> ShardedArray:
    """Returns the array and stops watching it: others may write to its memory."""
    array._root()[0]._owner.writes = UNWATCHED
    return array


def refuse_written(function: str, arrays: Iterable[ShardedArray], names: Callable[[], Sequence[str]]) -> None:
    """Raises UsageError naming every array that was written into. See Note [Noticing writes]."""
    found = list(arrays)
    if not found:
        return
    backend = backends.get(found[0].layout.mesh.framework)
    written = [_is_written(array, backend) for array in found]
    if any(written):
        rows = zip(names(), found, written, strict=True)
        bad = [f"{name}: {describe(array)}" for name, array, is_bad in rows if is_bad]
        raise UsageError(message(function, "an array is immutable, and was written into", bad, hint=HINT))


def _is_written(array: ShardedArray, backend: Backend) -> bool:
    owner = array._root()[0]._owner
    if owner.writes == UNWATCHED or owner.local is None:
        return False
    if owner.writes is None:
        _begin(owner, backend)
        return False
    return backend.num_writes(owner.local) != owner.writes
