"""Private names of a framework stand in one file, which refuses a version that lacks one of them, by its name."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hpfunc as hp
from hpfunc.backends import lookup
from hpfunc.backends.torch import private
from tests.backends.private_names import ROOT, declared, private_names

GONE = """
import torch

del torch._foreach_add_, torch._C._storage_Use_Count, torch.nn.MultiheadAttention._reset_parameters

import hpfunc

try:
    hpfunc.make_mesh((1,), ("shard",))
except hpfunc.VersionError as error:
    print(error)
"""


@pytest.mark.parametrize("package", ["torch", "mindspore"])
def test_private_names_stand_in_one_file(package: str) -> None:
    file = f"backends/{package}/private.py"
    uses = private_names(package, dir(torch.Tensor) if package == "torch" else ())
    elsewhere = {name: [place for place in places if not place.startswith(f"{file}:")] for name, places in uses.items()}
    assert not {name: places for name, places in elsewhere.items() if places}, f"use {file}"


@pytest.mark.parametrize("package", ["torch", "mindspore"])
def test_what_a_private_file_reads_of_objects_is_looked_up(package: str) -> None:
    """But for names that torch looks for, or that a module or a library may have: rows are in `private.rows`."""
    names = declared(f"backends/{package}/private.py")
    uses = {name.rpartition(".")[2] for name in private_names(package)}
    known = {part for name in names for part in name.split(".")}
    of_torch = {"_is_param", "_orig_mod", "_reset_parameters", "_torchdynamo_disable", "_torchdynamo_disable_msg"}
    assert uses - known == (of_torch | {"_group_start", "_group_end"} if package == "torch" else set())


def test_all_names_are_found_in_the_source() -> None:
    assert [*declared("backends/torch/private.py")] == private.LOOKUP.names


def loaded_without(monkeypatch: pytest.MonkeyPatch, is_gone: Callable[[str], bool]) -> str:
    """Loads a copy of the file with a torch that lacks names, and returns the error."""

    def find(self: lookup.Lookup, module: str, names: str) -> Any:
        gone = [name for name in names.split(".") if is_gone(f"{module}.{names[: names.index(name)]}{name}")]

        def censored(owner: Any, name: str) -> Any:
            if name in gone:
                raise AttributeError(name)
            return getattr(owner, name)

        monkeypatch.setattr(lookup, "getattr", censored, raising=False)
        return found(self, module, names)

    found = lookup.Lookup.find
    monkeypatch.setattr(lookup.Lookup, "find", find)
    spec: Any = importlib.util.spec_from_file_location("hpfunc.backends.torch.another", private.__file__)
    with pytest.raises(hp.VersionError) as refused:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return str(refused.value)


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.startswith("  ")]


@pytest.mark.parametrize("name", private.LOOKUP.names)
def test_a_name_that_is_lacking_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    told = loaded_without(monkeypatch, lambda path: path == name)
    assert lines(told) == [other for other in private.LOOKUP.names if other == name or other.startswith(f"{name}.")]
    assert told.startswith(f"hpfunc.backends: torch {torch.__version__} lacks private names that hpfunc uses\n")
    assert "\n\nHint: take a version that has them: pip install 'torch>=" in told


def test_all_names_that_are_lacking_are_named_together(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines(loaded_without(monkeypatch, lambda path: True)) == private.LOOKUP.names


def test_the_first_use_of_a_torch_that_lacks_names_is_refused() -> None:
    done = subprocess.run([sys.executable, "-c", GONE], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    assert lines(done.stdout) == ["torch._C._storage_Use_Count", "torch._foreach_add_"]


def test_private_names_are_found_however_they_are_reached(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(
        """
import torch
import torch.distributed as dist
from typing import cast
from torch._a import b
from torch.utils import _pytree as pytree

class Own:
    __slots__ = ("_kept",)

    def _mine(self): ...

def use(x, own):
    own._mine(), own._kept, x._theirs, vars(x)["_named"], torch.public
    cast(int, torch._C)._deep, pytree.tree_map, dist.distributed_c10d._world.names
"""
    )
    (tmp_path / "other.py").write_text("import numpy as np\nnp._private")
    (tmp_path / "both.py").write_text("import mindspore\nimport torch\nx._of_mindspore, torch._seen")
    (tmp_path / "private.py").write_text('import torch\n_find("torch", "Tensor._looked_up")')
    names = ["*._named", "*._theirs", "torch._C._deep", "torch._a.b", "torch._seen"]
    names += ["torch.distributed.distributed_c10d._world.names", "torch.utils._pytree.tree_map"]
    assert sorted(private_names("torch", (), tmp_path)) == names
    assert list(private_names("mindspore", (), tmp_path)) == ["*._of_mindspore"]
    assert declared("private.py", tmp_path) == {"torch.Tensor._looked_up": ["private.py:2"]}
