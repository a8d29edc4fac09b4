"""What is in a case, by name: so that a run says what it has drawn."""

from __future__ import annotations

import math

from tests.fuzz.cases import Call, Case, Join
from tests.fuzz.ops import KINDS


def features(case: Case) -> set[str]:
    """Returns what is in a case, for the summary."""
    around, found = case.around, set()
    found |= {f"op {op.kind}" for unit in case.units for op in unit.ops}
    found |= {f"tag {tag}" for unit in case.units for op in unit.ops for tag in KINDS[op.kind].tags}
    found |= {f"view {s[0]}" for u in case.units for op in u.ops for k, v in op.options if k == "steps" for s in v}
    found |= {f"output {unit.output}" for unit in case.units if unit.output != "tensor"}
    found |= {f"join {s.kind}" for s in case.body if isinstance(s, Join)}
    found |= {f"loss {term.kind}" for term in case.loss}
    names = "x".join(f"{name}{size}" for name, size in zip(case.grid.names, case.grid.sizes, strict=True))
    found.add(f"mesh {names}{'' if case.grid.given else ' by name'}")
    found |= _array_features(case)
    found |= {f"{key} {value}" for key, value in around.policy if key in ("release", "pack_below_bytes", "prefetch")}
    found |= {f"policy {key}" for key, _ in around.policy}
    flags = {
        "remat": any(unit.remat for unit in case.units),
        "checkpoint": any(isinstance(s, Call) and s.is_checkpointed for s in case.body),
        "unit used twice": len({u for s in case.body if isinstance(s, Call) for u in s.units}) < _num_uses(case),
        "checkpoint inside": any(unit.checkpoints for unit in case.units),
        "call without grad": any(isinstance(s, Call) and s.is_without_grad for s in case.body),
        "unused weight": any(unit.unused for unit in case.units),
        "expert unit": any(unit.is_expert for unit in case.units),
        "detached loss": case.has_detached_loss,
        "data axes by name": not case.grid.given,
    }
    named = ("has_aux", "twice", "evaluates", "is_donated", "is_remade", "is_partitioned", "debug")
    flags |= {name.removeprefix("is_").removeprefix("has_"): getattr(around, name) for name in named}
    found |= {name for name, is_there in flags.items() if is_there}
    named = ("returns", "accumulate", "reduce_op", "param_dtype", "accum_dtype", "update", "outer", "batch")
    return found | {f"{name} {getattr(around, name)}" for name in named if getattr(around, name)}


def _num_uses(case: Case) -> int:
    return sum(len(s.units) for s in case.body if isinstance(s, Call))


def _array_features(case: Case) -> set[str]:
    found = {f"group {a.group}" for a in case.arrays} | {f"array {a.kind}" for a in case.arrays if a.kind}
    found |= {f"dtype {a.dtype}" for a in case.arrays}
    for a in case.arrays:
        sizes = {"no dims": not a.shape, "0 elements": 0 in a.shape, "1 element": math.prod(a.shape) == 1}
        sizes |= {"rows": bool(a.num_rows), "whole": bool(a.shape) and not any(a.spec)}
        sizes |= {"cut over two axes": sum(len(e) if isinstance(e, tuple) else 1 for e in a.spec if e) > 1}
        sizes |= {"cut over a later dim": any(e for e in a.spec[a.num_rows + 1 :])}
        found |= {f"array {name}" for name, is_so in sizes.items() if is_so}
    for unit in case.units:
        if len(set(unit.refs)) < len(unit.refs):
            found.add("array twice in a unit")
        if any(ref.is_made for ref in unit.refs):
            found.add("array made in the loss")
    names = [{ref.array for ref in unit.refs} for unit in case.units]
    if sum(map(len, names)) > len(set().union(*names)):
        found.add("array in two units")
    return found
