"""What ranks do together while they save or load: one rank acts for all, and all ranks learn of disk errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .._errors import ArgumentError, CheckpointError, message
from .._running.agreement import agreeing, control
from .._values.mesh import Mesh


@contextmanager
def disk(function: str, doing: str, mesh: Mesh | None = None) -> Iterator[None]:
    """Turns an `OSError` of the body into a `CheckpointError` that says which rank could not do what.

    Raises:
        CheckpointError: instead of the `OSError`.
    """
    try:
        yield
    except OSError as error:
        who = "cannot" if mesh is None or mesh.size == 1 else f"rank {mesh.rank} cannot"
        raise CheckpointError(message(function, f"{who} {doing}", [str(error)])) from error


def by_first(mesh: Mesh, function: str, act: Callable[[], Sequence[int]], num_numbers: int = 1) -> Sequence[int]:
    """Calls `act` on the first rank of a mesh, and returns its numbers on all ranks.

    Raises:
        AgreementError: `act` raised on the first rank, which raises its own error.

    Communication: an agreement, and `num_numbers` numbers.
    """
    numbers: Sequence[int] = [0] * num_numbers
    with agreeing(mesh, function, lambda: ""):
        if mesh.rank == mesh.ranks[0]:
            numbers = act()
    return numbers if mesh.size == 1 else control(mesh).exchange(f"{function}: numbers", numbers)[0]


def as_path(path: str | Path) -> Path:
    """Returns an absolute path, which stays valid when the process changes its folder.

    Raises:
        ArgumentError: it is not a path.
    """
    if not isinstance(path, (str, os.PathLike)):
        hint = "the path comes first: hpfunc.checkpoint.save(path, tree), hpfunc.checkpoint.load(path, like=tree)"
        rule = f"path must be a string or a Path, got {type(path).__name__}"
        raise ArgumentError(message("hpfunc.checkpoint", rule, hint=hint))
    return Path(path).expanduser().absolute()
