"""Bad input to `from_module`, `init_module`, `to_module` and what they return: exact texts, on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hpfunc as hp
from tests.helpers.refusals import cases_among, check_texts, mesh, texts_of
from tests.nn.zoo import Case, Convolutional, Stack, Tied

X = torch.ones(2, 6)


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.gain = nn.Parameter(torch.ones(6))


class Writes(Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.inner.weight.mul_(0.5)
        return self.inner(x)


class Replaces(Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.gain = nn.Parameter(self.gain * 2)
        return self.inner(x) * self.gain


class WritesAlone(Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.gain.mul_(0.5)
        return self.inner(x) * self.gain


class Borrower(nn.Linear):
    """Uses a parameter of another part, which it knows by a reference that is no submodule."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__(6, 6)
        self.borrowed = [other]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, self.borrowed[0].weight, self.bias)


def calling(module: nn.Module, units: Any = None, x: torch.Tensor = X) -> Any:
    torch.manual_seed(0)
    for parameter in module.parameters():  # built before: the ranks may have drawn other numbers
        nn.init.normal_(parameter)
    apply, params = hp.from_module(module, units)
    kept = hp.shard(params, mesh(), hp.P("shard"))
    return lambda: hp.value_and_grad(lambda p: apply(p, x).sum())(kept), kept


def stack() -> nn.Module:
    return Case(Stack).module().float()


class Reversible(Module):
    """Its autograd function runs `inner` again in a backward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Again.apply(self.other(x), self.inner) * self.gain


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fn: Any) -> torch.Tensor:
        ctx.fn = fn
        ctx.save_for_backward(x)
        return fn(x).detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            ctx.fn(x := x.detach().requires_grad_()).backward(gradients[0])
        return x.grad, None


# --- what forward must not do -----------------------------------------------------------------------------------------
def a_forward_that_writes_into_a_parameter(rank: int) -> Any:
    return calling(Writes(), Writes)


def a_forward_that_writes_into_a_parameter_outside_of_units(rank: int) -> Any:
    return calling(WritesAlone(), ["inner", "other"])


def a_forward_that_replaces_a_parameter(rank: int) -> Any:
    return calling(Replaces(), Replaces)


def a_unit_that_uses_a_parameter_of_another(rank: int) -> Any:
    first = nn.Linear(6, 6)
    return calling(nn.Sequential(first, Borrower(first)))


def a_call_that_loses_statistics(rank: int) -> Any:
    return calling(Convolutional(), x=torch.arange(216.0).reshape(2, 3, 6, 6))


def plain_parameters_that_train(rank: int) -> Any:
    apply, params = hp.from_module(nn.Linear(6, 6))
    step = hp.sharded(hp.value_and_grad(lambda p: apply(p, X).sum()), mesh())
    return lambda: step(params), params


def frozen_parameters_that_lost_their_mark(rank: int) -> Any:
    torch.manual_seed(0)
    apply, params = hp.from_module(nn.Sequential(nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 6)))
    kept = hp.shard({path: x.detach() for path, x in params.items()}, mesh(), hp.P("shard"))
    return lambda: hp.value_and_grad(lambda p: apply(p, X).sum())(kept), kept


def a_gradient_of_frozen_arrays(rank: int) -> Any:
    torch.manual_seed(0)
    apply, params = hp.from_module(nn.Linear(6, 6).requires_grad_(False))
    kept = hp.shard(params, mesh(), hp.P("shard"))
    return lambda: hp.value_and_grad(lambda p: apply(p, X).sum())(kept), kept


def a_gradient_for_a_frozen_array(rank: int) -> Any:
    torch.manual_seed(0)
    kept = hp.shard(dict(nn.Linear(6, 6).named_parameters()), mesh(), hp.P("shard"))
    optimizer, frozen = hp.optim.sgd(0.1, weight_decay=0.1), hp.freeze(kept, "bias")
    return lambda: optimizer.update(kept, optimizer.init(frozen), frozen), kept


# --- which units ------------------------------------------------------------------------------------------------------
def units_that_overlap(rank: int) -> Any:
    return lambda: hp.from_module(stack(), ["blocks.*"]), None


def units_that_select_nothing(rank: int) -> Any:
    return lambda: hp.from_module(stack(), ["block.?", nn.Conv2d, stack(), lambda path, module: False]), None


def units_by_a_number(rank: int) -> Any:
    return lambda: hp.from_module(stack(), 3), None


def a_unit_without_forward(rank: int) -> Any:
    return lambda: hp.from_module(stack(), nn.ModuleList), None


def a_unit_inside_of_a_compiled_module(rank: int) -> Any:
    module: Any = stack()
    module.blocks[1] = torch.compile(module.blocks[1], backend="eager")
    return lambda: hp.from_module(module, nn.Linear), None


# --- which modules ----------------------------------------------------------------------------------------------------
def a_module_that_is_none(rank: int) -> Any:
    return lambda: hp.from_module(torch.tanh), None


def lazy_parameters(rank: int) -> Any:
    return lambda: hp.from_module(nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())), None


def parameters_in_the_same_memory(rank: int) -> Any:
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    module[1].weight = nn.Parameter(module[0].weight.data)
    return lambda: hp.from_module(module), None


def a_module_that_cannot_be_copied(rank: int) -> Any:
    module = stack()
    module.generator = (x for x in range(3))
    return lambda: hp.from_module(module), None


def a_meta_module_that_nothing_initialises(rank: int) -> Any:
    with torch.device("meta"):
        module = Tied()
    return lambda: hp.init_module(module, mesh(), hp.P("shard")), None


def a_module_to_initialise_that_has_values(rank: int) -> Any:
    return lambda: hp.init_module(nn.Linear(2, 2), mesh(), hp.P("shard")), None


def a_reversible_layer_around_units(rank: int) -> Any:
    return calling(Reversible(), ["inner", "other"])


# --- parameters that do not fit ---------------------------------------------------------------------------------------
def parameters_of_another_module(rank: int) -> Any:
    apply, _ = hp.from_module(nn.Linear(6, 6))
    kept = hp.shard({"weight": torch.ones(6, 6), "gain": torch.ones(6)}, mesh(), hp.P("shard"))
    return lambda: apply(kept, X), kept


def parameters_in_a_list(rank: int) -> Any:
    apply, params = hp.from_module(nn.Linear(6, 6))
    return lambda: apply(list(params.values()), X), None


def buffers_of_another_module(rank: int) -> Any:
    apply, params = hp.from_module(Convolutional())
    return lambda: apply.with_buffers(params, {"mean": X}, X), None


def weights_for_another_module(rank: int) -> Any:
    kept = hp.shard({"weight": torch.ones(6, 5), "gain": torch.ones(6)}, mesh(), hp.P("shard"))
    return lambda: hp.to_module(kept, nn.Linear(6, 6)), kept


def weights_for_a_meta_module(rank: int) -> Any:
    kept = hp.shard({"weight": torch.ones(6, 6)}, mesh(), hp.P("shard"))
    return lambda: hp.to_module(kept, nn.Linear(6, 6, bias=False, device="meta")), kept


def a_method_that_is_not_there(rank: int) -> Any:
    return lambda: hp.from_module(nn.Linear(6, 6))[0].method("generate"), None


CASES = cases_among(globals())


@pytest.mark.parametrize("name", CASES)
def test_refusals(name: str) -> None:
    check_texts(texts_of(CASES[name]), name)
