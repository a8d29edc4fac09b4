"""Launchers, and what happens where a package is missing. Each test starts processes of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.helpers.frameworks import needs_mindspore

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]
SCRIPT = """
import mindspore
import hpfunc as hp

one = mindspore.mint.zeros((1,)) + 1  # an operator that ran before hpfunc chose the device
mesh = hp.make_mesh((2,), "shard")
total = hp.psum(one + mesh.rank, "shard", mesh=mesh)
print(f"rank {mesh.rank} of {mesh.size}: {mesh.framework}, {float(total)}")
"""


def run(command: list[str], **extra: str) -> str:
    """Returns the output of a command that ends well."""
    names = ("RANK", "WORLD_SIZE", "HPFUNC_BACKEND", "MASTER_ADDR", "MASTER_PORT", "MS_DEV_HOST_BLOCKING_RUN")
    env = {key: value for key, value in os.environ.items() if key not in names}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOG_v": "3", "PYTHONDONTWRITEBYTECODE": "1"} | extra
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


@needs_mindspore
def test_plain_processes_with_the_usual_variables(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = os.environ | {"PYTHONPATH": str(ROOT), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "GLOG_v": "3"}
    env |= {"MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, str(script)], env=env | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in started]
    assert outputs == [f"rank {rank} of 2: mindspore, 3.0\n" for rank in range(2)]


@needs_mindspore
def test_msrun(tmp_path: Path) -> None:
    msrun = Path(sys.executable).parent / "msrun"
    if not msrun.exists() and shutil.which("msrun") is None:
        pytest.fail("MindSpore is installed without msrun")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [str(msrun), "--worker_num=2", "--local_worker_num=2", f"--master_port={free_port()}"]
    run([*command, f"--log_dir={tmp_path}", "--join=True", str(script)], PATH=f"{msrun.parent}:{os.environ['PATH']}")
    for rank in range(2):
        assert f"rank {rank} of 2: mindspore, 3.0" in (tmp_path / f"worker_{rank}.log").read_text()


POLLING = """
from pathlib import Path

import mindspore
import hpfunc as hp

mesh = hp.make_mesh((1,), "shard")
weight = hp.shard({"w": mindspore.mint.ones((8, 8))}, mesh, hp.P("shard"))
unit = hp.unit(lambda w, x: mindspore.mint.nn.functional.linear(x, w["w"]))
hp.grad(lambda w, x: unit(w, x).sum())(weight, mindspore.mint.ones((8, 8)))
names = {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}
print(sorted(names & {"frontend_queue", "bprop_queue", "backend_queue"}))
"""


@needs_mindspore
@pytest.mark.parametrize("chosen", [None, "0"])
def test_no_thread_polls_the_queues_unless_the_program_says_so(chosen: str | None) -> None:
    """They would take the time of the ranks that share the cores."""
    extra = {} if chosen is None else {"MS_DEV_HOST_BLOCKING_RUN": chosen}
    polling = run([sys.executable, "-c", POLLING], **extra).strip()
    assert polling == "[]" if chosen is None else "'backend_queue'" in polling


def without(*packages: str) -> str:
    """Returns a program that tries the backend of MindSpore where some packages are missing."""
    return textwrap.dedent(f"""
        import sys

        class Missing:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {packages!r}:
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

        sys.meta_path.insert(0, Missing())
        import hpfunc as hp

        print([name for name in ("torch", "mindspore", "numpy") if name in sys.modules])
        try:
            hp.backends.get("mindspore")
            print("loaded")
        except hp.MeshError as error:
            print(str(error).splitlines())
    """)


def test_hpfunc_imports_without_mindspore() -> None:
    said = run([sys.executable, "-c", without("mindspore")]).splitlines()
    assert said[0] == "[]"
    assert "cannot load 'mindspore': No module named 'mindspore'" in said[1]
    assert "pip install 'hpfunc[mindspore]'" in said[1]


@needs_mindspore
def test_hpfunc_imports_without_torch() -> None:
    said = run([sys.executable, "-c", without("torch")]).splitlines()
    assert said[0] == "[]"
    assert "on a CPU its transport is torch.distributed, and there is no torch" in said[-1]


@needs_mindspore
def test_numpy_2_is_refused() -> None:
    program = """
        import numpy
        numpy.__version__ = "2.1.0"
        import hpfunc as hp
        try:
            hp.backends.get("mindspore")
        except hp.MeshError as error:
            print(error)
    """
    assert "needs numpy < 2, found 2.1.0" in run([sys.executable, "-c", textwrap.dedent(program)])
