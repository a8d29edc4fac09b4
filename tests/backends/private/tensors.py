"""Rows of tensors, and of lists of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

from hpfunc.backends.torch import borrowed
from tests.backends.private.rows import Check, promise

_C: Any = torch._C


class Named(torch.Tensor):
    """A subclass that counts the calls of its hook."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


@promise(
    "counts writes, in all aliases alike, and cannot be read of a tensor of inference mode", "torch.Tensor._version"
)
def version() -> None:
    x = torch.ones(2)
    alias, before = x.detach(), x._version
    x.add_(1)
    assert x._version == alias._version == before + 1
    with torch.inference_mode():
        made = torch.ones(2)
    with pytest.raises(RuntimeError):
        _ = made._version


@promise("tells a view and its base", "torch.Tensor._base", "torch.Tensor._is_view")
def base() -> None:
    x = torch.ones(4)
    view = x[1:]
    assert view._is_view()
    assert view._base is x
    assert not x._is_view()
    assert x._base is None
    assert not x.detach().clone()._is_view()


@promise("is the same number for all tensors in the same memory, and no other", "torch.UntypedStorage._cdata")
def cdata() -> None:
    x, other = torch.ones(4), torch.ones(4)
    assert x.untyped_storage()._cdata == x[1:].view(3, 1).untyped_storage()._cdata
    assert x.untyped_storage()._cdata != other.untyped_storage()._cdata


@promise("counts the holders of a gradient, so that one that somebody else holds is noticed", "torch.Tensor._use_count")
def use_count() -> None:
    x = cast(Any, torch.ones(2, requires_grad=True))
    before = x._use_count()
    kept = x * x
    assert x._use_count() > before, kept
    assert borrowed._alone(), "shared gradients and lent ones have the same counts"


@promise("counts the tensors over a storage", "torch._C._storage_Use_Count")
def storage_use_count() -> None:
    x = torch.ones(4)
    storage = x.untyped_storage()
    before = _C._storage_Use_Count(storage._cdata)
    alias = x.detach()
    assert _C._storage_Use_Count(storage._cdata) == before + 1, alias


@promise("makes a tensor of a subclass, over the same memory", "torch.Tensor._make_subclass")
def make_subclass() -> None:
    x = torch.ones(2)
    made = torch.Tensor._make_subclass(Named, x, True)
    assert type(made) is Named
    assert made.requires_grad
    assert made.data_ptr() == x.data_ptr()


@promise("makes a tensor of a subclass a parameter for isinstance", "*._is_param")
def is_param() -> None:
    made = cast(Any, torch.Tensor._make_subclass(Named, torch.ones(2), True))
    assert not isinstance(made, nn.Parameter)
    made._is_param = True
    assert isinstance(made, nn.Parameter)


@promise("switches a subclass's __torch_function__ off", "torch._C.DisableTorchFunctionSubclass")
def no_torch_function() -> None:
    made = torch.Tensor._make_subclass(Named, torch.ones(2), False)
    before = Named.calls
    with torch._C.DisableTorchFunctionSubclass():
        made.exp()
    assert Named.calls == before
    made.exp()
    assert Named.calls > before


@promise("returns a lazily negated view of the same memory", "torch._neg_view")
def neg_view() -> None:
    x = torch.ones(2)
    view = torch._neg_view(x)
    assert view.is_neg()
    assert view.data_ptr() == x.data_ptr()
    assert view.resolve_neg().tolist() == [-1.0, -1.0]


@promise("tells 0: no overlap, 1: overlap, 2: unknown", "torch._debug_has_internal_overlap")
def overlap() -> None:
    tensors = torch.ones(4), torch.ones(1).expand(4), torch.ones(4).as_strided((2, 2), (1, 1))
    assert [torch._debug_has_internal_overlap(x) for x in tensors] == [0, 1, 2]


def pairs() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [torch.arange(1.0, 4.0), torch.full((2, 2), 4.0)], [torch.full((3,), 2.0), torch.full((2, 2), 0.5)]


FOREACH: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "add": (lambda xs, ys: torch._foreach_add(xs, ys, alpha=3.0), lambda x, y: x + 3 * y),
    "add_": (torch._foreach_add_, lambda x, y: x + y),
    "addcdiv_": (lambda xs, ys: torch._foreach_addcdiv_(xs, ys, xs, 2.0), lambda x, y: x + 2 * y / x),
    "addcmul_": (lambda xs, ys: torch._foreach_addcmul_(xs, ys, ys, 2.0), lambda x, y: x + 2 * y * y),
    "copy_": (lambda xs, ys: torch._foreach_copy_(xs, [y.double() for y in ys]), lambda x, y: y),
    "div_": (lambda xs, ys: torch._foreach_div_(xs, 4.0), lambda x, y: x / 4),
    "lerp_": (lambda xs, ys: torch._foreach_lerp_(xs, ys, 0.25), lambda x, y: x + 0.25 * (y - x)),
    "mul": (lambda xs, ys: torch._foreach_mul(xs, 2.0), lambda x, y: x * 2),
    "mul_": (lambda xs, ys: torch._foreach_mul_(xs, 2.0), lambda x, y: x * 2),
    "norm": (lambda xs, ys: torch._foreach_norm(xs, 2, dtype=torch.float64), lambda x, y: x.double().norm()),
    "sqrt": (lambda xs, ys: torch._foreach_sqrt(xs), lambda x, y: x.sqrt()),
}


def foreach(name: str) -> Check:
    def check() -> None:
        (xs, ys), (call, each) = pairs(), FOREACH[name]
        want = [each(x, y) for x, y in zip(xs, ys, strict=True)]
        got = call(xs, ys)
        got = xs if name.endswith("_") else got
        for x, y in zip(got, want, strict=True):
            assert x.dtype == y.dtype
            assert torch.equal(x, y), (x, y)

    return check


for _name in FOREACH:
    promise("does for each tensor what the operator does for one", f"torch._foreach_{_name}")(foreach(_name))


@promise("returns norms in a wider dtype, and the largest element, NaN if there is one", "torch._foreach_norm")
def foreach_norm() -> None:
    foreach("norm")()
    largest = torch._foreach_norm([torch.tensor([1.0, -3.0]), torch.tensor([1.0, torch.nan])], torch.inf)
    assert [str(x.item()) for x in largest] == ["3.0", "nan"]


@promise("adds a list, or a number, to each tensor in place", "torch._foreach_add_")
def foreach_add() -> None:
    foreach("add_")()
    xs = pairs()[0]
    torch._foreach_add_(xs, 1.0)
    assert xs[0].tolist() == [2.0, 3.0, 4.0]


@promise("multiplies by a number, by a tensor, or by a list of numbers", "torch._foreach_mul")
def foreach_mul() -> None:
    foreach("mul")()
    by_tensor, by_list = torch._foreach_mul(pairs()[0], torch.tensor(2.0)), torch._foreach_mul(pairs()[0], [2.0, 3.0])
    assert [by_tensor[0][0].item(), by_list[1][0, 0].item()] == [2.0, 12.0]
