"""Frozen stays frozen: a module with frozen parameters trains as in plain torch, by every loop that the pages show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optree
import pytest
import torch
from torch import nn

import hpfunc as hp
from tests.helpers.ranks import mesh_of, outcome, pool
from tests.nn.training import Pools

NUM_STEPS = 4
WIDTH = 6


# --- modules ----------------------------------------------------------------------------------------------------------
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Positions stand outside of units, the embedding is tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.positions = nn.Parameter(torch.randn(5, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight
        self.order = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)  # integers cannot want a gradient

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x[..., self.order])


class LowRank(nn.Module):
    """What libraries of adapters make of a linear layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features))
        self.b = nn.Parameter(torch.randn(base.out_features, 2) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


def nothing(model: Model) -> None:
    pass


def positions(model: Model) -> None:
    model.positions.requires_grad_(False)


def tied_embedding(model: Model) -> None:
    model.head.requires_grad_(False)  # one parameter, so the embedding too


def first_blocks(model: Model) -> None:
    tied_embedding(model)
    positions(model)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].requires_grad_(False)


def last_block(model: Model) -> None:
    model.blocks[2].requires_grad_(False)


def biases(model: Model) -> None:
    for path, x in model.named_parameters():
        x.requires_grad_(x.requires_grad and not path.endswith("bias"))


def all_but_norms(model: Model) -> None:
    model.requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.norm.requires_grad_(True)


def adapters(model: Model) -> None:
    model.requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.up = LowRank(block.up)  # pyright: ignore[reportAttributeAccessIssue] - of another class


FREEZES = [nothing, positions, tied_embedding, first_blocks, last_block, biases, all_but_norms, adapters]


def build(freeze: Callable[[Any], Any]) -> Model:
    torch.manual_seed(3)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = Model()
        freeze(model)
    finally:
        torch.set_default_dtype(before)
    return model


def batch(rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * number + rank)
    x, y = (torch.randint(0, 11, (4, 5), generator=generator) for _ in range(2))
    return x, y


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


# --- loops ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Recipe:
    """An optimizer, by torch and by hpfunc; `max_norm` of clipping."""

    cls: Any
    options: dict[str, Any]
    pure: Callable[..., Any]
    max_norm: float | None = None

    def optimizer(self) -> Any:
        made = self.pure(**self.options)
        return made if self.max_norm is None else hp.optim.chain(hp.optim.clip_by_global_norm(self.max_norm), made)


def torch_sgd(**options: Any) -> Any:
    return hp.optim.from_torch(torch.optim.SGD, **options)


def torch_adamw(lr: float, weight_decay: float) -> Any:
    groups = [("*bias", {"weight_decay": weight_decay}), ("blocks.1.*", {"weight_decay": weight_decay})]
    return hp.optim.from_torch(torch.optim.AdamW, lr=lr, weight_decay=weight_decay, groups=groups)


def parts_of_adamw(lr: float, weight_decay: float) -> Any:
    parts = [hp.optim.scale_by_adam(), hp.optim.add_decayed_weights(weight_decay), hp.optim.scale_by_learning_rate(lr)]
    return hp.optim.apply_if_finite(hp.optim.chain(*parts))


def adamw(lr: float, weight_decay: float) -> Any:
    return hp.optim.adamw(lr, weight_decay=weight_decay, mask=lambda params: optree.tree_map(lambda w: True, params))


def sgd(lr: float, momentum: float, weight_decay: float) -> Any:
    return hp.optim.sgd(lr, momentum, weight_decay=weight_decay)


SGD = {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.1}
ADAMW = {"lr": 0.02, "weight_decay": 0.3}
RECIPES = {
    "sgd": Recipe(torch.optim.SGD, SGD, sgd),
    "sgd, clipped": Recipe(torch.optim.SGD, SGD, sgd, 0.05),
    "adamw": Recipe(torch.optim.AdamW, ADAMW, adamw, 0.05),
    "parts of adamw": Recipe(torch.optim.AdamW, ADAMW, parts_of_adamw),
    "torch sgd": Recipe(torch.optim.SGD, SGD, torch_sgd),
    "torch adamw": Recipe(torch.optim.AdamW, ADAMW, torch_adamw, 0.05),
}


