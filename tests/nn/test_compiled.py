"""Modules that are compiled: a compiled layer is a unit that runs compiled; what cannot be kept is warned of."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import hpfunc as hp
from tests.helpers.ranks import Pool, mesh_of
from tests.nn.zoo import WIDTH, Block, Stack

# Dynamo looks at `.grad` of its arguments, and hides the warning in a way that does not hide an error.
OF_DYNAMO = "The .grad attribute of a Tensor that is not a leaf"
pytestmark = pytest.mark.filterwarnings(f"ignore:{OF_DYNAMO}:UserWarning")
LAYERS = 12  # more than `recompile_limit`, which all layers of one class share
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(7))


def build(compiler: Callable[[nn.Module], nn.Module] = lambda module: module) -> Stack:
    torch.manual_seed(0)
    module = Stack()
    module.blocks = nn.ModuleList(compiler(Block()) for _ in range(LAYERS))
    return module.double()


def data(rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def train(rank: int, remat: bool) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Returns gradients of planned steps, and how many graphs there were after each step."""
    torch._dynamo.reset()
    mesh, counter = mesh_of((2,), ("shard",)), CompileCounterWithBackend("aot_eager")
    apply, params = hp.from_module(build(lambda block: torch.compile(block, backend=counter)), remat=remat)
    params = hp.shard(params, mesh, hp.P("shard"))
    step = hp.sharded(hp.value_and_grad(lambda params, x: apply(params, x).square().mean()), mesh)
    num_graphs = []
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", OF_DYNAMO, UserWarning)
        for _ in range(3):
            _, grads = step(params, data(rank))
            num_graphs.append(counter.frame_count)
    assert step.followed_plan
    return hp.unshard(grads), num_graphs


@pytest.mark.processes
@pytest.mark.parametrize("remat", [False, True])
def test_compiled_layers_train_compiled(pool: Callable[[int], Pool], remat: bool) -> None:
    module = build()
    for rank in range(2):
        (module(data(rank)).square().mean() / 2).backward()
    want = {re.sub(r"^(blocks\.\d+)", r"\1._orig_mod", path): p for path, p in module.named_parameters()}
    for grads, num_graphs in pool(2).run(train, remat):
        assert grads.keys() == want.keys()
        for path, p in want.items():
            torch.testing.assert_close(grads[path], p.grad)
        assert 0 < num_graphs[0] <= 4  # not one for each layer
        assert num_graphs[0] == num_graphs[1] == num_graphs[2]


def compile_layer(block: nn.Module) -> nn.Module:
    return torch.compile(block, backend="eager")  # pyright: ignore[reportReturnType] (it returns a module for a module)


@pytest.mark.parametrize("units", [None, Block, "blocks.*._orig_mod", "blocks.?*"])
def test_a_compiled_layer_is_the_unit(units: Any) -> None:
    module = build(compile_layer)
    if units == "blocks.?*":
        units = lambda path, part: path.count(".") == 1  # noqa: E731 (one of several kinds of `units`)
    apply, params = hp.from_module(module, units)
    assert str(apply).startswith("Stack.forward: 12 units: 12 compiled Block (blocks.0 to blocks.11) [")
    assert torch.equal(apply(params, X.double()), module(X.double()))


def test_a_compiled_module_that_is_not_in_a_list_is_one_unit() -> None:
    module = nn.Sequential()
    module.add_module("body", compile_layer(Stack()))
    apply, params = hp.from_module(module)
    assert str(apply).startswith("Sequential.forward: 1 units: 1 compiled Stack (body) [")
    assert torch.equal(apply(params, X), module(X))


# --- what is not kept -------------------------------------------------------------------------------------------------
def said_by(module: Any) -> list[str]:
    mesh = hp.make_mesh((1,), ("shard",))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        apply, params = hp.from_module(module)
        want = build()
        assert params.keys() == dict(want.named_parameters()).keys()
        assert torch.equal(apply(hp.shard(params, mesh, hp.P("shard")), X.double()), want(X.double()))
    return [str(warning.message) for warning in said if isinstance(warning.message, hp.HpfuncWarning)]


HINT = "\n\nHint: compile each layer, which is kept: model.layers[i] = torch.compile(model.layers[i])"
RULE = "hpfunc.from_module: these are compiled around units, or in place, and run uncompiled\n  "


def test_a_whole_model_that_is_compiled_counts_as_the_model_in_it() -> None:
    module = compile_layer(build())
    assert said_by(module) == [f"{RULE}the whole module{HINT}"]
    _, params = hp.from_module(module)
    other = compile_layer(build())
    hp.to_module({path: x * 2 for path, x in params.items()}, other)
    assert all(torch.equal(b, 2 * a) for a, b in zip(module.parameters(), other.parameters(), strict=True))


def test_a_whole_model_that_is_compiled_is_initialised_too() -> None:
    mesh = hp.make_mesh((1,), ("shard",))
    apply, arrays = hp.init_module(lambda: compile_layer(Stack()), mesh, hp.P("shard"))
    assert arrays.keys() == dict(Stack().named_parameters()).keys()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        apply(arrays, X)
    assert [str(warning.message) for warning in said] == [f"{RULE}the whole module{HINT}"]


def test_layers_that_are_compiled_in_place_are_told() -> None:
    module = build()
    module.blocks[1].compile(backend="eager")
    module.blocks[4].compile(backend="eager")
    assert said_by(module) == [f"{RULE}blocks.1\n  blocks.4{HINT}"]


def test_modules_that_are_not_compiled_give_no_warning() -> None:
    assert said_by(build()) == []
