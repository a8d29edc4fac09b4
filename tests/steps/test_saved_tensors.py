"""What autograd saves within a unit is checked as torch checks it: a write is refused, or does no harm."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import hpfunc as hp
from tests.helpers.ranks import Pool, mesh_of

pytestmark = pytest.mark.processes
Tensor = torch.Tensor
Call = Callable[..., Any]
D = torch.float64
WIDTH = 6


# --- units: what they save, and what they write to themselves ---------------------------------------------------------
def linear(p: Any, x: Tensor) -> Tensor:
    return F.linear(x, p["w"], p["b"])


def gated(p: Any, x: Tensor) -> Tensor:
    return x * torch.sigmoid(F.linear(x, p["w"], p["b"]))


def saves_its_output(fn: Call) -> Call:
    return lambda p, x: fn(F.linear(x, p["w"], p["b"]))


def dropout_in_place(p: Any, x: Tensor) -> Tensor:
    torch.manual_seed(7)
    return F.dropout(linear(p, x), 0.5, inplace=True)


def writes_into_a_view_before_saving(p: Any, x: Tensor) -> Tensor:
    h = F.linear(x, p["w"])
    h[:, ::2] += p["b"][::2]
    return torch.tanh(h) * h


def writes_into_what_it_saved(p: Any, x: Tensor) -> Tensor:
    h = F.linear(x, p["w"])
    y = h.sin()
    h += p["b"]
    return (y * h).cos()


def writes_into_a_saved_output(p: Any, x: Tensor) -> Tensor:
    h = linear(p, x).exp()
    h.mul_(2)
    return h.sin()


def saves_and_writes_in_one_operator(p: Any, x: Tensor) -> Tensor:
    h = linear(p, x).clone()
    h.mul_(p["b"]).addcmul_(x, x).clamp_(min=-3).pow_(2)
    return h


def batch_norm(p: Any, x: Tensor) -> Tensor:
    mean, variance = torch.zeros(WIDTH, dtype=D), torch.ones(WIDTH, dtype=D)
    return F.batch_norm(linear(p, x), mean, variance, weight=p["b"], training=True)


UNITS: dict[str, Call] = {
    "linear": linear,
    "gated": gated,
    "tanh": saves_its_output(torch.tanh),
    "exp": saves_its_output(lambda h: torch.exp(-h.square())),
    "softmax": saves_its_output(lambda h: torch.softmax(h, -1)),
    "relu": saves_its_output(torch.relu),
    "relu in place": saves_its_output(lambda h: F.relu(h, inplace=True)),
    "view of the output": saves_its_output(lambda h: h.sigmoid().view(-1, 2).view(-1, WIDTH)),
    "dropout in place": dropout_in_place,
    "batch norm": batch_norm,
    "writes into a view before saving": writes_into_a_view_before_saving,
    "writes into what it saved": writes_into_what_it_saved,
    "writes into a saved output": writes_into_a_saved_output,
    "saves and writes in one operator": saves_and_writes_in_one_operator,
}
WRITES_ITSELF = ("writes into what it saved", "writes into a saved output")


# --- losses: what the caller writes to afterwards ---------------------------------------------------------------------
def nothing(call: Call, ps: Any, x: Tensor) -> Tensor:
    for p in ps:
        x = call(p, x)
    return x


def residual(call: Call, ps: Any, x: Tensor) -> Tensor:
    x = call(ps[0], x)
    for p in ps[1:]:
        x += call(p, x)
    return x


def residual_of_a_clone(call: Call, ps: Any, x: Tensor) -> Tensor:
    x = call(ps[0], x).clone()
    for p in ps[1:]:
        y = x.clone()
        y += call(p, x)
        x = y
    return x


def the_first_input(call: Call, ps: Any, x: Tensor) -> Tensor:
    y = call(ps[0], x)
    x.add_(1)
    return call(ps[1], y)


def the_output(call: Call, ps: Any, x: Tensor) -> Tensor:
    y = call(ps[0], x)
    y.mul_(2)
    return call(ps[1], y)


def a_row_of_the_output(call: Call, ps: Any, x: Tensor) -> Tensor:
    y = call(ps[0], x)
    y[0] = 0
    return call(ps[1], y)


def the_output_after_its_use(call: Call, ps: Any, x: Tensor) -> Tensor:
    y = call(ps[0], x) * 1
    z = call(ps[1], y)
    y[:, 0].zero_()
    return z


def the_output_without_gradients(call: Call, ps: Any, x: Tensor) -> Tensor:
    y = call(ps[0], x) * 1
    z = call(ps[1], y)
    with torch.no_grad():
        y.copy_(z)
    return z


def the_detached_output(call: Call, ps: Any, x: Tensor) -> Tensor:
    y = call(ps[0], x)
    z = call(ps[1], y)
    z.detach().neg_()
    return z


def an_activation_in_place(call: Call, ps: Any, x: Tensor) -> Tensor:
    return F.leaky_relu(call(ps[1], F.relu(call(ps[0], x) * 2, inplace=True)), 0.3, inplace=True)


def what_nobody_saved(call: Call, ps: Any, x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    for p in ps:
        total += call(p, x)
    return total


CALLERS: dict[str, Call] = {
    caller.__name__: caller
    for caller in (
        *(nothing, residual, residual_of_a_clone, the_first_input, the_output, a_row_of_the_output),
        *(the_output_after_its_use, the_output_without_gradients, the_detached_output),
        *(an_activation_in_place, what_nobody_saved),
    )
}


# --- the judge --------------------------------------------------------------------------------------------------------
def weights() -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(3)
    return [
        {"w": torch.randn(WIDTH, WIDTH, generator=g, dtype=D) / 2, "b": torch.randn(WIDTH, generator=g, dtype=D)}
        for _ in range(3)
    ]


def batch(rank: int) -> Tensor:
    return torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(5), dtype=D)[rank].clone()


def plain_gradients(unit: Call, caller: Call, num_ranks: int) -> list[Tensor] | str:
    """Returns the mean gradients over the ranks' data in plain torch, or what torch says."""
    tree = weights()
    leaves = [x.requires_grad_() for p in tree for x in p.values()]
    try:
        loss = torch.stack([caller(unit, tree, batch(rank)).square().mean() for rank in range(num_ranks)]).mean()
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
    except RuntimeError as error:
        return str(error)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


