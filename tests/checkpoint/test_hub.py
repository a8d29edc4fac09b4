"""Files of transformers and peft are read into sharded arrays, and written from them, as these libraries do it."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import hpfunc as hp
from tests.helpers.ranks import Pool, mesh_of, outcome

os.environ["HF_HUB_OFFLINE"] = "1"
pytestmark = pytest.mark.processes
Tensor = torch.Tensor

TEXT = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT |= {"max_position_embeddings": 8}
EXPERTS = TEXT | {"num_key_value_heads": 1}
# name: configuration, model, fields; whether its files have other names or layouts, and buffers
MODELS: dict[str, tuple[str, str, dict[str, Any], bool, bool]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", EXPERTS | {"tie_word_embeddings": True}, False, False),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", EXPERTS | {"num_local_experts": 3}, True, False),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        EXPERTS | {"moe_intermediate_size": 6, "num_experts": 12, "num_experts_per_tok": 2, "head_dim": 4},
        True,
        False,
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        TEXT
        | {"moe_intermediate_size": 6, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
        | {"first_k_dense_replace": 1, "q_lora_rank": 4, "kv_lora_rank": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
        | {"qk_nope_head_dim": 4},
        True,
        True,
    ),
    "vit": (
        "ViTConfig",
        "ViTForImageClassification",
        {"image_size": 8, "patch_size": 4, "num_labels": 3}
        | {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2},
        True,
        False,
    ),
    "resnet": (
        "ResNetConfig",
        "ResNetForImageClassification",
        {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "num_labels": 3},
        True,
        True,
    ),
    "bart": (
        "BartConfig",
        "BartForConditionalGeneration",
        {"vocab_size": 16, "d_model": 8, "max_position_embeddings": 8}
        | {
            f"{half}_{name}": n
            for half in ("encoder", "decoder")
            for name, n in {"layers": 1, "attention_heads": 2, "ffn_dim": 12}.items()
        },
        True,
        True,
    ),
}


def build(name: str, seed: int | None = None) -> Any:
    """Returns a model with weights and buffers of this seed, or, without one, on the meta device."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config, kind, fields, _, _ = MODELS[name]
    with torch.device("meta" if seed is None else "cpu"):
        model = getattr(transformers, kind)(getattr(transformers, config)(**fields))
    return model if seed is None else drawn(model, seed)


