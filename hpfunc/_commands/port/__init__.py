"""``python -m hpfunc port``: reads a training script of FSDP2 or accelerate, and says what to write instead.

The script is parsed by `ast`, never imported or run. `script` resolves names and guesses what variables are, the tables
in `torch_rules` and `accelerate_rules` say what becomes of each construct, `loop` writes the training loop anew, and
`report` prints it.
"""

from .report import Finding, Report
from .translate import port

__all__ = ["Finding", "Report", "port"]
