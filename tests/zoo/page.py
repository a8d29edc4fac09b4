"""Writes docs/zoo.md: which architectures work, and which units they have."""

from __future__ import annotations

import importlib.metadata
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hpfunc as hp
from hpfunc.nn._blocks import PARTS_OF_ALL
from tests.zoo.plain import NUM_RANKS, NUM_STEPS
from tests.zoo.verdict import ROUNDING, VERDICTS, Found

PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"
LIBRARIES = ("torch", "transformers", "timm", "diffusers")

TEXT = """# Models that exist

`make zoo` builds {total} architectures that nobody here wrote, each from a small configuration and with random
weights, and trains each by [`from_module`](howto/modules.md): {steps} planned steps of gradient descent on {ranks}
ranks, with other data on each. Dropout is off; of some multimodal models only the text part runs. The judge is the same
training in one process without hpfunc, in float64, or in float32 where the model does not run otherwise. Losses,
weights and buffers may differ by {rounding:g} of what the steps changed; beyond that by no more than torch's own
results in float32 differ from those in float64. And the first planned step must have the bits of the one that was
recorded. The tests of this project run a dozen of them.

Made with hpfunc {hpfunc}, {libraries}.

| verdict | models |
|---|---|
{totals}

In {num_equal} of them no number differs at all from those of one process; {num_rounded} needed the allowance for
torch's own rounding.

*works*: all of that holds. *refused*: hpfunc raises an error of its own, with a hint. *wrong*: other numbers. *error*:
what is raised is not an error of hpfunc. *hangs*: no answer within minutes, or a process died.
{reasons}
## Units

Which units `from_module` chooses by itself, and the share of the bytes that the largest one holds: in the small model
that was trained, and in the model in its usual size (for transformers: the defaults of its configuration), which is
built without data for this. Small models have two layers, so each holds much. In the usual size a unit of {num_large}
of {num_full} holds more than a fifth; in {num_heads} of them it is an embedding, or a head with a row for each word.

{table}
"""


def write(found: Sequence[Found], page: Path = PAGE) -> None:
    """Writes the page."""
    page.write_text(text(found, {name: importlib.metadata.version(name) for name in LIBRARIES}))


def text(found: Sequence[Found], versions: Mapping[str, str]) -> str:
    """Returns the page for what was found with these versions of libraries."""
    known = [each for each in found if each.verdict != "not built"]
    counts = Counter(each.verdict for each in known)
    full = [each.facts["full"] for each in known if each.facts.get("full")]
    large = [units for units in full if units["share"] > 1 / PARTS_OF_ALL]
    totals = [f"| {verdict} | {counts[verdict]} |" for verdict in VERDICTS if verdict != "not built"]
    return TEXT.format(
        total=len(known),
        steps=("no", "one", "two", "three")[NUM_STEPS],
        ranks=("no", "one", "two")[NUM_RANKS],
        rounding=ROUNDING,
        hpfunc=hp.__version__,
        libraries=", ".join(f"{name} {version}" for name, version in versions.items()),
        totals="\n".join(totals),
        num_equal=sum(each.facts.get("difference", (1.0, ""))[0] == 0 for each in known),
        num_rounded=sum("rounding" in each.facts for each in known),
        reasons=_reasons(known),
        num_full=len(full),
        num_large=len(large),
        num_heads=sum(units["is_of_words"] for units in large),
        table="\n".join([*HEAD, *map(_row, known)]),
    )


HEAD = (
    "| model | what it is | verdict | units | most of them | the largest | usual size | most of them | the largest |",
    "|---|---|---|---|---|---|---|---|---|",
)


def _row(found: Found) -> str:
    cells = [f"`{found.name}`", found.kind or "?", found.verdict]
    return f"| {' | '.join([*cells, *_units(found.facts.get('small')), *_units(found.facts.get('full'))])} |"


def _units(units: dict[str, Any] | None) -> list[str]:
    if units is None:
        return ["", "", ""]
    return [str(units["num"]), units["blocks"], f"{100 * units['share']:.0f} % `{units['largest']}`"]


def _reasons(found: Sequence[Found]) -> str:
    lines = [f"- `{each.name}`, {each.verdict}: {_first_line(each)}" for each in found if each.verdict != "works"]
    return "\n" + "\n".join(lines) + "\n" if lines else ""


def _first_line(found: Found) -> str:
    """What was raised: the last line of a traceback, the first one of an error of hpfunc."""
    lines = found.why.strip().splitlines() or [""]
    line = next((x for x in reversed(lines) if x and not x[0].isspace()), "") if found.verdict == "error" else lines[0]
    return re.sub(r"([<>`|*_])", r"\\\1", line)
