"""Arguments in another order, or by the names of other libraries: each call is refused in the recorded words.

Ranks compare nothing before, so one process shows the words; two show that they can go on.
"""

from __future__ import annotations

import ast
import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import hpfunc as hp
from tests.helpers.golden import assert_golden
from tests.helpers.ranks import mesh_of_one, outcome
from tests.helpers.refusals import assert_usable, mesh

GOLDEN = Path(__file__).parents[1] / "golden" / "wrong_arguments"

CALLS = {
    "order": """
        hp.shard(tree, P("shard"), mesh)
        hp.shard(mesh, tree, P("shard"))
        hp.shard(tree, None, P("shard"))
        hp.init(lambda: tree, P("shard"), mesh)
        hp.init_module(lambda: torch.nn.Linear(2, 2), P("shard"), mesh)
        hp.sharded(mesh, step_fn)
        hp.sharded("step", mesh)
        hp.sharded(step_fn, "shard")
        hp.sharded(step_fn, mesh, in_specs={"x": P("shard")})
        hp.make_mesh(("shard",), (1,))
        hp.make_mesh("shard", 1)
        hp.make_mesh({"shard": 1}, "shard")
        hp.make_mesh(("replicate", "shard"), (1, 1))
        hp.shard(tree, device_mesh, P("shard"))
        hp.unit(torch.nn.Linear(4, 4))
        hp.unit(hp.shard(tree, mesh, P("shard")))
    """,
    "names": """
        optim.adamw(lr=1e-3)
        optim.adamw(1e-3, betas=(0.9, 0.95))
        optim.adamw(lr=1e-3, betas=(0.9, 0.95))
        optim.adamw(tree, lr=1e-3)
        optim.scale_by_adam(betas=(0.9, 0.95))
        optim.sgd(lr=0.1, momentum=0.9)
        optim.adamw(tree)
        optim.sgd([torch.ones(1)], 0.1)
        optim.adam(1e-3)
        optim.Adam(tree, lr=1e-3)
        optim.AdamW(tree)
        optim.SGD(tree)
        optim.Adagrad(tree)
        optim.clip_grad_norm_(tree, 1.0)
        hp.psum(x, axis="shard")
        hp.pmean(x, axis="shard")
        hp.pmax(x, axis="shard")
        hp.pmin(x, axis="shard")
        hp.pvary(x, axis="shard")
        hp.all_gather(x, "shard", axis=0, tiled=True)
        hp.psum_scatter(x, "shard", scatter_dimension=0)
        hp.all_to_all(x, "shard", split_axis=0, concat_axis=1)
    """,
    "kinds": """
        hp.sharded(step_fn, mesh, policy="zero3")
        hp.sharded(step_fn, mesh, donate_argnums="x")
        hp.sharded(step_fn, mesh, donate_argnums=(0, True))
        hp.value_and_grad(step_fn, numerics="bfloat16")
        hp.value_and_grad(step_fn, argnums="x")
        hp.value_and_grad(x)
        hp.grad(x)
        hp.init(tree, mesh, P("shard"))
        hp.checkpoint.save(tree, "folder")
        hp.checkpoint.load(tree, "folder")
        optim.adamw(torch.optim.lr_scheduler.LambdaLR)
        optim.adamw(1e-3, mask="*.w").update(array, optim.adamw(1e-3).init(array), array)
        optim.clip_by_global_norm(1.0)(array)
    """,
    "foreign": """
        hp.jit
        hp.fully_shard
        hp.no_grad
        hp.all_reduce
        hp.save
        hp.value_and_grads
        hp.nothing_like_it
        mesh.world_size
        mesh.get_rank()
        mesh["shard"]
        mesh.data_axis
        optim.sgd(0.1).step()
        optim.sgd(0.1).zero_grad()
        optim.sgd(0.1).state_dict()
        bound.step()
        bound.zero_grad()
        hp.sharded(step_fn, mesh).schedule
        apply.parameters()
        apply.cuda()
        array.sharding
        array.full_tensor()
        array.placements
        array.block_until_ready()
        array.at[0].set(1)
    """,
}


