"""Text that every machine has: the sources of Python's own standard library, as bytes. No framework."""

from __future__ import annotations

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

NUM_BYTES = 256
_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "ensurepip", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Text:
    """Bytes to train on, and bytes of other files that are only looked at in the end.

    Attributes:
        train: 1-D uint8.
        held_out: 1-D uint8.
    """

    train: np.ndarray
    held_out: np.ndarray

    def batch(self, seed: int, step: int, rank: int, batch: int, context: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns what a rank sees in a step, and what follows each byte of it. Shapes: (batch, context), int64."""
        rng = np.random.default_rng([seed, step, rank])
        return _windows(self.train, rng.integers(0, len(self.train) - context, batch), context)

    def held_out_windows(self, count: int, context: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns windows spread evenly over the held-out text. Shapes: (count, context), int64."""
        starts = np.linspace(0, len(self.held_out) - context - 1, count).astype(np.int64)
        return _windows(self.held_out, starts, context)


def _windows(text: np.ndarray, starts: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    cut = text[starts[:, None] + np.arange(context + 1)].astype(np.int64)
    return cut[:, :-1], cut[:, 1:]


def standard_library() -> Text:
    """Reads the text: all modules without their tests. One file in sixteen, chosen by its name, is held out."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    parts: tuple[list[bytes], list[bytes]] = [], []
    for path in paths:
        if not _SKIPPED & set(path.split("/")):
            parts[zlib.crc32(path.encode()) % 16 == 0].append((root / path).read_bytes())
    train, held_out = (np.frombuffer(b"\n\n".join(part), np.uint8) for part in parts)
    return Text(train, held_out)


def help_texts() -> Text:
    """Reads English: what ``help("...")`` prints on the topics of the language. One topic in sixteen is held out."""
    parts: tuple[list[bytes], list[bytes]] = [], []
    for name, topic in sorted(topics.items()):
        parts[zlib.crc32(name.encode()) % 16 == 0].append(topic.encode())
    train, held_out = (np.frombuffer(b"\n\n".join(part), np.uint8) for part in parts)
    return Text(train, held_out)


def bigram_bits_per_byte(train: np.ndarray, inputs: np.ndarray, labels: np.ndarray) -> float:
    """Returns how many bits a byte of `labels` costs if only the byte before it is known.

    The model counts pairs in the whole of the training text, and one more of each, so that none is impossible.
    """
    pairs = train[:-1].astype(np.int64) * NUM_BYTES + train[1:]
    counts = np.bincount(pairs, minlength=NUM_BYTES**2).reshape(NUM_BYTES, NUM_BYTES) + 1
    probabilities = counts / counts.sum(1, keepdims=True)
    return float(-np.log2(probabilities[inputs, labels]).mean())
