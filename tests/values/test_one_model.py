"""Arrays are one: whatever seeds the ranks have, `init` gives one process's values, and `shard` takes no others."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hpfunc as hp
from hpfunc.backends.torch import digest as digests
from tests.helpers.ranks import mesh_of, outcome, pool

RANK_SEEDS = ([0, 1, 2, 3], [7, 7, 7, 7], [5, 5, 9, 9], [3, 8, 3, 8])


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def draws() -> list[Any]:
    return [torch.rand(3), random.random(), np.random.rand()]


# --- init -----------------------------------------------------------------------------------------------------------
def of_torch() -> Any:
    return {"w": torch.randn(6, 4), "layers": [nn.Linear(4, 4).weight, torch.empty(5).uniform_()]}


def of_python_and_numpy() -> Any:
    drawn = [random.gauss(0, 1) for _ in range(6)]
    return {"w": torch.tensor(drawn), "v": torch.from_numpy(np.random.randn(4, 2)), "u": torch.randn(3)}


def seeded_inside() -> Any:
    torch.manual_seed(11)
    return [torch.randn(4, 4), torch.randn(2, generator=torch.Generator().manual_seed(2))]


FUNCTIONS = [of_torch, of_python_and_numpy, seeded_inside]


def initialised(rank: int, init_fn: Callable[[], Any], seeds: list[int]) -> Any:
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    seed(seeds[rank])
    made = hp.unshard(hp.init(init_fn, mesh, hp.P("shard")))
    after = draws()
    seed(seeds[rank])
    untouched = draws()
    seed(seeds[rank])
    init_fn()
    return made, after, untouched, draws()


@pytest.mark.parametrize("seeds", RANK_SEEDS, ids=str)
@pytest.mark.parametrize("init_fn", FUNCTIONS)
def test_init_gives_one_processs_values_whatever_the_seeds(init_fn: Any, seeds: list[int]) -> None:
    seed(seeds[0])
    want = init_fn()
    results = pool(4).run(initialised, init_fn, seeds)
    for rank, (made, after, untouched, advanced) in enumerate(results):
        torch.testing.assert_close(made, want, rtol=0, atol=0)
        expected = advanced if seeds[rank] == seeds[0] else untouched
        torch.testing.assert_close(after, expected, rtol=0, atol=0)


def as_started(rank: int) -> Any:
    """Seeds nothing but what torch seeds by itself in each process; Python's and numpy's come from the system."""
    torch.seed()
    random.seed()
    np.random.seed()
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    return hp.unshard(hp.init(of_python_and_numpy, mesh, hp.P("shard"))), torch.rand(4)


def test_unseeded_ranks_have_one_model_and_numbers_of_their_own() -> None:
    results = pool(4).run(as_started)
    for made, _ in results:
        torch.testing.assert_close(made, results[0][0], rtol=0, atol=0)
    assert len({tuple(numbers.tolist()) for _, numbers in results}) == 4


def module_of(rank: int) -> Any:
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    torch.manual_seed(rank)
    _, params = hp.init_module(lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)), mesh, hp.P("shard"))
    torch.manual_seed(rank)
    with torch.device("meta"):
        meta = nn.Linear(4, 6)
    return hp.unshard(params), hp.unshard(hp.init_module(meta, mesh, hp.P("shard"))[1])


def test_init_module_gives_one_processs_values() -> None:
    results = pool(4).run(module_of)
    torch.manual_seed(0)
    assert torch.equal(results[0][0]["0.weight"], nn.Linear(3, 5).weight)
    torch.manual_seed(0)
    assert torch.equal(results[0][1]["weight"], nn.Linear(4, 6).weight)
    for result in results:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)


def own_generator(rank: int) -> Any:
    generator = torch.Generator().manual_seed(rank)
    return {"w": torch.randn(4, 2, generator=generator), "b": torch.zeros(3)}


def by_the_rank(rank: int) -> Any:
    return {"w": torch.full((4, 2), float(rank // 2)), "b": torch.zeros(3)}


def by_the_time(rank: int) -> Any:
    torch.seed()
    return {"w": torch.randn(4, 2), "b": torch.zeros(3)}


def closed_over(rank: int) -> Any:
    return {"w": torch.arange(8.0).reshape(4, 2) + rank, "b": torch.zeros(3)}


def refused_init(rank: int, make: Callable[[int], Any]) -> Any:
    mesh = mesh_of((4,), ("shard",))
    state = torch.get_rng_state()
    found = outcome(hp.init, lambda: make(rank), mesh, hp.P("shard"))
    return found, torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("make", [own_generator, by_the_rank, by_the_time, closed_over])
def test_init_that_depends_on_the_rank_is_an_error_on_all_ranks(make: Any) -> None:
    for text, _ in pool(4).run(refused_init, make):
        assert text.startswith("LeafError: hpfunc.init: ranks make different values\n  tree['w']: shape (4, 2)"), text
        assert "tree['b']" not in text


def failing_late(rank: int) -> str:
    def init_fn() -> Any:
        w = torch.zeros(3)
        if rank == 1:
            raise ValueError("no more")
        return w

    return outcome(hp.init, init_fn, mesh_of((2,), ("shard",)), hp.P("shard"))


def test_a_rank_that_fails_in_init_ends_the_others() -> None:
    texts = pool(2).run(failing_late)
    assert "ValueError: no more" in texts[1]
    assert "AgreementError" in texts[0]
    assert "rank 1 refuses" in texts[0]


# --- shard ----------------------------------------------------------------------------------------------------------
def flip(x: torch.Tensor, place: int, bit: int) -> None:
    data = x.view(torch.uint8).reshape(-1)
    data[(place * 8 + bit) // 8 % data.numel()] ^= 1 << bit % 8


def another_draw(rank: int) -> Any:
    torch.manual_seed(rank)
    return {"w": torch.randn(6, 4), "b": torch.zeros(4)}


def one_bit(rank: int) -> Any:
    tree = {"w": torch.arange(50_000.0).reshape(-1, 4), "b": torch.zeros(4)}  # larger than what blake2b reads alone
    if rank == 1:
        flip(tree["w"].view(-1), 31_111, 31)
    return tree


def one_integer(rank: int) -> Any:
    return {"w": torch.arange(6) + (rank == 1), "b": torch.zeros(4)}


def minus_zero(rank: int) -> Any:
    return {"w": torch.tensor([0.0, -0.0 if rank == 1 else 0.0]), "b": torch.zeros(4)}


def parameters_of_modules(rank: int) -> Any:
    torch.manual_seed(rank)
    return {"w": nn.Linear(3, 5).weight, "b": torch.zeros(4)}


def sharded_with(rank: int, make: Callable[[int], Any], where: str, **options: Any) -> Any:
    mesh = mesh_of((2,), ("shard",))
    tree = make(rank)
    before = {key: x.detach().clone() for key, x in tree.items()}
    found: list[Any] = []

    def cut() -> Any:
        found.append(hp.shard(tree, mesh, hp.P("shard"), **options))
        return torch.zeros(())

    if where == "outside":
        texts = [outcome(cut)]
    else:
        step = hp.sharded(cut, mesh)
        texts = [outcome(step), outcome(step)]
    assert all(torch.equal(x.detach().view(torch.uint8), before[key].view(torch.uint8)) for key, x in tree.items())
    return texts, hp.unshard(found[-1]) if found else None


@pytest.mark.parametrize("where", ["outside", "in a step"])
@pytest.mark.parametrize("make", [another_draw, one_bit, one_integer, minus_zero, parameters_of_modules])
def test_shard_takes_no_values_that_differ(make: Any, where: str) -> None:
    for texts, _ in pool(2).run(sharded_with, make, where):
        for text in texts:
            assert "hpfunc.shard: ranks give different values for one array\n  tree['w']: shape" in text, text
            assert "alike are ranks [0], [1]" in text
            assert "tree['b']" not in text


def test_broadcast_from_makes_one_array_of_values_that_differ() -> None:
    def run(**options: Any) -> list[Any]:
        return [whole for _, whole in pool(2).run(broadcast, options)]

    for whole in run(broadcast_from=1):
        assert torch.equal(whole["w"], another_draw(1)["w"])


def broadcast(rank: int, options: Any) -> Any:
    return sharded_with(rank, another_draw, "outside", **options)


def nans(rank: int) -> Any:
    return {"w": torch.full((3, 2), torch.nan), "b": torch.tensor([torch.inf, -0.0])}


def whole_parts(rank: int) -> Any:
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    tree = nans(rank) | {
        "none": torch.zeros(0, 3),
        "half": torch.ones(3, dtype=torch.bfloat16)[1:],
        "t": torch.ones(()),
    }
    tree |= {"strided": torch.arange(12.0).reshape(3, 4).t()[1:], "wide": torch.ones(1).expand(40_000)}
    tree |= {"conj": torch.tensor([1 + 2j]).conj(), "bool": torch.tensor([True, False])}
    own = torch.full((4,), float(mesh.rank))  # each rank vouches for the part that it keeps
    part = hp.shard(own, mesh, hp.P(("replicate", "shard")), check_replicas=False)
    return outcome(hp.shard, tree, mesh, hp.P()), hp.unshard(part)


def test_alike_values_of_any_kind_are_taken() -> None:
    for text, vouched in pool(4).run(whole_parts):
        assert text == "returned"
        assert vouched.tolist() == [0.0, 1.0, 2.0, 3.0]


def on_meta(rank: int) -> str:
    tree = {"w": torch.empty(4, 2, device="meta"), "b": torch.zeros(2)}
    return outcome(hp.shard, tree, mesh_of((2,), ("shard",)), hp.P("shard"))


def test_tensors_without_values_are_refused() -> None:
    for text in pool(2).run(on_meta):
        assert "LeafError: hpfunc.shard: a leaf is on the meta device, where it has no values\n  tree['w']" in text


# --- the digest -----------------------------------------------------------------------------------------------------
SIZES = st.sampled_from([1, 7, digests.WORDS * 4 - 1, digests.WORDS * 4, digests.WORDS * 4 + 1, digests.WORDS * 9 + 3])


@given(st.data())
def test_the_digest_sees_every_bit(data: st.DataObject) -> None:
    size, seed_of = data.draw(SIZES), data.draw(st.integers(0, 3))
    x = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed_of))
    y = x.clone()
    y[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert digests.digest(x) != digests.digest(y)
    assert digests.digest(x) == digests.digest(x.clone())
    shifted = torch.cat([x[:1], x])[1:]  # the same bytes at an odd place of the memory
    assert digests.digest(x) == digests.digest(shifted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.int8, torch.bfloat16])
def test_the_digest_sees_changes_that_are_alike_everywhere(dtype: torch.dtype) -> None:
    x = torch.arange(100_000).to(dtype)
    seen = [x, -x, x + 1, x.flip(0), x.roll(1), x.roll(digests.WORDS), torch.zeros_like(x), torch.zeros_like(x) - 1]
    assert len({digests.digest(tensor) for tensor in seen}) == len(seen)


def test_devices_and_the_host_sum_alike() -> None:
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (300, digests.WORDS), dtype=torch.int32)
    assert torch.equal(digests._host_sums(words), digests._device_sums(words))
