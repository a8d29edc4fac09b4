"""`Numerics`: the dtypes in which a differentiation computes and reduces, and its scale. It defines the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .._errors import LeafError, PolicyError, message
from .array import describe

_NAME = "hpfunc.Numerics"
_DTYPES = ("float16", "bfloat16", "float32", "float64")


def dtype_name(dtype: Any) -> str:
    """Returns ``"bfloat16"`` for a dtype of any framework, or for its name.

    >>> dtype_name("float32")
    'float32'
    """
    return str(dtype).split(".")[-1].lower()


def has_sums(dtype: str) -> bool:
    """Returns whether elements of a dtype can be added up: the sum of bools would be "any", 8-bit floats have no sum.

    >>> has_sums("uint16"), has_sums("bool"), has_sums("float8_e4m3fn")
    (True, False, False)
    """
    return dtype != "bool" and not dtype.startswith(("float8", "float4"))


def check_sums(function: str, leaves: Sequence[Any], names: Callable[[], Sequence[str]]) -> None:
    """Raises LeafError naming every tensor or array whose elements cannot be added up."""
    if all(has_sums(dtype_name(leaf.dtype)) for leaf in leaves):
        return
    bad = [
        f"{name}: {describe(leaf)}, {dtype_name(leaf.dtype)}"
        for name, leaf in zip(names(), leaves, strict=True)
        if not has_sums(dtype_name(leaf.dtype))
    ]
    hint = "cast it before: bool to int32, which counts (hpfunc.pmax says whether any is true), float8 to float32"
    raise LeafError(message(function, "elements of this dtype cannot be added up", bad, hint=hint))


@dataclass(frozen=True, slots=True)
class Numerics:
    """The dtypes and the scale of a differentiation. They define its result, which `Policy` never changes.

    Attributes:
        param_dtype: dtype of the whole weights that units compute with, and in which they are gathered; None is
            that of the shards. Weights that are not floating keep theirs.
        reduce_dtype: dtype in which gradients are reduced; None is that of the whole weights.
        accum_dtype: dtype in which gradients of several uses of a weight, and of several backwards (`accumulate`), are
            added up, and in which gradients are delivered; None is that of the shards.
        output_dtype: dtype to which floating outputs of units are cast; None leaves them.
        cast_inputs: cast floating tensors that units are called with, beside their weights, to `param_dtype`.
        reduce_op: gradients are the ``"mean"`` over the data axes (and over the backwards of `accumulate`), or their
            ``"sum"``.

    Raises:
        PolicyError: a field has a value outside of its range, or fields contradict each other.

    >>> Numerics(param_dtype="bfloat16", reduce_dtype="float32").reduce_dtype
    'float32'
    """

    param_dtype: Any = None
    reduce_dtype: Any = None
    accum_dtype: Any = None
    output_dtype: Any = None
    cast_inputs: bool = False
    reduce_op: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        if self.reduce_op not in ("mean", "sum"):
            raise PolicyError(message(_NAME, f"reduce_op must be 'mean' or 'sum', got {self.reduce_op!r}"))
        for field in ("param_dtype", "reduce_dtype", "accum_dtype", "output_dtype"):
            value = getattr(self, field)
            if value is None:
                continue
            name = dtype_name(value)
            if name not in _DTYPES:
                rule = f"{field} must be a floating dtype, got {value!r}"
                raise PolicyError(message(_NAME, rule, hint="float16, bfloat16, float32 or float64"))
            object.__setattr__(self, field, name)
        if not isinstance(self.cast_inputs, bool):
            raise PolicyError(message(_NAME, f"cast_inputs must be True or False, got {self.cast_inputs!r}"))
        if self.cast_inputs and self.param_dtype is None:
            rule = "cast_inputs casts to param_dtype, which is not given"
            raise PolicyError(message(_NAME, rule, hint="give param_dtype, or leave cast_inputs out"))
