"""Checkpoints: a tree of sharded arrays in safetensors files, loaded again on any mesh and any number of ranks.

A checkpoint is complete or does not exist, even if processes are killed while they save. Every byte that is loaded is
compared with a checksum. Nothing is ever unpickled.
"""

from ._files import export_safetensors, import_safetensors
from ._index import latest
from ._leaves import PerRank
from ._load import load
from ._save import Saving, save

# For autodoc, which leaves out imported names without it.
__all__ = ["PerRank", "Saving", "export_safetensors", "import_safetensors", "latest", "load", "save"]
