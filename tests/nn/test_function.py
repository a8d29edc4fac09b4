"""What `from_module` returns, besides that it trains: purity, buffers, modes, hooks, other methods, the way back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hpfunc as hp
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.ranks import mesh_of
from tests.nn.training import Pools
from tests.nn.zoo import WIDTH, Block, Convolutional, Many, Outside, Stack, Tied

X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(7))
IMAGES = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def mesh() -> hp.Mesh:
    return hp.make_mesh((1,), ("shard",))


def sharded(params: Any, mesh: hp.Mesh) -> Any:
    return hp.shard(params, mesh, hp.P("shard"))


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {path: x.clone() for path, x in module.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[path], b[path]) for path in a)


# --- purity -----------------------------------------------------------------------------------------------------------
def test_the_module_is_not_changed(mesh: hp.Mesh) -> None:
    module = Convolutional()
    before = state(module), [(m, m.training, dict(vars(m))) for m in module.modules()]
    identities = {path: id(x) for path, x in module.named_parameters()}
    apply, params = hp.from_module(module)
    apply.with_buffers(sharded(params, mesh), apply.buffers, IMAGES)
    apply.eval()(sharded(params, mesh), IMAGES)
    assert same(before[0], state(module))
    assert identities == {path: id(x) for path, x in module.named_parameters()}
    assert all(vars(m) == values and m.training == mode for m, mode, values in before[1])


@pytest.mark.parametrize("make", [Stack, Tied, Outside])
def test_plain_and_sharded_parameters_give_the_bits_of_the_module(mesh: hp.Mesh, make: type[nn.Module]) -> None:
    module = make()
    apply, params = hp.from_module(module)
    assert torch.equal(apply(params, X), module(X))
    assert torch.equal(apply(sharded(params, mesh), X), module(X))
    assert torch.equal(apply(params, X), apply(params, X))


def test_two_calls_in_one_loss_have_the_gradients_of_the_module(mesh: hp.Mesh) -> None:
    module = Outside()
    apply, params = hp.from_module(module)
    loss, grads = hp.value_and_grad(lambda p: (apply(p, X) * apply(p, 2 * X)).sum())(sharded(params, mesh))
    want = (module(X) * module(2 * X)).sum()
    want.backward()
    assert torch.equal(loss, want)
    for path, p in module.named_parameters():
        torch.testing.assert_close(grads[path].local, p.grad)


def test_a_tied_parameter_is_one_leaf() -> None:
    _, params = hp.from_module(Tied())
    assert "embed.weight" in params
    assert "head.weight" not in params


def test_frozen_parameters_are_told_apart() -> None:
    module = Stack()
    module.blocks[0].requires_grad_(False)
    _, params = hp.from_module(module)
    trained, frozen = hp.partition(params, lambda path, w: w.requires_grad)
    assert {path for path, w in frozen.items() if w is not None} == {p for p in params if p.startswith("blocks.0.")}
    assert {path for path, w in trained.items() if w is not None} == {p for p in params if p[:9] != "blocks.0."}


# --- buffers and modes ------------------------------------------------------------------------------------------------
def test_statistics_are_never_lost(mesh: hp.Mesh) -> None:
    module = Convolutional()
    apply, params = hp.from_module(module)
    arrays = sharded(params, mesh)
    with pytest.raises(
        hp.UsageError, match=r"would lose them\n  layer1.0.bn1.num_batches_tracked\n  layer1.0.bn1.running_mean"
    ):
        apply(arrays, IMAGES)
    start = {path: x.clone() for path, x in apply.buffers.items()}
    first, buffers = apply.with_buffers(arrays, apply.buffers, IMAGES)
    second, buffers = apply.with_buffers(arrays, buffers, IMAGES + 1)
    assert torch.equal(first, module(IMAGES))
    assert torch.equal(second, module(IMAGES + 1))
    assert same(buffers, dict(module.named_buffers()))
    assert same(start, dict(apply.buffers))
    assert torch.equal(apply.eval().with_buffers(arrays, buffers, IMAGES)[0], module.eval()(IMAGES))


class UnseenStatistics(nn.Module):
    """Running statistics that nothing but their values betrays: batch_norm raises no version."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(x, self.mean, self.var, self.w, training=self.training)


def test_statistics_that_change_unseen_are_not_lost_either() -> None:
    apply, params = hp.from_module(nn.Sequential(UnseenStatistics(), nn.Tanh()))
    with pytest.raises(hp.UsageError, match=r"would lose them\n  0.mean\n  0.var"):
        apply(params, X)
    apply.eval()(params, X)


