"""`doctor`: looks at this process, and with a mesh at all of its ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator

from ..._errors import UsageError, message
from ..._values.mesh import Mesh
from ..agreement import control
from ..context import current_session
from ..link_probe import probe
from .comparison import Report, compare, report
from .diagnosis import Diagnosis, Row
from .examine import examine
from .facts import Facts, size

_NAME = "hpfunc.doctor"


def doctor(mesh: Mesh | None = None) -> Diagnosis:
    """Looks at what this installation and this job can do, and says what to change.

    It looks at versions, backends, devices, the launcher's variables, NCCL and its settings, limits of the system, the
    network and the clock. Without a mesh it looks at this process alone, also where nothing else of hpfunc works:
    whatever is broken is a row of the result. It starts no device. ``python -m hpfunc doctor`` prints the same, and
    tries to load all backends that are installed, not only the one in use.

    Args:
        mesh: ranks that compare what they have found, and measure their links. All of them call this together, outside
            of `sharded` steps.

    Returns:
        The diagnosis, a value: print it, ask for its `problems`, or store it with `to_json`. With a mesh, each rank has
        its own rows, and those of others that are not ok.

    Raises:
        UsageError: it is called with a mesh inside of a step.
        PeerError: another rank of the mesh did not call it within the timeout.

    Communication: none without a mesh. With one of several ranks: a few kilobytes from each rank, and `probe` for each
    axis.

    >>> diagnosis = hpfunc.doctor()
    >>> {row.verdict for row in diagnosis.rows} <= {"ok", "warn", "wrong"}
    True
    """
    return diagnose(mesh)


def diagnose(mesh: Mesh | None = None, *, tries_all: bool = False) -> Diagnosis:
    """See `doctor`. With `tries_all` each backend that is installed is loaded, in a process of its own."""
    from .survey import survey  # it loads much of Python's library, and few programs call it

    if mesh is not None and current_session() is not None:
        raise UsageError(message(_NAME, "it is called inside of a step", hint="call it before the step"))
    facts = survey(None if mesh is None else mesh.framework, tries_all=tries_all)
    rows = examine(facts)
    if mesh is None:
        more = [Row("links", "not measured; hpfunc.doctor(mesh), called by all ranks, measures them")]
    elif mesh.size == 1:
        more = [Row("links", "one rank, none to measure")]
    else:
        more = [*_links(mesh), *_compared(mesh, facts, rows)]
    return Diagnosis((*rows, *more))


def _links(mesh: Mesh) -> Iterator[Row]:
    for axis in (axis for axis, length in mesh.shape.items() if length > 1):
        link = probe(mesh, axis)
        value = f"{link.latency_s * 1e6:.0f} us, {link.bytes_per_s / 1e9:.3g} GB/s"
        yield Row(f"link along {axis}", f"{value}; weights below {size_of_pack(link.pack_below_bytes)} are packed")


def size_of_pack(num_bytes: int) -> str:
    """Returns a size that is at most some megabytes."""
    return f"{num_bytes >> 10} KiB" if num_bytes < 1 << 20 else size(num_bytes)


def _compared(mesh: Mesh, facts: Facts, rows: tuple[Row, ...]) -> Iterator[Row]:
    ranks = control(mesh)
    ranks.agree(_NAME, lambda: str(mesh))
    mine = report(facts, rows, time.time())  # all ranks have just left the agreement
    texts = ranks.exchange_text("reports of the ranks", mine.to_json())
    reports = {rank: Report.from_json(text) for rank, text in zip(ranks.ranks, texts, strict=True)}
    yield from compare(reports, mesh.rank)
