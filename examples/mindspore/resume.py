"""Goes on with a run of ``examples/torch/resume.py``, or begins one: the same loop and losses on MindSpore.

    torchrun --nproc-per-node 4 examples/torch/resume.py --out build/parts --kill-at 37
    torchrun --nproc-per-node 2 examples/mindspore/resume.py --out build/parts --compare build/whole

The first run is killed; the second loads what it had saved, in the other framework, and ends with the losses of a run
that torch made alone: ``python examples/torch/resume.py --out build/whole``. ``--help`` lists the rest.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import resuming
from train_text import FRAMEWORK

if __name__ == "__main__":
    sys.exit(resuming.main(__doc__, FRAMEWORK))
