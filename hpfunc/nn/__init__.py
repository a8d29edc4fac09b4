"""Modules of a framework as pure functions of sharded weights.

`from_module` turns a `torch.nn.Module` or a `mindspore.nn.Cell` into a function and a dict of its parameters, and does
not change the module. Its repeated blocks become units. `init_module` does the same for a model that no rank holds as a
whole, and `to_module` writes weights back.
"""

from ._function import ModuleFunction
from ._module import from_module, init_module, to_module

# For autodoc, which leaves out imported names without it.
__all__ = ["ModuleFunction", "from_module", "init_module", "to_module"]
