"""From a parsed script to findings: each use of a library gets the rule of its name, its options those of theirs."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import cast

from . import accelerate_rules, torch_rules
from .loop import training_loop
from .report import Finding, Report
from .rule import Rule
from .script import Script, is_known_library, read
from .values import code, mesh_arguments, numerics_arguments, with_bound_parameters

_NAMES: Mapping[str, Rule] = {**torch_rules.NAMES, **accelerate_rules.NAMES}
_SKIP = {"torch.optim.lr_scheduler", "torch.optim.Optimizer", "torch.optim.swa_utils"}


def port(source: str, filename: str = "<script>") -> Report:
    """Says what to write instead of each use of `torch.distributed` and accelerate in a script.

    The script is parsed and not run. A variable is known by what makes it, or by its name.

    Args:
        source: the text of the script.
        filename: its name, for the report.

    Raises:
        SyntaxError: it is not Python.

    Communication: none.
    """
    script = read(source, filename)
    if not any(is_known_library(name) or name.startswith("torch.nn.parallel") for name in script.imports.values()):
        return Report(filename, source, ())
    findings = sorted(set(_Translation(script).findings()))
    return Report(filename, source, tuple(findings), training_loop(script))


class _Translation:
    """Walks over one script."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._parent = {child: node for node in ast.walk(script.tree) for child in ast.iter_child_nodes(node)}

    def findings(self) -> Iterator[Finding]:
        yield from self._imports()
        for node in ast.walk(self._script.tree):
            if isinstance(node, ast.Call):
                yield from self._call(node)
            elif isinstance(node, ast.Attribute | ast.Name) and not self._is_part_of_name(node):
                yield from self._reference(node)

    def _imports(self) -> Iterator[Finding]:
        """What is imported from these libraries goes; the first such statement imports hpfunc."""
        instead = "import hpfunc as hp"
        for node in ast.walk(self._script.tree):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if not any(is_known_library(module) or module.startswith("torch.nn.parallel") for module in modules):
                continue
            construct, line = "import of " + ", ".join(modules), cast(ast.stmt, node).lineno
            if any(alias.name == "*" for alias in cast(ast.ImportFrom, node).names):
                yield Finding(
                    line, 0, f"{construct} by *", "unknown", reason="name what is imported: its uses are not seen"
                )
            yield Finding(line, 0, construct, "write" if instead else "remove", instead)
            instead = ""

    def _call(self, node: ast.Call) -> Iterator[Finding]:
        name = self._script.name(node.func)
        rule = self._rule_of_call(node, name)
        if rule is None:
            if is_known_library(name):
                yield self._finding(node, f"{_short(str(name))}()", _UNKNOWN, {})
            return
        shown = _short(name) if name else f".{getattr(node.func, 'attr', code(node.func))}"
        if shown in ("fully_shard", "FullyShardedDataParallel") and self._is_part(node):
            rule = replace(_PART, parameters=rule.parameters, options=rule.options)
        yield self._finding(node, f"{shown}()", rule, self._fields(node, rule))
        for option, value in self._options(node, rule):
            finding = self._option(node, shown, rule, option, value)
            if (finding.code or finding.reason) and not (rule.reason == _PART.reason and option in _SAID_OF_THE_WHOLE):
                yield finding

    def _is_part(self, node: ast.Call) -> bool:
        """Whether what is wrapped is a part of a model, and not the whole."""
        wrapped = node.args[0] if node.args else None
        named = isinstance(wrapped, ast.Name | ast.Attribute | ast.Subscript)
        return isinstance(wrapped, ast.List) or (named and self._script.role(wrapped) != "model")

    def _rule_of_call(self, node: ast.Call, name: str | None) -> Rule | None:
        if name is not None and (rule := _by_name(name)) is not None:
            return rule
        if self._script.role(node.func) == "model":
            return Rule("write", "apply(params, {args})", "in the loss; elsewhere apply(bound.params, {args})")
        if not isinstance(node.func, ast.Attribute) or (name is not None and is_known_library(name)):
            return None
        role, method = self._script.role(node.func.value), node.func.attr
        if role == "accelerator":
            return accelerate_rules.METHODS.get(method)
        if role == "model" and method in torch_rules.MODEL_METHODS:
            return torch_rules.MODEL_METHODS[method]
        return torch_rules.METHODS.get(method)

    def _reference(self, node: ast.Attribute | ast.Name) -> Iterator[Finding]:
        """A name that is not called: an attribute of the accelerator, a class in an annotation."""
        if isinstance(node, ast.Attribute) and self._script.role(node.value) == "accelerator":
            rule = accelerate_rules.ATTRIBUTES.get(node.attr) or accelerate_rules.METHODS.get(node.attr)
            yield self._finding(node, f".{node.attr}", rule or _UNKNOWN, {"owner": code(node.value)})
            return
        name = self._script.name(node)
        if not is_known_library(name) or (isinstance(node, ast.Name) and node.id in _modules(self._script)):
            return
        rule = _by_name(str(name)) or _by_name(str(name).rpartition(".")[0])
        yield self._finding(node, _short(str(name)), rule or _UNKNOWN, {})

    def _options(self, node: ast.Call, rule: Rule) -> Iterator[tuple[str, ast.expr]]:
        if rule.options is None:
            return
        yield from zip(rule.parameters[1:], node.args[1:], strict=False)
        for keyword in node.keywords:
            if keyword.arg is not None:
                yield keyword.arg, keyword.value

    def _option(self, node: ast.Call, shown: str, rule: Rule, option: str, value: ast.expr) -> Finding:
        its = (rule.options or {}).get(option)
        text = code(value)
        if isinstance(its, Mapping):
            its = its.get(text) or its.get(".".join(text.split(".")[-2:])) or its["*"]
        its = its or Rule("unknown", reason="an option that this helper does not know")
        return self._finding(node, f"{shown}({option}=)", its, {**self._fields(node, rule), "value": text})

    def _fields(self, node: ast.Call, rule: Rule) -> dict[str, str]:
        """What templates are filled with."""
        values = {name: code(value) for name, value in zip(rule.parameters, node.args, strict=False)}
        values |= {keyword.arg: code(keyword.value) for keyword in node.keywords if keyword.arg}
        positional = [code(argument) for argument in node.args]
        keywords = [f"{keyword.arg}={code(keyword.value)}" for keyword in node.keywords if keyword.arg]
        statement = self._statement(node)
        target = code(statement.targets[0]) if isinstance(statement, ast.Assign) else "it"
        owner = code(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        name = self._script.name(node.func) or ""
        return {
            "arg": next((code(argument) for argument in node.args), next(iter(values.values()), "...")),
            "args": ", ".join(positional + keywords),
            "numerics": numerics_arguments(node) if "MixedPrecision" in name else "...",
            "bound_call": with_bound_parameters(code(node)),
            "max_norm": values.get("max_norm", positional[1] if len(positional) > 1 else "max_norm"),
            "mesh_args": mesh_arguments(node),
            "model": self._script.first("model", positional[0] if positional else "model"),
            "owner": owner,
            "target": target,
        }

    def _finding(self, node: ast.expr, construct: str, rule: Rule, fields: Mapping[str, str]) -> Finding:
        filled = _Default(fields)
        statement = self._statement(node)
        line = node.lineno if isinstance(statement, _BLOCKS) else statement.lineno
        column = node.col_offset
        return Finding(
            line, column, construct, rule.verdict, rule.code.format_map(filled), rule.reason.format_map(filled)
        )

    def _statement(self, node: ast.AST) -> ast.stmt:
        while not isinstance(node, ast.stmt):
            node = self._parent[node]
        return node

    def _is_part_of_name(self, node: ast.expr) -> bool:
        """Whether a longer name, or the call of it, is looked at instead."""
        parent = self._parent[node]
        if isinstance(parent, ast.Call):
            return parent.func is node
        return isinstance(parent, ast.Attribute) and self._script.name(node) is not None


_UNKNOWN = Rule("unknown", reason="look up what it is for, and whether a loop of your own needs it")
_PART = Rule("remove", reason="repeated blocks become units; hp.from_module(model, units=...) chooses others")
_SAID_OF_THE_WHOLE = ("mesh", "mp_policy", "dp_mesh_dims")
_BLOCKS = (ast.FunctionDef, ast.ClassDef, ast.For, ast.If, ast.While, ast.With)


class _Default(dict[str, str]):
    """What a template asks for and nobody knows is three dots."""

    def __missing__(self, key: str) -> str:
        return "..."


def _by_name(name: str) -> Rule | None:
    if name in _SKIP or name.startswith("torch.optim.lr_scheduler"):
        return None
    if name in _NAMES:
        return _NAMES[name]
    return next((rule for pattern, rule in _NAMES.items() if "*" in pattern and fnmatchcase(name, pattern)), None)


def _modules(script: Script) -> set[str]:
    """Variables that are imported modules, such as ``dist``."""
    modules = {name for name, full in script.imports.items() if full.rpartition(".")[2].islower()}
    return {name for name in modules if _by_name(script.imports[name]) is None}


def _short(name: str) -> str:
    """The last part of a name, which is what a reader sees in the script."""
    return name.rpartition(".")[2]