def names() -> dict[str, Any]:
    def step_fn(x: torch.Tensor) -> torch.Tensor:
        return x

    class DeviceMesh:
        mesh_dim_names = ("shard",)

        def __repr__(self) -> str:
            return "DeviceMesh((shard=1), 'cpu')"

    apply, _ = hp.from_module(torch.nn.Linear(2, 2))
    array, bound = (hp.shard(torch.ones(2), mesh_of_one(), hp.P("shard")) for _ in range(2))
    made = {"array": array, "bound": hp.optim.bind(bound), "apply": apply}
    known = {**made, "tree": {"w": torch.ones(2, 2)}, "x": torch.ones(1, 2), "mesh": mesh_of_one(), "step_fn": step_fn}
    return {**known, "device_mesh": DeviceMesh(), "hp": hp, "optim": hp.optim, "P": hp.P, "torch": torch}


@pytest.mark.parametrize("kind", CALLS)
def test_calls_are_refused_in_the_recorded_words(kind: str) -> None:
    known, texts = names(), []
    for line in CALLS[kind].strip().splitlines():
        call = ast.unparse(ast.parse(line.strip(), mode="eval"))
        with pytest.raises(hp.UsageError) as caught:
            eval(call, dict(known))
        texts.append(f">>> {call}\n{type(caught.value).__name__}: {caught.value}")
    assert_golden("\n\n".join(texts), GOLDEN / f"{kind}.txt")


def test_names_of_ours_are_taken_and_unknown_ones_are_python_s() -> None:
    assert outcome(hp.optim.adamw, learning_rate=1e-3, b1=0.8) == "returned"
    assert outcome(hp.optim.adamw, 1e-3, decay=1) == "TypeError: adamw() got an unexpected keyword argument 'decay'"
    for owner in (hp, hp.optim, mesh_of_one(), hp.optim.sgd(0.1), hp.sharded(len, mesh_of_one())):
        assert not hasattr(owner, "adam")
        assert not hasattr(owner, "_nothing")
    assert copy.deepcopy(mesh_of_one()) == mesh_of_one() == pickle.loads(pickle.dumps(mesh_of_one()))
    assert copy.copy(hp.optim.sgd(0.1)).init is not None


def refused(rank: int) -> list[str]:
    texts = [
        outcome(hp.shard, torch.ones(4), hp.P("shard"), mesh()),
        outcome(hp.make_mesh, "shard", 2),
        outcome(hp.all_gather, torch.ones(4), "shard", axis=0),
    ]
    assert_usable(rank, 2)
    return texts


def test_ranks_go_on(pool: Any) -> None:
    first, second = pool(2).run(refused)
    assert first == second
    assert all(text.startswith("ArgumentError: hpfunc.") for text in first)


# --- what is taken ---------------------------------------------------------------------------------------------------
def cut_by_one_spec(rank: int) -> list[Any]:
    weights = hp.shard({"w": torch.ones(4, 2), "scale": torch.ones(())}, mesh(), hp.P())

    def step_fn(params: Any, x: torch.Tensor, batch: Any) -> list[Any]:
        return [x, batch["y"], batch["eps"], params["w"].shape]

    step = hp.sharded(step_fn, mesh(), in_specs=hp.P(None, "shard"))
    x = torch.arange(8.0).view(2, 4)
    return [step(weights, x, {"y": x + 1, "eps": 0.5}) for _ in range(2)][-1]


def test_one_spec_stands_for_all_arguments_but_arrays(pool: Any) -> None:
    x = torch.arange(8.0).view(2, 4)
    for rank, (got_x, got_y, eps, shape) in enumerate(pool(2).run(cut_by_one_spec)):
        part = slice(2 * rank, 2 * rank + 2)
        assert torch.equal(got_x, x[:, part])
        assert torch.equal(got_y, x[:, part] + 1)
        assert (eps, shape) == (0.5, (4, 2))
