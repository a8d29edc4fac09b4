"""Rows of versions and backends."""

from __future__ import annotations

from collections.abc import Iterator

from ...backends.versions import TESTED, Version, asked, dotted, version_of
from .diagnosis import Row, Verdict
from .facts import Facts, Loading, shown

_BEFORE_NUMPY_2: Version = (2,)  # MindSpore's import, or its first operator, may fail with numpy 2
_NEEDS = {"torch": {"torch"}, "torch_npu": {"torch", "torch_npu"}, "mindspore": {"mindspore"}}


def version_rows(facts: Facts) -> Iterator[Row]:
    """Yields a row for hpfunc, and one for each distribution that it builds on and finds, or cannot do without."""
    version = facts.versions.get("hpfunc")
    yield Row("hpfunc", f"{version or 'a checkout that is not installed'}, in {facts.where}")
    for name in TESTED:
        if name in facts.versions:
            yield _version_row(name, facts)
        elif name in ("Python", "optree"):
            yield Row(name, "not found", "wrong", "pip install hpfunc")
        elif name == "numpy":
            yield Row(name, "not installed", "warn", f"pip install 'hpfunc[{facts.used}]'")


def _version_row(name: str, facts: Facts) -> Row:
    version = version_of(facts.versions[name])
    first, end = TESTED[name]
    if name == "numpy" and "mindspore" in facts.versions:
        end = _BEFORE_NUMPY_2
    value = shown(facts.versions[name])
    if version >= first and (end is None or version < end):
        return Row(name, value)
    needed = name in ("Python", "optree") or name in _NEEDS.get(facts.used, {facts.used})
    if name == "numpy":
        needed = facts.used == "mindspore"
    is_new = version >= first and name != "numpy"
    wanted = asked(name, end)
    verdict: Verdict = "wrong" if needed and not is_new else "warn"
    remedy = f"use Python {dotted(first)} or newer" if name == "Python" else f"pip install '{wanted}'"
    return Row(name, f"{value}; tested with {wanted.removeprefix(name)}", verdict, remedy)


def backend_rows(facts: Facts) -> Iterator[Row]:
    """Yields a row for each backend, then one for that which `make_mesh` uses."""
    for name, loading in facts.backends.items():
        yield _backend_row(name, loading, facts)
    named = facts.env.get("HPFUNC_BACKEND")
    value = f"{shown(facts.used)}{', named by HPFUNC_BACKEND' if named else ''}"
    used = facts.backends.get(facts.used)
    if used is None:
        remedy = f"set HPFUNC_BACKEND to one of {', '.join(facts.backends)}"
        yield Row("backend", f"{value}: there is no such backend", "wrong", remedy)
    elif used.state == "absent":
        yield Row("backend", f"{value}: not installed", "wrong", f"pip install 'hpfunc[{_extra(facts.used)}]'")
    elif used.state == "fails":
        yield Row("backend", f"{value}: does not load", "wrong", f"see the row of backend {facts.used}")
    else:
        yield Row("backend", value)


def _backend_row(name: str, loading: Loading, facts: Facts) -> Row:
    title = f"backend {name}"
    if loading.state == "fails":
        verdict: Verdict = "wrong" if name == facts.used else "warn"
        remedy = f"pip install 'hpfunc[{_extra(name)}]' brings versions that fit; import {name} alone to see all of it"
        return Row(title, f"does not load: {loading.why}", verdict, remedy)
    texts = {"loads": "loads", "absent": "not installed", "untried": "installed, not loaded by this process"}
    return Row(title, texts[loading.state])


def _extra(name: str) -> str:
    return "npu" if name == "torch_npu" else name
