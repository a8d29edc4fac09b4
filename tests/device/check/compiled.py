"""Rows viii and ix: units that `torch.compile` has compiled, and a step that is captured in a CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

import hpfunc as hp
from tests.device.cases import batch, block, chain, layer, plain_mesh, sharded_layers, train
from tests.device.harness import has_device, is_simulated, observe
from tests.helpers.ranks import mesh_of

from .found import Answer, Skip, Task, Wrong
from .programs import distance
from .steady import world_of

NEAR = 1e-3  # a compiled float32 kernel rounds elsewhere, and AdamW's first steps enlarge it


def compiled_units(task: Task) -> Answer:
    """Training with compiled units gives what training without them gives on the same device."""
    world, how = world_of(task)
    plain, compiled = (
        [each.result for each in observe(trains, compiles, task.is_planted, world=world, framework=task.framework)]
        for compiles in (False, True)
    )
    if 0 in (num_graphs := [found[1] for found in compiled]):
        raise Wrong(f"{how}: dynamo compiled nothing ({num_graphs} graphs)")
    far = max(distance(a[0], b[0]) for a, b in zip(compiled, plain, strict=True))
    if far > NEAR:
        raise Wrong(f"{how}: compiled units are {far:.1e} off")
    by = "AOTAutograd" if task.device == "sim" else "inductor"
    return Answer("done", f"{how}: by {by}, {'the same bits' if far == 0 else f'{far:.1e} off'}", {"farthest": far})


def trains(rank: int, compiles: bool, plants: bool) -> tuple[list[torch.Tensor], int]:
    """Returns what training gives, and how many graphs were compiled."""
    torch._dynamo.reset()
    counter = torch._dynamo.utils.counters["stats"]
    counter.clear()
    fn: Callable[..., Any] = block
    if compiles:
        scale = 1.01 if plants else 1.0
        fn = torch.compile(lambda p, x: scale * block(p, x), backend="aot_eager" if is_simulated() else "inductor")
    unit = hp.unit(fn, name="layer")
    mesh = plain_mesh()
    with warnings.catch_warnings():  # dynamo hides it, but where warnings are errors it is one before that
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        found = train(mesh, sharded_layers(mesh), lambda params, x: chain(params, x, unit))
    return found, counter["unique_graphs"]


def graph(task: Task) -> Answer:
    """A planned step of one rank, replayed with other data, gives what the step gives."""
    if task.device == "sim":
        raise Skip("the simulated device has no graphs")
    far, told = observe(replays, task.is_planted, world=1, framework=task.framework)[0].result
    if told:
        raise Skip(f"the step cannot be captured: {told}")
    if far > 0:
        raise Wrong(f"the replayed step is {far:.1e} off")
    return Answer("done", "1 rank: captured, replayed with other data: the same bits")


def replays(rank: int, plants: bool) -> tuple[float, str]:
    """Returns how far a replayed step is from the step itself, or why it cannot be captured."""
    assert has_device()
    mesh = mesh_of((1,), ("shard",))
    params, x = sharded_layers(mesh), batch(mesh, 0)
    step = hp.sharded(hp.value_and_grad(lambda params, x: chain(params, x, layer)), mesh)
    for _ in range(3):
        step(params, x)
    captured, graph = None, torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            captured = step(params, x)
    except (RuntimeError, hp.HpfuncError) as error:
        return 0.0, str(error).splitlines()[0]
    other = batch(mesh, 1)
    x.copy_(other if not plants else other + 1)
    graph.replay()
    assert captured is not None
    got, want = captured[0].detach().cpu(), step(params, other)[0].detach().cpu()
    return distance([got], [want]), ""
