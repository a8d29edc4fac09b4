"""Views of whole weights that have another dtype, or are read conjugated or negated: right as in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F

import hpfunc as hp
from tests.helpers.ranks import mesh_of, pool

pytestmark = pytest.mark.processes
Tensor = torch.Tensor
D, C = torch.float64, torch.complex128
NUM_RANKS = 2


# --- views of a real weight w of (7, 4), and of a frozen complex one of (7, 2), both used with x of (3, 2) ------------
def spectral(p: Any, x: Tensor) -> Tensor:
    w = torch.view_as_complex(p["real"].view(7, 2, 2))
    return (torch.fft.fft(x, n=2) * w[:3]).abs()


def part_of_rows(p: Any, x: Tensor) -> Tensor:
    return (torch.view_as_complex(p["real"][2:5].view(3, 2, 2)) * x).abs()


def conjugated(p: Any, x: Tensor) -> Tensor:
    w = torch.view_as_complex(p["real"].view(7, 2, 2)).conj()
    return (x.to(C) @ w.t()).real * 2 + (w * w).imag.sum()


def adjoint(p: Any, x: Tensor) -> Tensor:
    return (x.to(C) @ torch.view_as_complex(p["real"].view(7, 2, 2)).mH).abs()


def imaginary_part_of_the_conjugate(p: Any, x: Tensor) -> Tensor:
    w = torch.view_as_complex(p["real"].view(7, 2, 2)).conj().imag
    return (w[:3] * x.sin()) * w[1:4].exp()


def real_part(p: Any, x: Tensor) -> Tensor:
    return F.linear(x, torch.view_as_complex(p["real"].view(7, 2, 2))[::2].real).sin()


def back_and_forth(p: Any, x: Tensor) -> Tensor:
    w = torch.view_as_real(torch.view_as_complex(p["real"].view(7, 2, 2)).conj().resolve_conj())
    return x.repeat(1, 2) @ w.reshape(7, 4).t()


def permuted(p: Any, x: Tensor) -> Tensor:
    return (torch.view_as_complex(p["real"].view(7, 2, 2)).t()[:, 3:6].t() * x).abs()


def complex_product(p: Any, x: Tensor) -> Tensor:
    return (x.to(C) @ p["complex"].t()).abs() * p["real"].sum()


def parts_of_a_complex_weight(p: Any, x: Tensor) -> Tensor:
    w = p["complex"]
    return F.linear(x, w.real) * F.linear(x, w.imag) + F.linear(x, w.conj().imag[:, :1].expand(7, 2)).sin()


def conjugate_of_a_complex_weight(p: Any, x: Tensor) -> Tensor:
    return (x.to(C) @ p["complex"].mH[:, 1:]).abs()


def negated(p: Any, x: Tensor) -> Tensor:
    return x * torch._neg_view(p["real"])[1:4, 1:3]


def other_bits(p: Any, x: Tensor) -> Tensor:
    """A frozen weight of bytes that holds numbers of 16 bits, as packed weights of few bits do."""
    return (
        F.linear(x, p["bytes"].view(torch.bfloat16)[:, 1:3].to(D))
        + F.embedding(p["bytes"].view(torch.int8)[0].long() % 7, p["real"]).sum()
    )


def places(p: Any, x: Tensor) -> Tensor:
    """A view of a frozen weight that an operator saves to know where to put gradients."""
    return x.repeat(1, 4)[:, p["places"].view(torch.int64)[2:].flatten()]


UNITS: dict[str, Callable[..., Tensor]] = {
    fn.__name__: fn
    for fn in (
        *(spectral, part_of_rows, conjugated, adjoint, imaginary_part_of_the_conjugate, real_part, back_and_forth),
        *(permuted, complex_product, parts_of_a_complex_weight, conjugate_of_a_complex_weight, negated, other_bits),
        places,
    )
}


def weights() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    real = torch.randn(7, 4, generator=g, dtype=D)
    return {
        "real": real,
        "complex": torch.randn(7, 2, generator=g, dtype=C),
        "bytes": torch.randn(7, 4, generator=g).bfloat16().view(torch.uint8),
        "places": torch.randint(0, 8, (4, 2), generator=g).view(torch.float64),
    }


def batch(rank: int) -> Tensor:
    return torch.randn(NUM_RANKS, 3, 2, generator=torch.Generator().manual_seed(2), dtype=D)[rank]


def loss_of(unit: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The unit's own argument has a gradient to pass on, so that it has a backward where its weights are frozen."""
    return lambda first, p, x: unit(p, x * first["scale"]).square().mean()


def plain(name: str, is_frozen: bool) -> list[Tensor]:
    first, p = {"scale": torch.tensor([1.5, -2.0], dtype=D, requires_grad=True)}, weights()
    wanted = [first["scale"], *([] if is_frozen else [p["real"].requires_grad_()])]
    total = torch.stack([loss_of(UNITS[name])(first, p, batch(rank)) for rank in range(NUM_RANKS)]).mean()
    found = torch.autograd.grad(total, wanted, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]


