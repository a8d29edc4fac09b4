"""Arguments of other libraries' calls as arguments of hpfunc's."""

from __future__ import annotations

import ast
import re

from ..._values.mesh import CUTTING, default_data_axes

DEFAULT_MESH = '(-1,), ("shard",)'
_SAY_AXES = ", data_axes=(...)"
_DTYPE_OPTIONS = {
    "param_dtype": "param_dtype",
    "reduce_dtype": "reduce_dtype",
    "output_dtype": "output_dtype",
    "cast_forward_inputs": "cast_inputs",
}


def code(node: ast.AST) -> str:
    """The code of a node on one line."""
    return " ".join(ast.unparse(node).split())


def numerics_arguments(node: ast.Call) -> str:
    """The arguments of `Numerics` from those of a mixed-precision policy, which casts inputs if it says nothing."""
    given = {name: code(value) for name, value in zip(_DTYPE_OPTIONS, node.args, strict=False)}
    given |= {keyword.arg: code(keyword.value) for keyword in node.keywords if keyword.arg}
    given.setdefault("cast_forward_inputs", "True")
    return ", ".join(
        f"{ours}={with_dtype_names(given[name])}" for name, ours in _DTYPE_OPTIONS.items() if name in given
    )


def with_dtype_names(text: str) -> str:
    """Dtypes of torch by their names, as `Numerics` takes them."""
    return re.sub(r"\btorch\.(bfloat16|float16|float32|float64)\b", r'"\1"', text)


def mesh_arguments(node: ast.Call) -> str:
    """The arguments of `make_mesh` from those of `init_device_mesh`."""
    given = {name: code(value) for name, value in zip(("mesh_shape", "mesh_dim_names"), node.args[1:], strict=False)}
    given |= {keyword.arg: code(keyword.value) for keyword in node.keywords if keyword.arg}
    names = given.get("mesh_dim_names", "(...)")
    data_axes = "" if _constant_names(names) is None or default_data_axes(_constant_names(names) or ()) else _SAY_AXES
    return f"{given.get('mesh_shape', '(-1,)')}, {names}{data_axes}"


def shard_axis(node: ast.Call | None) -> str:
    """The axis of a mesh over which weights are cut, as it is called; ``shard`` where that cannot be read."""
    names = None
    if node is not None:
        written = [keyword.value for keyword in node.keywords if keyword.arg == "mesh_dim_names"] + node.args[2:3]
        names = _constant_names(code(written[0])) if written else None
    data = default_data_axes(names or ())
    return next((name for name in data if name.lower() in CUTTING), data[-1] if data else "shard")


def _constant_names(text: str) -> tuple[str, ...] | None:
    """Names of axes, if they are constants."""
    try:
        names = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None
    return tuple(names) if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names) else None


def with_bound_parameters(text: str) -> str:
    """The code that makes an optimizer, of the parameters of `bind`."""
    text, replaced = re.subn(r"[\w.]+\.parameters\(\)", "bound.parameters", text)
    return text if replaced else f"{text}  # its parameters: bound.parameters"
