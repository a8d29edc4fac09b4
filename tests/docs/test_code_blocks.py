"""Every Python block of the documentation runs, and prints what its page says."""

import contextlib
import subprocess
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs import pages
from tests.helpers.ranks import Pool

TIMEOUT_S = 240
PAGES: defaultdict[int, list[Path]] = defaultdict(list)
for path in pages.paths():
    text = path.read_text()
    if pages.code_blocks(text):
        PAGES[pages.num_ranks(text)].append(path)


def run(rank: int, paths: list[Path], folder: Path) -> list[str]:
    with warnings.catch_warnings(), contextlib.chdir(folder):  # what a page writes is not for the repository
        warnings.simplefilter("default")  # as for a reader
        return pages.run_all(rank, paths)


@pytest.mark.processes
@pytest.mark.parametrize("ranks", sorted(PAGES))
def test_the_code_of_the_pages_runs(pool: Callable[[int], Pool], ranks: int, tmp_path: Path):
    wrong = pool(ranks).run(run, PAGES[ranks], tmp_path, deadline_s=TIMEOUT_S)
    assert not any(wrong), "\n".join(wrong[0])


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_first_programs_run_on_any_number_of_ranks(pool: Callable[[int], Pool], ranks: int, tmp_path: Path):
    first = [pages.ROOT / "README.md", pages.ROOT / "docs/index.md"]
    assert not any(pool(ranks).run(run, first, tmp_path, deadline_s=TIMEOUT_S))


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("```python\nprint(1)\n```\n<!-- prints -->\n```text\n2\n```\n", "the page says\n2\nbut the block prints\n1\n"),
        ("# Title\n\n```python\nx = 1\nx.y\n```\n", 'page.md", line 5'),
    ],
)
def test_a_page_that_is_wrong_fails(tmp_path: Path, code: str, complaint: str):
    page = tmp_path / "page.md"
    page.write_text(code)
    command = [sys.executable, "-m", "tests.docs.pages", str(page)]
    done = subprocess.run(command, cwd=pages.ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode != 0
    assert complaint in done.stderr
