"""What `import hpfunc` loads, and what its public names say of themselves."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import hpfunc as hp

ROOT = Path(__file__).parents[2]
PUBLIC = sorted(name for name in vars(hp) if not name.startswith("_") and not inspect.ismodule(getattr(hp, name)))


def modules_after(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after `code`."""
    code += "\nimport sys; print(' '.join({name.split('.')[0] for name in sys.modules}))"
    environment = {key: value for key, value in os.environ.items() if key != "HPFUNC_BACKEND"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_list_of_modules_shows_what_is_loaded() -> None:
    assert {"json", "sys"} <= modules_after("import json")


def test_import_loads_no_framework() -> None:
    loaded = modules_after("import hpfunc")
    assert "optree" in loaded
    assert not loaded & {"torch", "mindspore", "torch_npu", "numpy", "jax"}


def test_values_and_plans_are_made_without_a_framework() -> None:
    code = "import hpfunc as hp; hp.Mesh(('shard',), (2,), ('shard',), (0, 1)); hp.P('shard'); hp.Policy()"
    assert not modules_after(code) & {"torch", "numpy"}


def test_the_package_knows_its_version() -> None:
    assert hp.__version__ == version("hpfunc")


def test_planning_knows_plain_python_only() -> None:
    # The package itself loads everything, so the module is taken with nothing but what it imports itself.
    code = (
        "import sys, types; package = types.ModuleType('hpfunc');"
        f"package.__path__ = [{str(ROOT / 'hpfunc')!r}]; sys.modules['hpfunc'] = package;"
        "import hpfunc.planning"
    )
    assert not modules_after(code) & {"torch", "numpy", "optree", "mindspore"}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name: str) -> None:
    thing = getattr(hp, name)
    text = inspect.getdoc(thing) or ""
    assert len(text.splitlines()[0]) > 10, name
    if inspect.isfunction(thing):
        assert ">>>" in text, f"{name} has no example"
    if inspect.isclass(thing):
        public = [(key, value) for key, value in vars(thing).items() if not key.startswith("_")]
        for key, value in public:
            if inspect.isfunction(value) or isinstance(value, (property, classmethod)):
                inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                assert inspect.getdoc(inner), f"{name}.{key}"


def test_every_error_is_one_of_ours_and_of_python() -> None:
    errors = [getattr(hp, name) for name in PUBLIC if name.endswith("Error")]
    for error in errors:
        assert issubclass(error, hp.HpfuncError)
        bases = (ValueError, TypeError, RuntimeError, ImportError)
        assert issubclass(error, bases) or error is hp.HpfuncError


def test_communication_is_told_where_there_is_some() -> None:
    names = "shard init unshard reduce reshard psum pvary pmean pmax pmin all_gather psum_scatter all_to_all ppermute"
    for name in [*names.split(), "value_and_grad", "unit", "make_mesh"]:
        assert "ommunication" in (getattr(hp, name).__doc__ or ""), name
