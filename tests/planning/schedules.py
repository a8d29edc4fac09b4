"""Schedules of three units on several meshes, whose texts are golden files."""

from __future__ import annotations

from hpfunc.planning.planner import Traits, plan
from hpfunc.planning.policy import Policy
from tests.planning.programs import three_units, two_backwards

MESHES = {"fsdp": {"shard": 4}, "hsdp": {"replicate": 2, "shard": 2}, "hsdp3": {"replicate": 3, "shard": 2}}

SCHEDULES = {
    f"{mesh}_{backend}": plan(three_units(sizes), Policy(), Traits(ordered_sums=backend == "ordered"))
    for mesh, sizes in MESHES.items()
    for backend in ("native", "ordered")
}
SCHEDULES["fsdp_packed"] = plan(three_units(MESHES["fsdp"]), Policy(prefetch=2, pack_below_bytes=float("inf")))
SCHEDULES["hsdp_one_bucket"] = plan(three_units(MESHES["hsdp"]), Policy(reduce_bucket_bytes=float("inf")))
SCHEDULES["hsdp_carried_shards"] = plan(two_backwards(MESHES["hsdp"], "shards"), Policy())
SCHEDULES["hsdp_carried_wholes"] = plan(two_backwards(MESHES["hsdp"], "wholes"), Policy.zero2())
SCHEDULES["hsdp_carried_bfloat16"] = plan(
    two_backwards(MESHES["hsdp"], "shards", reduce_dtype="bfloat16"), Policy.zero1(reduce_bucket_bytes=1 << 20)
)