def drawn(model: nn.Module, seed: int) -> nn.Module:
    """Draws all that is in files, or may be trained."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, x in sorted(model.state_dict(keep_vars=True).items()):
            drawn = torch.rand(x.shape, generator=generator) + 1
            x.copy_(drawn.to(x.dtype))
    return model


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in model.state_dict().items()}


def blank(apply: Any, params: Any, mesh: hp.Mesh) -> dict[str, Any]:
    """Returns zeros like the weights and buffers of a module."""
    zeros = {path: nn.Parameter(torch.zeros_like(x), x.requires_grad) for path, x in params.items()}
    buffers = {path: torch.zeros_like(x) for path, x in apply.buffers.items()}
    return {"params": hp.shard(zeros, mesh, hp.P("shard")), "buffers": buffers}


def there_and_back(rank: int, path: str) -> dict[str, dict[str, Tensor]]:
    """Reads what transformers has written, and saves a checkpoint. Returns what was read."""
    mesh, found = mesh_of((2,), ("shard",)), {}
    for name in MODELS:
        apply, params = hp.from_module(build(name, seed=2))
        folder = Path(path) / name
        state = hp.checkpoint.import_safetensors(folder / "theirs", blank(apply, params, mesh), module=build(name))
        hp.checkpoint.save(folder / "ours", state | {"position": 3, "ema": 0.5})
        found[name] = hp.unshard(state["params"]) | state["buffers"]
    return found


def test_models_of_transformers_go_there_and_back(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    for name in MODELS:
        build(name, seed=1).save_pretrained(tmp_path / name / "theirs")
    results = pool(2).run(there_and_back, str(tmp_path), deadline_s=240.0)
    for name, (*_, converts, has_buffers) in MODELS.items():
        model, folder = build(name, seed=1), tmp_path / name
        want = tensors_of(model)
        for found in (result[name] for result in results):
            read = [path for path in found if path in want]
            assert all(torch.equal(found[path], want[path]) for path in read), name
            assert set(read) >= {path for path, _ in model.named_parameters()}
            assert has_buffers == any(path in want for path, _ in model.named_buffers())
        assert hp.checkpoint.export_safetensors(folder / "ours", folder / "out", module=build(name)) == folder / "out"
        theirs, ours = (load_file(folder / side / "model.safetensors") for side in ("theirs", "out"))
        assert (set(theirs) != {path for path, _ in model.named_parameters()}) == converts
        assert theirs.keys() == ours.keys()
        assert all(torch.equal(ours[key], x) and ours[key].dtype == x.dtype for key, x in theirs.items())
        again = type(model).from_pretrained(folder / "out")
        assert all(torch.equal(x, want[path]) for path, x in again.state_dict().items())
        assert sorted(x.name for x in (folder / "out").iterdir()) == sorted(
            x.name for x in (folder / "theirs").iterdir()
        )


# --- details ----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def mesh() -> hp.Mesh:
    return hp.make_mesh((1,), ("shard",))


def like_of(model: Any, mesh: hp.Mesh) -> Any:
    return blank(*hp.from_module(model), mesh)


def test_a_model_in_several_files_is_read_by_its_index(mesh: hp.Mesh, tmp_path: Path) -> None:
    model = build("mixtral", seed=1)
    model.save_pretrained(tmp_path, max_shard_size="2KB")
    save_file({"other": torch.ones(1)}, tmp_path / "consolidated.safetensors")  # the same in another format, often
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    like = like_of(build("mixtral", seed=2), mesh)
    found = hp.checkpoint.import_safetensors(tmp_path, like, module=build("mixtral"))
    want = tensors_of(model)
    assert all(torch.equal(x.local, want[path]) for path, x in found["params"].items())


def test_other_dtypes_are_cast_only_if_that_is_allowed(mesh: hp.Mesh, tmp_path: Path) -> None:
    model = build("mixtral", seed=1).bfloat16()
    model.save_pretrained(tmp_path)
    like = like_of(build("mixtral", seed=2), mesh)
    with pytest.raises(hp.CheckpointError, match=r"cast: params\.model\.layers\.0\.mlp\.experts\.gate_up_proj: shape"):
        hp.checkpoint.import_safetensors(tmp_path, like, module=build("mixtral"))
    found = hp.checkpoint.import_safetensors(tmp_path, like, module=build("mixtral"), allow={"cast"})
    want = tensors_of(model)
    assert all(torch.equal(x.local, want[path].float()) for path, x in found["params"].items())


def test_a_tied_weight_may_stand_twice_if_it_is_the_same(mesh: hp.Mesh, tmp_path: Path) -> None:
    model = build("llama", seed=1)
    weights = {key: x.clone() for key, x in tensors_of(model).items()}
    save_file(weights, tmp_path / "model.safetensors")
    like = like_of(build("llama", seed=2), mesh)["params"]
    found = hp.checkpoint.import_safetensors(tmp_path, like, module=build("llama"))
    assert torch.equal(found["model.embed_tokens.weight"].local, weights["lm_head.weight"])
    del weights["model.embed_tokens.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    found = hp.checkpoint.import_safetensors(tmp_path / "model.safetensors", like, module=build("llama"))
    assert torch.equal(found["model.embed_tokens.weight"].local, weights["lm_head.weight"])
    save_file(weights | {"model.embed_tokens.weight": torch.ones(16, 8)}, tmp_path / "model.safetensors")
    with pytest.raises(hp.CheckpointError, match="weights that are one in the module differ in the files"):
        hp.checkpoint.import_safetensors(tmp_path, like, module=build("llama"))


def test_what_the_library_ignores_is_ignored(mesh: hp.Mesh, tmp_path: Path) -> None:
    weights = tensors_of(build("mixtral", seed=1))
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    save_file(weights | old, tmp_path / "model.safetensors")
    like = like_of(build("mixtral", seed=2), mesh)["params"]
    found = hp.checkpoint.import_safetensors(tmp_path, like, module=build("mixtral"))  # in the layout of the module
    assert all(torch.equal(x.local, weights[path]) for path, x in found.items())


def test_files_of_another_model_are_refused(mesh: hp.Mesh, tmp_path: Path) -> None:
    build("mixtral", seed=1).save_pretrained(tmp_path)
    like = like_of(build("mixtral", seed=2), mesh)
    with pytest.raises(hp.CheckpointError) as caught:
        hp.checkpoint.import_safetensors(tmp_path, like["params"])
    lines = str(caught.value).splitlines()
    assert "  missing: model.layers.0.mlp.experts.gate_up_proj: shape (3, 24, 8), float32" in lines
    assert any(line.startswith("  unexpected: model.layers.0.block_sparse_moe.experts.0.w1.weight") for line in lines)
    assert lines[-1] == (
        "Hint: the names are not those of `like`: module=model reads the files of a model of transformers or peft"
        " as its library does, rename=... any others"
    )
    key = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {key: torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(
        hp.CheckpointError, match="transformers cannot convert these arrays: RuntimeError stack expects"
    ):
        hp.checkpoint.import_safetensors(tmp_path, like, module=build("mixtral"))
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(hp.CheckpointError, match=r"missing: params\.model\.norm\.weight"):
        hp.checkpoint.import_safetensors(tmp_path, like, module=build("mixtral"))


def test_buffers_that_are_not_given_are_named(mesh: hp.Mesh, tmp_path: Path) -> None:
    model = build("deepseek_v3", seed=1)
    model.save_pretrained(tmp_path / "theirs")
    like = like_of(build("deepseek_v3", seed=2), mesh)
    with pytest.raises(hp.CheckpointError) as caught:
        hp.checkpoint.import_safetensors(tmp_path / "theirs", like["params"], module=build("deepseek_v3"))
    assert str(caught.value).splitlines()[1:] == [
        "  unexpected: model.layers.1.mlp.gate.e_score_correction_bias: shape (4,), float32",
        "",
        "Hint: buffers are read if `like` has them: like={'params': params, 'buffers': apply.buffers};"
        " what is not to be read: allow=('unexpected',)",
    ]
    hp.checkpoint.save(tmp_path / "ours", like["params"])
    with pytest.raises(hp.CheckpointError) as caught:
        hp.checkpoint.export_safetensors(tmp_path / "ours", tmp_path / "out", module=build("deepseek_v3"))
    assert str(caught.value).splitlines() == [
        "hpfunc.checkpoint.export_safetensors: the checkpoint has not all that the module saves",
        "  model.layers.1.mlp.gate.e_score_correction_bias: shape (4,)",
        "",
        "Hint: save buffers, too: hpfunc.checkpoint.save(path, {'params': params, 'buffers': buffers})",
    ]
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_another_model_is_not_exported(mesh: hp.Mesh, tmp_path: Path) -> None:
    params = like_of(build("llama", seed=1), mesh)["params"]
    hp.checkpoint.save(tmp_path, {"params": params, "ema": params})
    with pytest.raises(hp.CheckpointError, match=r"one name to several arrays(.|\n)*lm_head|embed_tokens.weight: of"):
        hp.checkpoint.export_safetensors(tmp_path, tmp_path / "out", module=build("llama"))

    def only_ema(path: str) -> str | None:
        return path.removeprefix("ema.") if path.startswith("ema.") else None

    file = hp.checkpoint.export_safetensors(
        tmp_path, tmp_path / "e.safetensors", module=build("llama"), rename=only_ema
    )
    assert set(load_file(file)) == set(params)
    hp.checkpoint.save(tmp_path, {"params": params | {"model.norm.weight": hp.shard(torch.ones(3), mesh, hp.P())}})
    with pytest.raises(hp.CheckpointError, match=r"model.norm.weight: shape \(3,\), float32, but the module has"):
        hp.checkpoint.export_safetensors(tmp_path, tmp_path / "out", module=build("llama"))
    with pytest.raises(hp.LeafError, match=r"module is to be a torch\.nn\.Module, got ModuleFunction"):
        hp.checkpoint.export_safetensors(tmp_path, tmp_path / "out", module=hp.from_module(nn.Linear(1, 1))[0])


def test_a_module_of_no_library_has_the_files_of_its_state_dict(mesh: hp.Mesh, tmp_path: Path) -> None:
    def made() -> nn.Module:
        net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Linear(3, 3), nn.Linear(3, 3))
        net[3].weight = net[2].weight
        net.register_buffer("index", torch.arange(3), persistent=False)
        return net

    net = drawn(made(), 1)
    apply, params = hp.from_module(net)
    state = {"params": hp.shard(params, mesh, hp.P("shard")), "buffers": dict(apply.buffers)}
    hp.checkpoint.save(tmp_path / "c", state)
    with torch.device("meta"):
        empty = made()
    file = hp.checkpoint.export_safetensors(tmp_path / "c", tmp_path / "net.safetensors", module=empty)
    stored = load_file(file)
    want = tensors_of(net)
    assert set(want) - set(stored) == {"3.weight"}
    assert all(torch.equal(stored[name], want[name]) for name in stored)
    like = blank(*hp.from_module(made()), mesh)
    like["buffers"]["index"] += 5
    found = hp.checkpoint.import_safetensors(file, like, module=made())
    assert all(torch.equal(found["params"][name].local, want[name]) for name in params)
    assert torch.equal(found["buffers"]["1.running_mean"], want["1.running_mean"])
    assert torch.equal(found["buffers"]["index"], torch.tensor([5, 5, 5]))  # in no file
    rows = {"net": {"bias": like["params"]["0.bias"], "index": like["buffers"]["index"]}}

    def of_rows(name: str) -> str | None:
        return {"0.bias": "net.bias", "index": "net.index"}.get(name)

    some = hp.checkpoint.import_safetensors(file, rows, module=made(), rename=of_rows, allow={"unexpected"})
    assert torch.equal(some["net"]["bias"].local, want["0.bias"])


def test_what_cannot_be_converted_is_refused(mesh: hp.Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    model = build("llama", seed=1)
    like = like_of(model, mesh)["params"]
    model.save_pretrained(tmp_path)
    model._hf_peft_config_loaded = True  # as after model.add_adapter(...)
    with pytest.raises(hp.UsageError, match=r"the module has adapters of its own(.|\n)*peft\.get_peft_model"):
        hp.checkpoint.import_safetensors(tmp_path, like, module=model)
    monkeypatch.setitem(sys.modules, "transformers.core_model_loading", None)
    monkeypatch.delattr(transformers, "core_model_loading", raising=False)
    with pytest.raises(hp.VersionError, match=r"does not tell how it converts weights(.|\n)*transformers>=5"):
        hp.checkpoint.import_safetensors(tmp_path, like, module=build("llama"))


# --- adapters ---------------------------------------------------------------------------------------------------------
def adapted(method: str, seed: int) -> Any:
    import peft

    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "lora": (peft.LoraConfig, {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
        "dora": (peft.LoraConfig, {"r": 2, "target_modules": ["down_proj"], "use_dora": True, "bias": "all"}),
        "embedding": (peft.LoraConfig, {"r": 2, "target_modules": ["embed_tokens"]}),
        "ia3": (peft.IA3Config, {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
        "prefix": (peft.PrefixTuningConfig, {"num_virtual_tokens": 3}),
    }
    kind, fields = kinds[method]
    base = build("mixtral" if method == "lora" else "llama", seed=7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft, at methods of transformers
        model = peft.get_peft_model(base, kind(task_type="CAUSAL_LM", **fields))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for x in model.parameters():
            if x.requires_grad:
                x.copy_(torch.randn(x.shape, generator=generator))
    return model


METHODS = ("lora", "dora", "embedding", "ia3", "prefix")


def adapters(rank: int, path: str) -> list[tuple[dict[str, Tensor], bool]]:
    """Saves the adapters alone, as a checkpoint; reads peft's files into other arrays."""
    mesh, found = mesh_of((2,), ("shard",)), []
    for method in METHODS:
        _, given = hp.from_module(adapted(method, seed=1))
        trained, frozen = hp.partition(hp.shard(given, mesh, hp.P("shard")), hp.is_trainable)
        hp.checkpoint.save(f"{path}/{method}/ours", {"adapter": trained, "step": 3})
        other, given = adapted(method, seed=2), None
        params = hp.shard(hp.from_module(other)[1], mesh, hp.P("shard"))
        every = hp.checkpoint.import_safetensors(f"{path}/{method}/theirs", params, module=other)
        part = hp.partition(params, hp.is_trainable)[0]
        part = hp.checkpoint.import_safetensors(f"{path}/{method}/theirs", part, module=other)
        same = all(torch.equal(every[key].local, x.local) for key, x in part.items() if x is not None)
        frozen = [torch.equal(every[key].local, x.local) for key, x in frozen.items() if x is not None]
        found.append((hp.unshard({key: x for key, x in part.items() if x is not None}), same and all(frozen)))
    return found


