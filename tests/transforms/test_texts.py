"""How a step, a gradient function and a schedule show themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hpfunc as hp


def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
    return hp.unit(lambda w, x: (w * x).sum())(params, x)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (hp.grad(loss_fn), "hpfunc.grad(loss_fn)"),
        (hp.value_and_grad(loss_fn, has_aux=True), "hpfunc.value_and_grad(loss_fn, has_aux=True)"),
        (hp.value_and_grad(loss_fn, (0, 1)), "hpfunc.value_and_grad(loss_fn, argnums=(0, 1))"),
        (
            hp.grad(loss_fn, 1, numerics=hp.Numerics(reduce_op="sum")),
            f"hpfunc.grad(loss_fn, argnums=1, {hp.Numerics(reduce_op='sum')!r})",
        ),
    ],
)
def test_a_gradient_function_names_its_function_and_its_options(made: Any, text: str) -> None:
    assert repr(made) == text


def test_a_step_names_its_function_its_mesh_and_its_plans() -> None:
    mesh = hp.make_mesh((1,), ("shard",))
    step = hp.sharded(hp.value_and_grad(loss_fn), mesh, donate_argnums=0)
    assert repr(step) == "<hpfunc.sharded(loss_fn, Mesh(shard=1), donate_argnums=(0,)), 0 plans>"
    evaluate = hp.sharded(loss_fn, mesh, debug=True)
    evaluate(hp.shard(torch.ones(2), mesh, hp.P("shard")), torch.ones(2))
    assert repr(evaluate) == "<hpfunc.sharded(loss_fn, Mesh(shard=1), debug=True), 1 plan>"


class Printer:
    """What IPython gives: it collects text."""

    def __init__(self) -> None:
        self.shown = ""

    def text(self, text: str) -> None:
        self.shown += text


def test_a_schedule_is_one_line_in_ipython_and_exact_as_a_string() -> None:
    mesh = hp.make_mesh((1,), ("shard",))
    schedule = hp.sharded(loss_fn, mesh).lower(hp.shard(torch.ones(2), mesh, hp.P("shard")), torch.ones(2)).schedule
    printer = Printer()
    schedule._repr_pretty_(printer, cycle=False)
    num_ops = len(list(schedule.ops))
    counts = f"1 unit, 2 events, {num_ops} ops"
    assert printer.shown == f"<Schedule {schedule.fingerprint}: {counts}; print it for its text>"
    assert len(printer.shown) < 100
    assert hp.Schedule.parse(str(schedule)) == schedule
