"""Texts that are compared with files, word for word.

When a change is meant, write the files anew and read their diff: ``HPFUNC_UPDATE_GOLDEN=1 make test``.
"""

from __future__ import annotations

import os
from pathlib import Path


def assert_golden(text: str, path: Path) -> None:
    """Fails unless a file has this text and a line break; writes the file first if HPFUNC_UPDATE_GOLDEN is set."""
    if os.environ.get("HPFUNC_UPDATE_GOLDEN"):
        path.write_text(f"{text}\n")
    assert f"{text}\n" == path.read_text(), f"{path} differs; HPFUNC_UPDATE_GOLDEN=1 writes it anew"
