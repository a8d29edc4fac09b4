"""A script as it is read: which library a name comes from, and what a variable is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, cast

Role = Literal["accelerator", "loader", "mesh", "model", "optimizer", "scaler", "scheduler"]

# The same things under their older or inner names.
_SAME = (
    ("torch.distributed._composable.fsdp.fully_shard.", "torch.distributed.fsdp."),
    ("torch.distributed._composable.fsdp.", "torch.distributed.fsdp."),
    ("torch.distributed._composable.", "torch.distributed."),
    ("torch.distributed.fsdp.fully_sharded_data_parallel.", "torch.distributed.fsdp."),
    ("torch.distributed._tensor.placement_types.", "torch.distributed.tensor."),
    ("torch.distributed._tensor.", "torch.distributed.tensor."),
    ("torch.distributed.distributed_c10d.", "torch.distributed."),
    ("torch.distributed.device_mesh.", "torch.distributed."),
    ("torch.nn.parallel.distributed.", "torch.nn.parallel."),
    ("torch.nn.utils.clip_grad.", "torch.nn.utils."),
    ("torch.cuda.amp.", "torch.amp."),
    ("accelerate.accelerator.", "accelerate."),
    ("accelerate.parallelism_config.", "accelerate."),
    ("accelerate.state.", "accelerate."),
    ("accelerate.utils.dataclasses.", "accelerate."),
    ("accelerate.utils.", "accelerate."),
    ("accelerate.data_loader.", "accelerate."),
)

# What a call makes. The first pattern that fits counts.
_MADE_BY: tuple[tuple[str, Role], ...] = (
    ("accelerate.Accelerator", "accelerator"),
    ("torch.optim.lr_scheduler.*", "scheduler"),
    ("transformers.get_*schedule*", "scheduler"),
    ("transformers.get_scheduler", "scheduler"),
    ("diffusers.optimization.get_*", "scheduler"),
    ("torch.optim.*", "optimizer"),
    ("torch.utils.data.DataLoader", "loader"),
    ("torch.distributed.init_device_mesh", "mesh"),
    ("torch.distributed.DeviceMesh*", "mesh"),
    ("torch.amp.GradScaler", "scaler"),
    ("torch.amp.*GradScaler", "scaler"),
)

# What the last part of a name says where no call does, as for an argument of a function.
_NAMED: dict[str, Role] = {
    "accelerator": "accelerator",
    "lr_scheduler": "scheduler",
    "model": "model",
    "net": "model",
    "optim": "optimizer",
    "optimizer": "optimizer",
    "scaler": "scaler",
    "scheduler": "scheduler",
}


@dataclass
class Script:
    """A parsed script.

    Attributes:
        source: its text.
        tree: its syntax tree.
        imports: what each imported name stands for, with dots.
        roles: what a variable is, by its text, such as ``self.model``.
    """

    source: str
    tree: ast.Module
    imports: dict[str, str] = field(default_factory=dict)
    roles: dict[str, Role] = field(default_factory=dict)

    def name(self, node: ast.expr) -> str | None:
        """The full name of what an expression refers to, if it is imported, such as ``torch.optim.Adam``."""
        text = _dots(node)
        if text is None:
            return None
        first, _, rest = text.partition(".")
        if first not in self.imports:
            return None
        full = f"{self.imports[first]}.{rest}" if rest else self.imports[first]
        return next((new + full.removeprefix(old) for old, new in _SAME if full.startswith(old)), full)

    def role(self, node: ast.expr) -> Role | None:
        """What an expression is, as far as it can be guessed."""
        if isinstance(node, ast.Subscript):
            node = node.value
        text = _dots(node)
        if text is None:
            return None
        owner, _, last = text.rpartition(".")
        return self.roles.get(text) or (_NAMED.get(last) if owner in ("", "self") else None)

    def calls(self) -> Iterator[ast.Call]:
        """All calls of the script."""
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.Call))

    def first(self, role: Role, default: str) -> str:
        """The variable that has the role, for code that is written anew."""
        return next((text for text, its in self.roles.items() if its == role), default)


def read(source: str, filename: str = "<script>") -> Script:
    """Parses a script.

    Args:
        source: its text.
        filename: its name, for errors.

    Raises:
        SyntaxError: it is not Python.
    """
    script = Script(source, ast.parse(source, filename))
    for node in ast.walk(script.tree):
        for name, full in _imported(node):
            script.imports[name] = full
    for node in script.calls():
        _guess_from_call(script, node)
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            role = _made_by(script, node.value)
            for text in filter(None, map(_dots, node.targets if role else ())):
                script.roles.setdefault(text, cast(Role, role))
    for node in script.calls():
        if is_known_library(script.name(node.func)):
            node.keywords = [keyword for given in node.keywords for keyword in _spread(script.tree, given)]
    return script


def is_known_library(name: str | None) -> bool:
    """Whether a name belongs to a library whose every use needs an answer."""
    return (name or "").partition(".")[0] == "accelerate" or (name or "").startswith("torch.distributed")


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Names that a statement imports, and what they stand for."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            first = alias.name.partition(".")[0]
            yield alias.asname or first, alias.name if alias.asname else first
    elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
        for alias in node.names:
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _guess_from_call(script: Script, node: ast.Call) -> None:
    """Notes what the arguments of a call are."""
    if node.args and _wraps(script, node) and (text := _dots(node.args[0])) and not _is_part(script, text):
        script.roles[text] = "model"
    if isinstance(node.func, ast.Attribute) and node.func.attr == "prepare" and script.name(node.func) is None:
        _guess_prepared(script, node)


def _made_by(script: Script, node: ast.Call) -> Role | None:
    """What a call makes."""
    if _wraps(script, node):
        return "model" if node.args and script.role(node.args[0]) == "model" else None
    made = script.name(node.func)
    return next((role for pattern, role in _MADE_BY if made and fnmatchcase(made, pattern)), None)


def _wraps(script: Script, node: ast.Call) -> bool:
    wrappers = ("fully_shard", "FullyShardedDataParallel", "DistributedDataParallel")
    return (script.name(node.func) or "").rpartition(".")[2] in wrappers


def _spread(tree: ast.Module, keyword: ast.keyword) -> Iterator[ast.keyword]:
    """What ``**options`` adds: the constant keys that the variable is made with, or gets in an assignment."""
    name = keyword.value.id if isinstance(keyword.value, ast.Name) else None
    if keyword.arg is not None or name is None:
        yield keyword
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        pairs: list[tuple[ast.expr | None, ast.expr]] = []
        if _dots(target) == name and isinstance(node.value, ast.Dict):
            pairs = list(zip(node.value.keys, node.value.values, strict=True))
        elif _dots(target) == name and isinstance(node.value, ast.Call) and _dots(node.value.func) == "dict":
            pairs = [(ast.Constant(given.arg), given.value) for given in node.value.keywords]
        elif isinstance(target, ast.Subscript) and _dots(target.value) == name:
            pairs = [(target.slice, node.value)]
        for key, value in pairs:
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield ast.keyword(key.value, value)


def _guess_prepared(script: Script, node: ast.Call) -> None:
    """The first argument of ``accelerator.prepare`` that is nothing else is the model."""
    for argument in node.args:
        text = _dots(argument)
        if text and script.role(argument) in (None, "model") and "load" not in text:
            script.roles[text] = "model"
            return


def _is_part(script: Script, text: str) -> bool:
    """Whether a name is one of many, as ``layer`` in ``for layer in model.layers``, or a part, as ``model.head``."""
    loops = (node for node in ast.walk(script.tree) if isinstance(node, ast.For | ast.comprehension))
    in_loop = any(isinstance(part, ast.Name) and part.id == text for loop in loops for part in ast.walk(loop.target))
    owner, _, last = text.rpartition(".")
    return in_loop or (bool(owner) and owner != "self" and last not in _NAMED)


def _dots(node: ast.AST) -> str | None:
    """The text of a name with dots, or None for another expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = _dots(node.value)
        return before and f"{before}.{node.attr}"
    return None
