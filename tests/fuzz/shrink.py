"""From a case to a smaller one that fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from tests.fuzz.cases import Around, Array, Call, Case, Entry, Grid, Join, Op, Ref, Unit
from tests.fuzz.drive import Result

ROUND = 24


def size(case: Case) -> int:
    """Returns how much there is to read in a case."""
    flags = sum(unit.remat + unit.checkpoints + (unit.output != "tensor") + len(unit.unused) for unit in case.units)
    ops = sum(1 + len(op.weights) + len(str(op.options)) // 20 for unit in case.units for op in unit.ops)
    calls = sum(len(s.units) + s.is_checkpointed + s.is_without_grad if isinstance(s, Call) else 2 for s in case.body)
    arrays = sum(3 + len(a.shape) + a.num_rows + sum(1 for e in a.spec if e) + (a.group != "a") for a in case.arrays)
    changed = sum(getattr(case.around, f.name) != f.default for f in fields(Around)) + len(case.around.policy)
    return flags + 2 * ops + 2 * calls + arrays + 2 * changed + 3 * len(case.loss) + 2 * len(case.grid.names)


def shrink(case: Case, key: str, run: Callable[[Sequence[Case]], Iterator[Result]], seconds: float) -> Case:
    """Returns the smallest case found within the time that still has a find of this kind."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        smaller = sorted((c for c in candidates(case) if size(c) < size(case)), key=size)
        found = None
        for start in range(0, len(smaller), ROUND):
            some = smaller[start : start + ROUND]
            found = next((result.case for result in run(some) if key in result.keys), None)
            if found is not None or time.monotonic() > end:
                break
        if found is None:
            return case
        case = found
    return case


def candidates(case: Case) -> Iterator[Case]:
    """Yields cases that are simpler in one point."""
    for smaller in (*_around(case), *_body(case), *_units(case), *_arrays(case), *_grid(case)):
        if (tidied := _tidy(smaller)) is not None:
            yield tidied


# --- parts ----------------------------------------------------------------------------------------------------------
def _around(case: Case) -> Iterator[Case]:
    around = case.around
    for f in fields(Around):
        if getattr(around, f.name) != f.default:
            yield replace(case, around=replace(around, **{f.name: f.default}))
    for i in range(len(around.policy)):
        yield replace(case, around=replace(around, policy=around.policy[:i] + around.policy[i + 1 :]))
    yield replace(case, around=replace(around, update="", is_donated=False))
    yield replace(case, around=replace(around, param_dtype="", reduce_dtype=""))
    yield replace(case, around=Around())
    if case.has_detached_loss:
        yield replace(case, has_detached_loss=False)


def _body(case: Case) -> Iterator[Case]:
    for i, statement in enumerate(case.body):
        if len(case.body) > 1:
            yield _without_statement(case, i)
        for simpler in _statements(statement, i):
            if simpler != statement:
                yield _with_statement(case, i, simpler)
    for i in range(len(case.loss)):
        if len(case.loss) > 1:
            yield replace(case, loss=case.loss[:i] + case.loss[i + 1 :])


def _statements(statement: Call | Join, i: int) -> Iterator[Call | Join]:
    if isinstance(statement, Call):
        yield replace(statement, is_without_grad=False)
        yield replace(statement, is_checkpointed=False)
        yield from (replace(statement, units=(unit,)) for unit in statement.units)
        yield replace(statement, source=i)
    elif i:
        yield Join("add", i, i - 1)


def _with_statement(case: Case, i: int, statement: Call | Join) -> Case:
    return replace(case, body=(*case.body[:i], statement, *case.body[i + 1 :]))


def _without_statement(case: Case, i: int) -> Case:
    def moved(n: int) -> int:
        return n - 1 if n > i else n

    body: list[Call | Join] = []
    for j, s in enumerate(case.body):
        if j == i:
            continue
        if isinstance(s, Call):
            body.append(replace(s, source=moved(s.source)))
        else:
            body.append(replace(s, first=max(moved(s.first), 1 if body else 0), second=moved(s.second)))
    loss = tuple(replace(t, of=moved(t.of)) if isinstance(t.of, int) else t for t in case.loss)
    return replace(case, body=tuple(body), loss=loss)