def reference(freeze: Any, recipe: Recipe, num_ranks: int) -> dict[str, torch.Tensor]:
    model = build(freeze)
    optimizer = recipe.cls(model.parameters(), **recipe.options)
    for number in range(NUM_STEPS):
        pairs = [batch(rank, number) for rank in range(num_ranks)]
        inputs, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        optimizer.zero_grad()
        loss_of(model(inputs), labels).backward()
        grads = [x.grad for x in model.parameters() if x.grad is not None]
        if recipe.max_norm is not None:
            factor = min(1.0, recipe.max_norm / float(torch.stack([g.norm() for g in grads]).norm()))
            for g in grads:
                g.mul_(factor)
        optimizer.step()
    return {path: x.detach() for path, x in model.named_parameters()}


def frozen_bits(model: nn.Module, params: Any) -> bool:
    whole = hp.unshard(params)
    return all(torch.equal(whole[path], x) for path, x in model.named_parameters() if not x.requires_grad)


def pure(rank: int, freeze: Any, name: str, how: str, layout: Any, options: Any) -> Any:
    mesh, recipe, optimizer = mesh_of(*layout), RECIPES[name], RECIPES[name].optimizer()
    apply, given = hp.from_module(build(freeze), **options)
    params = hp.shard(given, mesh, hp.P("shard"))
    state = optimizer.init(params)

    def step_fn(params: Any, state: Any, inputs: Any, labels: Any) -> Any:
        grad_fn = hp.value_and_grad(lambda params, inputs, labels: loss_of(apply(params, inputs), labels))
        grad_fn = hp.accumulate(grad_fn, 2, mode=how) if how in ("scatter", "local") else grad_fn
        _, grads = grad_fn(params, inputs, labels)
        updates, state = optimizer.update(grads, state, params)
        return hp.apply_updates(params, updates), state, [g is None for g in grads.values()]

    step: Any = step_fn
    if how != "eager":
        step = hp.sharded(step_fn, mesh, donate_argnums=(0, 1) if how == "donated" else (), debug=True)
    for number in range(NUM_STEPS):
        params, state, nones = step(params, state, *batch(rank, number))
        assert nones == [not x.requires_grad for x in given.values()]
    assert how == "eager" or step.followed_plan
    assert frozen_bits(build(freeze), params)
    del recipe
    return hp.unshard(params)


def compare(found: Any, freeze: Any, name: str) -> None:
    want = reference(freeze, RECIPES[name], len(found))
    for params in found:
        assert params.keys() == want.keys()
        for path, x in want.items():
            torch.testing.assert_close(
                params[path], x, rtol=1e-9, atol=1e-11, msg=lambda text, path=path: f"{path}: {text}"
            )


@pytest.mark.parametrize(
    ("freeze", "how"),
    [(freeze, how) for how in ("eager", "planned", "donated") for freeze in FREEZES]
    + [(freeze, how) for how in ("scatter", "local") for freeze in (first_blocks, biases, adapters)],
)
def test_pure_steps_train_what_torch_trains(pool: Pools, freeze: Any, how: str) -> None:
    compare(pool(2).run(pure, freeze, "adamw", how, ((2,), ("shard",)), {}), freeze, "adamw")


@pytest.mark.parametrize("freeze", [positions, biases, adapters])
@pytest.mark.parametrize("name", RECIPES)
def test_every_optimizer_leaves_frozen_weights_alone(pool: Pools, freeze: Any, name: str) -> None:
    compare(pool(2).run(pure, freeze, name, "donated", ((2,), ("shard",)), {}), freeze, name)


