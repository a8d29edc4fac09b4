"""Checkpoints inside of a module that is a unit, as modern blocks have them, give the numbers of the plain module."""

from __future__ import annotations

import copy
import inspect
import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import hpfunc as hp
from tests.helpers.ranks import mesh_of, outcome
from tests.nn.training import Pools

os.environ["HF_HUB_OFFLINE"] = "1"
pytestmark = pytest.mark.processes
Tensor = torch.Tensor
again: Any = partial(checkpoint, use_reentrant=False)
WIDTH = 6


class Block(nn.Module):
    """What the checkpoint holds varies."""

    def __init__(self, way: Callable[..., Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
        self.gain = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.way = way

    def inner(self, x: Tensor) -> Tensor:
        h = self.drop(x)  # the mode is asked for before any parameter
        h = self.norm(h) * self.scale * self.gain
        return x + self.down(torch.tanh(self.up(h)))

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def whole(block: Block, x: Tensor) -> Tensor:
    return again(block.inner, x)


def by_keywords(block: Block, x: Tensor) -> Tensor:
    return again(block.inner, x=x)


def without_arguments(block: Block, x: Tensor) -> Tensor:
    return again(lambda: block.inner(x))


def a_part(block: Block, x: Tensor) -> Tensor:
    return block.down(again(lambda x: torch.tanh(block.up(x)).sin(), block.norm(x) * 2)) * block.gain


def nested(block: Block, x: Tensor) -> Tensor:
    return again(lambda x: again(block.inner, x.sin()).cos() * block.gain, x)


def twice(block: Block, x: Tensor) -> Tensor:
    return again(block.inner, again(block.inner, x))


def to_the_end(block: Block, x: Tensor) -> Tensor:
    return again(block.inner, x, early_stop=False).sin()


contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
# Since torch 2.14 the caller says whether what such a checkpoint keeps goes through hooks, as hpfunc's are.
CHOOSES_HOOKS = "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters


def selective(block: Block, x: Tensor) -> Tensor:
    options = {"respect_saved_tensors_hooks": False} if CHOOSES_HOOKS else {}
    return again(block.inner, x, context_fn=contexts, **options)


def selective_by_hooks(block: Block, x: Tensor) -> Tensor:
    return again(block.inner, x, context_fn=contexts, respect_saved_tensors_hooks=True)


EVERYWHERE = (whole, by_keywords, without_arguments, a_part, nested, twice, to_the_end, selective)
WAYS = {fn.__name__: fn for fn in (*EVERYWHERE, *([selective_by_hooks] if CHOOSES_HOOKS else []))}


class Net(nn.Module):
    def __init__(self, way: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(way) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def net(way: str) -> Net:
    torch.manual_seed(0)
    return Net(WAYS[way]).double().train()


def batch(rank: int) -> Tensor:
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)[rank]


def loss_of(call: Callable[..., Tensor], eval_call: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Between forward and backward the same module runs in another mode: no checkpoint may see that."""
    torch.manual_seed(3)
    y = call(x)
    with torch.no_grad():
        wanted = eval_call(x)
    return (y - wanted).square().mean()


def plain(way: str) -> dict[str, Tensor]:
    """Returns the mean gradient over the ranks' data. The module that runs in the other mode is a copy."""
    totals: dict[str, Tensor] = {}
    for rank in range(2):
        module = net(way)
        loss_of(module, copy.deepcopy(module).eval(), batch(rank)).backward()
        for path, x in module.named_parameters():
            gradient = torch.zeros_like(x) if x.grad is None else x.grad
            totals[path] = totals.get(path, torch.zeros_like(x)) + gradient / 2
    return {path: x.detach() for path, x in totals.items()}


def sharded(rank: int, remat: bool) -> dict[str, list[dict[str, Tensor]]]:
    mesh = mesh_of((2,), ("shard",))
    found = {}
    for way in WAYS:
        apply, given = hp.from_module(net(way), remat=remat)
        params = hp.shard(given, mesh, hp.P("shard"))
        start = {path: x.clone() for path, x in apply.buffers.items()}

        def loss(params: Any, x: Tensor, apply: Any = apply) -> Tensor:
            def train(x: Tensor) -> Any:
                return apply.with_buffers(params, apply.buffers, x)[0]

            return loss_of(train, partial(apply.eval(), params), x)

        differentiate = hp.grad(loss)
        step = hp.sharded(differentiate, mesh, policy=hp.Policy(pack_below_bytes=0), debug=True)
        found[way] = [hp.unshard(run(params, batch(rank))) for run in (differentiate, step, step)]
        assert step.followed_plan
        assert all(torch.equal(x, start[path]) for path, x in apply.buffers.items())
    return found


@pytest.mark.parametrize("remat", [False, True])
def test_a_checkpoint_inside_gives_the_gradients_of_the_plain_module(pool: Pools, remat: bool) -> None:
    for found in pool(2).run(sharded, remat):
        for way, calls in found.items():
            want = plain(way)
            for got in calls:
                assert got.keys() == want.keys()
                for path, w in want.items():
                    torch.testing.assert_close(got[path], w, rtol=1e-10, atol=1e-13, msg=f"{way} {path}")


# --- what cannot be right ---------------------------------------------------------------------------------------------
def reentrant(rank: int) -> str:
    module = Net(lambda block, x: checkpoint(block.inner, x, use_reentrant=True)).double()
    apply, given = hp.from_module(module)
    params = hp.shard(given, mesh_of((2,), ("shard",)), hp.P("shard"))
    x = batch(rank).requires_grad_()  # without it torch would give no gradient, and warn of it
    return outcome(hp.grad(lambda p: apply.with_buffers(p, apply.buffers, x)[0].sum()), params)


def test_a_reentrant_checkpoint_inside_is_refused(pool: Pools) -> None:
    for text in pool(2).run(reentrant):
        assert "UsageError: hpfunc.value_and_grad: a checkpoint with use_reentrant=True" in text


def after_a_failure(rank: int) -> list[bool]:
    """A backward that fails half way leaves nothing of its weights in the module's copy."""
    fails = [False]

    def way(block: Block, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            if fails[0] and torch._C._current_graph_task_id() != -1 and block.up.weight.sum() < 1e9:
                raise ValueError("as planned")
            return block.inner(x)

        return again(inner, x)

    mesh = mesh_of((2,), ("shard",))
    apply, given = hp.from_module(Net(way).double().eval())
    first = hp.shard(given, mesh, hp.P("shard"))
    second = hp.shard({path: 2 * x.detach() for path, x in given.items()}, mesh, hp.P("shard"))
    gradient = hp.grad(lambda p: apply(p, batch(rank)).square().sum())
    want = gradient(second)
    fails[0] = True
    assert "as planned" in outcome(gradient, first)
    fails[0] = False
    return [torch.equal(x.local, want[path].local) for path, x in gradient(second).items()]


def test_after_a_failure_in_a_checkpoint_the_module_is_as_before(pool: Pools) -> None:
    for same in pool(2).run(after_a_failure):
        assert all(same)


# --- models of transformers -------------------------------------------------------------------------------------------
def of_transformers(rank: int, remat: bool) -> dict[str, list[float]]:
    """Returns the largest relative difference to the plain model's gradients on this rank's own data, by model."""
    from tests.nn.pretrained import Pretrained

    found: dict[str, list[float]] = {}
    mesh = mesh_of((2,), ("shard",))
    for name in ("llama", "gpt2", "bert", "vit"):
        case = Pretrained(name)
        want: dict[str, Tensor] = {}
        for other in range(2):
            module = case.module()
            args, kwargs = case.call(other, 0)
            module(*args, **kwargs).loss.backward()
            for path, x in module.named_parameters():
                gradient = torch.zeros_like(x) if x.grad is None else x.grad
                want[path] = want.get(path, torch.zeros_like(x)) + gradient.detach() / 2
        module = case.module()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # it has a new name in version 6
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        apply, given = hp.from_module(module, remat=remat)
        params = hp.shard(given, mesh, hp.P("shard"))
        gradient = hp.grad(lambda p, kwargs, apply=apply: apply(p, **kwargs).loss)
        step = hp.sharded(gradient, mesh, policy=hp.Policy(pack_below_bytes=0))
        for run in (gradient, step, step):
            _, kwargs = case.call(rank, 0)
            got = hp.unshard(run(params, kwargs))
            errors = [(got[path] - w).norm() / w.norm().clamp_min(1e-3) for path, w in want.items()]
            found.setdefault(name, []).append(float(max(errors)))
        assert step.followed_plan
    return found


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_models_that_checkpoint_their_blocks(pool: Pools, remat: bool) -> None:
    for found in pool(2).run(of_transformers, remat, deadline_s=240.0):
        for name, errors in found.items():
            assert max(errors) < 1e-10, (name, errors)
