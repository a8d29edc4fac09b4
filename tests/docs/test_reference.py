"""The reference pages leave no public name out."""

import inspect

import pytest

import hpfunc
from tests.docs import pages

PUBLIC = sorted(name for name in vars(hpfunc) if not name.startswith("_") and not inspect.ismodule(vars(hpfunc)[name]))
ERRORS = [
    name for name in PUBLIC if inspect.isclass(vars(hpfunc)[name]) and issubclass(vars(hpfunc)[name], (Exception))
]


def text(page: str) -> str:
    return (pages.ROOT / page).read_text()


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_in_the_reference(name: str):
    assert any(line.split()[-1:] == [name] for line in text("docs/api.md").splitlines()), f"docs/api.md lacks {name}"


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_has_a_section(name: str):
    assert name == "HpfuncError" or f"\n## {name}\n" in text("docs/errors.md")


def test_the_readme_leads_to_every_page():
    found = {path.relative_to(pages.ROOT).as_posix() for path in (pages.ROOT / "docs").rglob("*.md")}
    found = {path for path in found if not path.startswith(("docs/_build", "docs/design/"))}
    included = {
        "docs/index.md",
        "docs/contributing.md",
        "docs/changelog.md",
    }  # the site's home, and files beside the README
    assert {path for path in found - included if f"({path})" not in text("README.md")} == set()
    assert "(docs/design/index.md)" in text("README.md")
