"""Compiles the simulated device, once for each version of its sources, of torch and of the compiler.

A build takes half a minute on two cores. Its result lies in ``tests/device/_build``, which git ignores.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distribution
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
BUILDS = Path(__file__).parents[1] / "_build"
MODULE = "simulated_device"

# Not optimized: the kernels are torch's, and the compiler is done in half the time.
FLAGS = ["-std=c++20", "-O0", "-g0", "-fPIC", "-Wall", "-DUSE_C10D", f"-DTORCH_EXTENSION_NAME={MODULE}"]


class Unavailable(Exception):
    """The device cannot be built here; the text says what to install."""


def build() -> Path:
    """Returns the path of the compiled module, which is built if it is not there.

    Raises:
        Unavailable: there is no compiler, or no torch.
    """
    compiler, torch = _compiler(), _torch()
    sources = sorted(SOURCES.glob("*.cpp"))
    common = _key(_facts(compiler, torch), *sorted(SOURCES.glob("*.h")))
    library = BUILDS / f"{MODULE}-{_key([common.encode()], *sources)}.so"
    BUILDS.mkdir(parents=True, exist_ok=True)
    with (BUILDS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes one builds, and the others find what it has built
        if not library.exists():
            objects = {source: BUILDS / f"{source.stem}-{_key([common.encode()], source)}.o" for source in sources}
            _build(compiler, torch, objects, library)
    return library


def _compiler() -> str:
    name = os.environ.get("CXX", "g++")
    if (found := shutil.which(name)) is None:
        raise Unavailable(
            f"the simulated device needs a C++20 compiler, and {name} is not installed: apt install g++ or set CXX"
        )
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise Unavailable("the simulated device needs the headers of Python: apt install python3-dev")
    return found


def _torch() -> Path:
    # torch is not imported: it takes seconds, and nothing but its files matters here.
    try:
        return Path(str(distribution("torch").locate_file("torch")))
    except ModuleNotFoundError:
        raise Unavailable("the simulated device needs torch: pip install torch") from None


def _facts(compiler: str, torch: Path) -> list[bytes]:
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True).stdout
    texts = [distribution("torch").version, str(torch), sys.version, *FLAGS]
    return [version, *map(str.encode, texts)]


def _key(facts: list[bytes], *files: Path) -> str:
    parts = [*facts, *(part for path in files for part in (path.name.encode(), path.read_bytes()))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _build(compiler: str, torch: Path, objects: dict[Path, Path], library: Path) -> None:
    includes = [torch / "include", torch / "include/torch/csrc/api/include", Path(sysconfig.get_path("include"))]
    system = [part for path in includes for part in ("-isystem", str(path))]

    def compile_one(source: Path) -> None:
        command = [compiler, *FLAGS, *system, "-c", str(source)]
        if not objects[source].exists():  # it was compiled before, and another one has changed since
            _run([*command, "-o", str(objects[source].with_suffix(".part"))])
            objects[source].with_suffix(".part").replace(objects[source])

    # The longest first. Each is a process of its own: threads are enough to wait for them.
    in_order = sorted(objects, key=lambda path: path.stem not in ("bindings", "communicator", "tensors"))
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(compile_one, in_order))
    folder, names = torch / "lib", ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
    link = [compiler, "-shared", *map(str, objects.values()), f"-L{folder}", *names, f"-Wl,-rpath,{folder}"]
    _run([*link, "-o", str(library.with_suffix(".part"))])
    library.with_suffix(".part").replace(library)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


if __name__ == "__main__":
    print(build())
