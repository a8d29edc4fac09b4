"""Context variables: the enclosing mesh, step, differentiation, unit, module call and timeline.

All context variables of hpfunc are here. A hook of autograd sees the context of the code that started its backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from .._errors import MeshError, message
from .._values.mesh import Mesh
from .differentiation import Run
from .session import Session
from .timeline import Timeline

T = TypeVar("T")
_mesh: ContextVar[Mesh | None] = ContextVar("hpfunc_mesh", default=None)
_session: ContextVar[Session | None] = ContextVar("hpfunc_session", default=None)
_run: ContextVar[Run | None] = ContextVar("hpfunc_run", default=None)
_timeline: ContextVar[Timeline | None] = ContextVar("hpfunc_timeline", default=None)
unit_label: ContextVar[str | None] = ContextVar("hpfunc_unit", default=None)
"""The unit whose function is being called."""
module_call: ContextVar[Any] = ContextVar("hpfunc_module_call", default=None)
"""The call of a module's copy (see `nn`)."""
module_unit: ContextVar[str | None] = ContextVar("hpfunc_module_unit", default=None)
"""The path of that one of its units which computes."""


@contextmanager
def holding(variable: ContextVar[T | None], value: T) -> Iterator[T]:
    """Sets a context variable for the body of a ``with`` statement."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def current_session() -> Session | None:
    """Returns the session of the enclosing `sharded` step or `accumulate`, if there is one."""
    return _session.get()


@contextmanager
def stepping(session: Session) -> Iterator[None]:
    """Makes `session` the session of the enclosing step, and its mesh the mesh in use."""
    with holding(_session, session), holding(_mesh, session.mesh):
        yield


def current_run() -> Run | None:
    """Returns the differentiation whose forward or backward is running."""
    return _run.get()


def differentiating(run: Run) -> AbstractContextManager[Any]:
    """Makes `run` the enclosing differentiation."""
    return holding(_run, run)


def use_mesh(mesh: Mesh) -> AbstractContextManager[Mesh]:
    """Makes `mesh` the default of `psum` and the other collectives, for the body of a ``with`` statement.

    >>> with use_mesh(hpfunc.make_mesh((1,), ("shard",))) as mesh:
    ...     current_mesh("example").axis_names
    ('shard',)
    """
    return holding(_mesh, mesh)


def mesh_in_use() -> Mesh | None:
    """Returns the mesh of the enclosing step or `use_mesh`, if there is one.

    >>> mesh_in_use() is None
    True
    """
    return _mesh.get()


def current_mesh(function: str, mesh: Mesh | None = None) -> Mesh:
    """Returns `mesh`; if it is None, the mesh in use.

    Raises:
        MeshError: no mesh is in use.
    """
    found = mesh if mesh is not None else _mesh.get()
    if found is None:
        hint = "call it inside a hpfunc.sharded step or `with hpfunc.use_mesh(mesh)`, or give `mesh=`"
        raise MeshError(message(function, "no mesh is in use", hint=hint))
    return found


def current_timeline() -> Timeline | None:
    """Returns the timeline that is being recorded."""
    return _timeline.get()


def record_timeline() -> AbstractContextManager[Timeline]:
    """Records the planned steps in the body of a ``with`` statement.

    Only steps that follow a plan leave spans. The first call of a `sharded` step only records it and leaves none.

    >>> with record_timeline() as timeline:
    ...     pass
    >>> timeline.spans
    []
    """
    return holding(_timeline, Timeline())
