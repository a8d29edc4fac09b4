"""`torch.compile` of a block inside of a unit: the same numbers, one compilation for all layers, nothing kept."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.multiprocessing.reductions import StorageWeakRef

import hpfunc as hp
from hpfunc.backends import get
from tests.helpers.chain import WAYS, D, data, layers
from tests.helpers.leaves import assert_same_bits, local_leaves
from tests.helpers.models import P
from tests.helpers.ranks import Pool, mesh_of, outcome
from tests.helpers.waiting import settled

pytestmark = pytest.mark.processes
LAYERS = 12  # more than `recompile_limit`, which all calls of one function share
STEPS = 3


def block(p: Any, x: torch.Tensor) -> torch.Tensor:
    return F.linear(torch.tanh(F.linear(x, p["w"], p["b"])), p["w"]) + x


def compiled(rank: int, way: str, planned: bool) -> tuple[list[torch.Tensor], list[torch.Tensor], list[int], int]:
    """Returns gradients with and without compilation, graphs after each step, and weights alive before backward."""
    torch._dynamo.reset()
    mesh, backend = mesh_of((2,), ("shard",)), cast(Any, get("torch"))
    weights = [{name: x.double() for name, x in p.items()} for p in layers(LAYERS)]
    params = hp.shard(weights, mesh, P("shard"))
    counter = CompileCounterWithBackend("aot_eager")
    live: list[StorageWeakRef] = []
    num_live, num_graphs, empty = [0], [], backend.empty

    def watch(shape: Any, dtype: str, device: str, *, zero: bool = False) -> Any:
        out = empty(shape, dtype, device, zero=zero)
        if out.numel() == D * D:
            live.append(StorageWeakRef(out.untyped_storage()))
        return out

    def gradients(fn: Callable[..., Any], num_steps: int) -> list[torch.Tensor]:
        unit = WAYS[way](fn)

        def loss(trained: Any, frozen: Any, x: torch.Tensor) -> torch.Tensor:
            x = unit(frozen, x)
            for p in (*trained[:6], frozen, *trained[6:]):
                x = unit(p, x)
            gc.collect()
            num_live[0] = settled(lambda: sum(not ref.expired() for ref in live), lambda number: number <= planned)
            return x.square().mean()

        run: Any = hp.value_and_grad(loss)
        if planned:
            policy = hp.Policy(prefetch=0, pack_below_bytes=0)
            run = hp.sharded(run, mesh, policy=policy, debug=True)
        for _ in range(num_steps):
            _, grads = run(params[1:], params[0], data(rank).double())
            num_graphs.append(counter.frame_count)
        return local_leaves(grads)

    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True), warnings.catch_warnings():
        # Dynamo looks at `.grad` of its arguments, and hides the warning in a way that does not hide an error.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        want = gradients(block, 2)
        num_graphs.clear()
        backend.empty = watch
        try:
            got = gradients(torch.compile(block, backend=counter, fullgraph=True), STEPS)
        finally:
            del backend.empty
    return got, want, num_graphs, num_live[0]


@pytest.mark.parametrize(("way", "planned"), [("plain", False), ("plain", True), ("remat", True), ("checkpoint", True)])
def test_a_compiled_block_inside_of_a_unit(pool: Callable[[int], Pool], way: str, planned: bool) -> None:
    for got, want, graphs, num_live in pool(2).run(compiled, way, planned):
        assert_same_bits(got, want)
        # One for each combination of what wants a gradient: the weights or not, the argument or not.
        assert graphs == [4] * STEPS
        assert num_live == planned  # planned, the last unit stays whole for its backward


def compiled_sums(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    torch._dynamo.reset()
    mesh = mesh_of((1, 2), ("shard", "tp"), ("shard",))
    params = hp.shard([p["w"] for p in layers(2)], mesh, P("tp"))

    def tensor_parallel(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x + hp.psum(torch.tanh(hp.pvary(x, "tp") @ w.T) @ w, "tp")

    def gradients(fn: Callable[..., Any]) -> list[torch.Tensor]:
        unit = hp.unit(fn, name="block")

        def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
            for w in params:
                x = unit(w, x)
            return x.square().mean()

        run = hp.sharded(hp.value_and_grad(loss), mesh, debug=True)
        for _ in range(2):
            _, grads = run(params, data(0))
        assert run.followed_plan
        return local_leaves(grads)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo warns of what it does not trace
        got = gradients(torch.compile(tensor_parallel, backend="aot_eager"))
    return got, gradients(tensor_parallel)


def test_a_compiled_block_may_sum_over_ranks(pool: Callable[[int], Pool]) -> None:
    for got, want in pool(2).run(compiled_sums):
        assert_same_bits(got, want)


# --- what is not a block --------------------------------------------------------------------------------------------
def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(F.linear(x, p["w"], p["b"])) + x


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class Parts:
    """A small training step, with `wrap` around one of its functions."""

    def __init__(self, mesh: Any, wrap: Wrap, place: str) -> None:
        def at(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
            return wrap(fn) if name == place else fn

        self.mesh = mesh
        self.unit = at("unit", hp.unit(at("block", layer), name="layer"))
        self.loss = at("loss", self._loss)
        self.gradient = at("gradient", hp.value_and_grad(self.loss))
        self.accumulated: Any = self.gradient  # of a compiled one `accumulate` knows nothing
        if place != "gradient":
            self.accumulated = at("accumulated", hp.accumulate(cast(Any, self.gradient), 2))
        self.body = at("body", self._body)
        self.step = at("step", hp.sharded(self.body, mesh))
        self.caller = at("caller", self._caller)

    def _loss(self, params: Any, x: torch.Tensor) -> torch.Tensor:
        for p in params:
            x = self.unit(p, x)
        return x.square().mean() + 0.1 * params[0]["w"].local.square().sum()

    def _body(self, params: Any, x: torch.Tensor) -> Any:
        loss, grads = self.accumulated(params, x)
        updates, _ = hp.optim.sgd(0.1).update(grads, hp.optim.sgd(0.1).init(params))
        return hp.apply_updates(params, updates), hp.pmean(loss, "shard")

    def _caller(self, params: Any, x: torch.Tensor) -> Any:
        params, loss = self.step(params, 2 * x)
        w = hp.unshard(params[0]["w"])
        again = hp.shard(w, self.mesh, P("shard"))
        return params, loss + 0 * hp.psum(again.local.sum(), "shard", mesh=self.mesh)


PLACES = ("block", "unit", "loss", "gradient", "accumulated", "body", "step", "caller")


def compiled_part(rank: int, place: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    torch._dynamo.reset()
    mesh = mesh_of((2,), ("shard",))

    def trained(wrap: Wrap) -> list[torch.Tensor]:
        params: Any = hp.shard(layers(3), mesh, P("shard"))
        parts, losses = Parts(mesh, wrap, place), []
        for number in range(3):
            params, loss = parts.caller(params, data(2 * number + rank))
            losses.append(loss)
        return [*losses, *local_leaves(params), parts.unit(params[0], data(rank)).detach()]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo warns of what it does not trace
        return trained(lambda fn: torch.compile(fn, backend="aot_eager")), trained(lambda fn: fn)


@pytest.mark.parametrize("place", PLACES)
def test_what_is_compiled_around_hpfunc_runs_as_it_is(pool: Callable[[int], Pool], place: str) -> None:
    for got, want in pool(2).run(compiled_part, place):
        assert_same_bits(got, want)


def one_graph(rank: int, place: str) -> str:
    torch._dynamo.reset()
    mesh = mesh_of((2,), ("shard",))
    params = hp.shard(layers(3), mesh, P("shard"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo warns of what it does not trace
        parts = Parts(mesh, lambda fn: torch.compile(fn, backend="aot_eager", fullgraph=True), place)
        return outcome(getattr(parts, place), params[0] if place == "unit" else params, data(rank))


@pytest.mark.parametrize("place", PLACES[1:])
def test_what_must_be_one_graph_is_refused_at_once(pool: Callable[[int], Pool], place: str) -> None:
    for text in pool(2).run(one_graph, place):
        assert text.startswith("Unsupported: ")
        assert "compile the function of a unit: hpfunc.unit(torch.compile(block_fn))" in text