@pytest.mark.parametrize("freeze", [first_blocks, all_but_norms, adapters])
@pytest.mark.parametrize("options", [{}, {"remat": True}, {"units": nn.Linear}], ids=str)
def test_replicas_and_other_units_train_what_torch_trains(pool: Pools, freeze: Any, options: Any) -> None:
    layout = ((2, 2), ("replicate", "shard"))
    compare(pool(4).run(pure, freeze, "sgd, clipped", "donated", layout, options), freeze, "sgd, clipped")


def bound(rank: int, freeze: Any, name: str, is_planned: bool) -> Any:
    """The ten lines of the modules page."""
    mesh, recipe = mesh_of((2,), ("shard",)), RECIPES[name]
    apply, given = hp.from_module(build(freeze))
    bound = hp.optim.bind(hp.shard(given, mesh, hp.P("shard")))
    assert set(bound.names) == {path for path, x in given.items() if x.requires_grad}
    grad_fn: Any = hp.value_and_grad(lambda params, inputs, labels: loss_of(apply(params, inputs), labels))
    grad_fn = hp.sharded(grad_fn, mesh) if is_planned else grad_fn
    optimizer = recipe.cls(bound.parameters, **recipe.options)
    clip = None if recipe.max_norm is None else hp.optim.clip_by_global_norm(recipe.max_norm)
    for number in range(NUM_STEPS):
        _, grads = grad_fn(bound.params, *batch(rank, number))
        bound.set_grads(grads if clip is None else clip.update(grads, ())[0])
        optimizer.step()
    assert frozen_bits(build(freeze), bound.params)
    return hp.unshard(bound.params)


@pytest.mark.parametrize("freeze", FREEZES)
@pytest.mark.parametrize(("name", "is_planned"), [("sgd", False), ("sgd", True), ("torch adamw", True)])
def test_the_ten_lines_train_what_torch_trains(pool: Pools, freeze: Any, name: str, is_planned: bool) -> None:
    compare(pool(2).run(bound, freeze, name, is_planned), freeze, name)


def plain_on_one_rank(freeze: Any) -> Any:
    """Without `shard`: the module's own tensors, on a mesh of one."""
    mesh, optimizer = hp.make_mesh((1,), ("shard",)), RECIPES["adamw"].optimizer()
    apply, params = hp.from_module(build(freeze))
    state = optimizer.init(params)
    with hp.use_mesh(mesh):
        for number in range(NUM_STEPS):
            inputs, labels = batch(0, number)
            _, grads = hp.value_and_grad(lambda p, x=inputs, y=labels: loss_of(apply(p, x), y))(params)
            updates, state = optimizer.update(grads, state, params)
            params = hp.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("freeze", FREEZES)
def test_plain_parameters_on_one_rank(freeze: Any) -> None:
    compare([plain_on_one_rank(freeze)], freeze, "adamw")


