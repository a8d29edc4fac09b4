"""``python -m hpfunc port``: eleven scripts, whose constructs are those of public ones, and what is said about them."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hpfunc as hp
from hpfunc.__main__ import main
from hpfunc._commands.port import port
from hpfunc._commands.port.accelerate_rules import ATTRIBUTES
from hpfunc._commands.port.accelerate_rules import METHODS as ACCELERATOR_METHODS
from hpfunc._commands.port.accelerate_rules import NAMES as ACCELERATE_NAMES
from hpfunc._commands.port.rule import Rule
from hpfunc._commands.port.torch_rules import METHODS, MODEL_METHODS, NAMES
from tests.helpers.golden import assert_golden

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.txt"))  # no suffix of Python: they are not ours to lint
GOLDEN = Path(__file__).parents[1] / "golden" / "port"
TABLES = {"torch": NAMES, "accelerate": ACCELERATE_NAMES, "methods": METHODS, "model": MODEL_METHODS}
TABLES |= {"accelerator": ACCELERATOR_METHODS, "attributes": ATTRIBUTES}


def rules() -> Iterator[tuple[str, Rule]]:
    """All rules of all tables, with those of their options."""
    for name, rule in [(name, rule) for table in TABLES.values() for name, rule in table.items()]:
        yield name, rule
        for option, its in (rule.options or {}).items():
            yield from [(f"{name}({option}=)", its)] if isinstance(its, Rule) else [(name, r) for r in its.values()]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_what_is_said_about_a_script(path: Path) -> None:
    assert_golden(str(port(path.read_text(), path.stem)), GOLDEN / path.name)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_every_use_of_a_library_has_a_finding(path: Path) -> None:
    source = path.read_text()
    lines = {finding.line for finding in port(source).findings}
    words = r"\baccelerator\.|fully_shard\(|FSDP\(|DDP\(|\bdist\.|\bdcp\.|\.backward\(|zero_grad\(|clip_grad_norm_\("
    for statement in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr | ast.Assign)):
        if re.search(words, ast.unparse(statement)) and not re.search(r"\.writer\.|autocast", ast.unparse(statement)):
            assert statement.lineno in lines, ast.unparse(statement)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_loop_is_a_program(path: Path) -> None:
    loop = port(path.read_text()).loop
    calls = [node for node in ast.walk(ast.parse(loop)) if isinstance(node, ast.Call)]
    for node in calls:
        assert_can_be_called(node)
    assert "grad_fn(bound.params" in loop
    assert "accelerator" not in loop


def test_rules_write_what_exists() -> None:
    """Each name and option of ours in the tables is there."""
    named = 0
    for name, rule in rules():
        code = rule.code.format_map(Filled())
        for found in re.findall(r"\bhp(?:\.\w+)+", f"{code} {rule.reason}"):
            assert resolve(found), (name, found)
            named += 1
        for line in code.splitlines():
            tree = parsed(line)
            for node in ast.walk(tree) if tree else ():
                if isinstance(node, ast.Call):
                    assert_can_be_called(node)
    assert named > 100


def test_libraries_have_what_the_tables_name() -> None:
    """A name that its library does not have would never be met."""
    for name in [name for table in (NAMES, ACCELERATE_NAMES) for name in table if "*" not in name]:
        module, _, last = name.rpartition(".")
        modules = [module] if module != "accelerate" else [module, "accelerate.utils", "accelerate.state"]
        assert any(hasattr(importlib.import_module(each), last) for each in modules), name


@pytest.mark.parametrize("method", sorted(ACCELERATOR_METHODS))
def test_the_accelerator_has_what_the_tables_name(method: str) -> None:
    from accelerate import Accelerator

    assert hasattr(Accelerator, method)


def test_the_accelerator_has_no_method_that_the_tables_do_not_name() -> None:
    from accelerate import Accelerator

    public = {name for name in vars(Accelerator) if not name.startswith("_")}
    assert public <= {*ACCELERATOR_METHODS, *ATTRIBUTES}, public - {*ACCELERATOR_METHODS, *ATTRIBUTES}


@pytest.mark.parametrize("name", ["accelerate.Accelerator", "accelerate.FullyShardedDataParallelPlugin"])
def test_no_option_of_accelerate_is_unknown(name: str) -> None:
    import accelerate

    options = set(inspect.signature(getattr(accelerate, name.rpartition(".")[2])).parameters)
    assert options <= set(ACCELERATE_NAMES[name].options or {})


@pytest.mark.parametrize("name", ["fully_shard", "MixedPrecisionPolicy", "FullyShardedDataParallel", "MixedPrecision"])
def test_no_option_of_fsdp_is_unknown(name: str) -> None:
    from torch.distributed import fsdp

    known = {*(NAMES[f"torch.distributed.fsdp.{name}"].options or {}), "module"}
    assert set(inspect.signature(getattr(fsdp, name)).parameters) <= known


def test_fsdp_has_no_method_that_the_tables_do_not_name() -> None:
    from torch.distributed.fsdp import FSDPModule

    public = {name for name in vars(FSDPModule) if not name.startswith("_")}
    assert public <= {*METHODS, *MODEL_METHODS}, public - {*METHODS, *MODEL_METHODS}


@pytest.mark.processes
def test_a_script_of_fsdp2_and_its_loop_give_the_same_bits(pool: Any) -> None:
    source = (Path(__file__).parent / "scripts" / "fsdp2_pretraining.txt").read_text()
    source = re.sub(r"^(init|destroy)_process_group\(.*\)$", "", source, flags=re.MULTILINE)  # the pool has a group
    theirs = pool(2).run(train, f"{source}\nweights = {{n: p.full_tensor() for n, p in model.named_parameters()}}")
    head = source[: source.index("mesh = init_device_mesh")]
    loop = port(source).loop
    ours = pool(2).run(train, f"{head}\n{loop}\nweights = hp.unshard(bound.params)")
    for ranks in zip(theirs, ours, strict=True):
        assert list(ranks[0]) == list(ranks[1])
        for name, weight in ranks[0].items():
            assert torch.equal(weight, ranks[1][name]), name


def train(rank: int, program: str) -> dict[str, torch.Tensor]:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    try:
        names: dict[str, Any] = {"__name__": "script"}
        exec(program, names)
    finally:
        del os.environ["RANK"], os.environ["WORLD_SIZE"]
    return {name: weight.detach() for name, weight in names["weights"].items()}


PIECES = [
    "for layer in model.layers: fully_shard(layer)",
    "model = fully_shard(model, **options)",
    "with accelerator.accumulate(model):\n    accelerator.backward(model(x))",
    "accelerator.prepare(*things)",
    "accelerator = Accelerator(**options)",
    "dist.all_reduce(x, op=dist.ReduceOp.MAX)",
    "for x in loader:\n    loss = model(x)\n    loss.backward()\n    optimizer.step()",
    "while True:\n    (model(x)[0] / 2).backward()",
    "@accelerator.on_main_process\ndef f(): pass",
    "options = dict(mp_policy=MixedPrecisionPolicy(torch.bfloat16, None))",
    "optimizer = torch.optim.Adam([{'params': model.parameters()}])",
    "fully_shard()",
    "x = lambda m=fully_shard: m",
    "accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0, norm_type=2)",
]
IMPORTS = """import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.fsdp import *
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
"""


@given(st.lists(st.sampled_from(PIECES), max_size=6))
def test_no_script_is_too_odd(pieces: list[str]) -> None:
    report = port(IMPORTS + "\n".join(pieces))
    assert str(report)
    assert json.loads(report.to_json())["loop"] == report.loop
    ast.parse(report.loop)


def test_what_a_star_imports_is_said_not_to_be_seen() -> None:
    (found,) = port("from torch.distributed.fsdp import *").missing
    assert "its uses are not seen" in found.reason


def test_imports_within_functions_are_found() -> None:
    report = port("import torch\n\n\ndef f():\n    from torch.distributed.fsdp import fully_shard\n")
    assert [(finding.line, finding.code) for finding in report.findings] == [(5, "import hpfunc as hp")]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("from torch.distributed.fsdp import fully_shard\n\nfully_shard(model)\n")
    assert main(["port", str(script)]) == 0
    assert "apply, params = hp.from_module(model)" in capsys.readouterr().out
    assert main(["port", str(script), "--json"]) == 0
    assert [finding["line"] for finding in json.loads(capsys.readouterr().out)["findings"]] == [1, 3]
    script.write_text("from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard\n\nx = CPUOffloadPolicy()\n")
    assert main(["port", str(script)]) == 1
    script.write_text("print(1)\n")
    assert main(["port", str(script)]) == 0
    assert "nothing of FSDP2" in capsys.readouterr().out


@pytest.mark.parametrize("text", [None, "def f(:", b"\xff\xfe"])
def test_a_script_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: Any) -> None:
    script = tmp_path / "train.py"
    if text is not None:
        script.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["port", str(script)]) == 2
    assert str(script) in capsys.readouterr().err


class Filled(dict[str, str]):
    """Something for each field of a template."""

    def __missing__(self, key: str) -> str:
        return "it"


def parsed(line: str) -> ast.AST | None:
    """A line of a rule as code: a statement, an argument of a call, or a text that is neither."""
    for text in (line, f"f({line})"):
        try:
            return ast.parse(text)
        except SyntaxError:
            continue
    return None


def resolve(name: str) -> Any:
    found: Any = hp
    for part in name.split(".")[1:]:
        found = getattr(found, part, None)
    return found


def assert_can_be_called(node: ast.Call) -> None:
    """Fails if a call of ours has options that its function does not have."""
    function = resolve(ast.unparse(node.func)) if ast.unparse(node.func).startswith("hp.") else None
    if function is not None:
        known = inspect.signature(function).parameters
        assert all(keyword.arg in known for keyword in node.keywords if keyword.arg), ast.unparse(node)
