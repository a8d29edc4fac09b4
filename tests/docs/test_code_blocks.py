"""Every Python block of the documentation runs, and prints what its page says."""

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.docs import pages

TIMEOUT_S = 240
PAGES: defaultdict[int, list[Path]] = defaultdict(list)
for path in pages.paths():
    text = path.read_text()
    if pages.code_blocks(text):
        PAGES[pages.num_ranks(text)].append(path)


def run_pages(ranks: int, paths: list[Path]) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return subprocess.run(
        [sys.executable, *launcher, "-m", "tests.docs.pages", *map(str, paths)],
        cwd=pages.ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.parametrize("ranks", sorted(PAGES))
def test_the_code_of_the_pages_runs(ranks: int):
    done = run_pages(ranks, PAGES[ranks])
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
    done = run_pages(1, [page])
    assert done.returncode != 0
    assert complaint in done.stderr
