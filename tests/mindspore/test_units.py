"""What differs below the public API on MindSpore: release, remat, views of weights, order of backward, errors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch

import hpfunc as hp
from hpfunc.backends import get
from tests.helpers import frameworks as ops
from tests.helpers.frameworks import needs_mindspore, to_framework, to_torch
from tests.helpers.models import Model
from tests.helpers.ranks import Pool, mesh_of, outcome

pytestmark = [pytest.mark.processes, needs_mindspore]
WIDTH, DEPTH = 32, 6
HSDP = (2, 2), ("replicate", "shard")


def layer(p: Any, x: Any) -> Any:
    return ops.tanh(ops.linear(x, p["w"]))


def setting(rank: int, depth: int = DEPTH) -> tuple[hp.Mesh, Any, Any]:
    """Returns a mesh, sharded weights and this rank's batch."""
    mesh = mesh_of(*HSDP)
    generator = torch.Generator().manual_seed(1)
    weights = [{"w": torch.randn(WIDTH, WIDTH, generator=generator) / 4} for _ in range(depth)]
    batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 + rank))
    return mesh, hp.shard(to_framework(weights), mesh, hp.P("shard")), to_framework(batch)


def chain(unit: Callable[..., Any]) -> Callable[..., Any]:
    def loss(params: Any, x: Any) -> Any:
        for p in params:
            x = unit(p, x)
        return x.square().mean()

    return loss


