"""Element-wise arithmetic on lists of tensors: all that optimizers ask of a framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

Tensor = Any
Tensors = list[Any]


class Foreach(Protocol):
    """One call for many tensors. Results are new tensors; a method ending in ``_`` writes into its first argument.

    Nothing here is differentiated. Tensors at the same place of two lists have the same shape.
    """

    def groups(self, tensors: Tensors) -> list[list[int]]:
        """Returns groups of places whose tensors are best computed together. Each place is in one group."""
        ...

    def zeros(self, xs: Tensors) -> list[Tensor]:
        """Returns zeros in the shapes of `xs` and in their dtypes, at least float32."""
        ...

    def widened(self, xs: Tensors) -> list[Tensor]:
        """Returns `xs` in their dtypes, at least float32. A tensor that needs no cast is returned itself."""
        ...

    def cast(self, xs: Tensors, ys: Tensors) -> list[Tensor]:
        """Returns each x in the dtype of its y. A tensor that needs no cast is returned itself."""
        ...

    def copy(self, xs: Tensors) -> list[Tensor]:
        """Returns `xs` in new memory."""
        ...

    def writable(self, xs: Tensors) -> list[Tensor]:
        """Returns `xs` as tensors that may be written to from here on, in the same memory if that is possible.

        A tensor whose elements share memory (an expanded one) is copied.
        """
        ...

    def scaled(self, xs: Tensors, factor: float | Tensor | list[float]) -> list[Tensor]:
        """Returns ``x * factor``: a number, a 0-d tensor, or a number for each."""
        ...

    def added(self, xs: Tensors, ys: Tensors, factor: float = 1.0) -> list[Tensor]:
        """Returns ``x + factor * y`` in the dtype of x."""
        ...

    def roots(self, xs: Tensors) -> list[Tensor]:
        """Returns the square roots."""
        ...

    def scale_(self, xs: Tensors, factor: float) -> None:
        """X becomes ``x * factor``."""
        ...

    def divide_(self, xs: Tensors, divisor: float) -> None:
        """X becomes ``x / divisor``."""
        ...

    def shift_(self, xs: Tensors, number: float) -> None:
        """X becomes ``x + number``."""
        ...

    def add_(self, xs: Tensors, ys: Tensors) -> None:
        """X becomes ``x + y``, added in the wider dtype of the two and rounded once to that of x."""
        ...

    def lerp_(self, xs: Tensors, ys: Tensors, weight: float) -> None:
        """X becomes ``x + weight * (y - x)``."""
        ...

    def add_square_(self, xs: Tensors, ys: Tensors, factor: float) -> None:
        """X becomes ``x + factor * y * y``."""
        ...

    def add_quotient_(self, xs: Tensors, ys: Tensors, zs: Tensors, factor: float) -> None:
        """X becomes ``x + factor * y / z``."""
        ...

    def num_not_finite(self, xs: Tensors) -> Tensor:
        """Returns how many tensors have an element that is NaN or infinite, 0-d float32."""
        ...

    def powers(self, parts: Sequence[Tensors], ord: float, beside: Tensors) -> Tensor:
        """Returns for each part the sum of ``abs(x) ** ord`` over its tensors, for infinity the largest; 0 for none.

        1-d, on the device of the tensors in `beside`; float64 if one of those is, else float32.
        """
        ...

    def root(self, x: Tensor, ord: float) -> Tensor:
        """Returns ``x ** (1 / ord)``, computed in the dtype of x."""
        ...