def _units(case: Case) -> Iterator[Case]:
    for i, unit in enumerate(case.units):
        changes: list[dict[str, Any]] = [
            {"ops": unit.ops[:k] + unit.ops[k + 1 :]} for k in range(len(unit.ops)) if len(unit.ops) > 1
        ]
        changes += [{"unused": ()}, {"output": "tensor"}, {"remat": False}, {"tree": "dict"}, {"checkpoints": False}]
        for k, op in enumerate(unit.ops):
            changes += [{"ops": (*unit.ops[:k], simple, *unit.ops[k + 1 :])} for simple in _ops(op)]
        for change in changes:
            changed = replace(unit, **change)
            if changed != unit:
                yield replace(case, units=(*case.units[:i], changed, *case.units[i + 1 :]))


def _ops(op: Op) -> Iterator[Op]:
    if any(ref.is_made for ref in op.weights):
        yield replace(op, weights=tuple(replace(ref, is_made=False) for ref in op.weights))
    for i, (name, value) in enumerate(op.options):
        if name == "steps":
            for k in range(len(value)):
                shorter = (name, value[:k] + value[k + 1 :])
                yield replace(op, options=(*op.options[:i], shorter, *op.options[i + 1 :]))
        elif name == "into" and value != "square":
            yield replace(op, options=(*op.options[:i], (name, "square"), *op.options[i + 1 :]))


def _arrays(case: Case) -> Iterator[Case]:
    axis = case.grid.data_axes[-1]
    for array in case.arrays:
        changes: list[dict[str, Any]] = [{"group": "a"}] if array.dtype == "float64" and array.kind != "plain" else []
        if not array.kind:
            changes += [{"spec": ()}] + ([{"spec": (axis,)}] if array.shape and not array.num_rows else [])
        for change in changes:
            if (changed := replace(array, **change)) != array:
                yield _with_array(case, changed)
        if array.num_rows:
            yield _without_rows(case, array)


def _with_array(case: Case, changed: Array) -> Case:
    return replace(case, arrays=tuple(changed if a.name == changed.name else a for a in case.arrays))


def _without_rows(case: Case, array: Array) -> Case:
    n = array.num_rows
    case = _with_array(case, replace(array, shape=array.shape[n:], spec=array.spec[n:], num_rows=0))

    def whole(ref: Ref) -> Ref:
        return replace(ref, rows=()) if ref.array == array.name else ref

    def changed(unit: Unit) -> Unit:
        ops = tuple(replace(op, weights=tuple(map(whole, op.weights))) for op in unit.ops)
        return replace(unit, ops=ops, unused=tuple(map(whole, unit.unused)))

    return replace(case, units=tuple(map(changed, case.units)))


def _grid(case: Case) -> Iterator[Case]:
    if any(array.kind in ("tp", "ep") for array in case.arrays) or any(unit.is_expert for unit in case.units):
        return
    simple = Grid((case.num_ranks,), ("shard",), ("shard",))
    if case.grid != simple:
        arrays = tuple(replace(array, spec=_one_axis(array.spec), kind="" if array.kind == "dense" else array.kind)
                       for array in case.arrays)  # fmt: skip
        yield replace(case, grid=simple, arrays=arrays)
    if not case.grid.given:
        yield replace(case, grid=replace(case.grid, given=True))


def _one_axis(spec: tuple[Entry, ...]) -> tuple[Entry, ...]:
    first = next((i for i, entry in enumerate(spec) if entry), None)
    return tuple("shard" if i == first else None for i in range(len(spec)))


def _tidy(case: Case) -> Case | None:
    """Returns a case without what nothing uses, or None if nothing is left."""
    used = sorted({unit for s in case.body if isinstance(s, Call) for unit in s.units})
    if not case.loss or not case.body:
        return None
    place = {unit: i for i, unit in enumerate(used)}
    body = tuple(replace(s, units=tuple(place[u] for u in s.units)) if isinstance(s, Call) else s for s in case.body)
    units = tuple(case.units[unit] for unit in used)
    names = {ref.array for unit in units for ref in unit.refs} | {t.of for t in case.loss if isinstance(t.of, str)}
    arrays = tuple(array for array in case.arrays if array.name in names)
    if not any(array.group == "a" for array in arrays):
        alone = [array for array in case.arrays if array.group == "a"][:1]
        if not alone:
            return None
        arrays = (*arrays, *alone)
    return replace(case, body=body, units=units, arrays=arrays)
