"""Programs that ranks run on an accelerator, and on CPUs: each returns what this rank has in the end.

`CASES` has them by name, with the number of ranks, and `SLOW` the streams that are made slow in turn. Most of them
train some small layers for a few steps, in the way that their name says, so that each part of hpfunc which enqueues
work runs on the device.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import optree
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import hpfunc as hp
from tests.device.harness import accelerator, device, has_device, is_simulated, never_waits
from tests.helpers.ranks import mesh_of

P = hp.P
WIDTH = 16
STEPS = 4  # one is recorded, one may be recorded again, two follow a plan
Case = Callable[[int], list[torch.Tensor]]
CASES: dict[str, tuple[Case, int]] = {}


SLOW: dict[str, tuple[str | None, ...]] = {}

# By how much tasks of a stream are late, on average, in microseconds: there are far more of them on the first one.
DELAYS = {"compute": 100, "gather": 1500, "reduce_scatter": 1500, "all_reduce": 1500}
ALL = (None, *DELAYS)
NO_ALL_REDUCE = ALL[:-1]  # two shards have none, if all weights are cut
FEWER = ALL[1:-1]
ONE = ("gather",)


def case(world: int = 2, slow: tuple[str | None, ...] = ()) -> Callable[[Case], Case]:
    """Adds a function to `CASES`, and to `SLOW` the streams that are slow in turn when it runs."""

    def add(fn: Case) -> Case:
        name = fn.__name__.removeprefix("train_")
        CASES[name] = fn, world
        SLOW[name] = slow or (NO_ALL_REDUCE if world == 2 else ALL)
        return fn

    return add


# --- what they are made of -------------------------------------------------------------------------------------------
def layers(count: int = 3, width: int = WIDTH) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [
        {"w": torch.randn(width, width, generator=draw) / 4, "b": torch.randn(width, generator=draw)}
        for _ in range(count)
    ]


def batch(
    mesh: hp.Mesh, step: int, width: int = WIDTH, size: int = 4, axes: tuple[str, ...] | None = None
) -> torch.Tensor:
    """Every rank, or every place along some axes, and every step has its own."""
    place = mesh.rank if axes is None else mesh.axis_index(axes)
    draw = torch.Generator().manual_seed(100 * place + step)
    return torch.randn(size, width, generator=draw).to(mesh.device)


def block(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(F.linear(x, p["w"], p["b"]))


layer = hp.unit(block, name="layer")


def chain(params: Any, x: torch.Tensor, call: Callable[..., Any] = layer) -> torch.Tensor:
    for p in params:
        x = call(p, x)
    return x.square().mean()


def plain_mesh() -> hp.Mesh:
    return mesh_of((min(2, dist.get_world_size()),), ("shard",))


def hybrid_mesh() -> hp.Mesh:
    return mesh_of((2, 2) if dist.get_world_size() == 4 else (1, 1), ("replicate", "shard"))


def train(
    mesh: hp.Mesh,
    params: Any,
    loss: Callable[..., torch.Tensor] = chain,
    *extra: Any,
    optimizer: Any = None,
    policy: hp.Policy | None = None,
    numerics: hp.Numerics | None = None,
    wrap: Callable[[Any], Any] = lambda grad_fn: grad_fn,
    debug: bool = False,
    donates: bool = True,
    size: int = 4,
    width: int = WIDTH,
    must_follow: bool = True,
    waits_because: str = "",
) -> list[torch.Tensor]:
    """Trains with a planned step, and returns the local losses, weights and state of the optimizer.

    In the last step the host may not wait for the device, unless there is a reason.
    """
    optimizer = optimizer or hp.optim.adamw(1e-2)
    grad_fn = wrap(hp.value_and_grad(loss, numerics=numerics))

    def step(params: Any, state: Any, x: torch.Tensor, *extra: Any) -> Any:
        loss, grads = grad_fn(params, x, *extra)
        updates, state = optimizer.update(grads, state, params)
        return hp.apply_updates(params, updates), state, loss

    policy = policy or hp.Policy(pack_below_bytes=0)
    run = hp.sharded(step, mesh, policy=policy, donate_argnums=(0, 1) if donates else (), debug=debug)
    state, losses = optimizer.init(params), []
    for number in range(STEPS):
        x = batch(mesh, number, width, size, mesh.data_axes)
        with never_waits() if number == STEPS - 1 and not waits_because else nullcontext():
            params, state, value = run(params, state, x, *extra)
        losses.append(value)
    assert run.followed_plan or not must_follow, "the last step did not follow its plan"
    return local(losses, params, state)


def local(*trees: Any) -> list[torch.Tensor]:
    """Returns the local parts of all tensors in these trees, on the host."""

    def is_sharded(leaf: Any) -> bool:
        return isinstance(leaf, hp.ShardedArray)

    leaves = optree.tree_leaves(trees, is_leaf=is_sharded)
    values = [leaf.local if is_sharded(leaf) else leaf for leaf in leaves]
    return [value.detach().cpu() for value in values if isinstance(value, torch.Tensor)]


def sharded_layers(mesh: hp.Mesh, count: int = 3, width: int = WIDTH) -> Any:
    return hp.shard(layers(count, width), mesh, P("shard"))


# --- policies and layouts --------------------------------------------------------------------------------------------
@case()
def train_plain(rank: int) -> list[torch.Tensor]:
    return train(plain_mesh(), sharded_layers(plain_mesh()))


@case()
def train_packed(rank: int) -> list[torch.Tensor]:
    return train(plain_mesh(), sharded_layers(plain_mesh()), policy=hp.Policy(pack_below_bytes=1 << 20))


@case()
def train_probed(rank: int) -> list[torch.Tensor]:
    """What is packed is measured, so the measurement runs on the device, too."""
    return train(plain_mesh(), sharded_layers(plain_mesh()), policy=hp.Policy())


@case()
def train_without_prefetch(rank: int) -> list[torch.Tensor]:
    return train(plain_mesh(), sharded_layers(plain_mesh()), policy=hp.Policy(prefetch=0, pack_below_bytes=0))


@case()
def train_far_prefetch(rank: int) -> list[torch.Tensor]:
    policy = hp.Policy(prefetch=3, prefetch_backward=2, pack_below_bytes=0)
    return train(plain_mesh(), sharded_layers(plain_mesh(), 4), policy=policy)


@case()
def train_released_late(rank: int) -> list[torch.Tensor]:
    return train(plain_mesh(), sharded_layers(plain_mesh()), policy=hp.Policy(release="never", pack_below_bytes=0))


@case()
def train_bucketed(rank: int) -> list[torch.Tensor]:
    policy = hp.Policy(reduce_bucket_bytes=1500, pack_below_bytes=0)
    return train(plain_mesh(), sharded_layers(plain_mesh()), policy=policy)


@case()
def train_uneven(rank: int) -> list[torch.Tensor]:
    return train(plain_mesh(), sharded_layers(plain_mesh(), 3, 17), width=17)


@case(slow=ALL)
def train_second_dim(rank: int) -> list[torch.Tensor]:
    """A weight that is cut along its columns travels in pieces, which are copied."""
    specs = [{"w": P(None, "shard"), "b": P()}] * 3
    return train(plain_mesh(), hp.shard(layers(), plain_mesh(), specs))


@case()
def train_bf16(rank: int) -> list[torch.Tensor]:
    numerics = hp.Numerics(param_dtype="bfloat16", reduce_dtype="float32", cast_inputs=True)
    return train(plain_mesh(), sharded_layers(plain_mesh()), numerics=numerics)


@case(world=4)
def train_hybrid(rank: int) -> list[torch.Tensor]:
    return train(hybrid_mesh(), sharded_layers(hybrid_mesh()))


@case(world=4)
def train_hybrid_packed(rank: int) -> list[torch.Tensor]:
    return train(hybrid_mesh(), sharded_layers(hybrid_mesh()), policy=hp.Policy(pack_below_bytes=1 << 20))


@case(world=4)
def train_hybrid_in_two_queues(rank: int) -> list[torch.Tensor]:
    return train(hybrid_mesh(), sharded_layers(hybrid_mesh()), policy=hp.Policy(pack_below_bytes=0, communicators=2))


# --- ways to compute -------------------------------------------------------------------------------------------------
@case()
def train_remat(rank: int) -> list[torch.Tensor]:
    again = hp.unit(block, name="layer", remat=True)
    return train(plain_mesh(), sharded_layers(plain_mesh()), lambda params, x: chain(params, x, again))


@case()
def train_checkpoint(rank: int) -> list[torch.Tensor]:
    def again(p: Any, x: torch.Tensor) -> Any:
        return checkpoint(layer, p, x, use_reentrant=False)

    return train(plain_mesh(), sharded_layers(plain_mesh()), lambda params, x: chain(params, x, again))


@case()
def train_module(rank: int) -> list[torch.Tensor]:
    """No attention and no layer norm: for these the CPU has kernels of its own, with other bits."""
    torch.manual_seed(0)
    linear = torch.nn.Linear
    make = [torch.nn.Sequential(linear(WIDTH, 2 * WIDTH), torch.nn.GELU(), linear(2 * WIDTH, WIDTH)) for _ in range(3)]
    apply, params = hp.from_module(torch.nn.Sequential(*make))

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return apply(params, x).square().mean()

    return train(plain_mesh(), hp.shard(params, plain_mesh(), P("shard")), loss, optimizer=hp.optim.sgd(1e-2))


@case()
def train_buffers(rank: int) -> list[torch.Tensor]:
    """The buffers of the module were made on the CPU."""
    torch.manual_seed(0)
    linear, norm = torch.nn.Linear, torch.nn.BatchNorm1d
    apply, params = hp.from_module(torch.nn.Sequential(linear(WIDTH, WIDTH), norm(WIDTH), linear(WIDTH, WIDTH)))
    evaluated = apply.eval()

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return evaluated(params, x).square().mean()

    return train(plain_mesh(), hp.shard(params, plain_mesh(), P("shard")), loss)


@case()
def train_frozen(rank: int) -> list[torch.Tensor]:
    """Frozen weights, which are gathered and never reduced, beside small ones that train."""
    mesh = plain_mesh()
    frozen = hp.freeze(sharded_layers(mesh))
    scales = hp.shard([{"s": torch.ones(WIDTH)} for _ in range(3)], mesh, P("shard"))
    scale = hp.unit(lambda p, x: x * p["s"], name="scale")

    def loss(scales: Any, x: torch.Tensor, frozen: Any) -> torch.Tensor:
        for p, q in zip(scales, frozen, strict=True):
            x = scale(p, layer(q, x))
        return x.square().mean()

    return train(mesh, scales, loss, frozen, donates=False)


@case()
def train_uses(rank: int) -> list[torch.Tensor]:
    """One layer is used twice, one result is dropped, one layer is never used."""

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        first, second, third, _ = params
        layer(third, x)
        return layer(first, layer(second, layer(first, x))).square().mean()

    return train(plain_mesh(), sharded_layers(plain_mesh(), 4), loss)


@case()
def train_leaving(rank: int) -> list[torch.Tensor]:
    """Each step has another number of layers than the last, so it leaves its plan."""
    count = [0]

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        return chain(params[: 2 + count[0] % 3], x)

    return train(plain_mesh(), sharded_layers(plain_mesh(), 4), loss, must_follow=False)


@case()
def train_dynamic(rank: int) -> list[torch.Tensor]:
    """Two programs take turns, and one comes only once."""
    count = [0]

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        order = params if count[0] % 2 else params[::-1] + params[:1]
        return chain(order if count[0] != 3 else params[1:], x)

    return train(plain_mesh(), sharded_layers(plain_mesh()), loss, must_follow=False)


@case()
def train_debug(rank: int) -> list[torch.Tensor]:
    return train(plain_mesh(), sharded_layers(plain_mesh()), debug=True)


@case()
def train_accumulate_scatter(rank: int) -> list[torch.Tensor]:
    return train(plain_mesh(), sharded_layers(plain_mesh()), wrap=lambda fn: hp.accumulate(fn, 3), size=12)


@case()
def train_accumulate_local(rank: int) -> list[torch.Tensor]:
    return train(
        plain_mesh(), sharded_layers(plain_mesh()), wrap=lambda fn: hp.accumulate(fn, 3, mode="local"), size=12
    )


@case(world=4)
def train_accumulate_hybrid(rank: int) -> list[torch.Tensor]:
    return train(hybrid_mesh(), sharded_layers(hybrid_mesh()), wrap=lambda fn: hp.accumulate(fn, 2), size=8)


@case()
def train_side_stream(rank: int) -> list[torch.Tensor]:
    """The caller trains on a stream of its own."""
    mesh = plain_mesh()
    params = sharded_layers(mesh)
    if not has_device():
        return train(mesh, params)
    module = accelerator()
    side = module.Stream()
    if is_simulated():
        device().name_stream(side.stream_id, "compute of the caller")
    side.wait_stream(module.current_stream())
    with module.stream(side):
        result = train(mesh, params)
    module.current_stream().wait_stream(side)
    return result


@case()
def train_timeline(rank: int) -> list[torch.Tensor]:
    with hp.record_timeline() as timeline:
        result = train(plain_mesh(), sharded_layers(plain_mesh()))
    assert timeline.spans
    return result


# --- without a plan --------------------------------------------------------------------------------------------------
@case()
def eager(rank: int) -> list[torch.Tensor]:
    mesh = plain_mesh()
    params, optimizer, value_and_grad = sharded_layers(mesh), hp.optim.sgd(0.1), hp.value_and_grad(chain)
    state = optimizer.init(params)
    for number in range(STEPS):
        _, grads = value_and_grad(params, batch(mesh, number))
        updates, state = optimizer.update(grads, state, params)
        params = hp.apply_updates(params, updates)
    return local(params)


@case()
def saved(rank: int) -> list[torch.Tensor]:
    """Saves while the next step runs, loads again, and gathers."""
    mesh = plain_mesh()
    params, step = sharded_layers(mesh), hp.sharded(hp.value_and_grad(chain), mesh)
    with tempfile.TemporaryDirectory() if rank == 0 else nullcontext("") as own:
        folder = [own]
        dist.broadcast_object_list(folder, 0, device=torch.device("cpu"))
        saving = hp.checkpoint.save(Path(folder[0], "model"), params, asynchronous=True)
        _, grads = step(params, batch(mesh, 0))
        saving.wait()
        loaded = hp.checkpoint.load(Path(folder[0], "model"), params)
        result = local(grads, loaded, hp.unshard(loaded, ("shard",)), hp.reshard(params, P(None)))
        local(hp.psum(torch.zeros(1, device=mesh.device), "shard", mesh=mesh))  # all have read: the folder may go
    return result