# --- where the mark goes ----------------------------------------------------------------------------------------------
def everywhere(rank: int, path: str) -> Any:
    mesh = mesh_of((2,), ("shard",))
    apply, given = hp.from_module(build(biases))
    params = hp.shard(given, mesh, hp.P("shard"))
    frozen = {key for key, x in params.items() if x.is_frozen}
    assert frozen == {key for key, x in given.items() if not x.requires_grad}
    made = {
        "init_module": hp.init_module(lambda: build(biases), mesh, hp.P("shard"))[1],
        "init": hp.init(lambda: dict(build(biases).named_parameters()), mesh, hp.P("shard")),
        "named_parameters": hp.shard(dict(build(biases).named_parameters()), mesh, hp.P("shard")),
        "broadcast": hp.shard(given, mesh, hp.P("shard"), broadcast_from=1),
        "tree_map": optree.tree_map(torch.clone, params),
        "reshard": hp.reshard(params, hp.P()),
        "step": hp.sharded(lambda params: params, mesh)(params),
        "partition": hp.combine(*hp.partition(params, hp.is_trainable)),
    }
    hp.checkpoint.save(path, params, step=0)
    made["checkpoint"] = hp.checkpoint.load(path, like=made["init_module"])
    for name, tree in made.items():
        assert {key for key, x in tree.items() if x.is_frozen} == frozen, name
    trained = hp.partition(params, hp.is_trainable)[0]
    assert {key for key, x in trained.items() if x is not None} == set(params) - frozen
    grads = hp.grad(lambda p: loss_of(apply(p, batch(rank, 0)[0]), batch(rank, 0)[1]))(params)
    optimizer = hp.optim.adamw(0.1)
    state = optimizer.update(grads, optimizer.init(params), params)[1]
    hp.checkpoint.save(path, {"params": params, "opt": state}, step=1)
    like = {"params": params, "opt": optimizer.init(params)}
    loaded = hp.checkpoint.load(path, like=like)
    assert {key for key, x in loaded["params"].items() if x.is_frozen} == frozen
    return all(torch.equal(loaded["params"][key].local, params[key].local) for key in params)


def test_the_mark_stays_with_the_array(pool: Pools, tmp_path: Any) -> None:
    assert pool(2).run(everywhere, str(tmp_path)) == [True, True]


def marked_by_hand(rank: int) -> Any:
    """Arrays of no module; gradual unfreezing in the middle of a planned step."""
    mesh = mesh_of((2,), ("shard",))
    tree = {"a": torch.ones(4), "rows": torch.ones(3, 4), "b": torch.ones(4)}
    params = hp.shard(tree, mesh, {"a": hp.P("shard"), "rows": hp.P(None, "shard"), "b": hp.P("shard")})
    unit = hp.unit(lambda w, x: (w * x).sum())

    def loss(p: Any, x: Any) -> Any:
        return unit(p["a"], x) + sum(unit(p["rows"][i], x) for i in range(3)) + unit(p["b"], x)

    step = hp.sharded(hp.grad(loss), mesh)
    found = []
    for where in (["b"], ["b"], ["rows"], ["rows"], ["a", "b"], ["a", "b"], []):
        grads = step(hp.freeze(params, where) if where else params, torch.arange(4.0))
        found.append({key: None if g is None else hp.unshard(g) for key, g in grads.items()})
    thawed = hp.unfreeze(hp.freeze(params), "a")
    return found, [key for key, x in thawed.items() if not x.is_frozen], params["a"].is_frozen


def test_arrays_are_frozen_and_unfrozen_by_hand(pool: Pools) -> None:
    x = torch.arange(4.0)
    every = {"a": x, "rows": x.expand(3, 4), "b": x}
    for found, trains, changed in pool(2).run(marked_by_hand):
        for where, grads in zip((["b"], ["b"], ["rows"], ["rows"], ["a", "b"], ["a", "b"], []), found, strict=True):
            for key, want in every.items():
                assert grads[key] is None if key in where else torch.equal(grads[key], want)
        assert trains == ["a"]
        assert not changed


# --- what is not marked -----------------------------------------------------------------------------------------------
def cast(params: Any) -> Any:
    return {path: x.to(torch.float32).to(x.dtype) if x.is_floating_point() else x for path, x in params.items()}


def detached(params: Any) -> Any:
    return {path: x.detach() for path, x in params.items()}


def unmarked(rank: int, change: Any) -> Any:
    mesh = mesh_of((2,), ("shard",))
    apply, given = hp.from_module(build(positions))
    params = hp.shard({path: x for path, x in change(given).items() if path != "order"}, mesh, hp.P("shard"))
    params["order"] = hp.shard(given["order"], mesh, hp.P("shard"))

    def attempt(params: Any) -> str:
        step = hp.sharded(hp.value_and_grad(lambda p, x, y: loss_of(apply(p, x), y)), mesh)
        return outcome(step, params, *batch(rank, 0))

    texts = [attempt(params), attempt(hp.freeze(params, "positions")), attempt(hp.unfreeze(params, "positions"))]
    with hp.use_mesh(mesh), torch.no_grad():
        apply(params, batch(rank, 0)[0])
    return texts


