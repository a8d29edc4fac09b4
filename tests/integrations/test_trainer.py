"""transformers' `Trainer` over hpfunc against itself in one process on the global batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hpfunc as hp
from tests.helpers.golden import assert_golden
from tests.helpers.ranks import outcome
from tests.integrations.hosts import Examples, Net, launched

pytestmark = pytest.mark.processes
GOLDEN = Path(__file__).parents[1] / "golden" / "integrations"
BATCH = 4
SLOW_S = 240.0  # each rank imports the host first


def arguments(out: str, num_ranks: int, **options: Any) -> Any:
    from transformers import TrainingArguments

    given = {
        **{"max_steps": 4, "logging_steps": 1, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2},
        **{"per_device_train_batch_size": BATCH // num_ranks, "per_device_eval_batch_size": 2, "learning_rate": 0.05},
        **{"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "warmup_steps": 2, "weight_decay": 0.1, "seed": 1},
        **{"use_cpu": True, "report_to": [], "disable_tqdm": True},
    }
    return TrainingArguments(out, **(given | options))


def run(trainer: Any, resume: str | None = None) -> Any:
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    names = "loss", "grad_norm", "eval_loss", "learning_rate"
    return [{key: float(log[key]) for key in names if key in log} for log in trainer.state.log_history]


def cut(rank: int, num_ranks: int, out: str, resume: str | None, options: dict[str, Any]) -> Any:
    with launched(rank, num_ranks):
        from hpfunc.integrations.transformers import Trainer

        sharding = options.pop("sharding", None)
        args = arguments(out, num_ranks, **options)
        return run(Trainer(Net(), args, train_dataset=Examples(), eval_dataset=Examples(), sharding=sharding), resume)


def plain(rank: int, out: str, resume: str | None, options: dict[str, Any]) -> Any:
    with launched(0, 1):
        from transformers import Trainer

        args = arguments(out, 1, per_device_eval_batch_size=BATCH, **options)
        return run(Trainer(Net(), args, train_dataset=Examples(), eval_dataset=Examples()), resume)


def assert_same(found: Any, expected: Any, out: Path, other: Path) -> None:
    """Fails unless logs and saved weights agree to the rounding of float64 (the host logs in float32)."""
    assert [list(log) for log in found] == [list(log) for log in expected]
    for log, wanted in zip(found, expected, strict=True):
        assert log == pytest.approx(wanted, rel=1e-6)
    weights, theirs = (load_file(path / "model.safetensors") for path in (out, other))
    assert weights.keys() == theirs.keys()
    assert all((weights[key] - theirs[key]).abs().max() < 1e-12 for key in weights)


def test_it_trains_as_one_process_and_resumes_on_other_ranks(pool: Any, tmp_path: Path) -> None:
    (expected,) = pool(1).run(plain, str(tmp_path / "plain"), None, {}, deadline_s=SLOW_S)
    for found in pool(2).run(cut, 2, str(tmp_path / "cut"), None, {}, deadline_s=SLOW_S):
        assert_same(found, expected, tmp_path / "cut", tmp_path / "plain")
    (alone,) = pool(1).run(cut, 1, str(tmp_path / "alone"), str(tmp_path / "cut" / "checkpoint-2"), {})
    assert_same(alone, expected, tmp_path / "alone", tmp_path / "plain")
    again = pool(2).run(cut, 2, str(tmp_path / "again"), str(tmp_path / "alone" / "checkpoint-4"), {"max_steps": 4})
    assert_same(again[0], expected, tmp_path / "again", tmp_path / "plain")


def best(rank: int, num_ranks: int, out: str) -> Any:
    options = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    return cut(rank, num_ranks, out, None, options)


def test_the_best_weights_are_loaded(pool: Any, tmp_path: Path) -> None:
    pool(2).run(best, 2, str(tmp_path / "cut"))
    saved = load_file(tmp_path / "cut" / "model.safetensors")
    first = load_file(tmp_path / "cut" / "checkpoint-2" / "model.safetensors")  # the loss is the greatest at first
    assert all(torch.equal(saved[key], first[key]) for key in first)


def refused(rank: int, out: str) -> dict[str, str]:
    with launched(rank, 2):
        from hpfunc.integrations.transformers import Trainer

        def trainer(options: dict[str, Any], **more: Any) -> Any:
            return Trainer(Net(), arguments(out, 2, eval_strategy="no", **options), train_dataset=Examples(), **more)

        many = {"fp16": False, "torch_compile": True, "ddp_bucket_cap_mb": 25, "optim": "adafactor"}
        many |= {"auto_find_batch_size": True, "save_on_each_node": True, "torch_empty_cache_steps": 3}
        found = {"options": outcome(trainer, many)}
        sgd = torch.optim.SGD(Net().parameters(), lr=0.1)
        found["an_optimizer"] = outcome(trainer, {}, optimizers=(sgd, None))
        muon = trainer({}, optimizer_cls_and_kwargs=(torch.optim.Adafactor, {"lr": 0.1}))
        found["an_optimizer_that_is_not_element_wise"] = outcome(muon.train)
        one = trainer({"max_steps": 1, "save_strategy": "no"})
        one.train()
        model = one.model_wrapped
        found["a_call_with_gradients"] = outcome(model, torch.ones(1, 8, dtype=torch.float64))
        return found


def test_what_is_not_done_is_refused(pool: Any, tmp_path: Path) -> None:
    first, second = pool(2).run(refused, str(tmp_path), deadline_s=SLOW_S)
    assert first == second
    assert "returned" not in first.values()
    for name, text in first.items():
        assert_golden(text, GOLDEN / f"trainer_{name}.txt")


def test_a_mesh_and_a_policy_are_taken(pool: Any, tmp_path: Path) -> None:
    (expected,) = pool(1).run(plain, str(tmp_path / "plain"), None, {}, deadline_s=SLOW_S)
    results = pool(2).run(replicated, str(tmp_path / "cut"), deadline_s=SLOW_S)
    assert_same(results[0], expected, tmp_path / "cut", tmp_path / "plain")


def replicated(rank: int, out: str) -> Any:
    from hpfunc.integrations import Sharding

    mesh = hp.make_mesh((2, 1), ("replicate", "shard"), device="cpu")
    return cut(rank, 2, out, None, {"sharding": Sharding(mesh=mesh, policy=hp.Policy(prefetch=2))})
