"""`Parts` of torch's modules."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.utils.parametrize import is_parametrized


class TorchParts:
    """See `Parts`."""

    kind = nn.Module
    method = "forward"

    def named(self, module: nn.Module) -> dict[str, nn.Module]:
        return dict(module.named_modules())

    def children(self, module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
        return module.named_children()

    def own(self, module: nn.Module) -> list[str]:
        return [name for name, parameter in vars(module)["_parameters"].items() if parameter is not None]

    def computes_own(self, module: nn.Module) -> bool:
        return is_parametrized(module)

    def is_list(self, module: nn.Module) -> bool:
        return isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)

    def is_called(self, module: nn.Module) -> bool:
        return type(module).forward is not nn.Module.forward


PARTS = TorchParts()