@pytest.mark.parametrize("change", [cast, detached])
def test_a_frozen_parameter_without_its_mark_is_not_trained_silently(change: Any) -> None:
    for refused, *taken in pool(2).run(unmarked, change):
        rule = "UsageError: hpfunc.ModuleFunction: parameters that are frozen in the module"
        assert refused.startswith(rule), refused
        assert "\n  positions\n" in refused
        assert taken == ["returned", "returned"]


def changed_afterwards(rank: int) -> Any:
    """`requires_grad_` on what `from_module` gave counts, that on the module later does not."""
    mesh, model = mesh_of((2,), ("shard",)), build(positions)
    _, params = hp.from_module(model)
    model.requires_grad_(False)
    params["positions"].requires_grad_(True)
    params["embed.weight"].requires_grad_(False)
    arrays = hp.shard(params, mesh, hp.P("shard"))
    return sorted(path for path, x in arrays.items() if x.is_frozen)


def test_requires_grad_counts_when_it_is_set_after_from_module() -> None:
    assert pool(2).run(changed_afterwards) == [["embed.weight", "order"]] * 2


def wholly_frozen(rank: int) -> Any:
    mesh = mesh_of((2,), ("shard",))
    apply, given = hp.from_module(build(lambda model: model.requires_grad_(False)))
    params = hp.shard(given, mesh, hp.P("shard"))
    x, y = batch(rank, 0)
    logits = hp.sharded(apply, mesh)(params, x)
    w = hp.shard(torch.ones(11, dtype=torch.float64), mesh, hp.P("shard"))
    scale = hp.unit(lambda w, x: x * w)
    both = hp.value_and_grad(lambda w, params: loss_of(scale(w, apply(params, x)), y), argnums=(0, 1))
    grads = both(w, params)[1]
    texts = [
        outcome(hp.value_and_grad(lambda p: loss_of(apply(p, x), y)), params),
        outcome(hp.optim.bind, params),
    ]
    return logits, [g is None for g in grads[1].values()], hp.unshard(grads[0]), texts


def test_a_module_that_is_frozen_as_a_whole_evaluates(pool: Pools) -> None:
    model, w = build(lambda model: model.requires_grad_(False)), torch.ones(11, dtype=torch.float64, requires_grad=True)
    results = pool(2).run(wholly_frozen)
    inputs, labels = (torch.cat(parts) for parts in zip(batch(0, 0), batch(1, 0), strict=True))
    loss_of(model(inputs) * w, labels).backward()
    for rank, (logits, nones, gradient, texts) in enumerate(results):
        torch.testing.assert_close(logits, model(batch(rank, 0)[0]))
        assert all(nones)
        torch.testing.assert_close(gradient, w.grad)
        assert "UsageError: hpfunc.value_and_grad: all that is to be differentiated is frozen" in texts[0]
        assert "LeafError: hpfunc.optim.bind: every array of params is frozen" in texts[1]


def test_parameters_in_one_memory_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.data, requires_grad=False)  # an optimizer would change it, too
    with pytest.raises(hp.UsageError, match=r"share memory, and are not one parameter\n  0.weight and 1.weight"):
        hp.from_module(model)


def ranks_disagree(rank: int) -> str:
    model = nn.Linear(4, 4).requires_grad_(rank == 0)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.ones_(model.bias)
    return outcome(hp.shard, hp.from_module(model)[1], mesh_of((2,), ("shard",)), hp.P("shard"))


def test_ranks_agree_on_what_is_frozen() -> None:
    for text in pool(2).run(ranks_disagree):
        assert "AgreementError: hpfunc.shard: ranks disagree" in text
        assert "frozen" in text
