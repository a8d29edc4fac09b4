"""Shards of gradients that one backward carries to the next. See Note [Carried gradients]."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from .builder import Draft
from .ops import Region
from .program import Program
from .reduce_buffers import Bundle, Member, Share, key_of, lay_out, merged

# Note [Where a carried shard lives]
# A carried shard stays in the reduce buffer of the first backward's reduce-scatter if that has the accumulation dtype.
# Otherwise it is copied to a buffer of its own. Later shards are added to it in place. The last backward adds the
# carried shard into its own reduce buffer, so that the all-reduce is in place as usual. If the reduction and
# accumulation dtypes differ, the sum is formed in the buffer of the carried shard. It is then cast into the reduce
# buffer, or delivered from there if there are no replicas.


def carries_shards(program: Program) -> list[bool]:
    """Returns for each event whether gradients that are complete there are carried to the next backward as shards."""
    result: list[bool] = []
    carries = False
    for event in reversed(program.events):
        if event.kind == "end_backward" and event.carry != "wholes":
            carries = event.carry == "shards"
        result.append(carries)
    return result[::-1]


class Carried:
    """The shards that are carried now."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._weights = draft.program.weights
        self._regions: dict[int, Region] = {}
        self._left: Counter[int] = Counter()
        self._spent: list[Region] = []

    def __contains__(self, weight: int) -> bool:
        return weight in self._regions

    def free_spent(self) -> None:
        """Frees buffers that are not needed any more. Compute waits for their last use, so this is done a unit late."""
        for region in self._spent:
            self._draft.free(region)
        self._spent = []

    def add(self, bundles: Iterable[Bundle]) -> None:
        """Carries the shards that were scattered into these reduce buffers."""
        for bundle in bundles:
            slices = bundle.slices
            fresh = {w: region for w, region in slices.items() if w not in self._regions}
            later = {w: region for w, region in slices.items() if w in self._regions}
            if not later and all(self._accumulates(w, region) for w, region in fresh.items()):
                self._carry(fresh)
                continue
            self._begin(bundle.label, fresh)
            if later:
                pairs = [(self._regions[w], region, self._regions[w]) for w, region in later.items()]
                self._accumulate(f"carry {bundle.label}", pairs)
            self._spent.append(bundle.buffer)

    def finish(self, label: str, members: Sequence[tuple[Bundle, Member]]) -> None:
        """Adds carried shards to the shards of the last backward. The sums are in the slices of the members."""
        into: list[tuple[Region, Region, Region]] = []
        onto: list[tuple[Region, Region, Region]] = []
        back: dict[Region, Region] = {}
        spent: list[int] = []
        for bundle, member in members:
            for w, region in member.slices.items():
                if w not in self._regions:
                    continue
                carried = self._regions[w]
                if self._accumulates(w, region):
                    into.append((carried, region, region))
                else:
                    onto.append((carried, region, carried))
                    if bundle.first.num_replicas > 1:
                        back[carried] = region
                    else:
                        member.slices[w] = self._regions.pop(w)
                        continue
                spent.append(w)
        self._accumulate(f"add carried {label}", into)
        self._accumulate(f"carry {label}", onto)
        if back:
            self._draft.local(f"cast {label}", "copy", self._draft.reduced, list(back), list(back.values()))
        self._drop(spent)

    def rest(self) -> list[Bundle]:
        """Returns the carried shards of weights that the last backward has not used, ready for the all-reduce."""
        keys: defaultdict[object, list[int]] = defaultdict(list)
        for w in sorted(self._regions):
            keys[key_of(self._weights[w])].append(w)
        return [self._rest(weights) for weights in keys.values()]

    def _rest(self, weights: list[int]) -> Bundle:
        first, regions = self._weights[weights[0]], [self._regions[w] for w in weights]
        if first.num_replicas == 1:
            for w in weights:
                del self._regions[w]
            return Bundle("the rest", first, regions[0], [Member(dict(zip(weights, regions, strict=True)), regions)])
        bundle = lay_out(self._draft, ["the rest"], Share((0,), (tuple((w,) for w in weights),)))
        self._draft.local("copy the rest", "copy", self._draft.reduced, regions, bundle.members[0].regions)
        self._drop(weights)
        return bundle

    def _accumulates(self, weight: int, region: Region) -> bool:
        return self._draft.buffers[region.buffer].dtype == self._weights[weight].accum_dtype

    def _carry(self, regions: dict[int, Region]) -> None:
        self._regions |= regions
        self._left.update(region.buffer for region in regions.values())

    def _begin(self, label: str, slices: dict[int, Region]) -> None:
        """Makes buffers for weights without a carried shard, one for each dtype."""
        dtypes: defaultdict[str, list[int]] = defaultdict(list)
        for w in slices:
            dtypes[self._weights[w].accum_dtype].append(w)
        for dtype, weights in dtypes.items():
            sources = [slices[w] for w in weights]
            sizes = [region.numel for region in sources]
            regions = self._draft.buffer("carry", label, sum(sizes), dtype, "compute").split(sizes)  # may be delivered
            self._draft.local(f"begin to carry {label}", "copy", self._draft.reduced, sources, regions)
            self._carry(dict(zip(weights, regions, strict=True)))

    def _accumulate(self, name: str, sums: list[tuple[Region, Region, Region]]) -> None:
        """Adds pairs of regions, given as (earlier, later, sum), in as few pieces as possible."""
        if sums:
            pieces = _merged(sums)
            reads = [region for *pair, _ in pieces for region in pair]
            self._draft.local(name, "accumulate", self._draft.reduced, reads, [total for *_, total in pieces])

    def _drop(self, weights: Iterable[int]) -> None:
        for w in weights:
            buffer = self._regions.pop(w).buffer
            self._left[buffer] -= 1
            if not self._left[buffer]:
                self._spent.append(Region(buffer, 0, 0))


def _merged(sums: list[tuple[Region, Region, Region]]) -> list[tuple[Region, ...]]:
    """Returns the triples, with adjacent ones joined if all three of their regions are adjacent."""
    result: list[tuple[Region, ...]] = []
    for triple in sums:
        pairs = [merged(pair) for pair in zip(result[-1], triple, strict=True)] if result else []
        if pairs and all(len(pair) == 1 for pair in pairs):
            result[-1] = tuple(pair[0] for pair in pairs)
        else:
            result.append(triple)
    return result
