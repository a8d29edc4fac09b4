"""torch's modes: gradients and new tensors do not depend on the modes that the caller has set.

# Note [Inference mode]
Tensors that are made under ``torch.inference_mode`` cannot be saved for backward, nor written to outside of it, for as
long as they live. So hpfunc never allocates one, whatever mode the caller has set: whole weights of an evaluation,
loaded arrays and gradients must be usable in a later step. If the caller has made an array from one (in an optimizer
of their own, say), hpfunc uses an ordinary tensor in the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..._errors import UsageError, message


def empty(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
    """Returns a new ordinary tensor. See Note [Inference mode]."""
    if not torch.is_inference_mode_enabled():
        return torch.empty(shape, **options)
    with torch.inference_mode(False):
        return torch.empty(shape, **options)


def zeros(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
    """Returns a new ordinary tensor of zeros."""
    with torch.inference_mode(False):
        return torch.zeros(shape, **options)


def ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor; for a tensor of inference mode an ordinary one in the same memory."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            return tensor.clone()
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def _ordinary_leaf(leaf: Any) -> Any:
    return ordinary(leaf) if isinstance(leaf, torch.Tensor) else leaf


@contextmanager
def ordinary_mode() -> Iterator[Callable[[Any], Any] | None]:
    """See `Differentiation.ordinary`."""
    if not torch.is_inference_mode_enabled():
        yield None
        return
    with torch.inference_mode(False):
        yield _ordinary_leaf


@contextmanager
def differentiating() -> Iterator[None]:
    """A context in which autograd records, as in ``torch.func.grad``, whatever mode the caller has set outside.

    A backward runs on the caller's thread, on a device, too: context variables of the step, and of the caller, hold for
    what a checkpoint computes again. There is one device in a process, so no other thread has work to do.

    Raises:
        UsageError: a tensor that was made in inference mode takes part.
    """
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            yield
    except RuntimeError as error:
        if "nference tensor" not in str(error):
            raise
        rule = f"a tensor that was made under torch.inference_mode takes part in a differentiation: {error}"
        hint = (
            "make it under torch.no_grad, or clone it outside of inference_mode; arrays, and arguments of a gradient "
            "that is itself called under inference_mode, are taken as they are"
        )
        raise UsageError(message("hpfunc.value_and_grad", rule, hint=hint)) from error
