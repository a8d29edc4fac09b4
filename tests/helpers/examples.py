"""The examples of this repository: loaded as modules, run in ranks, or started by torchrun."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

import hpfunc as hp
from tests.helpers.ranks import mesh_of

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FOLDER = EXAMPLES / "torch"


def example(name: str, framework: str = "torch") -> ModuleType:
    """Returns an example as a module of its own."""
    folder = EXAMPLES / framework
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    sys.path.insert(0, str(folder))  # as for a script
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


def bytes_to_learn(module: ModuleType) -> Any:
    """Returns bytes with something to learn in them: each is the one before it plus 0, 1 or 2."""
    steps = np.random.default_rng(0).integers(0, 3, 4096)
    return module.text.Text(np.cumsum(steps).astype(np.uint8), np.zeros(0, np.uint8))


def launch(num_ranks: int, *arguments: str, script: str = "examples/torch/train_text.py") -> tuple[int, str]:
    """Returns the exit code and the output of an example under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(
        [*command, script, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=200, check=False
    )
    return done.returncode, done.stdout + done.stderr


# --- resume.py ------------------------------------------------------------------------------------------------------
SMALL_RUN = ["--steps", "8", "--every", "3", "--dim", "32", "--layers", "1", "--context", "16", "--dtype", "float64"]


def losses_of_a_run(rank: int, arguments: list[str], forgotten: str = "", framework: str = "torch") -> list[float]:
    """Returns the curve of a run, which may forget a part of what it loads."""
    module = example("resume", framework)
    resuming, mesh = module.resuming, mesh_of((-1,), ("shard",))

    def load(path: Path, like: Any) -> Any:
        state = hp.checkpoint.load(path, like=like)
        return state | {name: like[name] for name in state if name == forgotten}

    names = {**vars(hp.checkpoint), "load": load}
    vars(resuming)["hp"] = SimpleNamespace(**{**vars(hp), "checkpoint": SimpleNamespace(**names)})
    args = resuming.options(None, [*SMALL_RUN, *arguments])
    with contextlib.redirect_stdout(io.StringIO()):
        return resuming.train(args, mesh, resuming.text.standard_library(), module.FRAMEWORK, print)


# --- fsdp_demo.py ---------------------------------------------------------------------------------------------------
SMALL_DEMO = ["--dim", "32", "--layers", "2", "--context", "16", "--batch", "2", "--steps", "3"]


def said_by_the_demo(rank: int, framework: str, *arguments: str) -> tuple[int, str]:
    """Returns the exit code of the demo, and what it says."""
    module, output = example("fsdp_demo", framework), io.StringIO()
    args = module.fsdp.options(None, [*SMALL_DEMO, *arguments])
    with contextlib.redirect_stdout(output):
        code = module.fsdp.main(args, module.FRAMEWORK, module.judge, mesh_of)
    return code, output.getvalue()


def assert_demonstrated(codes_and_outputs: list[tuple[int, str]]) -> None:
    """Asserts that the demo ended well and showed three kinds of communication between two backwards."""
    assert [code for code, _ in codes_and_outputs] == [0] * 4, codes_and_outputs
    output = codes_and_outputs[0][1]
    kinds = [line.split()[0] for line in output.split("\n\n")[1].splitlines()]
    between = kinds[kinds.index("compute") + 1 :]
    assert sorted(between) == ["all_reduce", "compute", "gather", "reduce_scatter"]
    assert between[-1] == "compute"
    assert "HSDP in five ways: equal bits" in output
    assert output.endswith("all agree\n")
