"""Over which axes of the mesh the gradient of an array is reduced, and by what number the sum is divided.

Ranks hold different data along the data axes, so a gradient is summed over all of them: by a reduce-scatter over those
that cut the array (the transpose of its gather), and by an all-reduce over the others. Along axes of another kind all
ranks compute the same gradient, or the function that is differentiated communicates itself.
"""

from __future__ import annotations

from .layout import Layout
from .mesh import Mesh
from .numerics import Numerics

Axes = tuple[str, ...]


def scatter_axes(layout: Layout) -> Axes:
    """Returns the data axes that cut the array, in mesh order. A unit may gather over fewer: see `unit`."""
    return layout.mesh.sort(set(layout.mesh.data_axes) & set(layout.spec.axes))


def reduce_axes(layout: Layout) -> Axes:
    """Returns the data axes that do not cut the array, in mesh order."""
    return layout.mesh.sort(set(layout.mesh.data_axes) - set(layout.spec.axes))


def alike_axes(layout: Layout) -> Axes:
    """Returns the axes along which nothing reduces a gradient, because ranks have the same array and the same data."""
    return layout.mesh.sort(set(layout.mesh.axis_names) - set(layout.mesh.data_axes) - set(layout.spec.axes))


def mean_axes(mesh: Mesh, numerics: Numerics) -> Axes:
    """Returns the axes over which gradients are averaged."""
    return mesh.data_axes if numerics.reduce_op == "mean" else ()


def divisor(mesh: Mesh, numerics: Numerics, num_backwards: int) -> int:
    """Returns the number by which a gradient that is summed over all ranks and backwards is divided."""
    return mesh.axis_size(mesh.data_axes) * num_backwards if numerics.reduce_op == "mean" else 1
