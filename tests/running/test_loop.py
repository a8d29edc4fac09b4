"""What a loop needs around its step: batches that end at different times, numbers of all ranks, a meeting point."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import hpfunc as hp
from tests.helpers.ranks import Pool, mesh_of, outcome

Tensor = torch.Tensor
pytestmark = pytest.mark.processes
LENGTHS = [3, 1, 0, 2]


# --- batches --------------------------------------------------------------------------------------------------------
def batches_of(rank: int, known: bool, lengths: list[int]) -> list[int]:
    batches = range(10 * rank, 10 * rank + lengths[rank])
    return list(hp.loop.even_batches(batches if known else iter(batches), mesh_of((4,), ("shard",)), -1))


@pytest.mark.parametrize("known", [True, False])
def test_all_ranks_get_as_many_batches(pool: Callable[[int], Pool], known: bool) -> None:
    found = pool(4).run(batches_of, known, LENGTHS)
    assert found == [[0, 1, 2], [10, -1, -1], [-1, -1, -1], [30, 31, -1]]
    assert pool(4).run(batches_of, known, [0] * 4) == [[]] * 4


def some_know(rank: int) -> list[int]:
    batches = range(rank + 1)
    return list(hp.loop.even_batches(batches if rank else iter(batches), mesh_of((2,), ("shard",)), -1))


def test_one_rank_that_does_not_know_is_enough(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(some_know) == [[0, -1], [0, 1]]


class Sized:
    """A loader with a length, whose second batch cannot be read on rank 1."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        yield 0
        if self.rank:
            raise OSError("no such file")
        yield from (1, 2)


def failing(rank: int, known: bool) -> tuple[str, float, float]:
    mesh = mesh_of((2,), ("shard",))
    step = hp.sharded(lambda x: hp.psum(x, "shard"), mesh)

    def epoch() -> None:
        for batch in hp.loop.even_batches(Sized(rank) if known else iter(Sized(rank)), mesh, -1):
            step(torch.tensor(float(batch)))

    begin = time.monotonic()
    text = outcome(epoch)
    return text, time.monotonic() - begin, float(step(torch.ones(())))


@pytest.mark.parametrize("known", [True, False])
def test_a_loader_that_fails_on_one_rank_ends_all(pool: Callable[[int], Pool], known: bool) -> None:
    (text, taken_s, after), (own, _, _) = pool(2).run(failing, known)
    assert own == "OSError: no such file"
    assert text.startswith("PeerError: hpfunc: rank 1 failed while rank 0 waited for")
    assert "rank 1: OSError: no such file" in text
    assert taken_s < 5
    assert after == 2.0


# --- the mean over the tokens of all ranks --------------------------------------------------------------------------
SEQUENCES, LONGEST, WIDTH, CLASSES = 11, 5, 6, 7  # 11 sequences: no number of ranks but 1 divides them


def model_weights() -> Any:
    generator = torch.Generator().manual_seed(0)
    shapes = {"table": (CLASSES, WIDTH), "w": (WIDTH, WIDTH), "b": (WIDTH,)}
    return {k: torch.randn(shape, generator=generator, dtype=torch.float64) / 3 for k, shape in shapes.items()}


