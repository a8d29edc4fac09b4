"""`examples/torch/training_script.py`, which its page shows: on one rank and on two, at once and in two parts."""

from __future__ import annotations

import contextlib
import io
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hpfunc as hp
from tests.docs import pages
from tests.helpers.examples import FOLDER
from tests.helpers.ranks import Pool

SOURCE = (FOLDER / "training_script.py").read_text()
SMALL = {
    "BATCH, CONTEXT, DIM, LAYERS = 0, 2, 16, 64, 64, 2": "BATCH, CONTEXT, DIM, LAYERS = 0, {}, {}, 24, 32, 2",
    'read_lines("[a-d]*.py", 500), read_lines("e*.py", 101)': 'read_lines("a*.py", 150), read_lines("e*.py", 31)',
}


def trained(rank: int, folder: Path, epochs: int, batch: int) -> Any:
    """Returns the weights after a run in small and in float64, its losses, and what is left on the disk."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    source = SOURCE
    for old, new in SMALL.items():
        assert source.count(old) == 1
        source = source.replace(old, new.format(epochs, batch))
    folder.mkdir(exist_ok=True)
    names: dict[str, Any] = {"__name__": "__main__"}
    output = io.StringIO()
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings(), contextlib.chdir(folder), contextlib.redirect_stdout(output):
            warnings.simplefilter("default")
            exec(compile(source, "training_script.py", "exec"), names)
    finally:
        torch.set_default_dtype(torch.float32)
    if writer := names["writer"]:
        writer.close()
    hp.loop.barrier(names["mesh"])  # all is written
    curves = EventAccumulator(str(folder / "build/training_script/tensorboard")).Reload()
    tags = curves.Tags()["scalars"]
    found = {tag: {event.step: event.value for event in curves.Scalars(tag)} for tag in tags}
    hp.loop.barrier(names["mesh"])  # the folder may be used again
    return hp.unshard(names["params"]), found, output.getvalue()


@pytest.mark.processes
def test_two_ranks_train_as_one_does_with_all_lines(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    ((one, curves, said),) = pool(1).run(trained, tmp_path / "one", 2, 32)
    both = pool(2).run(trained, tmp_path / "two", 2, 16)
    for weights, others, _ in both:
        for name, weight in one.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-9, atol=1e-11)
        for tag in ("loss", "norm", "tokens", "held out"):
            assert others[tag] == pytest.approx(curves[tag], rel=1e-6), tag  # float32 on the disk
    assert list(curves["loss"]) == list(range(10))
    assert curves["loss"][9] < curves["loss"][0] - 0.5
    assert min(value for tag in ("tokens/s", "MFU") for value in curves[tag].values()) > 0
    assert both[0][2].splitlines()[-1:] == said.splitlines()[-1:]
    assert "epoch 1: " in said
    assert "epoch 1: " not in both[1][2]

    traces = sorted((tmp_path / "two").rglob("*.pt.trace.json"))
    assert [trace.name.split(".")[0] for trace in traces] == ["rank0", "rank1"]
    names = {event.get("name") for event in json.loads(traces[0].read_text())["traceEvents"]}
    page = (pages.ROOT / "docs/howto/training-script.md").read_text()
    shown = re.findall(r"`(hpfunc::[^`]+)`", page)
    assert len(shown) == 4
    assert set(shown) <= names


@pytest.mark.processes
def test_a_run_goes_on_after_its_last_epoch(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    whole, *_ = pool(2).run(trained, tmp_path / "whole", 2, 16)[0]
    pool(2).run(trained, tmp_path / "parts", 1, 16)
    parts, curves, said = pool(2).run(trained, tmp_path / "parts", 2, 16)[0]
    assert all(torch.equal(parts[name], weight) for name, weight in whole.items())
    assert list(curves["loss"]) == list(range(10))
    assert "epoch 0" not in said


def test_the_page_shows_all_of_the_program() -> None:
    page = (pages.ROOT / "docs/howto/training-script.md").read_text()
    shown = [line for block in pages.code_blocks(page) for line in block.code.splitlines() if line]
    _, _, program = SOURCE.split('"""', 2)
    assert shown == [line for line in program.splitlines() if line]
