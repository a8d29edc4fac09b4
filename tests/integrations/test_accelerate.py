"""accelerate over hpfunc against itself in one process on the global batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.golden import assert_golden
from tests.helpers.ranks import outcome
from tests.integrations.hosts import Examples, Net, launched

pytestmark = pytest.mark.processes
GOLDEN = Path(__file__).parents[1] / "golden" / "integrations"
BATCH, SLOW_S = 4, 240.0  # each rank imports the host first


def train(accelerator: Any, out: str, epochs: range, resume: str | None = None) -> list[float]:
    """A loop as in accelerate's own examples."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    data = torch.utils.data.DataLoader(Examples(), batch_size=BATCH)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    if resume is not None:
        accelerator.load_state(resume)
    found = []
    for epoch in epochs:
        model.train()
        for batch in data:
            with accelerator.accumulate(model):
                outputs = model(batch["x"])["logits"]
                with torch.no_grad():  # while the step waits
                    assert torch.equal(model(batch["x"])["logits"], outputs)
                loss = (outputs - batch["labels"]).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    found.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            found.append(float(accelerator.reduce(loss.detach(), "mean")))
        model.eval()
        for batch in data:
            with torch.no_grad():
                found.append(float(accelerator.gather_for_metrics(model(batch["x"])["logits"]).square().mean()))
        accelerator.save_state(f"{out}/{epoch}")
    accelerator.save_model(model, f"{out}/model")
    return found


def made(kind: Any, **options: Any) -> Any:
    """Returns an accelerator of a process that may have had others. A batch of the loader is cut over the ranks."""
    from accelerate import DataLoaderConfiguration
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    return kind(cpu=True, **({"dataloader_config": DataLoaderConfiguration(split_batches=True)} | options))


def cut(rank: int, num_ranks: int, out: str, epochs: range, resume: str | None = None) -> list[float]:
    with launched(rank, num_ranks):
        from hpfunc.integrations.accelerate import Accelerator

        return train(made(Accelerator, gradient_accumulation_steps=2), out, epochs, resume)


def plain(rank: int, out: str, epochs: range) -> list[float]:
    with launched(0, 1):
        from accelerate import Accelerator

        return train(made(Accelerator, gradient_accumulation_steps=2), out, epochs)


def assert_same(found: list[float], expected: list[float], one: Path, two: Path) -> None:
    assert found == pytest.approx(expected, rel=1e-11)
    weights, theirs = (load_file(path / "model" / "model.safetensors") for path in (one, two))
    assert weights.keys() == theirs.keys()
    assert all((weights[key] - theirs[key]).abs().max() < 1e-12 for key in weights)


def test_it_trains_as_one_process_and_resumes_on_other_ranks(pool: Any, tmp_path: Path) -> None:
    (expected,) = pool(1).run(plain, str(tmp_path / "plain"), range(4), deadline_s=SLOW_S)
    for found in pool(2).run(cut, 2, str(tmp_path / "cut"), range(4), deadline_s=SLOW_S):
        assert_same(found, expected, tmp_path / "cut", tmp_path / "plain")
    rest = expected[len(expected) // 2 :]
    (alone,) = pool(1).run(cut, 1, str(tmp_path / "alone"), range(2, 4), str(tmp_path / "cut" / "1"))
    assert_same(alone, rest, tmp_path / "alone", tmp_path / "plain")
    again, _ = pool(2).run(cut, 2, str(tmp_path / "again"), range(3, 4), str(tmp_path / "alone" / "2"))
    assert_same(again, rest[len(rest) // 2 :], tmp_path / "again", tmp_path / "plain")


def before_the_first_step(rank: int, path: str) -> Any:
    """Saves a run that has not begun, without and with an optimizer; loads it after a step."""
    with launched(rank, 2):
        from hpfunc.integrations.accelerate import Accelerator

        found = []
        for with_optimizer in (False, True):
            accelerator = made(Accelerator)
            model = accelerator.prepare(Net())
            start, folder = model.head.bias.detach().clone(), f"{path}/{with_optimizer}"
            optimizer = torch.optim.Adam(model.parameters())
            if with_optimizer:
                optimizer = accelerator.prepare(optimizer)
            accelerator.save_state(folder)
            accelerator.backward(model(torch.ones(2, 8, dtype=torch.float64))["logits"].sum())
            optimizer.step()
            moved = not torch.equal(model.head.bias, start)
            accelerator.load_state(folder)
            is_fresh = not with_optimizer or not any(optimizer.state.values())
            found.append((bool(moved), torch.equal(model.head.bias, start), is_fresh))
        return found


def test_a_run_is_saved_before_its_first_step(pool: Any, tmp_path: Path) -> None:
    first, second = pool(2).run(before_the_first_step, str(tmp_path), deadline_s=SLOW_S)
    assert first == [(True, True, True)] * 2  # the bias has one element, which lies on the first rank
    assert second == [(False, True, True)] * 2


def refused(rank: int) -> dict[str, str]:
    with launched(rank, 2):
        from accelerate import DataLoaderConfiguration, DistributedDataParallelKwargs

        from hpfunc.integrations.accelerate import Accelerator

        batch = {"x": torch.ones(2, 8, dtype=torch.float64), "labels": torch.ones(2, 1, dtype=torch.float64)}
        many = {
            "kwargs_handlers": [DistributedDataParallelKwargs(bucket_cap_mb=5)],
            "dataloader_config": DataLoaderConfiguration(even_batches=False),
            "dynamo_backend": "eager",
        }
        found = {"options": outcome(made, Accelerator, **many)}
        accelerator = made(Accelerator)
        model = accelerator.prepare(Net())
        others = torch.optim.SGD(Net().parameters(), lr=0.1)
        found["an_optimizer_of_other_parameters"] = outcome(accelerator.prepare, others)
        found["a_second_model"] = outcome(accelerator.prepare, Net())
        found["a_part_of_the_parameters"] = outcome(
            accelerator.clip_grad_norm_, [others.param_groups[0]["params"][0]], 1
        )
        found["uneven_inputs"] = outcome(accelerator.join_uneven_inputs, [model])
        loss = model(**batch)["loss"]
        found["a_second_call"] = outcome(model, **batch)
        accelerator.backward(loss)
        model(**batch)
        found["another_loss"] = outcome(accelerator.backward, torch.ones((), requires_grad=True))
        accelerator.backward(model(**batch)["loss"])
        return found


def test_what_is_not_done_is_refused(pool: Any) -> None:
    first, second = pool(2).run(refused, deadline_s=SLOW_S)
    assert first == second
    assert "returned" not in first.values()
    for name, text in first.items():
        assert_golden(text, GOLDEN / f"accelerate_{name}.txt")
