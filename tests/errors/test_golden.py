"""The recorded texts: each belongs to a test, and has the form of ours."""

from __future__ import annotations

import re

import pytest

import hpfunc as hp
from tests.errors import (
    test_autograd,
    test_debug,
    test_loops,
    test_meshes,
    test_modes,
    test_modules,
    test_policies,
    test_steps,
    test_unit_functions,
    test_values,
    test_versions,
)
from tests.helpers.refusals import GOLDEN

WARNINGS = {
    "a_step_that_is_made_anew",
    "nothing_can_be_hidden",
    "one_unit_holds_most_of_the_weights",
    "parts_of_different_sizes",
    "parts_of_weights_in_the_loss",
    "the_whole_model_is_one_unit",
    "updated_weights_that_nobody_keeps",
    test_versions.NEW,
}
FILES = sorted(path.stem for path in GOLDEN.glob("*.txt"))


def test_each_text_has_its_test() -> None:
    modules = (
        test_values,
        test_steps,
        test_policies,
        test_debug,
        test_modules,
        test_meshes,
        test_modes,
        test_autograd,
        test_versions,
        test_unit_functions,
        test_loops,
    )
    cases = [name for module in modules for name in module.CASES]
    assert len(set(cases)) == len(cases)
    assert set(FILES) == set(cases) | WARNINGS


@pytest.mark.parametrize("name", [str(path.relative_to(GOLDEN).with_suffix("")) for path in GOLDEN.rglob("*.txt")])
def test_texts_name_our_class_and_our_function(name: str) -> None:
    text = (GOLDEN / f"{name}.txt").read_text()
    for part in re.split(r"--- rank \d+\n", text):
        if part:
            found = re.match(r"(\w+): hpfunc(?:\.\w+)*: \S", part)
            assert found, part
            assert issubclass(getattr(hp, found[1]), (hp.HpfuncError, hp.HpfuncWarning)), part
    assert all(line == line.rstrip() for line in text.splitlines()), "trailing blanks"
    assert max(map(len, text.splitlines())) < 250
