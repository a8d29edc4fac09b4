"""What MindSpore lacks is refused, or done in another way, as `lacks.py` says; and all else is tested here, too."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.frameworks import needs_mindspore
from tests.helpers.ranks import Pool
from tests.helpers.refusals import GOLDEN
from tests.mindspore import test_errors
from tests.mindspore.lacks import DIFFERS, LACKS, NOT_HERE

pytestmark = [pytest.mark.processes, needs_mindspore]
TESTS = Path(__file__).parents[1]
LEFT_OUT = {name for lack in LACKS.values() for name in lack.tests} | set(NOT_HERE)


@pytest.mark.parametrize("name", LACKS)
def test_what_is_lacking_is_refused_or_said(pool: Callable[..., Pool], name: str) -> None:
    lack = LACKS[name]
    for found in pool(2).run(lack.shown):
        assert lack.says in found


def test_the_design_note_names_each() -> None:
    note = (TESTS.parent / "docs" / "design" / "0005-mindspore.md").read_text()
    assert [name for name in LACKS if f"| {name} |" not in note] == []


def test_texts_that_differ_are_listed() -> None:
    assert {path.stem for path in (GOLDEN / "mindspore").glob("*.txt")} == set(DIFFERS)
    for name in DIFFERS:
        assert (GOLDEN / "mindspore" / f"{name}.txt").read_text() != (GOLDEN / f"{name}.txt").read_text()
    assert set(test_errors.ALL) >= set(DIFFERS)


def with_ranks(folder: str, pattern: str) -> dict[str, list[str]]:
    """Returns the tests that take the pool, by module."""
    found = {}
    for path in sorted((TESTS / folder).glob(pattern)):
        module = ".".join(path.relative_to(TESTS).with_suffix("").parts)
        members = vars(importlib.import_module(f"tests.{module}"))
        names = [n for n, test in members.items() if n.startswith("test_") and "pool" in _parameters(test)]
        found[module] = names
    return found


def _parameters(test: object) -> set[str]:
    inner = getattr(getattr(test, "hypothesis", None), "inner_test", test)
    return set(inspect.signature(inner).parameters) if callable(inner) else set()


def missing(here: set[str], left_out: set[str]) -> list[str]:
    """Returns the tests of torch that neither run on MindSpore nor are listed."""
    found = []
    for module, names in with_ranks("", "**/test_*.py").items():
        places = {module, module.partition(".")[0]}
        if module.startswith("mindspore.") or places & left_out:
            continue
        found += [f"{module}::{n}" for n in names if n not in here and f"{module}::{n}" not in left_out]
    return found


def test_each_test_of_torch_runs_here_or_is_listed() -> None:
    here = {name for names in with_ranks("mindspore", "test_*.py").values() for name in names}
    assert missing(here, LEFT_OUT) == [], "import it in tests/mindspore, or say in tests/mindspore/lacks.py why not"
    assert missing(here, LEFT_OUT - {"steps.test_compile"})  # the search sees something
    both = [name for name in LEFT_OUT if name.partition("::")[2] in here]
    assert both == [], "it runs here"
