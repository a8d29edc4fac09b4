"""The digest of a tensor: of its elements, in order, whatever the dtype and however they lie in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hpfunc as hp
from hpfunc import backends
from tests.helpers.ranks import Pool, mesh_of

DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.bool, torch.complex64, torch.complex128),
]
SHAPES = [(), (0,), (0, 4), (3, 0), (1,), (1, 1), (5,), (2, 3), (1, 4), (4, 1)]


def digest(tensor: torch.Tensor) -> int:
    return backends.get("torch").digest(tensor)


def elements(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    values = torch.randint(0, 8, shape, generator=torch.Generator().manual_seed(len(shape)))
    return (values % 2 if dtype == torch.bool else values).to(dtype)


def strided(plain: torch.Tensor) -> list[torch.Tensor]:
    """Returns tensors of the same elements that lie otherwise in memory: with gaps, transposed, behind an offset."""
    wide = torch.zeros((*plain.shape, 3), dtype=plain.dtype)
    wide[..., 1] = plain
    order = tuple(reversed(range(plain.dim())))
    longer = torch.zeros(plain.numel() + 3, dtype=plain.dtype)
    longer[3:] = plain.reshape(-1)
    return [wide[..., 1], plain.permute(order).contiguous().permute(order), longer[3:].reshape(plain.shape)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_digest_is_of_the_elements_and_not_of_the_strides(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    plain = elements(shape, dtype)
    assert {digest(tensor) for tensor in strided(plain)} == {digest(plain)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (1, 1), (4,), (3, 2), (2, 0)], ids=str)
def test_an_expanded_tensor_has_the_digest_of_its_elements(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    expanded = elements((), dtype).expand(shape)
    assert digest(expanded) == digest(expanded.clone(memory_format=torch.contiguous_format))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_a_digest_is_of_what_lazy_bits_stand_for(dtype: torch.dtype) -> None:
    values = torch.complex(torch.arange(4.0), torch.arange(4.0) + 1).to(dtype)
    assert digest(values.conj()) == digest(values.conj().resolve_conj()) != digest(values)
    negative = values.conj().imag  # a view with the bit of negation
    assert negative.is_neg()
    assert digest(negative) == digest(negative.resolve_neg()) != digest(values.imag)


def test_other_elements_have_another_digest() -> None:
    for dtype in DTYPES:
        plain = elements((5,), dtype)
        other = plain.clone()
        other.view(torch.uint8)[-1] ^= 1
        assert digest(other) != digest(plain), dtype


def gradients_of_one_element(rank: int, debug: bool) -> list[torch.Tensor]:
    mesh = mesh_of((1, 2), ("shard", "tp"))
    shapes = {"gain": (1,), "scalar": (), "nothing": (0,), "row": (1, 1)}
    params = hp.shard({name: torch.ones(shape) for name, shape in shapes.items()}, mesh, hp.P())
    unit = hp.unit(lambda p, x: sum((leaf.sum() for leaf in p.values()), x.sum()))  # their gradients are expanded
    step = hp.sharded(hp.value_and_grad(unit), mesh, debug=debug)
    found: list[torch.Tensor] = []
    for _ in range(3):
        _, gradients = step(params, torch.ones(2))
        found += [leaf.local.clone() for leaf in gradients.values()]
    return found


def test_debug_takes_gradients_of_every_size(pool: Callable[..., Pool]) -> None:
    def same(left: Any, right: Any) -> bool:
        return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))

    for compared, plain in zip(
        pool(2).run(gradients_of_one_element, True), pool(2).run(gradients_of_one_element, False), strict=True
    ):
        assert same(compared, plain)
        assert [tuple(g.shape) for g in plain] == [(1,), (), (0,), (1, 1)] * 3
        assert all(bool((g == 1).all()) for g in plain)
