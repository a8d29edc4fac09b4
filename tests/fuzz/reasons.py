"""When hpfunc may refuse what plain torch computes, and when either may raise. Everything else is a find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.fuzz.cases import Call, Case, Term
from tests.fuzz.judge import judge


def recomputes(case: Case) -> bool:
    """Returns whether a case computes something again in backward."""
    checkpointed = any(isinstance(s, Call) and s.is_checkpointed for s in case.body)
    return checkpointed or any(unit.remat or unit.checkpoints for unit in case.units)


def checkpointing_raises(case: Case) -> bool:
    """Returns whether plain torch raises if it checkpoints where the step does."""
    return _raises(case, checkpoints=True)


def _raises(case: Case, *, checkpoints: bool = False) -> bool:
    try:
        judge(case, 1, checkpoints=checkpoints)
    except Exception:
        return True
    return False


def _all_reached(case: Case) -> Case:
    """Returns a case whose loss depends on everything: hpfunc goes backward through each unit, torch where it must."""
    units = tuple(replace(unit, output="tensor" if unit.output == "lost" else unit.output) for unit in case.units)
    every = tuple(Term("mean", i, 1e-9) for i in range(len(case.body) + 1))
    return replace(case, units=units, loss=case.loss + every)


def _has_no_gradient(case: Case) -> bool:
    return not any(bool(g.any()) for each in judge(case, 1)[0].gradients for g in each.values())


def _trains_complex(case: Case) -> bool:
    return any(array.group in case.trained_groups and array.dtype.startswith("complex") for array in case.arrays)


_REASONS: dict[str, Callable[[Case], bool]] = {
    "gather_budget_bytes": lambda case: "gather_budget_bytes" in dict(case.around.policy),
    "only floating tensors can be differentiated": _trains_complex,
    "are computed within the loss": lambda case: any(ref.is_made for unit in case.units for ref in unit.refs),
    "written to in place": lambda case: _raises(_all_reached(case)) or checkpointing_raises(_all_reached(case)),
    "changes its arguments, and is computed again": lambda case: checkpointing_raises(_all_reached(case)),
    "the loss does not depend on what is differentiated": _has_no_gradient,
    "computed again for a differentiation inside of the loss": lambda case: (
        recomputes(case) and any(term.kind == "penalty" for term in case.loss)
    ),
    "sparse": lambda case: any(op.kind == "sparse_embedding" for unit in case.units for op in unit.ops),
}


def has_reason(text: str, case: Case) -> bool:
    """Returns whether a case may be refused with these words."""
    return any(words in text and fits(case) for words, fits in _REASONS.items())
