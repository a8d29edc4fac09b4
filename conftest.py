"""What all tests and docstring examples share."""

import pytest

import hpfunc


@pytest.fixture(autouse=True)
def names_in_examples(doctest_namespace: dict[str, object]) -> None:
    """Lets the example of a docstring use the package that it belongs to without an import."""
    doctest_namespace["hpfunc"] = hpfunc
