"""Models that nobody here wrote: some of transformers, from small configurations, as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hpfunc as hp
from tests.helpers.ranks import mesh_of
from tests.nn.pretrained import CACHING, LAYERS, Pretrained
from tests.nn.training import FEWER, FSDP, HSDP, Layout, Pools, assert_trained, resume, train
from tests.nn.zoo import Found

pytestmark = pytest.mark.processes
FROZEN = {  # by the models themselves
    "whisper": {"model.encoder.embed_positions.weight"},
    "marian": {"model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"},
}


def trained(rank: int, layout: Layout, other: Layout, path: str) -> dict[str, tuple[Found, Found]]:
    cases = {name: (Pretrained(name), f"{path}/{name}") for name in LAYERS}
    return {
        name: (train(rank, case, layout, where), resume(rank, case, other, where))
        for name, (case, where) in cases.items()
    }


def gone_on(rank: int, path: str) -> Found:
    return resume(rank, Pretrained("llama"), FEWER, f"{path}/llama")


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "other"), [(FSDP, HSDP), (HSDP, FSDP)], ids=["fsdp", "hsdp"])
def test_training_matches_the_plain_models_also_after_a_checkpoint(
    pool: Pools, tmp_path: Path, layout: Layout, other: Layout
) -> None:
    results = pool(4).run(trained, layout, other, str(tmp_path), deadline_s=240.0)  # each rank loads the package first
    for name in LAYERS:
        before, after = zip(*(found[name] for found in results), strict=True)
        assert_trained(Pretrained(name), before, after)
    if layout == HSDP:
        case = Pretrained("llama")
        assert_trained(case, [found["llama"][0] for found in results], pool(3).run(gone_on, str(tmp_path)))


@pytest.mark.parametrize("name", LAYERS)
def test_their_blocks_are_found(name: str) -> None:
    apply, _ = hp.from_module(Pretrained(name).module())
    assert LAYERS[name][3] in str(apply)


def as_on_the_page(rank: int) -> dict[str, tuple[Any, bool]]:
    """The ten lines of the modules page, with a decay that would show on any weight."""
    mesh, found = mesh_of((2,), ("shard",)), {}
    for name in FROZEN:
        case = Pretrained(name)
        apply, params = hp.from_module(case.module().eval())
        bound = hp.optim.bind(hp.shard(params, mesh, hp.P("shard")))
        grad_fn = hp.sharded(hp.value_and_grad(lambda params, kwargs, apply=apply: apply(params, **kwargs).loss), mesh)
        optimizer = torch.optim.AdamW(bound.parameters, lr=0.01, weight_decay=0.5)
        for step in range(3):
            _, grads = grad_fn(bound.params, case.call(rank, step)[1])
            bound.set_grads(grads)
            optimizer.step()
        found[name] = {path: x.is_frozen for path, x in bound.params.items()}, hp.unshard(bound.params)
    return found


def test_what_the_models_freeze_by_themselves_stays(pool: Pools) -> None:
    results = pool(2).run(as_on_the_page, deadline_s=240.0)
    for name, frozen in FROZEN.items():
        module = Pretrained(name).module().eval()
        start = {path: x.detach().clone() for path, x in module.named_parameters()}
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.5)
        for step in range(3):
            optimizer.zero_grad()
            for rank in range(2):
                (module(**Pretrained(name).call(rank, step)[1]).loss / 2).backward()
            optimizer.step()
        for marks, weights in (result[name] for result in results):
            assert {path for path, is_frozen in marks.items() if is_frozen} == frozen
            assert all(torch.equal(weights[path], start[path]) for path in frozen)
            assert not any(torch.equal(weights[path], x) for path, x in start.items() if path not in frozen)
            for path, x in module.named_parameters():
                torch.testing.assert_close(weights[path].double(), x.detach().double(), rtol=1e-6, atol=1e-8)


# --- caches in training -----------------------------------------------------------------------------------------------
FILLING = ("llama", "gpt2", "t5", "whisper", *CACHING)


def call_of(name: str, rank: int) -> dict[str, Any]:
    """Returns arguments with padding, and the cache that the model makes where it is asked for one."""
    kwargs = Pretrained(name).call(rank, 0)[1]
    if name == "llama":
        kwargs["attention_mask"] = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    return kwargs | {"use_cache": True}


def filled(outputs: Any) -> int:
    cache = outputs.past_key_values
    return 0 if cache is None else sum(x.numel() for layer in _layers(cache) for x in (layer.keys, layer.values))


def _layers(cache: Any) -> list[Any]:
    caches = [cache.self_attention_cache, cache.cross_attention_cache] if hasattr(cache, "is_updated") else [cache]
    return [layer for each in caches for layer in each.layers if getattr(layer, "keys", None) is not None]


def computed_again(rank: int) -> dict[str, tuple[Any, list[int]]]:
    mesh, found = mesh_of((2,), ("shard",)), {}
    for name in FILLING:
        apply, given = hp.from_module(Pretrained(name).module(), remat=True)
        params = hp.shard(given, mesh, hp.P("shard"))
        sizes: list[int] = []

        def loss(params: Any, kwargs: Any, apply: Any = apply, sizes: Any = sizes) -> Any:
            outputs = apply(params, **kwargs)
            sizes.append(filled(outputs))
            return outputs.loss

        step = hp.sharded(hp.grad(loss), mesh, policy=hp.Policy(pack_below_bytes=0))
        for _ in range(2):
            gradients = step(params, call_of(name, rank))
        assert step.followed_plan
        found[name] = hp.unshard(gradients), sizes
    return found


def test_blocks_that_fill_a_cache_are_computed_again(pool: Pools) -> None:
    results = pool(2).run(computed_again, deadline_s=240.0)
    for name in FILLING:
        module, sizes = Pretrained(name).module(), set()
        for rank in range(2):
            outputs = module(**call_of(name, rank))
            sizes.add(filled(outputs))
            (outputs.loss / 2).backward()
        assert max(sizes) > 0
        for gradients, found in (result[name] for result in results):
            assert set(found) == sizes, name
            for path, x in module.named_parameters():
                if not x.requires_grad:
                    assert gradients[path] is None
                    continue
                want = torch.zeros_like(x) if x.grad is None else x.grad
                # some of these models compute in float32 inside
                error = (gradients[path] - want).norm() / want.norm().clamp_min(1e-3)
                assert error < 1e-5, f"{name}: {path} differs by {error:.1e}"


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_generation_gives_the_tokens_of_the_model(name: str) -> None:
    mesh, module = hp.make_mesh((1,), ("shard",)), Pretrained(name).module().eval()
    apply, params = hp.from_module(module)
    (ids,) = [x for key, x in Pretrained(name).call(0, 0)[1].items() if key == "input_ids"]
    options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    got = apply.method("generate")(hp.shard(params, mesh, hp.P("shard")), ids, **options)
    assert torch.equal(got, module.generate(ids, **options))


def test_init_module_makes_what_the_model_has() -> None:
    mesh, case = hp.make_mesh((1,), ("shard",)), Pretrained("llama")
    _, params = hp.from_module(case.built())
    _, arrays = hp.init_module(case.built, mesh, hp.P("shard"))
    assert params.keys() == arrays.keys()
    assert all(torch.equal(arrays[path].local, x.detach()) for path, x in params.items())
