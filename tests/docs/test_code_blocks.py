"""Every Python block of the documentation runs, and prints what its page says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import pages

TIMEOUT_S = 120
PAGES = [page for page in pages.paths() if pages.code_blocks(page.read_text())]


def run_page(page: Path) -> subprocess.CompletedProcess[str]:
    ranks = pages.num_ranks(page.read_text())
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return subprocess.run(
        [sys.executable, *launcher, "-m", "tests.docs.pages", str(page)],
        cwd=pages.ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(pages.ROOT)))
def test_the_code_of_a_page_runs(page: Path):
    done = run_page(page)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


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
    done = run_page(page)
    assert done.returncode != 0
    assert complaint in done.stderr