def sharded(rank: int) -> dict[tuple[str, bool, str], list[list[Tensor]]]:
    """Returns the gradients of eager, recorded and planned calls, by unit, whether it is frozen, and way."""
    mesh = mesh_of((NUM_RANKS,), ("shard",))
    first = hp.shard({"scale": torch.tensor([1.5, -2.0], dtype=D)}, mesh, hp.P("shard"))
    params = hp.shard(weights(), mesh, hp.P("shard"))
    trained, frozen = hp.partition(params, "real")
    found = {}
    scale = hp.unit(lambda first, x: x * first["scale"])
    for name, fn in UNITS.items():
        for way in ("unit", "remat"):
            unit = hp.unit(fn, remat=way == "remat")
            for is_frozen in (False, True):

                def loss(first: Any, trained: Any, frozen: Any, x: Tensor, unit: Any = unit) -> Tensor:
                    return unit(hp.combine(trained, frozen), scale(first, x)).square().mean()

                differentiate = hp.value_and_grad(loss, 0 if is_frozen else (0, 1))
                step = hp.sharded(differentiate, mesh, policy=hp.Policy(pack_below_bytes=0), debug=True)
                calls = [run(first, trained, frozen, batch(rank))[1] for run in (differentiate, step, step)]
                assert step.followed_plan
                leaves = [[g["scale"]] if is_frozen else [g[0]["scale"], g[1]["real"]] for g in calls]
                found[name, is_frozen, way] = [hp.unshard(x) for x in leaves]
    return found


@cache
def results() -> list[dict[tuple[str, bool, str], list[list[Tensor]]]]:
    return pool(NUM_RANKS).run(sharded)


@pytest.mark.parametrize("name", UNITS)
@pytest.mark.parametrize("is_frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("way", ["unit", "remat"])
def test_any_view_of_a_weight_has_the_gradients_of_plain_torch(name: str, is_frozen: bool, way: str) -> None:
    want = plain(name, is_frozen)
    assert all(g.norm() > 0 for g in want[:1])
    for found in results():
        for got in found[name, is_frozen, way]:
            for g, w in zip(got, want, strict=True):
                torch.testing.assert_close(g, w, rtol=1e-11, atol=1e-13)


def trained_as_real_ones(rank: int) -> list[Tensor]:
    """Does what the refusal of complex weights says, for three planned steps."""
    mesh = mesh_of((NUM_RANKS,), ("shard",))
    params = hp.shard({"w": torch.view_as_real(weights()["complex"])}, mesh, hp.P("shard"))
    unit = hp.unit(lambda p, x: (x.to(C) @ torch.view_as_complex(p["w"]).t()).abs().square().mean())
    step = hp.sharded(hp.grad(unit), mesh)
    for _ in range(3):
        updates = optree.tree_map(lambda g: -0.1 * g, step(params, batch(rank)))
        params = hp.apply_updates(params, updates)
    return [torch.view_as_complex(hp.unshard(params)["w"])]


def test_complex_weights_train_as_pairs_of_real_ones() -> None:
    w = weights()["complex"].requires_grad_()
    for _ in range(3):
        total = torch.stack([(batch(rank).to(C) @ w.t()).abs().square().mean() for rank in range(NUM_RANKS)]).mean()
        (gradient,) = torch.autograd.grad(total, w)
        w = (w - 0.1 * gradient).detach().requires_grad_()
    for (found,) in pool(NUM_RANKS).run(trained_as_real_ones):
        torch.testing.assert_close(found, w.detach(), rtol=1e-12, atol=1e-13)


# --- a whole weight lies as any other -------------------------------------------------------------------------------
UNEVEN = [
    (hp.P("shard"), (7, 3)),
    (hp.P(None, "shard"), (3, 5)),
    (hp.P("replicate", "shard"), (7, 5)),
    (hp.P(None, "shard"), (2, 3, 2)),
]


def lies_as_others(rank: int, spec: Any, shape: tuple[int, ...], param_dtype: str | None, packs: bool) -> list[Tensor]:
    """Returns the gradients of a unit that asks how its weight lies, eager, recorded and planned."""
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    whole = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape) + 1

    def fn(w: Tensor, x: Tensor) -> Tensor:
        assert w.is_contiguous()
        assert w.storage_offset() == 0
        flat = w.view(-1)
        return (flat * flat.roll(1) * x).sum() + w.as_strided((2, 2), (2, 1)).square().sum()

    params = hp.shard(whole, mesh, spec)
    grad_fn = hp.grad(hp.unit(fn), numerics=hp.Numerics(param_dtype=param_dtype))
    step = hp.sharded(grad_fn, mesh, policy=hp.Policy(pack_below_bytes=1 << 20 if packs else 0))
    x = torch.ones((), dtype=torch.float64) * (1 + rank)
    return [hp.unshard(call(params, x)) for call in (grad_fn, step, step)]


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("param_dtype", [None, "float32"])
@pytest.mark.parametrize(("spec", "shape"), UNEVEN)
def test_a_whole_weight_is_contiguous_whatever_cuts_it(
    spec: Any, shape: tuple[int, ...], param_dtype: str | None, packs: bool
) -> None:
    w = (torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape) + 1).requires_grad_()
    loss = (w.view(-1) * w.view(-1).roll(1)).sum() * 2.5 + w.as_strided((2, 2), (2, 1)).square().sum()
    (right,) = torch.autograd.grad(loss, w)  # the mean of x over the ranks is 2.5
    for gradients in pool(4).run(lies_as_others, spec, shape, param_dtype, packs):
        for gradient in gradients:
            assert torch.equal(gradient, gradients[0])
            torch.testing.assert_close(gradient, right)