def whole_buffers(rank: int, remat: bool, release: Any) -> tuple[int, int, list[torch.Tensor]]:
    """Returns the most whole weights that were alive at once, those after the steps, and the gradients."""
    mesh, params, x = setting(rank)
    backend = get("mindspore")
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    peak, plain = 0, backend.empty

    def empty(shape: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal peak
        tensor = plain(shape, *args, **kwargs)
        if tensor.numel() == WIDTH * WIDTH:
            alive.add(tensor)
            peak = max(peak, len(alive))
        return tensor

    policy: Any = hp.Policy(1, release, pack_below_bytes=0)
    grads: Any = None
    step = hp.sharded(hp.grad(chain(hp.unit(layer, remat=remat))), mesh, policy=policy, debug=True)
    backend.empty = empty
    try:
        for _ in range(3):
            peak = 0
            grads = step(params, x)
    finally:
        del backend.empty
    assert step.followed_plan
    gc.collect()
    return peak, len(alive), to_torch(optree.tree_leaves(grads))


@pytest.mark.parametrize("remat", [False, True])
def test_whole_weights_are_released(pool: Callable[..., Pool], remat: bool) -> None:
    ranks = pool(4)
    kept, released = ranks.run(whole_buffers, False, "never"), ranks.run(whole_buffers, remat, "forward")
    for (most, _, want), (peak, left, got) in zip(kept, released, strict=True):
        assert most >= DEPTH
        assert peak <= 4  # one in use, one gathered ahead; in backward also a message of gradients, and what arrives
        assert left == 0
        assert all(map(torch.equal, got, want))


def events_of(rank: int) -> list[str]:
    """Uses whose outputs do not reach the loss, and units without a trainable weight, have their backward in order."""
    mesh, params, x = setting(rank, 4)
    units = [hp.unit(layer, name=name) for name in "abcd"]

    def loss(trained: Any, frozen: Any, x: Any) -> Any:
        x = units[0](trained[0], x)
        units[1](trained[1], x)
        return units[3](trained[2], units[2](frozen, x)).square().mean()

    step = hp.sharded(lambda p, x: hp.grad(loss)(p[:3], p[3], x), mesh)
    step(params, x)
    assert step.last_schedule is not None
    program = step.last_schedule.program
    return [program.spell(event) for event in program.events]


def test_backwards_come_in_reverse_order_on_every_rank(pool: Callable[..., Pool]) -> None:
    for events in pool(4).run(events_of):
        backwards = [event.split("backward")[1].strip()[:1] for event in events if event.startswith("backward")]
        assert backwards == ["d", "c", "b", "a"], events


def features(rank: int) -> dict[str, Any]:
    _, params, x = setting(rank, 2)
    unit = hp.unit(layer)
    loss = chain(unit)

    def direct(params: Any, x: Any) -> Any:
        return loss(params, x) + (params[0]["w"].local ** 2).sum()

    found: dict[str, Any] = {"plain": hp.value_and_grad(loss)(params, x)}
    for mode in ("scatter", "local"):
        found[mode] = hp.accumulate(hp.value_and_grad(loss), 2, mode=mode)(params, x)
    found["batch"] = hp.value_and_grad(loss, argnums=(0, 1))(params, x)
    found["direct"] = hp.value_and_grad(direct)(params, x)
    found["float16"] = hp.value_and_grad(loss, numerics=hp.Numerics("float16", cast_inputs=True))(params, x)
    found["bfloat16 sums"] = hp.value_and_grad(loss, numerics=hp.Numerics(reduce_dtype="bfloat16"))(params, x)
    found["w"] = params[0]["w"].local
    return {name: to_torch(optree.tree_leaves(tree)) for name, tree in found.items()}


def test_gradients_of_what_is_no_plain_unit(pool: Callable[..., Pool]) -> None:
    results = pool(4).run(features)
    for rank, found in enumerate(results):
        loss, *grads = found["plain"]
        for mode in ("scatter", "local"):
            torch.testing.assert_close(found[mode], [loss, *grads])
        assert all(map(torch.equal, found["batch"][:3], [loss, *grads]))
        assert found["batch"][3].shape == (4, WIDTH)
        torch.testing.assert_close(found["direct"][1] - grads[0], found["w"][0])  # 2 w, on 2 of 4 ranks
        assert torch.equal(found["direct"][2], grads[1])
        torch.testing.assert_close(found["float16"][1], grads[0], rtol=0.1, atol=1e-4)
        torch.testing.assert_close(found["bfloat16 sums"][1], grads[0], rtol=0.02, atol=1e-4)
        assert not torch.equal(found["bfloat16 sums"][1], grads[0])
        assert all(map(torch.equal, grads, results[rank ^ 2]["plain"][1:]))  # the same on both replicas


def misuses(rank: int) -> dict[str, str]:
    import mindspore

    mesh, params, x = setting(rank, 1)
    w, unit = params[0], hp.unit(layer)
    grad = hp.grad(lambda w, x: unit(w, x).mean())
    before = to_torch(grad(w, x)["w"].local)

    def transposed(w: Any, x: Any) -> Any:
        return hp.unit(lambda w, x: ops.matmul(x, w["w"].T), name="view")(w, unit(w, x)).mean()

    def recomputing(w: Any, x: Any) -> Any:
        return mindspore.recompute(lambda x: unit(w, x).mean(), x, use_reentrant=False)

    def failing(w: Any, x: Any) -> Any:
        raise ValueError(f"after {unit(w, x).shape}")

    def failing_backward(w: Any, x: Any) -> Any:
        def broken(_: Any) -> Any:
            raise ValueError("in backward")

        backend = get("mindspore")
        return backend.linear(lambda t: t, broken, unit(w, x)).mean()

    half = hp.Numerics("bfloat16", cast_inputs=True)
    found = {
        "view": outcome(hp.grad(transposed), w, x),
        "escape": outcome(hp.unit(lambda w: w["w"][1:3]), w),
        "recompute": outcome(hp.grad(recomputing), w, x),
        "forward": outcome(hp.grad(failing), w, x),
        "backward": outcome(hp.grad(failing_backward), w, x),
        "bfloat16": outcome(hp.grad(lambda w, x: unit(w, x).mean(), numerics=half), w, x),
        "pair": outcome(hp.grad(unit), w, x),
        "mixed": outcome(hp.shard, [x, torch.ones(2)], mesh, hp.P()),
        "torch": outcome(hp.shard, [torch.ones(2)], mesh, hp.P()),
        "device": outcome(hp.make_mesh, HSDP[0], HSDP[1], device="npu:0"),
        "lower": outcome(hp.sharded(grad, mesh).lower, w, x),
    }
    assert torch.equal(to_torch(grad(w, x)["w"].local), before), "an error leaves nothing behind"
    return found


def test_misuse_is_named_and_leaves_nothing_behind(pool: Callable[..., Pool]) -> None:
    for found in pool(4).run(misuses):
        assert found["view"].startswith("HpfuncWarning: hpfunc.unit: autograd keeps a copy of a whole weight")
        assert "remat=True" in found["view"]
        assert "escapes from the unit" in found["escape"]
        assert "remat=True" in found["recompute"]
        assert found["forward"] == f"ValueError: after (4, {WIDTH})"
        assert found["backward"] == "ValueError: in backward"
        assert "does not exist on the CPU in this dtype: Select CPU operator[MatMul]" in found["bfloat16"]
        assert "compute in float32" in found["bfloat16"]
        assert "the loss must be a real scalar tensor, got shape (4, 32)" in found["pair"]
        assert "tensors of mindspore and torch in one tree" in found["mixed"]
        assert "torch tensors on a mesh of mindspore" in found["torch"]
        assert found["device"].startswith("MeshError: hpfunc.make_mesh: MindSpore runs on the CPU in this process")
        assert found["lower"].startswith("LoweringError")


def made(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    mesh, model = mesh_of(*HSDP), Model()
    specs = optree.tree_map(lambda x: hp.P("shard") if x.dim() else hp.P(), model.weights())
    arrays = hp.init(lambda: to_framework(model.weights()), mesh, specs)
    return to_torch(optree.tree_leaves(hp.unshard(arrays))), optree.tree_leaves(model.weights())


def test_init_gives_the_values_of_its_function(pool: Callable[..., Pool]) -> None:
    for got, want in pool(4).run(made):
        assert all(map(torch.equal, got, want))