def test_adapters_alone_are_peft_s_own_files(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft, at embeddings and names of its own
        for method in METHODS:
            adapted(method, seed=1).save_pretrained(tmp_path / method / "theirs")
    results = pool(2).run(adapters, str(tmp_path), deadline_s=240.0)
    for i, method in enumerate(METHODS):
        model, folder = adapted(method, seed=1), tmp_path / method
        want = {name: x.detach() for name, x in model.named_parameters() if x.requires_grad}
        for found, same in (result[i] for result in results):
            assert same
            assert found.keys() == want.keys()
            assert all(torch.equal(found[name], x) for name, x in want.items())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if method == "embedding":  # peft saves the embedding that is adapted, too
                with pytest.raises(hp.CheckpointError, match="has not all of the adapter"):
                    hp.checkpoint.export_safetensors(folder / "ours", folder / "out", module=adapted(method, seed=2))
                continue
            for _ in range(2):  # the second one in the place of the first
                hp.checkpoint.export_safetensors(folder / "ours", folder / "out", module=adapted(method, seed=2))
            other = adapted(method, seed=2)
            base = other.get_base_model() if method == "prefix" else other.unload()
            again = peft.PeftModel.from_pretrained(base, folder / "out")
            ids = torch.arange(6)[None]
            assert torch.equal(again.eval()(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
        for file in ("adapter_model.safetensors", "adapter_config.json", "README.md"):
            assert (folder / "out" / file).read_bytes() == (folder / "theirs" / file).read_bytes(), (method, file)


def test_an_adapter_of_another_module_is_refused(tmp_path: Path) -> None:
    mesh = hp.make_mesh((1,), ("shard",))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted("lora", seed=1).save_pretrained(tmp_path)
    other = adapted("ia3", seed=2)
    params = hp.shard(hp.from_module(other)[1], mesh, hp.P("shard"))
    assert "peft cannot load the adapter of" in outcome(
        hp.checkpoint.import_safetensors, tmp_path, params, module=other
    )
    build("llama", seed=1).save_pretrained(tmp_path / "base")
    text = outcome(hp.checkpoint.import_safetensors, tmp_path / "base", params, module=other)
    assert "no adapter_model.safetensors in" in text
    assert "module=model.get_base_model()" in text
