"""Trainers that people use, with hpfunc in the place of their own sharding.

Each module is imported by itself, and needs its host: `hpfunc.integrations.transformers`,
`hpfunc.integrations.lightning` and `hpfunc.integrations.accelerate`. No host is patched: what is offered are subclasses
of its classes.
"""

from ._sharding import Sharding as Sharding

__all__ = ["Sharding"]
