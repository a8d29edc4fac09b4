"""Messages: which weights share a message, and which weights are received in place."""

from __future__ import annotations

from collections import defaultdict

from .ops import itemsize
from .policy import Policy
from .program import Program


def messages(program: Program, weights: tuple[int, ...], policy: Policy) -> list[tuple[int, ...]]:
    """Returns the weights of each message. Small cut weights with the same axes and dtype share one; others do not."""
    assert policy.pack_below_bytes is not None, "`plan` puts a number there"
    buckets: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for index in weights:
        weight = program.weights[index]
        packs = weight.whole_numel * itemsize(weight.dtype) < policy.pack_below_bytes
        buckets[(weight.gather_axes, weight.dtype, None if packs else index)].append(index)
    return [tuple(bucket) for bucket in buckets.values()]


def gathered_messages(program: Program, unit: int, policy: Policy) -> list[tuple[int, ...]]:
    """Returns the weights of each message in which a unit is gathered."""
    weights = dict.fromkeys(program.units[unit].weights)
    return messages(program, tuple(w for w in weights if program.weights[w].num_shards > 1), policy)


def is_received_in_place(program: Program, bucket: tuple[int, ...]) -> bool:
    """Returns whether the buffer that a gather receives into is the whole weight."""
    return len(bucket) == 1 and program.weights[bucket[0]].direct
