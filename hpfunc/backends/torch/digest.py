"""A digest of a tensor's bits that is fast enough for whole models.

# Note [Digests of large tensors]
blake2b reads 0.5 to 1 GB/s, so the digests of a model would take as long as its creation. A large tensor is first
cut into blocks of 32-bit words; a block becomes ``sum(word * weight)`` modulo 2 ** 64, with a fixed odd weight of 64
bits for each place, and blake2b reads these sums only: 2.5 to 4 GB/s on one core. A word that changes by d changes its
sum by d * weight, which is not 0 modulo 2 ** 64 because the weight is odd and d has fewer than 33 bits. So a change
within one word is always seen; several at once cancel each other in about one of 2 ** 32 cases (multilinear hashing).
Sums of integers do not depend on their order, so the digest is the same for every device and number of threads.

Source: Lemire and Kaser, Strongly universal string hashing is fast (2014).
"""

from __future__ import annotations

import hashlib

import torch

from .bytes import as_bytes

WORDS = 1 << 14  # in a block: with its weights it stays in the cache of a core
_SMALL_BYTES = 4 * WORDS
_DEVICE_BLOCKS = 256  # at once
_WEIGHTS = 1 | torch.randint(
    -(1 << 63),
    (1 << 63) - 1,
    (WORDS,),
    dtype=torch.int64,
    device="cpu",
    generator=torch.Generator("cpu").manual_seed(1),
)


@torch.no_grad()
def digest(tensor: torch.Tensor) -> int:
    """Returns a number of 56 bits that depends on all bits of the elements, in order, and on nothing else."""
    data = as_bytes(tensor)
    if data.numel() <= _SMALL_BYTES:
        return _blake(_bytes(data))
    if data.storage_offset() % 4:
        data = data.clone()
    rest = data.numel() % _SMALL_BYTES
    words = data[: data.numel() - rest].view(torch.int32).reshape(-1, WORDS)
    sums = _host_sums(words) if words.device.type == "cpu" else _device_sums(words)
    return _blake(_bytes(sums.view(torch.uint8)), _bytes(data[data.numel() - rest :]))


def _host_sums(words: torch.Tensor) -> torch.Tensor:
    wide = torch.empty(WORDS, dtype=torch.int64, device="cpu")
    return torch.stack([torch.dot(wide.copy_(block), _WEIGHTS) for block in words])


def _device_sums(words: torch.Tensor) -> torch.Tensor:
    weights = _WEIGHTS.to(words.device)  # no device has a dot product of integers
    return torch.cat([(blocks.to(torch.int64) * weights).sum(1) for blocks in words.split(_DEVICE_BLOCKS)])


def _bytes(data: torch.Tensor) -> bytes:
    return data.cpu().numpy().tobytes()


def _blake(*parts: bytes) -> int:
    hashed = hashlib.blake2b(digest_size=7)
    for part in parts:
        hashed.update(part)
    return int.from_bytes(hashed.digest(), "big")
