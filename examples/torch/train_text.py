"""Trains a small language model on the sources of Python's standard library, over four processes on one machine.

    torchrun --nproc-per-node 4 examples/torch/train_text.py

`make demo` runs this. It ends with the bits per byte on files that were kept apart, beside those of a bigram model, a
sample of generated text, and a picture of one step: what was computed and what was communicated, when. ``--check``
compares with one process on the same data instead. ``--help`` lists the rest.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import check
import model
import training

FRAMEWORK = training.Framework(
    model.PLAIN, model.init, model.loss, model.generate, torch.manual_seed, torch.from_numpy, torch.no_grad
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(training.main(__doc__, FRAMEWORK, lambda *args: check.run(FRAMEWORK, *args)))