def test_dropout_follows_the_mode(mesh: hp.Mesh) -> None:
    module = Stack(0.5)
    apply, params = hp.from_module(module)
    arrays = sharded(params, mesh)
    torch.manual_seed(1)
    got = apply(arrays, X)
    torch.manual_seed(1)
    assert torch.equal(got, module(X))
    assert torch.equal(apply.eval()(arrays, X), module.eval()(X))
    torch.manual_seed(1)
    assert torch.equal(apply.eval().train()(arrays, X), got)


def test_the_modes_of_parts_are_kept() -> None:
    module = Stack(0.5)
    module.blocks[1].eval()
    apply, params = hp.from_module(module)
    torch.manual_seed(1)
    got = apply(params, X)
    apply.eval()(params, X)
    torch.manual_seed(1)
    assert torch.equal(got, module(X))
    torch.manual_seed(1)
    assert torch.equal(apply(params, X), got)


# --- hooks and other methods ------------------------------------------------------------------------------------------
class Recorder:
    """A hook of a user: it must be this very object that is called."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.seen.append(tuple(output.shape))

    def doubled(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        self.seen.append(tuple(output.shape))
        return output * 2


def test_hooks_are_called(mesh: hp.Mesh) -> None:
    module, recorder = Stack(), Recorder()
    module.register_forward_hook(recorder)
    module.blocks[1].register_forward_hook(recorder.doubled)
    module.get_submodule("blocks.2.up").register_forward_hook(recorder)
    module.blocks[0].register_forward_pre_hook(lambda m, args: (args[0] + m.get_parameter("up.bias").sum(),))
    apply, params = hp.from_module(module)
    got = apply(sharded(params, mesh), X)
    assert recorder.seen == [(4, WIDTH), (4, 10), (4, WIDTH)]
    assert torch.equal(got, module(X))


class Generator(Stack):
    @torch.no_grad()
    def generate(self, x: torch.Tensor, *, times: int) -> list[torch.Tensor]:
        outputs = []
        for _ in range(times):
            x = self(x.to(next(self.parameters()).device))
            outputs.append(x)
        return outputs


def test_another_method_gives_the_bits_of_the_module(mesh: hp.Mesh) -> None:
    module = Generator()
    apply, params = hp.from_module(module)
    got = apply.method("generate")(sharded(params, mesh), X, times=3)
    assert all(torch.equal(a, b) for a, b in zip(got, module.generate(X, times=3), strict=True))
    assert repr(apply.method("generate")).startswith("Generator.generate: 3 units")
    with pytest.raises(hp.UsageError, match="Generator has no method 'sample'"):
        apply.method("sample")


def test_a_parametrized_weight_gives_the_bits_of_the_module(mesh: hp.Mesh) -> None:
    module = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 4, bias=False)), nn.Tanh())
    apply, params = hp.from_module(module)
    assert torch.equal(apply(sharded(params, mesh), X), module(X))


# --- which units ------------------------------------------------------------------------------------------------------
STACK = "3 units: 3 Block (blocks.0 to blocks.2) [568 B, 33 % each]"


@pytest.mark.parametrize(
    ("make", "units", "text"),
    [
        (Stack, None, f"Stack.forward: {STACK}"),
        (Stack, Block, f"Stack.forward: {STACK}"),
        (Stack, [Block], f"Stack.forward: {STACK}"),
        (Stack, "blocks.?", f"Stack.forward: {STACK}"),
        (Stack, lambda path, module: path.count(".") == 1, f"Stack.forward: {STACK}"),
        (Stack, Stack, "Stack.forward: 1 units: 1 Stack (the whole module) [1.66 KiB, 100 %]"),
        (Many, None, "Many.forward: 2 units: 2 ManyBlock (blocks.0 to blocks.1) [568 B, 50 % each]"),
        (
            Tied,
            None,
            "Tied.forward: 5 units: 1 Linear (embed) [144 B, 8 %], 3 Block (stack.blocks.0 to stack.blocks.2) "
            "[568 B, 30 % each], 1 Linear (head) [168 B, 9 %], gain alone [24 B, 1 %]",
        ),
        (
            Convolutional,
            ["layer?", "stem"],
            "Convolutional.forward: 4 units: 3 Sequential (stem to layer2) [580 B to 3.67 KiB, 10 to 66 % each], "
            "1 Linear (fc) [60 B, 1 %]",
        ),
        (
            Convolutional,
            None,
            "Convolutional.forward: 7 units: 1 Conv2d (stem.0) [540 B, 9 %], 1 BatchNorm2d (stem.1) [40 B, <1 %], "
            "2 Residual (layer1.0 to layer1.1) [1.84 KiB, 33 % each], 1 Conv2d (layer2.0) [96 B, 2 %], "
            "1 Residual (layer2.1) [1.19 KiB, 21 %], 1 Linear (fc) [60 B, 1 %]",
        ),
    ],
)
def test_the_text_says_what_was_chosen(make: type[nn.Module], units: Any, text: str) -> None:
    assert str(hp.from_module(make(), units)[0]) == text


def test_a_module_may_be_named_itself() -> None:
    module = Stack()
    apply, params = hp.from_module(module, units=[module.blocks[1], "blocks.[02]"])
    assert STACK in str(apply)
    assert torch.equal(apply(params, X), module(X))


def test_units_have_the_names_of_their_modules(mesh: hp.Mesh) -> None:
    apply, params = hp.from_module(Tied())
    step = hp.sharded(lambda p, x: hp.value_and_grad(lambda p: apply(p, x).sum())(p), mesh)
    units = step.lower(sharded(params, mesh), X).schedule.program.units
    assert [unit.name for unit in units] == [
        "embed.0", "stack.blocks.0.0", "stack.blocks.1.0", "stack.blocks.2.0", "gain.0", "head.0",
    ]  # fmt: skip


# --- the way back -----------------------------------------------------------------------------------------------------
def test_weights_go_back(mesh: hp.Mesh) -> None:
    module, other = Convolutional(), Convolutional()
    apply, params = hp.from_module(module)
    _, buffers = apply.with_buffers(params, apply.buffers, IMAGES)
    assert hp.to_module(sharded(params, mesh), other, buffers) is other
    module(IMAGES)
    assert same(state(module), state(other))


def test_init_module_makes_what_the_module_has(mesh: hp.Mesh) -> None:
    torch.manual_seed(3)
    want, params = hp.from_module(Convolutional())
    torch.manual_seed(3)
    apply, arrays = hp.init_module(Convolutional, mesh, hp.P("shard"))
    assert same({path: a.local for path, a in arrays.items()}, {path: x.detach() for path, x in params.items()})
    assert same(dict(apply.buffers), dict(want.buffers))
    assert torch.equal(apply.eval()(arrays, IMAGES), want.eval()(params, IMAGES))


def big() -> nn.Module:
    return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))


def peaks(rank: int) -> tuple[int, int]:
    mesh = mesh_of((4,), ("shard",))
    hp.init_module(Stack, mesh, hp.P("shard"))  # groups are made
    with torch.device("meta"):
        on_meta = big()
    found = []
    for source in (big, on_meta):
        with LiveBytes() as live:
            apply, params = hp.init_module(source, mesh, hp.P("shard"))
        assert len(params) == 8
        found.append(live.peak)
        del apply, params
    return found[0], found[1]


@pytest.mark.processes
def test_no_rank_ever_holds_the_whole_model(pool: Pools) -> None:
    weight = 4 * 512 * 512
    for found in pool(4).run(peaks):
        # A quarter of all eight, one whole weight, and what drawing it takes.
        assert all(2 * weight < peak <= 4 * weight + (1 << 16) for peak in found), found


@pytest.mark.parametrize("make", [Stack, Convolutional])
def test_a_module_on_the_meta_device(mesh: hp.Mesh, make: type[nn.Module]) -> None:
    with torch.device("meta"):
        module = make()
    torch.manual_seed(3)
    apply, arrays = hp.init_module(module, mesh, hp.P("shard"))
    torch.manual_seed(3)
    assert same({**{p: a.local for p, a in arrays.items()}, **apply.buffers}, state(make()))
    assert all(x.is_meta for x in module.state_dict().values())


def test_a_module_on_the_meta_device_with_a_function(mesh: hp.Mesh) -> None:
    with torch.device("meta"):
        module = Tied()

    def init(part: nn.Module) -> None:
        for p in part.parameters(recurse=False):
            nn.init.constant_(p, p.numel())

    _, arrays = hp.init_module(module, mesh, hp.P("shard"), init_fn=init)
    assert all((a.local == a.local.numel()).all() for a in arrays.values())


def test_a_meta_module_with_what_nothing_initialises(mesh: hp.Mesh) -> None:
    with torch.device("meta"):
        module = Tied()
    with pytest.raises(hp.UsageError, match=r"has written these\n  gain"):
        hp.init_module(module, mesh, hp.P("shard"))
