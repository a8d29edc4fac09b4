"""Trees of the user's own classes."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import optree
import pytest
import torch

import hpfunc as hp
from tests.helpers.ranks import mesh_of, mesh_of_one, outcome


@hp.register_dataclass
@dataclasses.dataclass(frozen=True)
class Linear:
    weight: Any
    bias: Any
    scale: float = dataclasses.field(default=2.0, metadata={"static": True})

    def __post_init__(self) -> None:
        assert self.weight is not None, "unflattening must not run the checks of the class"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * (x @ self.weight + self.bias)


@dataclasses.dataclass(slots=True)
class Model:
    layers: list[Linear]
    name: str = "model"


hp.register_dataclass(Model, meta_fields=("name",))


class AttrsLike:
    """As `attrs.define` leaves a class, which has no other public mark."""

    __attrs_attrs__ = tuple(
        typing.NamedTuple("Field", [("name", str), ("metadata", dict)])(name, {}) for name in ("w", "b")
    )

    def __init__(self, w: Any, b: Any) -> None:
        self.w, self.b = w, b


hp.register_dataclass(AttrsLike)


def model() -> Model:
    return Model([Linear(torch.eye(4) * (i + 1), torch.ones(4)) for i in range(2)])


def loss(model: Model, x: torch.Tensor) -> torch.Tensor:
    layer = hp.unit(lambda layer, x: layer(x), name="linear")
    for each in model.layers:
        x = layer(each, x)
    return x.square().mean()


def trained(rank: int) -> list[torch.Tensor]:
    mesh = mesh_of((2,), ("shard",))
    params, optimizer = hp.shard(model(), mesh, hp.P("shard")), hp.optim.adamw(1e-2)

    def step(params: Any, state: Any, x: torch.Tensor) -> Any:
        value, grads = hp.value_and_grad(loss)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return hp.apply_updates(params, updates), state, value

    run, state = hp.sharded(step, mesh, donate_argnums=(0, 1)), optimizer.init(params)
    for number in range(4):
        params, state, _ = run(params, state, torch.full((2, 4), 1.0 + rank + number))
    assert isinstance(params, Model)
    assert run.followed_plan
    return [layer.weight.full() for layer in params.layers] + [layer.bias.full() for layer in params.layers]


@pytest.mark.processes
def test_a_model_of_own_classes_trains_as_a_tree_of_dicts_does(pool: Any) -> None:
    plain: list[Any] = [{"w": torch.eye(4) * (i + 1), "b": torch.ones(4)} for i in range(2)]
    weights = [p["w"] for p in plain] + [p["b"] for p in plain]
    for weight in weights:
        weight.requires_grad_()
    optimizer = torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.01)
    for number in range(4):
        losses = []
        for rank in range(2):
            x = torch.full((2, 4), 1.0 + rank + number)
            for p in plain:
                x = 2.0 * (x @ p["w"] + p["b"])
            losses.append(x.square().mean())
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    for got in pool(2).run(trained):
        for a, b in zip(got, weights, strict=True):
            torch.testing.assert_close(a, b.detach())


def test_paths_name_fields() -> None:
    params = hp.shard(model(), mesh_of_one(), hp.P("shard"))
    assert "layers.1.bias" in str(hp.visualize(params))
    assert hp.num_parameters(params, "layers.*.weight") == 32
    text = outcome(hp.shard, Model([Linear("text", torch.ones(2))]), mesh_of_one(), hp.P())
    assert "tree.layers[0].weight: str" in text


def test_constants_are_a_part_of_the_structure() -> None:
    one, other = optree.tree_structure(model()), optree.tree_structure(dataclasses.replace(model(), name="other"))
    assert one != other
    assert optree.tree_map(lambda x: x, model()).layers[0].scale == 2.0
    assert optree.tree_leaves(AttrsLike(1, 2)) == [1, 2]
    assert optree.tree_map(str, AttrsLike(1, 2)).w == "1"


@dataclasses.dataclass
class NotRegistered:
    w: Any


class Plain:
    pass


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: hp.register_dataclass(Plain), "Plain is not a dataclass, nor a class of attrs"),
        (lambda: hp.register_dataclass(NotRegistered(1)), "NotRegistered(w=1) is not a dataclass"),
        (lambda: hp.register_dataclass(NotRegistered, meta_fields=("x", "w")), "NotRegistered has no fields ['x']"),
        (lambda: hp.register_dataclass(Linear), "Linear is a pytree node already"),
    ],
)
def test_other_classes_are_refused(call: Any, text: str) -> None:
    said = outcome(call)
    assert said.startswith("UsageError: hpfunc.register_dataclass: ")
    assert text in said


@pytest.mark.parametrize(
    ("tree", "hint"),
    [
        (NotRegistered(torch.ones(2)), "hpfunc.register_dataclass(NotRegistered) makes"),
        ({"m": torch.nn.Linear(2, 2)}, "apply, params = hpfunc.from_module(module), then shard params"),
        (torch.nn.Linear(2, 2).named_parameters(), "a generator can be read only once"),
        ({"eps": 1e-5}, "make it a tensor first"),
    ],
)
def test_what_is_not_a_tree_is_refused_with_the_call_that_makes_it_one(tree: Any, hint: str) -> None:
    said = outcome(hp.shard, tree, mesh_of_one(), hp.P("shard"))
    assert said.startswith("LeafError: hpfunc.shard: ")
    assert hint in said
    assert max(map(len, said.splitlines())) < 200