def sharded_gradients(rank: int, mesh: Any, unit: Call, caller: Call) -> list[list[Tensor] | str]:
    """Returns the gradients of an eager, a recorded and a planned call, or the refusal."""
    params = hp.shard(weights(), mesh, hp.P("shard"))
    differentiate = hp.value_and_grad(lambda p, x: caller(unit, p, x).square().mean())
    step = hp.sharded(differentiate, mesh, policy=hp.Policy(pack_below_bytes=0))
    found: list[list[Tensor] | str] = []
    for run in (differentiate, step, step):
        try:
            _, grads = run(params, batch(rank))
            found.append([x for p in hp.unshard(grads) for x in p.values()])
        except RuntimeError as error:  # ours, and under a checkpoint of torch its own
            found.append(str(error))
    assert isinstance(found[-1], str) or step.followed_plan
    return found


again: Any = partial(checkpoint, use_reentrant=False)
WAYS: dict[str, tuple[Callable[[Call], Call], Callable[[Call], Call]]] = {  # ours, and torch's
    "unit": (partial(hp.unit, name="block"), lambda fn: fn),
    "remat": (partial(hp.unit, name="block", remat=True), lambda fn: partial(again, fn)),
    "checkpoint": (lambda fn: partial(again, hp.unit(fn, name="block")), lambda fn: partial(again, fn)),
}
MODIFIED = "modified by an inplace operation"
REFUSED = "hpfunc.unit: a tensor that the unit 'block."


