"""An array taken for a tensor: each use is refused in the recorded words, which show the line to write."""

from __future__ import annotations

import ast
import copy
import operator
import re
from pathlib import Path
from typing import Any

import numpy as np
import optree
import pytest
import torch
import torch.nn.functional as F

import hpfunc as hp
from tests.helpers.golden import assert_golden
from tests.helpers.ranks import mesh_of_one

GOLDEN = Path(__file__).parents[1] / "golden" / "array_misuse"

USES = {
    "arithmetic": """
        array * 2, 2 * array, array + other, x + array, array - x, array / 3, array // 2, array % 2, array ** 2
        array @ x, x @ array, array & 1, array << 1, -array, +array, ~array, abs(array), round(array, 2)
    """,
    "comparisons": """
        array == other, array != other, array == 2, array != x, x == array, array < 1, array >= other, 1 > array
        bool(array), array and 1, 3 in array, max(array, other)
    """,
    "numbers": """
        float(array), int(array), complex(array), range(array), f"{array:.2f}", "%d" % array
        np.asarray(array), np.add(np.ones(3), array), np.ones(3) * array
    """,
    "functions": """
        torch.exp(array), torch.stack([array, other]), torch.add(array, other, alpha=2), torch.where(x > 0, array, x)
        F.linear(x, array), F.linear(input=x, weight=array), F.cross_entropy(x, array), torch.einsum("ij,jk", x, array)
        x.add_(array), x.copy_(array), torch.equal(array, other)
    """,
    "torch_itself": """
        torch.optim.AdamW([array]), torch.optim.SGD([{"params": [array]}], lr=0.1), torch.optim.Adam([("w", array)])
        torch.func.functional_call(module, {"weight": array}, x), module.register_parameter("w", array)
        setattr(module, "weight", array)
    """,
    "attributes": """
        array.T, array.mT, array.sum(), array.mean(0), array.reshape(3), array.requires_grad, array.requires_grad_()
        array.grad, array.backward(), array.to("cuda"), array.cuda(), array.cpu(), array.half(), array.float()
        array.data, array.detach(), array.clone(), array.item(), array.tolist(), array.numpy(), array.mul_(2)
        array.zero_(), array.dim(), array.size(0), array.size(), array.type(), array.register_hook(print)
    """,
    "changes": """
        operator.iadd(array, 1), operator.imul(array, other), operator.isub(array, x), operator.imatmul(array, x)
        operator.setitem(array, 0, 1.0), operator.setitem(array, slice(2), x)
    """,
}


def names() -> dict[str, Any]:
    array, other = (hp.shard(torch.arange(9.0).view(3, 3), mesh_of_one(), hp.P("shard")) for _ in range(2))
    module = torch.nn.Linear(3, 3, bias=False)
    modules = {"torch": torch, "np": np, "F": F, "operator": operator, "copy": copy, "optree": optree, "hpfunc": hp}
    return {"array": array, "other": other, "x": torch.ones(3, 3), "module": module, **modules}


def expressions(uses: str) -> list[str]:
    lines = [ast.parse(f"[{line.strip()}]", mode="eval").body for line in uses.strip().splitlines()]
    return [ast.unparse(each) for line in lines for each in line.elts]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", USES)
def test_uses_are_refused_in_the_recorded_words(kind: str) -> None:
    known, texts = names(), []
    for expression in expressions(USES[kind]):
        with pytest.raises(hp.UsageError) as caught:
            eval(expression, dict(known))
        texts.append(f">>> {expression}\n{type(caught.value).__name__}: {caught.value}")
    assert torch.equal(known["array"].local, torch.arange(9.0).view(3, 3))
    assert torch.equal(known["x"], torch.ones(3, 3))
    assert_golden("\n\n".join(texts), GOLDEN / f"{kind}.txt")


def _whole_numbers(value: Any) -> Any:
    return value.int() if isinstance(value, torch.Tensor) else value


# --- the lines that they show do what was wanted ---------------------------------------------------------------------
def lines_of(kind: str) -> list[tuple[str, str]]:
    """Returns what was wanted, and each line of a remedy that can be run as it stands."""
    found = []
    for text in (GOLDEN / f"{kind}.txt").read_text().split(">>> ")[1:]:
        if text.startswith(("round(array, 2)", "max(", "torch.where")):  # the lines are those of a part of these
            continue
        expression, hint = text.split("\n")[0], text.split("Hint: ")[1].strip()
        for part in hint.removeprefix("make a new one; ").split("; "):
            line = part.split("it is a tensor: ")[-1].split("rank's part: ")[-1].split("of all values: ")[-1]
            if re.match(r"hpfunc\.unit\(|optree\.tree_map\(|array\.full\(\)(\.\w+)?$", line) and "..." not in line:
                found.append((expression, line))
    return found


LINES = [line for kind in ("arithmetic", "comparisons", "functions", "attributes") for line in lines_of(kind)]


@pytest.mark.parametrize(("expression", "line"), LINES, ids=[f"{a}: {b}" for a, b in LINES])
def test_the_line_of_a_remedy_gives_what_was_wanted(expression: str, line: str) -> None:
    known, plain = names(), names()
    if any(symbol in expression for symbol in ("&", "<<", "~")):
        known = {key: optree.tree_map(_whole_numbers, value) for key, value in known.items()}
        plain = dict(known)
    plain["array"], plain["other"] = plain["array"].local, plain["other"].local
    functions = {name: getattr(F, name) for name in ("linear", "cross_entropy")}
    found = eval(line, {"array2": known["other"], "y": known["x"], **functions, **vars(torch), **known})
    if isinstance(found, hp.ShardedArray):
        found = found.local
    if "alpha" not in expression:  # arguments that are neither arrays nor tensors may be left out
        want = eval(expression, plain)
        assert torch.equal(found, want) if isinstance(want, torch.Tensor) else found == want


# --- what is true ----------------------------------------------------------------------------------------------------
def test_what_an_array_is_asked_without_harm() -> None:
    array, other = names()["array"], names()["other"]
    assert not hasattr(array, "grad")
    assert not hasattr(array, "no_such_attribute")
    assert getattr(array, "T", None) is None
    assert array != None  # noqa: E711 - as users write it
    assert array != "array"
    assert array == array  # noqa: PLR0124 - as containers of Python ask
    assert array in [array, other]
    assert {array: 1}[array] == 1
    assert f"{array}" == str(array) == repr(array)
    with pytest.raises(AttributeError, match=r"^'ShardedArray' object has no attribute 'spek'"):
        _ = array.spek


def test_a_donated_array_says_so_first() -> None:
    array = names()["array"]
    step = hp.sharded(lambda w: optree.tree_map(lambda x: x * 2, w), mesh_of_one(), donate_argnums=0)
    step(array)
    for use in ("dtype", "nbytes", "device"):
        with pytest.raises(hp.DonatedError):
            getattr(array, use)
    assert (array.shape, array.ndim, array.size) == ((3, 3), 2, 9)
