"""Collectives of the caller: pinned in the program of the enclosing step, or compared with all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .. import backends
from .._errors import HpfuncError
from .._values.mesh import Mesh
from .agreement import agreeing, control
from .context import current_session

Tensor = Any


def pinned(
    kind: str, axes: tuple[str, ...], mesh: Mesh, work: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """Returns `work`, a collective over `axes` that all ranks of the mesh must call at this place, in backward too."""
    session, backend = current_session(), backends.get(mesh.framework)
    if mesh.axis_size(axes) == 1:
        return work

    def run(tensor: Tensor) -> Tensor:
        facts = f"{kind} over {axes}: shape {tuple(tensor.shape)}, {backend.dtype_name(tensor)}"
        if session is not None:
            session.pin(facts)
        elif not backend.is_abstract(tensor):
            control(mesh).agree(f"hpfunc.{kind}", lambda: facts)
        return work(tensor)

    return run


@contextmanager
def together(function: str, mesh: Mesh, facts: Callable[[], str]) -> Iterator[None]:
    """Runs the body, in which ranks check their arguments. Then they compare `facts`, or the step pins them.

    Raises:
        AgreementError: facts differ, or another rank raised in the body.
    """
    session = current_session()
    if session is None:
        with agreeing(mesh, function, facts):
            yield
        return
    yield  # an error ends the step, on all ranks
    if mesh.size > 1:
        session.pin(f"{function}: " + "; ".join(facts().splitlines()))


@contextmanager
def refusing_together(function: str, mesh: Mesh) -> Iterator[None]:
    """Reports an error of the body to the other ranks, which wait to compare their next collective, so they raise too.

    Inside a `sharded` step it does nothing: the step ends on all ranks.
    """
    try:
        yield
    except HpfuncError as error:
        if current_session() is None:
            control(mesh).agree(function, lambda: "", error)
        raise
