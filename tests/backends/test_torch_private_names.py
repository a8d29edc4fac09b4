"""Each private name of torch does what hpfunc relies on: the rows in `tests/backends/private`."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable

import pytest
import torch

from tests.backends.private.rows import ROWS, USES, outcome
from tests.helpers.ranks import Pool

for _rows in ("tensors", "autograd", "modules", "groups"):
    importlib.import_module(f"tests.backends.private.{_rows}")


def checked(rank: int, name: str) -> str:
    return outcome(rank, name)


def test_each_private_name_has_a_row() -> None:
    new, old = sorted(USES.keys() - ROWS.keys()), sorted(ROWS.keys() - USES.keys())
    assert not new, f"private names of torch without a row: {[(name, USES[name]) for name in new]}"
    assert not old, f"rows for names that hpfunc does not use: {old}"


@pytest.mark.parametrize("name", sorted(name for name, row in ROWS.items() if not row.on_ranks))
def test_a_private_name_does_what_hpfunc_relies_on(name: str) -> None:
    if said := outcome(0, name):
        pytest.fail(said, pytrace=False)


@pytest.mark.processes
@pytest.mark.parametrize("name", sorted(name for name, row in ROWS.items() if row.on_ranks))
def test_a_private_name_of_groups_does_what_hpfunc_relies_on(pool: Callable[..., Pool], name: str) -> None:
    if said := next(filter(None, pool(2).run(checked, name)), ""):
        pytest.fail(said, pytrace=False)


def test_a_name_that_is_gone_is_told_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_neg_view")
    said = outcome(0, "torch._neg_view")
    assert "torch._neg_view returns a lazily negated view of the same memory no more (AttributeError" in said
    assert re.search(r"hpfunc/backends/torch/private.py:\d+", said)
