"""The build of the simulated device: what is missing is said, and it is built once."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from tests.device import simulated
from tests.device.simulated import build


def test_without_a_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(simulated.Unavailable, match="no-such-compiler is not installed: apt install"):
        simulated.build()


def test_of_several_builders_one_builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built: list[Path] = []

    def build_slowly(compiler: str, torch: Path, objects: dict[Path, Path], library: Path) -> None:
        built.append(library)
        time.sleep(0.2)
        library.touch()

    module = sys.modules[simulated.build.__module__]
    monkeypatch.setattr(module, "BUILDS", tmp_path / "builds")
    monkeypatch.setattr(module, "_build", build_slowly)
    builders = [threading.Thread(target=build) for _ in range(3)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert len(built) == 1
