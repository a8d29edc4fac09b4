"""Ends a run and goes on with it on another number of processes: the losses are those of a run that nothing ended.

    python examples/torch/resume.py --out build/whole
    torchrun --nproc-per-node 4 examples/torch/resume.py --out build/parts --kill-at 37
    torchrun --nproc-per-node 2 examples/torch/resume.py --out build/parts --compare build/whole

The second run is killed in the middle; what it had saved by then is loaded by the third, on half as many processes. The
step after the last checkpoint sees the same text, the same noise and the same learning rate as it would have seen.
``--help`` lists the rest.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import resuming
from train_text import FRAMEWORK

if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(resuming.main(__doc__, FRAMEWORK))