def sequences() -> tuple[Tensor, Tensor]:
    """Inputs and labels; labels of -100 do not count. Lengths differ from sequence to sequence."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randint(CLASSES, (SEQUENCES, LONGEST), generator=generator)
    labels = torch.randint(CLASSES, (SEQUENCES, LONGEST), generator=generator)
    lengths = torch.randint(1, LONGEST + 1, (SEQUENCES, 1), generator=generator)
    return inputs, torch.where(torch.arange(LONGEST) < lengths, labels, -100)


def sum_of_losses(p: Any, inputs: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(torch.tanh(F.linear(F.embedding(inputs, p["table"]), p["w"], p["b"])), p["table"])
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def trained(rank: int, shape: tuple[int, ...], names: tuple[str, ...], batch_size: int) -> Any:
    """Returns the losses of an epoch, the weights after it, and the loss over all data, as the page does it."""
    mesh = mesh_of(shape, names, ("shard",))
    params = hp.shard(model_weights(), mesh, hp.P("shard"))
    unit = hp.unit(sum_of_losses)

    def step_fn(params: Any, inputs: Tensor, labels: Tensor) -> Any:
        num_tokens = hp.psum((labels != -100).sum(), mesh.data_axes)

        def loss_fn(params: Any) -> Tensor:
            return unit(params, inputs, labels) / num_tokens

        loss, grads = hp.value_and_grad(loss_fn, numerics=hp.Numerics(reduce_op="sum"))(params)
        updates, _ = hp.optim.sgd(0.5).update(grads, hp.optim.sgd(0.5).init(params), params)
        return hp.apply_updates(params, updates), hp.psum(loss, mesh.data_axes)

    inputs, labels = sequences()
    mine = range(mesh.data_rank, SEQUENCES, mesh.num_data_ranks)
    loader = torch.utils.data.DataLoader(list(zip(inputs, labels, strict=True)), batch_size, sampler=mine)
    empty = torch.zeros(1, LONGEST, dtype=torch.long), torch.full((1, LONGEST), -100)
    step, losses = hp.sharded(step_fn, mesh), []
    for batch in hp.loop.even_batches(loader, mesh, empty):
        params, loss = step(params, *batch)
        losses.append(loss.item())
    sums = {"loss": 0.0, "tokens": 0}
    evaluate = hp.sharded(unit, mesh)
    for x, y in hp.loop.even_batches(loader, mesh, empty):
        sums["loss"] += evaluate(params, x, y).item()
        sums["tokens"] += int((y != -100).sum())
    sums = hp.loop.reduce_metrics(sums, mesh, "sum")
    return losses, hp.unshard(params), sums


@pytest.mark.parametrize(
    ("shape", "names", "batch_size"), [((2,), ("shard",), 2), ((4,), ("shard",), 1), ((2, 2), ("shard", "tp"), 3)]
)
def test_uneven_batches_give_the_mean_over_the_union_of_the_data(
    pool: Callable[[int], Pool], shape: tuple[int, ...], names: tuple[str, ...], batch_size: int
) -> None:
    inputs, labels = sequences()
    num_ranks, weights = shape[0], model_weights()
    losses = []
    for number in range(math.ceil(SEQUENCES / num_ranks / batch_size)):
        rows = [
            row
            for rank in range(num_ranks)
            for row in range(rank, SEQUENCES, num_ranks)[number * batch_size : (number + 1) * batch_size]
        ]
        leaves = {name: weight.requires_grad_() for name, weight in weights.items()}
        loss = sum_of_losses(leaves, inputs[rows], labels[rows]) / (labels[rows] != -100).sum()
        loss.backward()
        losses.append(loss.item())
        weights = {name: (w - 0.5 * w.grad).detach() for name, w in leaves.items() if w.grad is not None}
    total = float(sum_of_losses(weights, inputs, labels))
    for found, params, sums in pool(math.prod(shape)).run(trained, shape, names, batch_size):
        assert found == pytest.approx(losses, rel=1e-13)
        for name, weight in weights.items():
            torch.testing.assert_close(params[name], weight, rtol=1e-12, atol=1e-14)
        assert sums == pytest.approx({"loss": total, "tokens": int((labels != -100).sum())}, rel=1e-13)


# --- numbers --------------------------------------------------------------------------------------------------------
def reduced(rank: int, op: Any, shape: tuple[int, ...], names: tuple[str, ...]) -> tuple[Any, int]:
    mesh = mesh_of(shape, names, ("shard",))
    place = mesh.data_rank
    metrics = {"loss": torch.tensor(0.1 * (place + 1)), "counts": [place, 2**40 + place], "bad": math.nan * (place > 0)}
    return hp.loop.reduce_metrics(metrics, mesh, op), mesh.num_data_ranks


@pytest.mark.parametrize("op", ["mean", "sum", "max", "min"])
@pytest.mark.parametrize(("shape", "names"), [((4,), ("shard",)), ((2, 2), ("shard", "tp")), ((2, 2), ("tp", "shard"))])
def test_numbers_of_ranks_with_other_data_are_reduced(
    pool: Callable[[int], Pool], op: str, shape: tuple[int, ...], names: tuple[str, ...]
) -> None:
    for found, n in pool(4).run(reduced, op, shape, names):
        numbers = {"mean": statistics.fmean, "sum": sum, "max": max, "min": min}[op]
        places = range(n)
        assert n == (4 if len(shape) == 1 else 2)
        assert found["loss"] == pytest.approx(numbers([float(torch.tensor(0.1 * (i + 1))) for i in places]), rel=1e-15)
        assert found["counts"] == [numbers(list(places)), numbers([2**40 + i for i in places])]
        assert math.isnan(found["bad"])
        assert all(type(x) is float for x in (found["loss"], *found["counts"]))


def test_one_process_gets_its_own_numbers() -> None:
    mesh = hp.make_mesh((1,), ("shard",))
    assert hp.loop.reduce_metrics({"a": torch.ones(1, 1), "b": True}, mesh) == {"a": 1.0, "b": 1.0}
    assert hp.loop.reduce_metrics({}, mesh) == {}
    assert hp.loop.reduce_metrics(3, mesh, "sum") == 3.0


# --- a meeting point ------------------------------------------------------------------------------------------------
def meeting(rank: int, folder: Path) -> list[str]:
    mesh = mesh_of((4,), ("shard",))
    found = []
    for number in range(3):
        if mesh.is_main:
            time.sleep(0.05)
            (folder / f"{number}").write_text("written")
        hp.loop.barrier(mesh)
        found.append((folder / f"{number}").read_text())
    return found


def test_what_one_rank_has_written_others_read_behind_a_barrier(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    assert pool(4).run(meeting, tmp_path) == [["written"] * 3] * 4


# --- FLOPs ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("frozen", [False, True])
def test_flops_are_those_that_torch_counts(frozen: bool) -> None:
    layers, dim, heads, context = 2, 16, 4, 8
    weights = {f"{i}.{name}": torch.ones(shape) for i in range(layers) for name, shape in {
        "qkv": (3 * dim, dim), "out": (dim, dim), "up": (4 * dim, dim), "down": (dim, 4 * dim)}.items()}  # fmt: skip
    for weight in weights.values():
        weight.requires_grad_(not frozen)
    x = torch.ones(1, context, dim, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        y = x
        for i in range(layers):
            qkv = F.linear(y, weights[f"{i}.qkv"]).view(1, context, 3, heads, dim // heads).permute(2, 0, 3, 1, 4)
            q, k, v = qkv
            seen = (q @ k.transpose(-1, -2)).softmax(-1) @ v
            y = y + F.linear(seen.transpose(1, 2).reshape(1, context, dim), weights[f"{i}.out"])
            y = y + F.linear(F.gelu(F.linear(y, weights[f"{i}.up"])), weights[f"{i}.down"])
        y.sum().backward()
    count = hp.num_parameters(weights)
    sizes = {"num_layers": layers, "dim": dim, "context": context}
    flops = hp.loop.flops_per_token(count, num_frozen=count if frozen else 0, **sizes)
    assert context * flops == counter.get_total_flops()
