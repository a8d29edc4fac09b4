"""`Sharding`: what all hosts are told alike; how a host is found, and how its options are refused."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .._errors import UsageError, VersionError, message
from .._values.mesh import Mesh, PartitionSpec
from .._values.numerics import Numerics
from ..planning.policy import Policy


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a host's model is cut and scheduled.

    Attributes:
        mesh: where the weights lie; default: all processes along one axis, ``"shard"``.
        spec: how each weight is cut. Weights without dims are whole on each rank.
        units: which modules are gathered together, as for `from_module`.
        policy: how to schedule.
        numerics: the dtypes of weights, gradients and their sums.
        remat: recompute units in backward; see `unit`.
        elementwise: whether the optimizer's step on parts of the weights gives parts of its step, as in
            `hpfunc.optim.from_torch`. None: known for the classes of torch, else refused.

    >>> hpfunc.integrations.Sharding(policy=hpfunc.Policy(prefetch=2)).spec
    P('shard')
    """

    mesh: Mesh | None = None
    spec: PartitionSpec = field(default_factory=lambda: PartitionSpec("shard"))
    units: Any = None
    policy: Policy | None = None
    numerics: Numerics = field(default_factory=Numerics)
    remat: bool = False
    elementwise: bool | None = None


def host(function: str, package: str, extra: str, name: str, methods: Iterable[str]) -> Any:
    """Returns the class of a host that an integration extends.

    Raises:
        VersionError: the host is not installed, or its class lacks methods that the integration overrides.
    """
    try:
        found = importlib.import_module(package)
    except ImportError as error:
        rule = f"{package} cannot be imported: {error}"
        raise VersionError(message(function, rule, hint=f"pip install 'hpfunc[{extra}]'")) from error
    kind = getattr(found, name)
    if lacking := [f"{name}.{method}" for method in methods if not hasattr(kind, method)]:
        version = getattr(found, "__version__", "of this version")
        rule = f"{package} {version} lacks methods that hpfunc overrides"
        raise VersionError(
            message(function, rule, lacking, hint=f"pip install 'hpfunc[{extra}]' has a version that works")
        )
    return kind


def refuse(function: str, found: Iterable[tuple[bool, str, str]]) -> None:
    """Raises UsageError naming what the host was asked for and hpfunc does not do.

    Args:
        function: the public class.
        found: whether it was asked for, how it was asked for, and what to do instead.
    """
    if bad := [f"{what}: {instead}" for is_asked, what, instead in found if is_asked]:
        hint = "docs/howto/hosts.md lists every option; or use the host's own class for this run"
        raise UsageError(message(function, "options ask for what hpfunc does not do", bad, hint=hint))
