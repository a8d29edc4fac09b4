"""Bad input to `shard`, `init`, `unshard`, `reduce` and the collectives: exact texts, on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import hpfunc as hp
from tests.helpers import frameworks as ops
from tests.helpers.refusals import cases_among, check_texts, mesh, params, texts_of


def tree() -> Any:
    return {"layers": [{"w": ops.ones(10, 6), "b": ops.ones(6)} for _ in range(2)], "scale": ops.ones()}


def unknown_axis(rank: int) -> Any:
    kept = tree()
    return lambda: hp.shard(kept, mesh(), {"layers": [hp.P("shard"), hp.P("shrad")], "scale": None}), kept


def unknown_axis_without_likeness(rank: int) -> Any:
    return lambda: hp.shard(ops.ones(4), mesh(), hp.P("experts")), None


def repeated_axis(rank: int) -> Any:
    return lambda: hp.P("shard", ("replicate", "shard")), None


def repeated_unreduced_axis(rank: int) -> Any:
    return lambda: hp.P("shard", unreduced={"shard"}), None


def entry_of_another_type(rank: int) -> Any:
    return lambda: hp.P(0), None


def more_entries_than_dims(rank: int) -> Any:
    kept = tree()
    return lambda: hp.shard(kept, mesh(), hp.P(None, "shard")), kept


def several_faults(rank: int) -> Any:
    kept = tree()
    specs = {"layers": [{"w": hp.P("shrad"), "b": hp.P(None, "shard")}, hp.P("x")], "scale": hp.P("shard")}
    return lambda: hp.shard(kept, mesh(), specs), kept


def unreduced_values(rank: int) -> Any:
    return lambda: hp.shard(ops.ones(4), mesh(), hp.P(unreduced={"shard"})), None


def specs_of_another_tree(rank: int) -> Any:
    kept = tree()
    return lambda: hp.shard(kept, mesh(), {"layers": [hp.P("shard")], "scale": None}), kept


def specs_with_other_keys(rank: int) -> Any:
    kept = tree()
    return lambda: hp.shard(kept, mesh(), {"layer": hp.P("shard"), "scale": None}), kept


def a_string_for_a_spec(rank: int) -> Any:
    kept = tree()
    return lambda: hp.shard(kept, mesh(), "shard"), kept


def leaves_that_are_no_tensors(rank: int) -> Any:
    return lambda: hp.shard({"w": ops.ones(4), "eps": 1e-5, "table": np.ones(3)}, mesh(), hp.P("shard")), None


def only_another_framework(rank: int) -> Any:
    return lambda: hp.shard({"table": np.ones(3)}, mesh(), hp.P("shard")), None


def sharded_twice(rank: int) -> Any:
    kept = params()
    return lambda: hp.shard(kept, mesh(), hp.P("shard")), kept


def unsharding_plain_tensors(rank: int) -> Any:
    return lambda: hp.unshard({"w": ops.ones(4), "b": params()["layers"][0]["b"]}), None


def unsharding_over_an_unknown_axis(rank: int) -> Any:
    kept = params()
    return lambda: hp.unshard(kept, axes="tp"), kept


def unsharding_a_partial_sum(rank: int) -> Any:
    return lambda: hp.unshard(hp.reduce(ops.ones(4), mesh(), hp.P(unreduced={"shard"}))), None


def reducing_without_specs(rank: int) -> Any:
    return lambda: hp.reduce({"w": ops.ones(4)}, mesh()), None


def reducing_without_a_mesh(rank: int) -> Any:
    return lambda: hp.reduce({"w": ops.ones(4)}, specs=hp.P("shard")), None


def a_mesh_of_another_size(rank: int) -> Any:
    return lambda: hp.make_mesh((2, 4), ("replicate", "shard")), None


def a_mesh_with_an_axis_twice(rank: int) -> Any:
    return lambda: hp.make_mesh((2, 1), ("shard", "shard")), None


def an_unknown_data_axis(rank: int) -> Any:
    return lambda: hp.make_mesh((2, 1), ("replicate", "shard"), data_axes=("replicate", "shrad")), None


def an_unknown_axis_of_a_collective(rank: int) -> Any:
    return lambda: hp.psum(ops.ones(4), "tp", mesh=mesh()), None


def a_dim_that_does_not_divide(rank: int) -> Any:
    return lambda: hp.psum_scatter(ops.ones(3, 4), "shard", tiled=True, mesh=mesh()), None


def a_permutation_with_a_place_twice(rank: int) -> Any:
    return lambda: hp.ppermute(ops.ones(4), "shard", [(0, 1), (1, 1)], mesh=mesh()), None


def a_sum_of_bools(rank: int) -> Any:
    kept = {"mask": ops.ones(4, dtype=torch.bool), "w": ops.ones(4), "more": [ops.ones(2, 3, dtype=torch.bool)]}
    return lambda: hp.psum(kept, "shard", mesh=mesh()), kept


def the_largest_of_complex_numbers(rank: int) -> Any:
    kept = {"w": ops.ones(4), "phase": ops.ones(4, dtype=torch.complex64)}
    return lambda: hp.pmax(kept, "shard", mesh=mesh()), kept


def the_smallest_of_complex_numbers(rank: int) -> Any:
    kept = ops.ones(4, dtype=torch.complex64)
    return lambda: hp.pmin(kept, "shard", mesh=mesh()), kept


def the_number_of_ranks_as_a_sum(rank: int) -> Any:
    return lambda: hp.psum(1, "shard", mesh=mesh()), None


def a_collective_of_a_sharded_array(rank: int) -> Any:
    return lambda: hp.psum({"eps": 1.0}, "shard", mesh=mesh()), None


# --- faults of one rank ---------------------------------------------------------------------------------------------
def ranks_disagree_on_shapes(rank: int) -> Any:
    kept = tree()
    kept["layers"][1]["w"] = ops.ones(10 + rank, 6)
    return lambda: hp.shard(kept, mesh(), hp.P("shard")), kept


def ranks_disagree_on_dtypes(rank: int) -> Any:
    kept = {"w": ops.ones(4, dtype=torch.float64 if rank else torch.float32)}
    return lambda: hp.shard(kept, mesh(), hp.P("shard")), kept


def ranks_disagree_on_the_tree(rank: int) -> Any:
    kept = tree()
    if rank == 1:
        kept["layers"].append({"w": ops.ones(10, 6), "b": ops.ones(6)})
    return lambda: hp.shard(kept, mesh(), hp.P("shard")), kept


def ranks_disagree_on_specs(rank: int) -> Any:
    kept = tree()
    return lambda: hp.shard(kept, mesh(), hp.P() if rank else hp.P("shard")), kept


def ranks_disagree_in_init(rank: int) -> Any:
    return lambda: hp.init(lambda: {"w": ops.zeros(4 + rank)}, mesh(), hp.P("shard")), None


def one_rank_has_a_bad_spec(rank: int) -> Any:
    kept = tree()
    return lambda: hp.shard(kept, mesh(), hp.P("shrad" if rank else "shard")), kept


def one_rank_has_a_bad_spec_of_init(rank: int) -> Any:
    return lambda: hp.init(tree, mesh(), hp.P("shrad" if rank == 0 else "shard")), None


def one_rank_has_a_bad_leaf(rank: int) -> Any:
    return lambda: hp.shard({"w": ops.ones(4) if rank else None, "b": ops.ones(2)}, mesh(), hp.P("shard")), None


def one_rank_has_another_type(rank: int) -> Any:
    return lambda: hp.shard({"w": ops.ones(4) if rank else 1.0}, mesh(), hp.P("shard")), None


def one_rank_differs_in_broadcast_from(rank: int) -> Any:
    return lambda: hp.shard(ops.ones(4), mesh(), hp.P("shard"), broadcast_from=rank), None


def ranks_give_different_values(rank: int) -> Any:
    kept = {"w": ops.arange(6.0) + float(rank), "b": ops.ones(2), "same": ops.zeros(3) + float(rank)}
    return lambda: hp.shard(kept, mesh(), hp.P("shard")), kept


def ranks_make_different_values(rank: int) -> Any:
    return lambda: hp.init(lambda: {"w": ops.zeros(4) + float(rank), "b": ops.ones(2)}, mesh(), hp.P("shard")), None


def one_rank_unshards_something_else(rank: int) -> Any:
    kept = params()
    layer = kept["layers"][0]
    return lambda: hp.unshard(layer["w"] if rank else layer["b"]), kept


def one_rank_cannot_unshard(rank: int) -> Any:
    kept = params()
    return lambda: hp.unshard(kept, axes="shrad" if rank else "shard"), kept


def one_rank_reduces_something_else(rank: int) -> Any:
    return lambda: hp.reduce(ops.ones(4 + rank), mesh(), hp.P("shard")), None


def one_rank_reshards_to_a_bad_spec(rank: int) -> Any:
    kept = params()
    return lambda: hp.reshard(kept, hp.P("shrad") if rank else hp.P()), kept


def one_rank_calls_another_collective(rank: int) -> Any:
    call = hp.psum if rank else hp.all_gather
    return lambda: call(ops.ones(4), "shard", mesh=mesh()), None


def one_rank_has_another_axis(rank: int) -> Any:
    return lambda: hp.psum(ops.ones(4), "shrad" if rank else "shard", mesh=mesh()), None


# --- partition --------------------------------------------------------------------------------------------------------
def a_pattern_that_selects_nothing(rank: int) -> Any:
    kept = params()
    return lambda: hp.partition(kept, ["layers.*.w", "layer.*.b", "layers.0.lora_a"]), kept


def a_partition_by_a_number(rank: int) -> Any:
    return lambda: hp.partition(tree(), 3), None


def freezing_plain_tensors(rank: int) -> Any:
    return lambda: hp.freeze({"w": ops.ones(4)}), None


def freezing_what_is_not_there(rank: int) -> Any:
    kept = params()
    return lambda: hp.unfreeze(kept, "layer.*"), kept


def a_leaf_in_two_parts(rank: int) -> Any:
    kept = params()
    return lambda: hp.combine(kept, hp.partition(kept, "*.b")[0]), kept


def parts_of_two_trees(rank: int) -> Any:
    kept = params()
    return lambda: hp.combine(hp.partition(kept, "*.b")[0], {"layers": [{"w": 1, "c": 2}]}), kept


def parts_of_two_kinds(rank: int) -> Any:
    return lambda: hp.combine({"a": [1, None]}, {"a": (None, 2)}), None


def a_combination_of_nothing(rank: int) -> Any:
    return hp.combine, None


CASES = cases_among(globals())


@pytest.mark.parametrize("name", CASES)
def test_refusals(name: str) -> None:
    check_texts(texts_of(CASES[name]), name)
