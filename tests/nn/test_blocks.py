"""Which modules `from_module` chooses as units by itself, by their use and their bytes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hpfunc as hp
from hpfunc.nn._choose import Choice, choose
from hpfunc.nn.torch.module import PARTS

WIDTH = 4
Module = nn.Module


def linear(factor: int = 1) -> Module:
    """Returns a layer of `factor` times 80 bytes, which keeps its input's shape."""
    return nn.Linear(WIDTH, WIDTH) if factor == 1 else Flat(*(linear() for _ in range(factor)))


class Flat(Module):
    """Parts that run one after another."""

    def __init__(self, *parts: Module) -> None:
        super().__init__()
        for place, part in enumerate(parts):
            self.add_module(f"part{place}", part)

    def forward(self, x: Any) -> Any:
        for part in self.children():
            x = x + torch.tanh(part(x))
        return x


class Block(Flat):
    pass


class Other(Flat):
    pass


class Attention(Flat):
    pass


class Mlp(Flat):
    pass


class Listed(Module):
    """A module with a list of others, each of which runs `times` times."""

    def __init__(self, *layers: Module, times: int = 1, around: Sequence[Module] = ()) -> None:
        super().__init__()
        self.before = nn.ModuleList(around)
        self.layers, self.times = nn.ModuleList(layers), times

    def forward(self, x: Any) -> Any:
        for layer in [*self.before, *self.layers] * self.times:
            x = layer(x)
        return x


class Stage(Listed):
    pass


class Chain(Module):
    """A stage whose layers stand in a Sequential."""

    def __init__(self, *layers: Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Any) -> Any:
        return self.layers(x)


class Experts(Module):
    """One of its experts runs, depending on the data."""

    def __init__(self, num: int, factor: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Mlp(*(linear() for _ in range(factor))) for _ in range(num))

    def forward(self, x: Any) -> Any:
        return self.experts[int(x.sum() * 100) % len(self.experts)](x)


class WithOwn(Module):
    """A module whose own parameter is small beside its parts."""

    def __init__(self, *parts: Module) -> None:
        super().__init__()
        self.first, self.second = parts
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x)) * self.scale


def layer(factor: int = 1) -> Module:
    return Block(Attention(linear(factor)), Mlp(linear(factor)))


def choice_of(module: Module, units: Any = None) -> Choice:
    return choose(PARTS, module, units)


def kinds(module: Module) -> str:
    """Returns the units of a module, as "class paths"."""
    found: dict[str, list[str]] = {}
    for unit in choice_of(module).modules:
        found.setdefault(str(unit.kind), []).append(unit.path)
    return "; ".join(f"{kind} {' '.join(paths)}" for kind, paths in found.items())


CASES: dict[str, tuple[Callable[[], Module], str]] = {
    "two layers stay two": (lambda: Listed(layer(), layer()), "Block layers.0 layers.1"),
    "stages": (
        lambda: Listed(Stage(layer(), layer()), Stage(*(layer(2) for _ in range(5)))),
        "Block layers.0.layers.0 layers.0.layers.1 layers.1.layers.0 layers.1.layers.1 layers.1.layers.2 "
        "layers.1.layers.3 layers.1.layers.4",
    ),
    "stages with a stem each": (
        lambda: Listed(
            Stage(Block(linear(), linear()), around=[Other(linear())]),
            Stage(*(Block(linear(4), linear(4)) for _ in range(2)), around=[Other(linear())]),
        ),
        "Other layers.0.before.0 layers.1.before.0; Block layers.0.layers.0 layers.1.layers.0 layers.1.layers.1",
    ),
    "stages of the same size, in chains": (
        lambda: Listed(*(Chain(Block(linear(), linear()), Block(linear(), linear())) for _ in range(3))),
        "Block layers.0.layers.0 layers.0.layers.1 layers.1.layers.0 layers.1.layers.1 layers.2.layers.0 "
        "layers.2.layers.1",
    ),
    "towers": (
        lambda: nn.ModuleList([Listed(layer(), layer()), Listed(layer(), layer())]),
        "Block 0.layers.0 0.layers.1 1.layers.0 1.layers.1",
    ),
    "experts in layers": (
        lambda: Listed(*(Block(Attention(linear()), Experts(4, 5)) for _ in range(2))),
        "Block layers.0 layers.1",
    ),
    "experts in layers of which one is dense": (
        lambda: Listed(layer(), *(Block(Attention(linear()), Experts(4, 5)) for _ in range(2))),
        "Block layers.0 layers.1 layers.2",
    ),
    "experts beside layers": (
        lambda: nn.Sequential(*(x for _ in range(2) for x in (Attention(linear()), Experts(4, 5)))),
        "Attention 0 2; Experts 1 3",
    ),
    "experts in a large layer of many": (
        lambda: Listed(*(layer() for _ in range(6)), Block(Attention(linear(9)), Experts(4, 9))),
        "Block layers.0 layers.1 layers.2 layers.3 layers.4 layers.5; Attention layers.6.part0; Experts layers.6.part1",
    ),
    "one large block among many": (
        lambda: Listed(*(layer() for _ in range(6)), layer(4)),
        "Block layers.0 layers.1 layers.2 layers.3 layers.4 layers.5; Attention layers.6.part0; Mlp layers.6.part1",
    ),
    "a large block whose bytes are in one matrix": (
        lambda: Listed(*(Block(linear()) for _ in range(6)), Block(nn.Bilinear(WIDTH, 3 * WIDTH, WIDTH))),
        "Block layers.0 layers.1 layers.2 layers.3 layers.4 layers.5 layers.6",
    ),
    "a large block whose bytes are in one part": (
        lambda: Listed(*(layer() for _ in range(7)), Block(Mlp(linear(4), linear(4)))),
        "Block layers.0 layers.1 layers.2 layers.3 layers.4 layers.5 layers.6; "
        "Flat layers.7.part0.part0 layers.7.part0.part1",
    ),
    "repeated chains of layers": (
        lambda: Listed(*(nn.Sequential(linear(), nn.ReLU(), linear()) for _ in range(6))),
        "Sequential layers.0 layers.1 layers.2 layers.3 layers.4 layers.5",
    ),
    "two chains of layers": (
        lambda: nn.Sequential(*(nn.Sequential(linear(), nn.ReLU(), linear()) for _ in range(2))),
        "Linear 0.0 0.2 1.0 1.2",
    ),
    "chains of one layer": (
        lambda: Listed(*(nn.Sequential(nn.ReLU(), linear()) for _ in range(6))),
        "Linear layers.0.1 layers.1.1 layers.2.1 layers.3.1 layers.4.1 layers.5.1",
    ),
    "a layer that is used many times": (lambda: Listed(layer(), times=12), "Block layers.0"),
    "a kind of layer that occurs once": (
        lambda: Listed(*(layer() for _ in range(6)), Other(linear(), linear())),
        "Block layers.0 layers.1 layers.2 layers.3 layers.4 layers.5; Other layers.6",
    ),
    "a kind of module that occurs once in a chain": (
        lambda: nn.Sequential(linear(), Other(linear(), linear()), linear()),
        "Linear 0 1.part0 1.part1 2",
    ),
    "a module with a small parameter of its own": (
        lambda: WithOwn(linear(3), linear(3)),
        "Linear first.part0 first.part1 first.part2 second.part0 second.part1 second.part2",
    ),
    "a module without large parts that has a parameter of its own": (
        lambda: Listed(*(layer() for _ in range(6)), WithOwn(linear(), linear())),
        "Block layers.0 layers.1 layers.2 layers.3 layers.4 layers.5; WithOwn layers.6",
    ),
}


