"""A case from a seed, by the standard library's random numbers: nothing here is shared with the property tests."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from tests.fuzz.build import JOINS, OUTPUTS
from tests.fuzz.cases import Around, Array, Call, Case, Entry, Grid, Join, Op, Ref, Term, Unit
from tests.fuzz.ops import KINDS, Need


@dataclass(frozen=True, slots=True)
class Limits:
    """How large a case may be."""

    units: int = 3
    ops: int = 3
    statements: int = 5


def _grids(ranks: int) -> list[Grid]:
    n, both = ranks, ("replicate", "shard")
    found = [Grid((n,), ("shard",), ("shard",))] * 4
    found += [Grid((1, n), both, both), Grid((n, 1), both, both)]
    found += [Grid((n,), (name,), (name,), False) for name in ("dp", "fsdp", "data")]
    found += [Grid((n, 1), ("dp", "tp"), ("dp",), False)] * 2
    found += [Grid((1, n), ("dp_replicate", "dp_shard"), ("dp_replicate", "dp_shard"), False)]
    for sizes in [(n, 1), (1, n), (2, n // 2), (n // 2, 2)]:
        found += [Grid(sizes, ("shard", "tp"), ("shard",))]
        found += [Grid(sizes, ("shard", "ep"), ("shard", "ep"))]
    found += [
        Grid((1, n, 1), ("replicate", "shard", "tp"), both),
        Grid((n // 2, 1, 2), ("replicate", "shard", "tp"), both),
    ]
    found += [Grid((1, n), ("x", "y"), ("x", "y")), Grid((1, 1, n), ("replicate", "shard", "ep"), (*both, "ep"))]
    if n == 4:
        found += [Grid((2, 2), both, both)] * 5 + [Grid((2, 2), ("dp", "tp"), ("dp",), False)]
        found += [Grid((2, 2), ("dp_replicate", "dp_shard"), ("dp_replicate", "dp_shard"), False)]
    return found


def draw(seed: int, ranks: int = 2, limits: Limits | None = None) -> Case:
    """Returns the case of a seed."""
    return _Drawer(Random(f"hpfunc {seed}"), seed, ranks, limits or Limits()).case()


class _Drawer:
    """Draws one case."""

    def __init__(self, rng: Random, seed: int, ranks: int, limits: Limits) -> None:
        self.rng, self.seed, self.limits = rng, seed, limits
        self.grid = rng.choice(_grids(ranks))
        self.arrays: list[Array] = []

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    # --- arrays -----------------------------------------------------------------------------------------------------
    def ref(self, need: Need, *, is_expert: bool) -> Ref:
        """Returns an array for a need: one that is there, a row of one, or a new one."""
        kind = need.kind or ("dense" if is_expert else "")
        known = [a for a in self.arrays if a.kind == kind and a.dtype == need.dtype]
        fitting = [a for a in known if a.shape[a.num_rows :] == need.shape]
        array = self.rng.choice(fitting) if fitting and self.chance(0.35) else self._new(need, kind)
        rows = tuple(self.rng.randrange(n) for n in array.shape[: array.num_rows])
        return Ref(array.name, rows, array.dtype == "float64" and self.chance(0.01))

    def _new(self, need: Need, kind: str) -> Array:
        lead: tuple[int, ...] = ()
        if kind not in ("ep", "tp") and need.dtype == "float64" and self.chance(0.15):
            lead = self.rng.choice([(1,), (2,), (3,), (2, 2)])
        group = self.rng.choices(["a", "frozen", "b", "closure"], [70, 15, 10, 5] if self.arrays else [1, 0, 0, 0])[0]
        if need.dtype in ("int64", "bool") or (need.dtype.startswith("complex") and self.chance(0.7)):
            group = self.rng.choice(["frozen", "closure"])
        spec = (None,) * len(lead) + self._spec(need, kind)
        while spec and spec[-1] is None and self.chance(0.5):
            spec = spec[:-1]
        array = Array(f"p{len(self.arrays)}", lead + need.shape, spec, group, kind, need.dtype, len(lead))
        self.arrays.append(array)
        return array

    def _spec(self, need: Need, kind: str) -> tuple[Entry, ...]:
        if not need.shape:
            return ()
        axes = [axis for axis in self.grid.data_axes if not (kind in ("ep", "dense") and axis == "ep")]
        self.rng.shuffle(axes)
        dims: list[list[str]] = [[] for _ in need.shape]
        for axis in axes:
            if self.chance(0.8):
                dims[0 if self.chance(0.65) else self.rng.randrange(len(dims))].append(axis)
        if kind == "ep":
            dims[0].insert(0, "ep")
        if kind == "tp":
            dims[need.tp_dim].insert(0, "tp")
        return tuple(None if not d else d[0] if len(d) == 1 else tuple(d) for d in dims)

    def _narrow(self, array: Array) -> Array:
        return replace(array, dtype="float32") if array.dtype == "float64" and self.chance(0.5) else array

    # --- units ------------------------------------------------------------------------------------------------------
    def unit(self, *, may_write_input: bool, may_be_bad: bool) -> Unit:
        is_expert = "ep" in self.grid.names and self.chance(0.5)
        allowed = {"", "ep"} if is_expert else {"", "tp"} if "tp" in self.grid.names else {""}
        kinds = {
            name: kind.weight
            for name, kind in KINDS.items()
            if kind.only in allowed
            and (may_write_input or "writes input" not in kind.tags)
            and (may_be_bad or "bad" not in kind.tags)
        }
        names = self.rng.choices(list(kinds), list(kinds.values()), k=self.rng.randint(1, self.limits.ops))
        ops = []
        for name in names:
            needs, options = KINDS[name].draw(self.rng)
            refs = tuple(self.ref(need, is_expert=is_expert) for need in needs)
            if len(refs) > 1 and len({n.shape for n in needs}) == 1 and self.chance(0.1):
                refs = (refs[0],) * len(refs)
            ops.append(Op(name, refs, tuple(options.items())))
        unused = []
        if self.chance(0.12):
            need = Need(self.rng.choice([(6, 6), (5,), (), (0,), (1,), (3, 2)]))
            unused = [self.ref(need, is_expert=is_expert)]
        output = "tensor" if self.chance(0.6) else self.rng.choice(list(OUTPUTS))
        tree = "tuple" if self.chance(0.3) else "dict"
        inside = self.chance(0.06) and not any("bad" in KINDS[op.kind].tags for op in ops) and not may_write_input
        return Unit(tuple(ops), tuple(unused), output, tree, self.chance(0.2), is_expert, inside)

    # --- the loss ---------------------------------------------------------------------------------------------------
    def body(self, num_units: int, *, checkpoints: bool, may_be_bad: bool) -> list[Call | Join]:
        found: list[Call | Join] = []
        order = list(range(num_units))
        for _ in range(self.rng.randint(num_units, max(self.limits.statements, num_units))):
            last = len(found)
            source = last if self.chance(0.85) else self.rng.randint(0, last)
            if order or self.chance(0.3):
                first = order.pop(0) if order else self.rng.randrange(num_units)
                chain = (first, self.rng.randrange(num_units)) if self.chance(0.1) else (first,)
                found.append(Call(chain, source, checkpoints and self.chance(0.4), self.chance(0.03)))
            elif last:
                found.append(self._join(last, may_be_bad=may_be_bad))
            if last and order and self.chance(0.3):
                found.append(self._join(len(found), may_be_bad=may_be_bad))
        return found

    def _join(self, last: int, *, may_be_bad: bool) -> Join:
        kinds = [kind for kind in JOINS if may_be_bad or kind not in ("residual_in_place", "relu_in_place")]
        kind = self.rng.choice(kinds)
        if kind in ("residual_in_place", "relu_in_place") and self.chance(0.5):
            kind = "add"
        first = self.rng.randint(1, last)  # not the examples: they are the caller's
        first = last if self.chance(0.5) else first
        # What is detached is the first one: the gradient goes on through the second.
        lost = kind in ("detached", "without_grad")
        return Join(kind, first, last if lost else self.rng.randint(0, last))

    def loss(self, num_activations: int) -> list[Term]:
        kind = "square" if self.chance(0.75) else "mean"
        terms = [Term(kind, num_activations)]
        if self.chance(0.25):
            terms.append(Term("square", self.rng.randint(0, num_activations), 0.5))
        if "tp" not in self.grid.names and self.chance(0.15):
            floating = [a for a in self.arrays if a.dtype == "float64" and a.kind != "plain"]
            if floating:
                terms.append(Term("local", self.rng.choice(floating).name, 0.3))
        if "tp" not in self.grid.names and self.chance(0.03):
            floating = [a for a in self.arrays if a.dtype == "float64" and a.kind != "plain"]
            terms += [Term("whole", self.rng.choice(floating).name, 0.3)] if floating else []
        if self.chance(0.01):
            terms.append(Term("penalty", 0, 0.3))
        if self.chance(0.08):
            name, shape = f"p{len(self.arrays)}", self.rng.choice([(), (3,), (2, 2), (0,)])
            self.arrays.append(Array(name, shape, (), "b", "plain"))
            terms.append(Term("plain", name))
        return terms

    # --- around -----------------------------------------------------------------------------------------------------
    def policy(self) -> dict[str, Any]:
        rng, kept = self.rng, {}
        kept["pack_below_bytes"] = rng.choice([0, 0, 100, 1000, math.inf, math.inf])
        if self.chance(0.6):
            kept["prefetch"] = rng.choice([0, 1, 2, 3])
        if self.chance(0.3):
            kept["prefetch_backward"] = rng.choice([0, 1, 2])
        if self.chance(0.4):
            kept["release"] = rng.choice(["backward", "never"])
        if self.chance(0.4):
            kept["reduce_bucket_bytes"] = rng.choice([300, 3000, math.inf])
        if self.chance(0.1):
            kept["gather_budget_bytes"] = rng.choice([2000, 4000, 8000])
        return kept

    def around(self) -> Around:
        rng = self.rng
        update = rng.choices(["", "by hand", "sgd", "momentum"], [78, 8, 7, 7])[0]
        param_dtype = rng.choices(["", "float32", "bfloat16", "float64"], [84, 5, 5, 6])[0]
        return Around(
            returns="value_and_grad" if self.chance(0.85) else "grad",
            has_aux=self.chance(0.2),
            accumulate=rng.choices(["", "scatter", "local"], [65, 18, 17])[0],
            reduce_op=rng.choices(["mean", "sum"], [80, 20])[0],
            param_dtype=param_dtype,
            reduce_dtype=rng.choice(["", "float64", "float32"]) if param_dtype else "",
            accum_dtype=rng.choices(["", "float32"], [95, 5])[0],
            policy=tuple(self.policy().items()),
            twice=self.chance(0.08),
            evaluates=param_dtype != "float64" and self.chance(0.08),
            update=update,
            is_donated=bool(update) and self.chance(0.6),
            is_remade=not update and self.chance(0.05),
            is_partitioned=self.chance(0.15),
            debug=self.chance(0.12),
            outer=rng.choices(["", "no_grad", "inference_mode"], [95, 3, 2])[0],
            batch=rng.choices(["contiguous", "transposed", "expanded"], [85, 8, 7])[0],
        )

    def case(self) -> Case:
        checkpoints, may_be_bad = self.chance(0.2), self.chance(0.35)
        may_be_bad = may_be_bad and not checkpoints
        count = self.rng.randint(1, self.limits.units)
        units = [self.unit(may_write_input=may_be_bad, may_be_bad=may_be_bad) for _ in range(count)]
        body = self.body(count, checkpoints=checkpoints, may_be_bad=may_be_bad)
        loss, around = self.loss(len(body)), self.around()
        if not any(a.group == "a" for a in self.arrays):
            self.arrays.append(Array("p_alone", (2,), (), "a"))
        if any(unit.is_expert for unit in units) or "tp" in self.grid.names:
            body = [_unchecked(s) for s in body] if self.chance(0.5) else body
        if around.param_dtype == "bfloat16" and any(KINDS[op.kind].tags for unit in units for op in unit.ops):
            around = replace(around, param_dtype="float32")  # torch has no views of it as complex numbers
        if around.param_dtype in ("float32", "bfloat16") and any(array.kind == "tp" for array in self.arrays):
            around = replace(around, param_dtype="", reduce_dtype="")  # sums over tp are rounded in another order
        if any(array.group == "a" and array.dtype.startswith("complex") for array in self.arrays):
            around = replace(around, update="", is_donated=False)  # optimizers refuse them before the step
        if around.param_dtype == "float64":
            self.arrays = [self._narrow(array) for array in self.arrays]
        detached = self.chance(0.01)
        return Case(self.seed, self.grid, tuple(self.arrays), tuple(units), tuple(body), tuple(loss), around, detached)


def _unchecked(statement: Call | Join) -> Call | Join:
    return replace(statement, is_checkpointed=False) if isinstance(statement, Call) else statement