def assert_right(got: list[Tensor] | str, want: list[Tensor] | str) -> None:
    """Fails unless both are refusals, or the same numbers."""
    if isinstance(want, str) or isinstance(got, str):
        assert isinstance(want, str), got
        assert isinstance(got, str), want
        assert got.startswith(REFUSED) or MODIFIED in got
    else:
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-11, atol=1e-13)


def alone(way: str, unit: str, caller: str) -> list[list[Tensor] | str]:
    """Returns what a mesh of one rank gives: most of it needs no others."""
    mesh = hp.make_mesh((1,), ("shard",))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hp.HpfuncWarning)  # nothing can be hidden
        return sharded_gradients(0, mesh, WAYS[way][0](UNITS[unit]), CALLERS[caller])


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("caller", CALLERS)
def test_writes_are_refused_exactly_where_torch_refuses_them(unit: str, caller: str) -> None:
    want = plain_gradients(UNITS[unit], CALLERS[caller], 1)
    for got in alone("unit", unit, caller):
        assert_right(got, want)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("way", ["remat", "checkpoint"])
def test_what_is_recomputed_has_the_numbers_of_torch_or_is_refused_where_it_writes(way: str, unit: str) -> None:
    """A write inside of what torch recomputes escapes it. Here it is refused, as torch does without recomputation."""
    for caller, call in CALLERS.items():
        want = plain_gradients(UNITS[unit] if unit in WRITES_ITSELF else WAYS[way][1](UNITS[unit]), call, 1)
        for got in alone(way, unit, caller):
            assert_right(got, want)


# Of each kind: nothing is written, a write does no harm, one into an input, an output, or inside.
TOGETHER = [
    *(("linear", "residual_of_a_clone"), ("relu in place", "an_activation_in_place"), ("batch norm", "the_output")),
    *(("gated", "the_first_input"), ("tanh", "the_output"), ("writes into a saved output", "nothing")),
]


def all_together(rank: int, way: str) -> list[list[list[Tensor] | str]]:
    mesh = mesh_of((2,), ("shard",))
    return [sharded_gradients(rank, mesh, WAYS[way][0](UNITS[unit]), CALLERS[caller]) for unit, caller in TOGETHER]


@pytest.mark.parametrize("way", ["unit", "remat"])
def test_ranks_refuse_together(pool: Callable[[int], Pool], way: str) -> None:
    """Their weights are released: what autograd saves of these passes by."""
    for found in pool(2).run(all_together, way):
        for (unit, caller), results in zip(TOGETHER, found, strict=True):
            judge = UNITS[unit] if unit in WRITES_ITSELF else WAYS[way][1](UNITS[unit])
            want = plain_gradients(judge, CALLERS[caller], 2)
            for got in results:
                assert_right(got, want)


def test_the_callers_do_write() -> None:
    """Fails if the cases above were all of one kind: torch accepts many of them, and refuses many."""
    results = [plain_gradients(unit, caller, 1) for unit in UNITS.values() for caller in CALLERS.values()]
    refused = [x for x in results if isinstance(x, str)]
    assert len(refused) > 40
    assert len(results) - len(refused) > 40
    assert all(MODIFIED in text for text in refused)


def test_a_write_beside_a_unit_that_the_loss_does_not_need_is_refused_in_our_words() -> None:
    """Units run backward even if the loss does not depend on them, and so does what led to them."""
    mesh = hp.make_mesh((1,), ("shard",))
    scale = hp.unit(lambda p, x: x * p)

    def loss(p: Any, x: Tensor) -> Tensor:
        hidden = scale(p, x)
        scale(p, hidden * hidden)
        hidden.add_(1)  # what was squared
        return hidden.sum()

    params, x = hp.shard(torch.ones(WIDTH, dtype=D), mesh, hp.P("shard")), torch.ones(WIDTH, dtype=D)
    with pytest.raises(hp.UsageError, match="written to in place since; units run backward even if") as refusal:
        hp.value_and_grad(loss)(params, x)
    assert MODIFIED in str(refusal.value)
