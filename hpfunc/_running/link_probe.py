"""Measures how fast ranks gather, once for each group, and derives the size below which weights are packed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median, median_high
from typing import Any

from .._errors import PolicyError, UsageError, message
from .._values.mesh import AxisNames, Mesh
from ..planning.policy import PACK_BELOW_BYTES, Policy
from ..planning.program import Program
from .agreement import control
from .channel import Comm, comm
from .context import current_session

_NAME = "hpfunc.probe"
_SMALLEST, _LARGEST = 1 << 12, 1 << 20  # a larger copy costs more than the message it saves
_SMALL_BYTES, _LARGE_BYTES = 1 << 10, 1 << 20
_NUM_SMALL, _NUM_LARGE = 7, 5


@dataclass(frozen=True, slots=True)
class Link:
    """How fast some ranks gather: an all-gather of n bytes takes about ``latency_s + n / bytes_per_s`` seconds.

    Attributes:
        latency_s: seconds that the smallest message takes.
        bytes_per_s: bytes of whole weights that arrive in a second, for large messages.

    Raises:
        PolicyError: a number is not positive, or the latency is infinite.

    >>> Link(latency_s=20e-6, bytes_per_s=25e9).pack_below_bytes
    524288
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        for name in ("latency_s", "bytes_per_s"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not value > 0 or (name == "latency_s" and math.isinf(value)):
                raise PolicyError(message("hpfunc.Link", f"{name} must be a positive number, got {value!r}"))

    @property
    def pack_below_bytes(self) -> int:
        """The size in bytes whose transfer takes as long as the latency of a message.

        This is latency times bandwidth: below it messages cost more than bytes. It is rounded to a power of two from 4
        KiB to 1 MiB: with gloo a message takes the host 0.2 to 0.6 ms, and so do the copies of a weight of 1 MiB.
        """
        product = min(max(self.latency_s * self.bytes_per_s, _SMALLEST), _LARGEST)
        return 1 << round(math.log2(product))


_ALONE = Link(latency_s=PACK_BELOW_BYTES / 1e9, bytes_per_s=1e9)
# Each link has the generation of the ranks' agreement in which it was measured. After a failure all measure again: one
# rank may have failed before it got the result that the others have kept.
_links: dict[tuple[Mesh, tuple[str, ...]], tuple[int, Link]] = {}


def probe(mesh: Mesh, axes: AxisNames) -> Link:
    """Measures how fast the ranks along `axes` gather. All ranks of the mesh must call it together.

    A group is measured once, and again only after a failed step. All ranks get the same bits: the median over the ranks
    of the medians over the messages. `sharded` calls it for ``Policy(pack_below_bytes=None)``; call it yourself to see
    the result.

    Args:
        mesh: the ranks.
        axes: one axis or several, as in ``gather_axes`` of a weight.

    Returns:
        The link. With one rank along `axes` nothing is measured, and ``Link.pack_below_bytes == 65536``.

    Raises:
        MeshError: an axis is not an axis of the mesh.
        UsageError: it is called inside of a `sharded` step.
        AgreementError: ranks measure different axes.

    Communication: 9 all-gathers of 1 KiB and 7 of 1 MiB, tens of milliseconds, and 32 bytes for the agreement. Nothing
    if it was measured before, or with one rank along `axes`.

    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> probe(mesh, "shard").pack_below_bytes
    65536
    """
    if current_session() is not None:
        hint = "measure before the step, and give it hpfunc.Policy(pack_below_bytes=link.pack_below_bytes)"
        raise UsageError(message(_NAME, "it is called inside of a sharded step", hint=hint))
    return _link(mesh, mesh.check_axes(_NAME, axes))


def _link(mesh: Mesh, axes: tuple[str, ...]) -> Link:
    if mesh.axis_size(axes) == 1:
        return _ALONE
    ranks, standing = control(mesh), control(mesh).standing
    generation, link = _links.get((mesh, axes), (-1, _ALONE))
    if generation != standing.generation or standing.is_broken:
        ranks.agree(_NAME, lambda: f"axes {', '.join(axes)}")
        measured = _measure(comm(mesh, axes, "gather"))
        numbers = max(1, round(measured.latency_s * 1e9)), max(1, round(measured.bytes_per_s))
        latencies, rates = zip(*ranks.exchange("measurement of a link", numbers), strict=True)
        link = Link(median_high(latencies) / 1e9, float(median_high(rates)))
        _links[mesh, axes] = standing.generation, link
    return link


def settle(policy: Policy, mesh: Mesh, program: Program, *, measures: bool) -> Policy:
    """Returns `policy` with a number in `pack_below_bytes`: the largest one of the links of the program's gathers.

    Args:
        policy: the policy of the caller.
        mesh: the mesh of the program.
        program: its cut weights determine the links. Without any, nothing is packed, and the number is 65536.
        measures: whether to measure; else the number for an unknown link is 65536.

    Communication: see `probe`; none without `measures`.
    """
    if policy.pack_below_bytes is not None:
        return policy
    axes = dict.fromkeys(weight.gather_axes for weight in program.weights if weight.num_shards > 1)
    links = [_link(mesh, each) if measures else _links.get((mesh, each), (0, _ALONE))[1] for each in axes]
    number = max((link.pack_below_bytes for link in links), default=PACK_BELOW_BYTES)
    return replace(policy, pack_below_bytes=number)


def _measure(channel: Comm) -> Link:
    small_s = _median_s(channel, _SMALL_BYTES, _NUM_SMALL)
    large_s = _median_s(channel, _LARGE_BYTES, _NUM_LARGE)
    # On a link that is too fast for this message, at least 1/16 of the time counts as transfer.
    return Link(small_s, _LARGE_BYTES / max(large_s - small_s, large_s / 16))


def _median_s(channel: Comm, whole_bytes: int, count: int) -> float:
    """Returns the median seconds of an all-gather whose result has `whole_bytes`."""
    backend, device = channel.backend, channel.mesh.device
    send = backend.empty((-(-whole_bytes // channel.size),), "uint8", device, zero=True)
    receive = backend.empty((send.shape[0] * channel.size,), "uint8", device, zero=True)
    # The first two make the connection, and on a device wait for all earlier work.
    return median([_gather_s(channel, send, receive) for _ in range(count + 2)][2:])


def _gather_s(channel: Comm, send: Any, receive: Any) -> float:
    def work() -> Any:
        return channel.backend.launch("all_gather", channel.group(), [send], [receive])

    pending = channel.awaited("probe", work, is_timed=True)
    return pending.completed.seconds_after(pending.begun)
