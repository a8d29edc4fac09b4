"""Uses one process's random numbers on all ranks, while they make values that must be equal on all ranks.

# Note [Whose random numbers]
Frameworks seed every process separately, and a program need not seed anything. So `init_fn` draws from the generators
of the first rank of the mesh: the framework's global ones (of the host and of the mesh's device), that of Python's
`random`, and numpy's global one. Afterwards a generator that had another state than the first rank's gets it back, so
ranks whose dropout masks differed before still have different ones. Generators that `init_fn` makes itself are not
handled: if it seeds them by the rank, the comparison of values fails (`_transforms.shard.compare_values`).
"""

from __future__ import annotations

import ast
import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from .. import backends
from .._values.mesh import Mesh
from .agreement import control, digest_of_text


@contextmanager
def numbers_of_one_process(mesh: Mesh) -> Iterator[None]:
    """A context in which all ranks draw the random numbers of the first rank. See Note [Whose random numbers].

    Communication: 8 bytes from each rank for each of up to four generators; if some differ, the first rank sends their
        states, about 10 KB each.
    """
    if mesh.size == 1:
        yield
        return
    own = _read(mesh)
    found = control(mesh).exchange("comparison of random generators", [digest_of_text(text) for text in own])
    places = [place for place, column in enumerate(zip(*found, strict=True)) if len(set(column)) > 1]
    if not places:
        yield
        return
    mine = json.dumps([own[place] for place in places]) if mesh.rank == mesh.ranks[0] else ""
    firsts = json.loads(control(mesh).exchange_text("states of random generators", mine)[0])
    others = [(place, text) for place, text in zip(places, firsts, strict=True) if text != own[place]]
    for place, text in others:
        _write(mesh, place, text)
    try:
        yield
    finally:
        for place, _ in others:
            _write(mesh, place, own[place])


def _read(mesh: Mesh) -> list[str]:
    """Returns the states of the generators of Python, numpy and the framework; "" for a missing one."""
    states = backends.get(mesh.framework).random_states(mesh.device)
    return [repr(random.getstate()), _read_numpy(), *(state.hex() for state in states)]


def _read_numpy() -> str:
    numpy = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    if not isinstance(state, tuple):  # missing, or replaced by another bit generator
        return ""
    return repr((state[0], state[1].tolist(), *state[2:]))


def _write(mesh: Mesh, place: int, text: str) -> None:
    if not text:
        return
    if place == 0:
        random.setstate(ast.literal_eval(text))
    elif place == 1:
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.set_state(ast.literal_eval(text))
    else:
        backends.get(mesh.framework).set_random_state(mesh.device, place - 2, bytes.fromhex(text))
