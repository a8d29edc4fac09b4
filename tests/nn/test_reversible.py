"""Reversible layers, which run their code again in an autograd function of their own: right within one unit."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hpfunc as hp
from tests.helpers.ranks import mesh_of, outcome
from tests.helpers.reversible import Again
from tests.nn.training import Pools

os.environ["HF_HUB_OFFLINE"] = "1"
pytestmark = pytest.mark.processes
Tensor = torch.Tensor
WIDTH = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)
        self.gain = nn.Parameter(torch.full((WIDTH,), 1.5))  # used on both ways
        self.unused = nn.Parameter(torch.ones(2))

    def inner(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))) * self.gain

    def forward(self, x: Tensor) -> Tensor:
        return x + Again.apply(Again.apply(x, self.inner) * self.gain, self.inner)


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Net(nn.Module):
    """Blocks with reversible code within; or, reversed, reversible code around blocks."""

    def __init__(self, block: type[Block], around: bool) -> None:
        super().__init__()
        self.first, self.blocks, self.around = nn.Linear(WIDTH, WIDTH), nn.ModuleList([block(), block()]), around

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = Again.apply(x, block) if self.around else block(x)
        return x


def net(block: type[Block], around: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(block, around).double()


def batch(rank: int) -> Tensor:
    return torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)[rank]


def mean_gradients(module: nn.Module, loss: Callable[[Any, int], Tensor]) -> dict[str, Tensor]:
    (loss(module, 0) / 2).backward()
    (loss(module, 1) / 2).backward()
    return {path: torch.zeros_like(x) if x.grad is None else x.grad for path, x in module.named_parameters()}


def sharded(rank: int, module: nn.Module, loss: Callable[[Any, int], Tensor], **options: Any) -> Any:
    mesh = mesh_of((2,), ("shard",))
    apply, given = hp.from_module(module, **options)
    params = hp.shard(given, mesh, hp.P("shard"))

    def fn(params: Any) -> Tensor:
        return loss(lambda *args, **kwargs: apply(params, *args, **kwargs), rank)

    step = hp.sharded(hp.grad(fn), mesh, policy=hp.Policy(pack_below_bytes=0), debug=True)
    found = [hp.unshard(run(params)) for run in (hp.grad(fn), step, step)]
    assert step.followed_plan
    return found


def compare(ranks: Any, want: dict[str, Tensor]) -> None:
    for found in ranks:
        for gradients in found:
            assert gradients.keys() == want.keys()
            for path, w in want.items():
                torch.testing.assert_close(gradients[path], w, rtol=1e-10, atol=1e-13, msg=path)


def square(call: Any, rank: int) -> Tensor:
    return call(batch(rank)).square().mean()


def within(rank: int, block: type[Block], options: Any) -> Any:
    return sharded(rank, net(block), square, **options)


@pytest.mark.parametrize("block", [Block, Checkpointed])
@pytest.mark.parametrize("options", [{}, {"remat": True}, {"units": ""}], ids=str)
def test_reversible_code_within_a_unit_gives_the_gradients_of_the_module(
    pool: Pools, block: type[Block], options: Any
) -> None:
    compare(pool(2).run(within, block, options), mean_gradients(net(block), square))


def around(rank: int) -> Any:
    return sharded(rank, net(Block, around=True), square, units="")


def test_one_unit_around_it_gives_them_too(pool: Pools) -> None:
    compare(pool(2).run(around), mean_gradients(net(Block, around=True), square))


# --- plain units ------------------------------------------------------------------------------------------------------
def layer(p: dict[str, Tensor], x: Tensor) -> Tensor:
    y = Again.apply((x @ p["v"]).sin(), lambda x: Again.apply(x @ p["w"], lambda x: (x @ p["w"]).sin()))
    return y * p["w"].sum()


def plain_units(rank: int, remat: bool) -> Any:
    mesh = mesh_of((2,), ("shard",))
    params = hp.shard(weights(), mesh, hp.P("shard"))
    unit = hp.unit(layer, remat=remat)
    step = hp.sharded(hp.grad(lambda p: unit(p[1], unit(p[0], batch(rank))).square().mean()), mesh, debug=True)
    return [hp.unshard(step(params)) for _ in range(3)]


def weights() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        {key: torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) for key in "vw"} for _ in range(2)
    ]


@pytest.mark.parametrize("remat", [False, True])
def test_it_is_right_within_a_unit_by_hand(pool: Pools, remat: bool) -> None:
    p = [{key: x.requires_grad_() for key, x in each.items()} for each in weights()]
    for rank in range(2):
        (layer(p[1], layer(p[0], batch(rank))).square().mean() / 2).backward()
    for found in pool(2).run(plain_units, remat):
        for gradients in found:
            for got, want in zip(gradients, p, strict=True):
                for key in want:
                    torch.testing.assert_close(got[key], want[key].grad, rtol=1e-10, atol=1e-13)


# --- what cannot be right ---------------------------------------------------------------------------------------------
def parts_of_it(rank: int) -> list[str]:
    mesh, texts = mesh_of((2,), ("shard",)), []
    for module, units in ((net(Block, around=True), None), (net(Block), ["first", "*.up", "*.down"])):
        apply, given = hp.from_module(module, units)
        params = hp.shard(given, mesh, hp.P("shard"))
        gradient = hp.grad(lambda p, apply=apply: apply(p, batch(rank)).sum())
        texts += [outcome(gradient, params), outcome(hp.sharded(gradient, mesh), params)]
    return texts


def test_units_within_it_are_refused(pool: Pools) -> None:
    for texts in pool(2).run(parts_of_it):
        for text in texts:
            assert "a backward of the module's own, such as that of a reversible layer" in text


# --- Reformer ---------------------------------------------------------------------------------------------------------
def reformer() -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.ReformerConfig(
        vocab_size=16,
        hidden_size=8,
        num_attention_heads=2,
        attention_head_size=4,
        feed_forward_size=8,
        attn_layers=["local", "lsh"],
        axial_pos_embds=False,
        max_position_embeddings=8,
        local_attn_chunk_length=4,
        lsh_attn_chunk_length=4,
        num_buckets=2,
        is_decoder=True,
        hash_seed=0,
        hidden_dropout_prob=0.0,  # it seeds its dropout anew, from the clock
        local_attention_probs_dropout_prob=0.0,
        lsh_attention_probs_dropout_prob=0.0,
    )
    return transformers.ReformerModelWithLMHead(config).double().train()


def language(call: Any, rank: int) -> Tensor:
    torch.manual_seed(7 + rank)
    ids = torch.randint(0, 16, (2, 8))
    return call(input_ids=ids, labels=ids).loss


def of_reformer(rank: int) -> Any:
    mesh = mesh_of((2,), ("shard",))
    module = reformer()
    apply, given = hp.from_module(module)
    params = hp.shard(given, mesh, hp.P("shard"))
    text = outcome(hp.grad(lambda p: language(lambda **kwargs: apply(p, **kwargs), rank)), params)
    return text, sharded(rank, module, language, units="reformer.encoder")


def test_reformer_trains_with_its_encoder_as_one_unit(pool: Pools) -> None:
    results = pool(2).run(of_reformer, deadline_s=240.0)  # each rank loads the package first
    assert all("units='reformer.encoder' for Reformer" in text for text, _ in results)
    compare([found for _, found in results], mean_gradients(reformer(), language))
