"""Which device a process computes on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import hpfunc as hp
from hpfunc.backends.torch.devices import choose_device


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with four devices of kind ``cuda``; its fields can be changed."""
    found = SimpleNamespace(count=4, current=0)

    def choose(index: int) -> None:
        found.current = index

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: found.count > 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: found.count)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: found.current)
    monkeypatch.setattr(torch.accelerator, "set_device_index", choose)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return found


@pytest.mark.parametrize(
    ("wanted", "local_rank", "count", "current", "chosen"),
    [
        (None, "2", 4, 0, "cuda:2"),
        (None, "5", 4, 0, "cuda:1"),  # more than one machine's ranks, counted on
        (None, "3", 1, 0, "cuda:0"),  # the launcher shows each process one device
        (None, "2", 4, 3, "cuda:3"),  # the caller has set one
        ("cuda", "2", 4, 0, "cuda:2"),
        ("cuda", "0", 4, 1, "cuda:1"),
        ("cuda:1", "2", 4, 3, "cuda:1"),
        ("cpu", "2", 4, 0, "cpu"),
        (None, "2", 0, 0, "cpu"),
    ],
)
def test_a_process_gets_its_own_device(
    monkeypatch: pytest.MonkeyPatch,
    machine: SimpleNamespace,
    wanted: str | None,
    local_rank: str,
    count: int,
    current: int,
    chosen: str,
) -> None:
    machine.count, machine.current = count, current
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert choose_device(wanted) == chosen
    if chosen != "cpu":
        assert machine.current == int(chosen.partition(":")[2])


@pytest.mark.parametrize(
    ("wanted", "count", "text"),
    [
        ("cuda:4", 4, "the devices of this process are cuda:0 to cuda:3"),
        ("cuda:x", 4, "the mesh asks for 'cuda:x'"),
        ("npu", 4, "the mesh asks for 'npu', but this process has 'cuda' and 'cpu' only"),
        ("cuda", 0, "the mesh asks for 'cuda', but this process has 'cpu' only"),
    ],
)
def test_a_device_that_is_not_there_is_refused(machine: SimpleNamespace, wanted: str, count: int, text: str) -> None:
    machine.count = count
    with pytest.raises(hp.MeshError, match=text):
        choose_device(wanted)


def test_more_processes_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch, machine: SimpleNamespace) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(hp.MeshError, match="8 processes run on this machine, but it has 4 devices of kind 'cuda'"):
        choose_device(None)
