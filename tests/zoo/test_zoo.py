"""A dozen architectures of transformers, of different families; and what a sweep does with those that do not work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import hpfunc as hp
from tests.helpers.ranks import Pool
from tests.zoo import page, plain, runner
from tests.zoo.registry import names
from tests.zoo.sweep import read, sweep, write
from tests.zoo.verdict import Found, Trained, difference, judged

DOZEN = (
    "causal:llama",
    "causal:mixtral",
    "causal:gpt_oss",
    "causal:mamba2",
    "causal:jamba",
    "masked:albert",
    "seq2seq:t5",
    "speech:whisper",
    "ctc:wav2vec2",
    "image:resnet",
    "image:swin",
    "detect:detr",
    "zsimage:clip",
    "itt:llava",
)


@pytest.mark.processes
@pytest.mark.parametrize("name", DOZEN)
def test_architectures_that_exist(name: str, pool: Callable[[int], Pool]) -> None:
    (found,) = sweep([name], pool(2))
    assert (found.verdict, found.why) == ("works", "")
    assert found.facts["planned"] == 3
    assert found.facts["warnings"] == []


def test_names_are_unique_and_hundreds() -> None:
    every = names()
    assert len(set(every)) == len(every) > 300
    assert set(DOZEN) <= set(every)


# --- what does not work -----------------------------------------------------------------------------------------------
def trained(weight: float, loss: float = 2.0, buffer: float = 3.0) -> Trained:
    weights = {"w": torch.tensor([1.0, weight], dtype=torch.float64), "unused": torch.ones(3)}
    return Trained((1.0, loss), weights, {"mean": torch.tensor([buffer]), "count": torch.tensor(1)})


START = {"w": torch.zeros(2), "unused": torch.ones(3)}


def test_equal_numbers_work() -> None:
    assert judged(trained(1.5), trained(1.5), START, 0.0) == ("works", "")


@pytest.mark.parametrize(
    ("got", "where"),
    [
        (trained(1.5001), "w"),
        (trained(float("nan")), "w"),
        (trained(1.5, loss=2.001), "the loss"),
        (trained(1.5, buffer=3.01), "mean"),
    ],
)
def test_other_numbers_are_wrong(got: Trained, where: str) -> None:
    verdict, why = judged(got, trained(1.5), START, 1e-6)
    assert verdict == "wrong"
    assert why.startswith(f"{where} differs by ")


def test_a_weight_that_should_not_move_is_compared_too() -> None:
    got = trained(1.5)
    got.weights["unused"][0] += 1e-6
    found, where = difference(got, trained(1.5), START)
    assert where == "unused"
    assert found > 1e-4


def test_what_torch_rounds_itself_is_not_wrong() -> None:
    assert judged(trained(1.5001), trained(1.5), START, 1e-3)[0] == "works"


@pytest.fixture
def own_pool() -> Iterator[Pool]:
    ranks = Pool(2)
    yield ranks
    ranks.stop()


def examine_with_another_rate(rank: int, name: str) -> Found:
    planned = runner._planned

    def faulty(*args: Any) -> Any:
        with mock.patch.object(plain, "RATE", 1.02 * plain.RATE):
            return planned(*args)

    with mock.patch.object(runner, "_planned", faulty):
        return runner.examine(rank, name)


@pytest.mark.processes
def test_planned_steps_that_train_otherwise_are_found(own_pool: Pool) -> None:
    (found,) = sweep(["causal:llama"], own_pool, examine=examine_with_another_rate)
    assert found.verdict == "wrong"
    assert 0.015 < found.facts["difference"][0] < 0.025
    assert found.facts["rounding"] < 0.01


def examine_badly(rank: int, name: str) -> Found:
    if name == "hangs" and rank == 1:
        time.sleep(60)
    if name == "dies" and rank == 1:
        raise SystemExit(3)
    return Found(name, "kind", "refused" if name == "refused" and rank == 1 else "works", name)


@pytest.mark.processes
def test_a_sweep_goes_on_after_what_goes_wrong(own_pool: Pool, tmp_path: Path) -> None:
    wanted = ["first", "hangs", "second", "dies", "refused", "last"]
    found = list(sweep(wanted, own_pool, deadline_s=3.0, examine=examine_badly))
    assert [each.verdict for each in found] == ["works", "hangs", "works", "hangs", "refused", "works"]
    assert "rank 1 hung" in found[1].why
    for each in found:
        write(tmp_path / "kept.jsonl", each)
    assert list(read(tmp_path / "kept.jsonl").values()) == found


def test_the_page_counts_and_gives_reasons() -> None:
    units: dict[str, Any] = {"num": 5, "blocks": "2 Block", "share": 0.41, "largest": "a (B)", "is_of_words": True}
    found = [
        Found("causal:good", "text decoder", "works", facts={"small": units, "full": units}),
        Found("causal:bad", "text decoder", "refused", "UsageError: a | b\n\nHint: c"),
        Found("causal:broken", "text decoder", "error", "Traceback\n  File x\nTypeError: no\n"),
        Found("causal:none", "", "not built", "KeyError"),
    ]
    text = page.text(found, {"torch": "2.13.0"})
    assert "builds 3 architectures" in text
    assert "| works | 1 |\n| refused | 1 |\n| wrong | 0 |\n| error | 1 |\n| hangs | 0 |" in text
    assert "- `causal:bad`, refused: UsageError: a \\| b\n- `causal:broken`, error: TypeError: no\n" in text
    assert "hpfunc 0.1.0, torch 2.13.0." in text.replace(hp.__version__, "0.1.0")
    assert "In the usual size a unit of 1\nof 1 holds more than a fifth; in 1 of them" in text
    cells = "5 | 2 Block | 41 % `a (B)` | 5 | 2 Block | 41 % `a (B)`"
    assert f"| `causal:good` | text decoder | works | {cells} |" in text
