"""Versions of frameworks that hpfunc refuses, or was not tested with."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable

import pytest

import hpfunc as hp
from hpfunc.backends import versions
from hpfunc.backends.lookup import Lookup
from tests.backends.private_names import ROOT
from tests.helpers.refusals import check_texts


def lookup_that_lacks_two() -> None:
    lookup = Lookup("torch", "2.14.2")
    lookup.lacking += ["torch._foreach_add_", "torch.Tensor._version"]
    lookup.end()


CASES: dict[str, Callable[[], object]] = {
    "a_torch_that_is_too_old": lambda: Lookup("torch", "2.12.1+cu126"),
    "a_mindspore_that_is_too_old": lambda: Lookup("mindspore", "2.8.0"),
    "a_torch_that_lacks_private_names": lookup_that_lacks_two,
    "a_torch_npu_for_another_torch": lambda: versions.refuse_unlike("torch_npu", "2.13.0", "torch", "2.14.1+cpu"),
}
NEW = "a_torch_that_is_newer_than_the_tested"


@pytest.mark.parametrize("name", CASES)
def test_a_version_is_refused(name: str) -> None:
    with pytest.raises(hp.VersionError) as refused:
        CASES[name]()
    assert isinstance(refused.value, ImportError)
    check_texts([f"VersionError: {refused.value}"], name)


def test_a_newer_version_is_warned_of() -> None:
    with pytest.warns(hp.HpfuncWarning) as found:
        Lookup("torch", "2.15.0").end()
    assert len(found) == 1
    check_texts([f"HpfuncWarning: {found[0].message}"], NEW)


@pytest.mark.parametrize(
    ("name", "version"),
    [("torch", "2.13.0+cpu"), ("torch", "2.14.1+cu130"), ("torch", "a build without numbers"), ("mindspore", "2.10.0")],
)
def test_of_a_tested_version_nothing_is_said(name: str, version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Lookup(name, version).end()
    versions.refuse_unlike("torch_npu", "2.13.0.post1", "torch", "2.13.0+cpu")


IN_A_PROCESS = """
import warnings

import torch

torch.__version__ = {version!r}

import hpfunc

with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    try:
        for _ in range(2):
            hpfunc.make_mesh((1,), ("shard",))
            hpfunc.from_module(torch.nn.Linear(2, 2))
    except hpfunc.VersionError as error:
        print(error)
for each in found:
    print(f"{{each.category.__name__}}: {{each.message}}")
"""


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("2.12.1", "hpfunc.backends: torch 2.12.1 is too old, hpfunc needs 2.13 or newer"),
        ("3.0.0", "HpfuncWarning: hpfunc.backends: torch 3.0.0 is newer than all versions that hpfunc is tested with"),
    ],
)
def test_it_is_said_once_when_torch_is_first_used(version: str, said: str) -> None:
    code = IN_A_PROCESS.format(version=version)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    assert done.stdout.splitlines()[0] == said
    assert done.stdout.count("hpfunc.backends:") == 1
