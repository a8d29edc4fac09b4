"""The Markdown pages of the project, and the Python code in them.

The ``python`` blocks of a page are one program. Two comments, which readers do not see, direct its run::

    <!-- ranks: 4 -->     anywhere: the page runs on 4 processes; without it, on one
    <!-- prints -->       before a ``text`` block: it is exactly what the Python block above it prints

``python -m tests.docs.pages PAGE...`` runs pages on this rank, one after another; with ``--update`` it writes what the
blocks print into them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
PRINTS = "<!-- prints -->\n"


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """A Python block of a page.

    Attributes:
        code: its text.
        line: number of the line above it, so that a traceback names lines of the page.
        printed: what it should print, and where in the page that stands; None if the page does not say.
    """

    code: str
    line: int
    printed: tuple[str, slice] | None = None


def paths() -> list[Path]:
    """Returns every page of the project."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(page for page in pages if "_build" not in page.parts)


def num_ranks(page: str) -> int:
    """Returns how many processes the page runs on.

    >>> num_ranks("# HSDP\\n<!-- ranks: 4 -->\\n"), num_ranks("# FSDP")
    (4, 1)
    """
    found = re.search(r"^<!-- ranks: (\d+) -->$", page, re.MULTILINE)
    return int(found[1]) if found else 1


def code_blocks(page: str) -> list[CodeBlock]:
    """Returns the Python blocks of a page, in order.

    >>> page = "```python\\nprint(1)\\n```\\n\\n<!-- prints -->\\n```text\\n1\\n```\\n"
    >>> code_blocks(page)
    [CodeBlock(code='print(1)\\n', line=1, printed=('1\\n', slice(48, 50, None)))]
    """
    return list(_code_blocks(page))


def _code_blocks(page: str) -> Iterator[CodeBlock]:
    blocks = list(BLOCK.finditer(page))
    for block, following in itertools.zip_longest(blocks, blocks[1:]):
        if block["language"] != "python":
            continue
        printed = None
        if following and following["language"] == "text" and page[: following.start()].endswith(PRINTS):
            printed = following["text"], slice(*following.span("text"))
        yield CodeBlock(block["text"], page.count("\n", 0, block.start("text")), printed)


def run(page: str, name: str) -> str:
    """Runs the Python blocks of a page in one namespace, and returns the page with what they really print.

    >>> run("```python\\nprint(1 + 1)\\n```\\n<!-- prints -->\\n```text\\n3\\n```\\n", "sum.md")[-10:]
    'ext\\n2\\n```\\n'
    """
    namespace: dict[str, object] = {"__name__": "__main__", "__file__": name}
    parts, done = [], 0
    for block in code_blocks(page):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile("\n" * block.line + block.code, name, "exec"), namespace)
        if block.printed is not None:
            _, place = block.printed
            parts += [page[done : place.start], output.getvalue()]
            done = place.stop
    return "".join([*parts, page[done:]])


def differences(page: str, real: str, name: str) -> list[str]:
    """Returns what a page says otherwise than its blocks print.

    >>> differences("```python\\n1\\n```\\n<!-- prints -->\\n```text\\n3\\n```\\n", "", "sum.md")
    []
    """
    return [
        f"{name}:{told.line}: the page says\n{told.printed[0]}but the block prints\n{shown.printed[0]}"
        for told, shown in zip(code_blocks(page), code_blocks(real), strict=False)
        if told.printed and shown.printed and told.printed[0] != shown.printed[0]
    ]


def run_all(rank: int, paths: list[Path], *, update: bool = False) -> list[str]:
    """Runs pages, one after another, on this rank; rank 0 returns what they say otherwise, or writes it into them."""
    import torch

    wrong = []
    for path in paths:
        page = path.read_text()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # alike on all ranks, as in processes that have just begun
            real = run(page, str(path))
        if rank == 0 and update:
            path.write_text(real)
        elif rank == 0:
            wrong += differences(page, real, str(path))
    return wrong


def main() -> None:
    """Runs pages, on this rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("page", type=Path, nargs="+")
    parser.add_argument("--update", action="store_true", help="write what the blocks print into the pages")
    arguments = parser.parse_args()
    if wrong := run_all(int(os.environ.get("RANK", "0")), arguments.page, update=arguments.update):
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
