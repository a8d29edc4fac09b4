"""Lightning over hpfunc's strategy against itself in one process on the global batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

from tests.helpers.golden import assert_golden
from tests.helpers.ranks import outcome
from tests.integrations.hosts import Examples, Net, launched

pytestmark = pytest.mark.processes
GOLDEN = Path(__file__).parents[1] / "golden" / "integrations"
BATCH = 4
SLOW_S = 240.0  # each rank imports the host first


def lit() -> Any:
    """Returns a LightningModule with a parameter, a count and logs of its own."""
    from lightning.pytorch import LightningModule

    class Lit(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.seen, self.losses = Net(), 0, []
            self.shift = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))

        def loss(self, batch: Any) -> torch.Tensor:
            return (self.net(batch["x"])["logits"] + self.shift - batch["labels"]).square().mean()

        def training_step(self, batch: Any, index: int) -> Any:
            self.seen += 1
            loss = self.loss(batch)
            self.log("train", loss, sync_dist=True)
            return {"loss": loss, "index": index}

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val", self.loss(batch), sync_dist=True)

        def predict_step(self, batch: Any, index: int) -> Any:
            return self.net(batch["x"])["logits"]

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert outputs["index"] == batch_idx
            self.losses.append(float(self.trainer.callback_metrics["train"]))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    return Lit()


def trainer(strategy: Any, devices: int, out: str, **options: Any) -> Any:
    from lightning.pytorch import Trainer

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    given = {"max_epochs": 2, "gradient_clip_val": 0.1, "accumulate_grad_batches": 2, "num_sanity_val_steps": 0}
    given |= {"use_distributed_sampler": False, "enable_checkpointing": False, "default_root_dir": out}
    return Trainer(strategy=strategy, devices=devices, **quiet, **(given | options))


def loader(rank: int, num_ranks: int) -> Any:
    return torch.utils.data.DataLoader(Examples(rank, num_ranks), batch_size=BATCH // num_ranks)


def fit(strategy: Any, rank: int, num_ranks: int, out: str, name: str, resume: str | None, epochs: int) -> Any:
    model, run = lit(), trainer(strategy, num_ranks, out, max_epochs=epochs)
    data = loader(rank, num_ranks)
    run.fit(model, data, data, ckpt_path=resume, weights_only=False)
    val = float(run.callback_metrics["val"])
    run.save_checkpoint(f"{out}/{name}.ckpt")
    return model.losses, val, model.seen, torch.cat(run.predict(model, data))


def cut(rank: int, num_ranks: int, out: str, name: str, resume: str | None = None, epochs: int = 2) -> Any:
    with launched(rank, num_ranks):
        from hpfunc.integrations.lightning import ShardedStrategy

        return fit(ShardedStrategy(), rank, num_ranks, out, name, resume, epochs)


def plain(rank: int, out: str, name: str, resume: str | None = None, epochs: int = 2) -> Any:
    with launched(0, 1):
        return fit("auto", 0, 1, out, name, resume, epochs)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def assert_same(found: Any, expected: Any, out: Path, name: str, other: str) -> None:
    """Fails unless losses, and all of the two checkpoints, agree to the rounding of float64."""
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    assert found[1:3] == pytest.approx(expected[1:3], rel=1e-12)
    one, two = (torch.load(out / f"{x}.ckpt", weights_only=False) for x in (name, other))
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step"):
        assert pytree.tree_structure(one[key]) == pytree.tree_structure(two[key])
        assert all((a - b).abs().max() < 1e-12 for a, b in zip(tensors(one[key]), tensors(two[key]), strict=True))


def test_it_trains_as_one_process_and_checkpoints_are_those_of_one(pool: Any, tmp_path: Path) -> None:
    out = str(tmp_path)
    (expected,) = pool(1).run(plain, out, "plain", deadline_s=SLOW_S)
    results = pool(2).run(cut, 2, out, "cut", deadline_s=SLOW_S)
    for found in results:
        assert_same(found, expected, tmp_path, "cut", "plain")
    predicted = torch.stack([found[3] for found in results], 1).flatten(0, 1)
    assert (predicted - expected[3]).abs().max() < 1e-12

    # One process resumes what two have saved, two what one has saved: each as the host alone.
    (expected,) = pool(1).run(plain, out, "plain-4", f"{out}/plain.ckpt", 4)
    (found,) = pool(1).run(plain, out, "plain-of-cut", f"{out}/cut.ckpt", 4)
    assert_same(found, expected, tmp_path, "plain-of-cut", "plain-4")
    for found in pool(2).run(cut, 2, out, "cut-of-plain", f"{out}/plain.ckpt", 4):
        assert_same(found, expected, tmp_path, "cut-of-plain", "plain-4")


def twice(rank: int, out: str) -> Any:
    """A second fit goes on with the parts of the first, and a checkpoint is loaded into parts."""
    with launched(rank, 2):
        from hpfunc.integrations.lightning import ShardedStrategy

        model, strategy, data = lit(), ShardedStrategy(), loader(rank, 2)
        run = trainer(strategy, 2, out)
        run.fit(model, data)
        run.save_checkpoint(f"{out}/first.ckpt")
        parts = [x.detach().clone() for x in model.parameters()]
        run.fit_loop.max_epochs = 3
        run.fit(model, data)
        moved = any(not torch.equal(a, b) for a, b in zip(parts, model.parameters(), strict=True))
        run.fit_loop.max_epochs = 2
        run.fit(model, data, ckpt_path=f"{out}/first.ckpt", weights_only=False)
        return moved, all(torch.equal(a, b) for a, b in zip(parts, model.parameters(), strict=True))


def test_a_second_fit_goes_on_and_a_checkpoint_goes_back(pool: Any, tmp_path: Path) -> None:
    assert pool(2).run(twice, str(tmp_path), deadline_s=SLOW_S) == [(True, True)] * 2


def refused(rank: int, out: str) -> dict[str, str]:
    with launched(rank, 2):
        from hpfunc.integrations.lightning import ShardedStrategy

        def fitted(change: Any = None, **options: Any) -> None:
            model = lit()
            if change is not None:
                change(model)
            trainer(ShardedStrategy(), 2, out, **options).fit(model, loader(rank, 2))

        def manual(model: Any) -> None:
            model.automatic_optimization = False

        def adafactor(model: Any) -> None:
            model.configure_optimizers = lambda: torch.optim.Adafactor(model.parameters())

        def early(model: Any) -> None:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model.configure_optimizers = lambda: optimizer

        def without_loss(model: Any) -> None:
            type(model).training_step = lambda self, batch, index: None

        many = {"precision": "64-true", "sync_batchnorm": True, "gradient_clip_val": None}
        many["accumulate_grad_batches"] = 1  # the host itself refuses the two with manual optimization
        return {
            "options": outcome(fitted, manual, **many),
            "arguments": outcome(ShardedStrategy, find_unused_parameters=True),
            "an_optimizer_that_is_not_element_wise": outcome(fitted, adafactor),
            "an_optimizer_that_was_made_early": outcome(fitted, early),
            "a_step_without_a_loss": outcome(fitted, without_loss),
        }


def test_what_is_not_done_is_refused(pool: Any, tmp_path: Path) -> None:
    first, second = pool(2).run(refused, str(tmp_path), deadline_s=SLOW_S)
    assert first == second
    assert "returned" not in first.values()
    for name, text in first.items():
        assert_golden(text, GOLDEN / f"lightning_{name}.txt")
