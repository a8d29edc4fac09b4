"""FSDP and HSDP, ZeRO 1 to 3, prefetch and fused communication: what each costs, and that none changes a loss.

    torchrun --nproc-per-node 4 examples/mindspore/fsdp_demo.py

It trains one transformer in six ways, prints the middle of a backward, in which gathers, reduce-scatters and
all-reduces run while a block computes, and compares losses and weights with plain MindSpore in float64 on one process.
``--help`` lists the rest.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import fsdp
from check import judge
from train_text import FRAMEWORK

if __name__ == "__main__":
    sys.exit(fsdp.main(fsdp.options(__doc__), FRAMEWORK, judge))
