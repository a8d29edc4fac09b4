"""Trains a small language model on the sources of Python's standard library, over four processes on one machine.

    torchrun --nproc-per-node 4 examples/mindspore/train_text.py

The twin of ``examples/torch/train_text.py`` on MindSpore: only the operations of the model differ. It may be started by
``msrun`` as well. ``--check`` compares with one process on the same data instead. ``--help`` lists the rest.
"""

from __future__ import annotations

import sys
from pathlib import Path

import mindspore
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
import check
import model
import training


def tensor(array: np.ndarray) -> mindspore.Tensor:
    """Returns bytes as MindSpore's operators want their indices: int32."""
    return mindspore.Tensor.from_numpy(array.astype(np.int32))


FRAMEWORK = training.Framework(
    model.PLAIN, model.init, model.loss, model.generate, np.random.seed, tensor, mindspore._no_grad
)

NUM_STEPS = 140  # on a CPU MindSpore's operators take three times as long as torch's, of whose example these are 200

if __name__ == "__main__":
    sys.exit(training.main(__doc__, FRAMEWORK, lambda *args: check.run(FRAMEWORK, *args), NUM_STEPS))
