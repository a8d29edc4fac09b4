"""`docs/design/map.md` names every file of hpfunc once, and nothing that is not there."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/design/map.md").read_text()
PICTURE = (ROOT / "docs/design/index.md").read_text()
THERE = {
    f"{path.relative_to(ROOT)}".removesuffix("__init__.py")
    for path in (ROOT / "hpfunc").rglob("*")
    if path.is_file() and path.parent.name != "__pycache__"
}
"""Every file of the package; a folder, with a slash at its end, stands for its ``__init__.py``."""


def entries(page: str) -> list[str]:
    """The folders and files that have a line in the lists of the map: headings, and first cells below them."""
    found, folder = [], ""
    for line in page.splitlines():
        if heading := re.match(r"## (?:`(hpfunc/.*)`)?", line):
            folder = heading[1] or ""
            found += [folder] if folder else []
        elif folder and (row := re.match(r"\| `([^`]+)` \|", line)):
            found.append(folder + row[1])
    return found


def wrong_entries(page: str) -> set[str]:
    counts = Counter(entries(page))
    return {entry for entry in THERE | set(counts) if counts[entry] != (entry in THERE)}


def dead_ends(page: str) -> list[str]:
    """What "to change X, open Y" names, and does not exist: paths, and names in parentheses behind their file."""
    table = page.split("## To change")[1].split("\n## ", maxsplit=1)[0]
    rows = [line.split("|")[2] for line in table.splitlines() if line.startswith("| ")][1:]
    wrong = []
    for path, name in re.findall(r"`([\w./]*[./]\w*)`(?: \(`(\w+)`\))?", "\n".join(rows)):
        place = ROOT / path if path.startswith(("tests/", "pyproject")) else ROOT / "hpfunc" / path
        if not place.exists() or (name and name not in place.read_text()):
            wrong.append(f"{path} {name}".strip())
    return wrong


def test_every_file_stands_in_the_map_once() -> None:
    assert {"hpfunc/", "hpfunc/py.typed", "hpfunc/planning/checking/", "hpfunc/_values/mesh.py"} <= THERE
    assert not wrong_entries(PAGE)


@pytest.mark.parametrize(
    ("old", "new", "entry"),
    [
        ("| `mesh.py` |", "| mesh |", "hpfunc/_values/mesh.py"),
        ("| `mesh.py` |", "| `meshes.py` |", "hpfunc/_values/meshes.py"),
        ("| `mesh.py` |", "| `layout.py` |", "hpfunc/_values/layout.py"),
        ("## `hpfunc/planning/checking/`", "## Checking", "hpfunc/planning/checking/"),
    ],
)
def test_a_wrong_line_is_found(old: str, new: str, entry: str) -> None:
    assert old in PAGE
    assert entry in wrong_entries(PAGE.replace(old, new))


def test_what_is_to_be_opened_exists() -> None:
    assert not dead_ends(PAGE)


def test_a_dead_end_is_found() -> None:
    assert dead_ends(PAGE.replace("`planning/windows.py`", "`planning/window.py`"))
    assert dead_ends(PAGE.replace("(`reduce_axes`)", "(`sum_axes_of`)")) == ["_values/reduction_axes.py sum_axes_of"]


def test_the_picture_has_the_rooms_of_the_contract_in_order() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = " ".join(contracts[0]["layers"]).replace("|", "")
    picture = PICTURE.split("```text")[1].split("```")[0]
    assert re.findall(r"│ (\w+)", picture) == layers.split()
    assert all(contract["name"] in PICTURE for contract in contracts)