@pytest.mark.parametrize(("make", "expected"), CASES.values(), ids=CASES)
def test_what_is_chosen(make: Callable[[], Module], expected: str) -> None:
    assert kinds(make()) == expected


def test_a_module_that_stands_in_two_lists_is_one_unit() -> None:
    shared, module = layer(), Flat()
    module.first, module.layers, module.others = shared, nn.ModuleList([layer(), shared]), nn.ModuleList([shared])
    assert kinds(module) == "Block first layers.0"


def test_the_text_has_sizes_and_shares() -> None:
    module = Listed(*(layer() for _ in range(3)), layer(2))
    text = "4 units: 4 Block (layers.0 to layers.3) [160 B to 320 B, 20 to 40 % each]"
    assert str(hp.from_module(module)[0]) == f"Listed.forward: {text}"


# --- laws -------------------------------------------------------------------------------------------------------------
def _modules() -> Any:
    leaves = st.builds(linear)
    groups = [Block, Other, Listed, Stage, Chain, nn.Sequential]
    return st.recursive(
        leaves,
        lambda inner: st.builds(
            lambda kind, parts: kind(*parts), st.sampled_from(groups), st.lists(inner, min_size=1, max_size=4)
        ),
        max_leaves=24,
    )


@given(_modules())
def test_every_parameter_is_in_one_unit_and_the_function_is_the_module(module: Module) -> None:
    choice = choice_of(module)
    named = dict(module.named_modules())
    inside = [id(x) for unit in choice.modules for x in named[unit.path].parameters()]
    alone = [id(module.get_parameter(unit.path)) for unit in choice.alone]
    assert sorted(inside + alone) == sorted(id(x) for x in module.parameters())
    assert sum(unit.size_bytes for unit in (*choice.modules, *choice.alone)) == choice.total_bytes
    apply, params = hp.from_module(module)
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0))
    assert torch.equal(apply(params, x), module(x))


@given(st.lists(st.integers(1, 3), min_size=2, max_size=4), st.integers(1, 3))
def test_stages_become_units_of_at_most_a_fifth(depths: list[int], growth: int) -> None:
    stages = [Stage(*(layer(growth**place) for _ in range(5 * depth))) for place, depth in enumerate(depths)]
    choice = choice_of(Listed(*stages))
    assert all(5 * unit.size_bytes <= choice.total_bytes for unit in choice.modules)


# --- the warning ------------------------------------------------------------------------------------------------------
class Wide(Flat):
    def __init__(self) -> None:
        super().__init__(nn.Linear(400, 400), nn.Linear(400, 400))


def warnings_of(units: Any, module: Module) -> list[str]:
    mesh = hp.make_mesh((1,), ("shard",))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        apply, params = hp.from_module(module, units)
        apply(params, torch.ones(1, 400))
        assert not said  # plain parameters are gathered by nobody
        params = hp.shard(params, mesh, hp.P("shard"))
        apply(params, torch.ones(1, 400))
        apply(params, torch.ones(1, 400))
    return [str(warning.message) for warning in said]


def test_a_choice_of_large_units_is_warned_of_once() -> None:
    module = Listed(*(Stage(*(Wide() for _ in range(depth))) for depth in (3, 5)))
    assert warnings_of(Stage, module) == [
        "hpfunc.from_module: chosen units hold more than 1/5 of the bytes each, and consist of blocks\n"
        "  layers.0: Stage, 3.67 MiB, 38 %\n"
        "  layers.1: Stage, 6.12 MiB, 62 %\n\n"
        "Hint: choose their blocks, as from_module does without `units`; all of a unit is gathered at once"
    ]


@pytest.mark.parametrize("units", [None, Wide])
def test_blocks_are_not_warned_of(units: Any) -> None:
    assert not warnings_of(units, Listed(*(Wide() for _ in range(3))))
