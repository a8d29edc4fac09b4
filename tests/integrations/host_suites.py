"""Runs a host's own tests over hpfunc: the tests of a checkout, with our class where they take the host's default.

    cd CHECKOUT/tests && PYTHONPATH=HPFUNC:. python -m pytest -p tests.integrations.host_suites tests_pytorch/loops

It is a plugin of pytest, for these runs only: the package itself patches no host. ``HPFUNC_HOST=none`` leaves the host
as it is, for the same tests without hpfunc. What passes is published in ``docs/howto/hosts.md``.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any


def pytest_configure(config: Any) -> None:
    """Replaces the host's default."""
    {"lightning": lightning, "accelerate": accelerate, "none": lambda: None}[os.environ["HPFUNC_HOST"]]()


def lightning() -> None:
    """Gives a `Trainer` that names no strategy, and no accelerator but the CPU, ours on one process."""
    found: Any = importlib.import_module("lightning.pytorch.trainer.trainer").Trainer
    strategy: Any = importlib.import_module("hpfunc.integrations.lightning").ShardedStrategy
    original = found.__init__

    @functools.wraps(original)
    def init(self: Any, **options: Any) -> None:
        is_default = options.get("strategy", "auto") == "auto" and options.get("devices", "auto") in ("auto", 1)
        if is_default and options.get("accelerator", "auto") in ("auto", "cpu"):
            options |= {"strategy": strategy(), "accelerator": "cpu", "devices": 1}
        original(self, **options)

    found.__init__ = init


def accelerate() -> None:
    """Gives whoever imports `Accelerator` ours."""
    host: Any = importlib.import_module("accelerate")
    host.Accelerator = importlib.import_module("hpfunc.integrations.accelerate").Accelerator
