"""`Numerics`: in which dtypes a differentiation computes and reduces, and with which scale. It defines the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ._errors import PolicyError, message


def dtype_name(dtype: Any) -> str:
    """Returns ``"bfloat16"`` for a dtype of any framework, or for its name.

    >>> dtype_name("float32")
    'float32'
    """
    return str(dtype).split(".")[-1].lower()


@dataclass(frozen=True, slots=True)
class Numerics:
    """What a differentiation computes, as far as dtypes and scale go. `Policy` never changes it.

    Attributes:
        param_dtype: dtype of the whole weights that units compute with, and in which they are gathered; None is
            that of the shards.
        reduce_dtype: dtype in which gradients are reduced; None is that of the whole weights.
        reduce_op: gradients are the ``"mean"`` over the data axes, or their ``"sum"``.

    Raises:
        PolicyError: a field has a value outside of its range.

    >>> Numerics(param_dtype="bfloat16", reduce_dtype="float32")
    Numerics(param_dtype='bfloat16', reduce_dtype='float32', reduce_op='mean')
    """

    param_dtype: Any = None
    reduce_dtype: Any = None
    reduce_op: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        if self.reduce_op not in ("mean", "sum"):
            raise PolicyError(message("hpfunc.Numerics", f"reduce_op must be 'mean' or 'sum', got {self.reduce_op!r}"))
        for field in ("param_dtype", "reduce_dtype"):
            value = getattr(self, field)
            if value is None:
                continue
            name = dtype_name(value)
            if name not in ("float16", "bfloat16", "float32", "float64"):
                rule = f"{field} must be a floating dtype, got {value!r}"
                raise PolicyError(message("hpfunc.Numerics", rule, hint="float16, bfloat16, float32 or float64"))
            object.__setattr__(self, field, name)
