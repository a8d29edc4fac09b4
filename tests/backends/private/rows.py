"""What hpfunc relies on of each private name of torch: one row for each, which a new version of torch has to pass.

torch may change these without a word. A version that does fails a row, which says what hpfunc relied on, and where. The
rows need neither an accelerator nor another process, but for those of groups, which run on two ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from tests.backends.private_names import declared, private_names

Check = Callable[[], None]
FILE = "backends/torch/private.py"
LOOKED_UP = declared(FILE)
READ_BY_TORCH = {
    name: uses
    for name, uses in private_names("torch", dir(torch.Tensor)).items()
    if name.rpartition(".")[2] not in {path.rpartition(".")[2] for path in LOOKED_UP}
}
"""What torch, or a module of somebody, may have or may look for: nothing is lacking if it does not."""
USES = {**LOOKED_UP, **READ_BY_TORCH}


@dataclass(frozen=True)
class Row:
    """One private name: what hpfunc relies on, and a check of that, which raises."""

    promise: str
    check: Check
    on_ranks: bool = False


ROWS: dict[str, Row] = {}


def promise(text: str, *names: str, on_ranks: bool = False) -> Callable[[Check], Check]:
    def keep(check: Check) -> Check:
        ROWS.update({name: Row(text, check, on_ranks) for name in names})
        return check

    return keep


def broken(name: str, error: BaseException) -> str:
    """Returns the sentence for a name that does not do what hpfunc relies on."""
    places = ", ".join(f"hpfunc/{use}" for use in USES.get(name, ()))
    found = f"{type(error).__name__}: {error}".strip()
    return f"torch {torch.__version__}: {name.removeprefix('*.')} {ROWS[name].promise} no more ({found}); see {places}"


def outcome(rank: int, name: str) -> str:
    """Checks one name, and returns what is broken."""
    try:
        ROWS[name].check()
    except (Exception, pytest.fail.Exception) as error:
        return broken(name, error)
    return ""
