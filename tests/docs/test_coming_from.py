"""The tables of `docs/coming-from.md` name what exists."""

import re
from dataclasses import fields

import pytest
import torch
from torch.distributed import fsdp

import hpfunc as hp
from tests.docs import pages

TEXT = (pages.ROOT / "docs/coming-from.md").read_text()
OURS = sorted(set(re.findall(r"\bhp\.([a-zA-Z_.]*[a-zA-Z_])", TEXT)))
METHODS_OF_FSDP2 = sorted(set(re.findall(r"`(set_[a-z_]+)`", TEXT.partition("## DeepSpeed")[0])))


@pytest.mark.parametrize("name", OURS)
def test_a_name_of_ours_exists(name):
    value = hp
    for part in name.split("."):
        assert hasattr(value, part), f"hpfunc has no {name}"
        value = getattr(value, part)


@pytest.mark.parametrize("kind", [hp.Policy, hp.Numerics])
def test_fields_of_ours_exist(kind):
    calls = re.findall(rf"\b{kind.__name__}\(([^`]*)\)`", TEXT)
    used = {name for call in calls for name in re.findall(r"\b([a-z_]+)(?==|,|$)", re.sub(r'"[^"]*"', "", call))}
    assert used
    assert used <= {field.name for field in fields(kind)}


@pytest.mark.parametrize("name", METHODS_OF_FSDP2)
def test_a_method_of_fsdp2_exists(name):
    assert callable(getattr(fsdp.FSDPModule, name))


def test_fields_of_fsdp2_exist():
    policy = fsdp.MixedPrecisionPolicy(None, None, None)
    assert policy.cast_forward_inputs is True
    assert {field.name for field in fields(fsdp.MixedPrecisionPolicy)} == {
        "param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"
    }  # fmt: skip


def test_a_module_of_torch_is_a_unit_by_functional_call():
    module, mesh = torch.nn.Linear(3, 2), hp.make_mesh((1,), ("shard",))
    params = hp.shard(dict(module.named_parameters()), mesh, hp.P("shard"))
    unit = hp.unit(lambda params, x: torch.func.functional_call(module, params, (x,)))
    loss, grads = hp.value_and_grad(lambda params, x: unit(params, x).square().sum())(params, torch.ones(4, 3))
    expected = module(torch.ones(4, 3)).square().sum()
    expected.backward()
    assert torch.equal(loss, expected.detach())
    assert module.weight.grad is not None
    torch.testing.assert_close(grads["weight"].local, module.weight.grad)
