"""The training loop of a script, written anew: a program to begin with."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from . import accelerate_rules
from .script import Script
from .values import DEFAULT_MESH, code, mesh_arguments, numerics_arguments, shard_axis, with_bound_parameters


@dataclass(frozen=True)
class _Backward:
    """A backward in a loop: the statements around it, in their order, and the loss."""

    loop: ast.For | ast.While
    before: tuple[ast.stmt, ...]
    after: tuple[ast.stmt, ...]
    loss: ast.expr


def training_loop(script: Script) -> str:
    """Writes a program of the script's model, optimizer and loss.

    What the loss depends on before the first call of the model stays in the loop, the rest becomes a function.

    Returns:
        Its text, or "" if the script has no loop with a backward.
    """
    found = next(_backwards(script), None)
    if found is None:
        return ""
    data, forward = _slices(script, found)
    arguments = _arguments(found, data, forward)
    taken = {node.id for node in ast.walk(script.tree) if isinstance(node, ast.Name)}
    name = "loss_fn" if "loss_fn" not in taken else "loss_of_weights"
    lines = ["import hpfunc as hp", "", *_setup(script), "", f"def {name}({', '.join(['params', *arguments])}):"]
    lines += _indented(line for statement in forward for line in _text(script, statement))
    lines += [f"    return {_text(script, found.loss)[0]}", "", *_grad_fn(script, name), ""]
    lines += _header(found.loop)
    lines += _indented(line for statement in data for line in _text(script, statement))
    lines += [f"    loss, grads = grad_fn({', '.join(['bound.params', *arguments])})"]
    lines += _indented(_after(script, found))
    lines += ["    loss = hp.pmean(loss, mesh.data_axes, mesh=mesh)  # for the log: the mean over the ranks"]
    return "\n".join(lines)


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _backwards(script: Script) -> Iterator[_Backward]:
    for loop in ast.walk(script.tree):
        if not isinstance(loop, ast.For | ast.While):
            continue
        statements = list(_flat(loop.body))
        for i, statement in enumerate(statements):
            if isinstance(statement, ast.Expr) and (loss := _loss(script, statement.value)) is not None:
                yield _Backward(loop, tuple(statements[:i]), tuple(statements[i + 1 :]), loss)


def _flat(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a block, and of the `with` blocks and `if` without `else` that contain the backward."""
    for statement in statements:
        inner = isinstance(statement, ast.With) or (isinstance(statement, ast.If) and not statement.orelse)
        if inner and any(_is_method(node, "backward") for node in ast.walk(statement)):
            yield from _flat(cast(ast.With | ast.If, statement).body)
        else:
            yield statement


def _loss(script: Script, node: ast.expr) -> ast.expr | None:
    """What a call of `backward` differentiates."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "backward":
        return None
    if script.role(node.func.value) == "accelerator":
        return node.args[0] if node.args else None
    loss = node.func.value
    if isinstance(loss, ast.Call) and loss.args and _is_method(loss, "scale"):
        return loss.args[0]
    return loss


def _setup(script: Script) -> Iterator[str]:
    """The mesh, the model and its optimizer."""
    meshes = [node for node in script.calls() if script.name(node.func) == "torch.distributed.init_device_mesh"]
    is_replicated = any((script.name(node.func) or "").endswith("DistributedDataParallel") for node in script.calls())
    spec = "hp.P()" if is_replicated else f'hp.P("{shard_axis(meshes[0] if meshes else None)}")'
    model = script.first("model", "model")
    yield f"mesh = hp.make_mesh({mesh_arguments(meshes[0]) if meshes else DEFAULT_MESH})"
    if any(_is_method(node, "to_empty") for node in script.calls()):
        yield f"apply, params = hp.init_module({model}, mesh, {spec})"
        yield "bound = hp.optim.bind(params)"
    else:
        yield f"apply, params = hp.from_module({model})"
        yield f"bound = hp.optim.bind(hp.shard(params, mesh, {spec}))"
    for role in ("optimizer", "scheduler"):
        yield from _assigned(script, role)


def _assigned(script: Script, role: str) -> Iterator[str]:
    """Statements that make an optimizer, or a scheduler."""
    for node in ast.walk(script.tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        if script.role(node.targets[0]) == role and not _is_method(node.value, "prepare"):
            text, comment = code(node), ""
            if role == "optimizer":
                text, _, comment = with_bound_parameters(text).partition("  #")
            yield " ".join(_text(script, ast.parse(text))) + (comment and f"  #{comment}")


def _grad_fn(script: Script, loss_fn: str) -> Iterator[str]:
    """The gradient function, with the numerics, the accumulation and the policy that the script asks for."""
    arguments = _numerics(script)
    yield f"grad_fn = hp.value_and_grad({loss_fn}{f', numerics={arguments}' if arguments else ''})"
    if any(_is_method(node, "accumulate", "no_sync", "set_requires_gradient_sync") for node in script.calls()):
        yield "# A batch holds all micro-batches; their mean is taken, so the loss is not divided by their number."
        yield "grad_fn = hp.accumulate(grad_fn, num_microbatches)"
    keeps = any(
        keyword.arg == "reshard_after_forward" and ast.unparse(keyword.value) == "False"
        for node in script.calls()
        if _wraps_whole(script, node)
        for keyword in node.keywords
    )
    policy = ', policy=hp.Policy(release="backward")' if keeps else ""
    yield f"grad_fn = hp.sharded(grad_fn, mesh{policy})"


def _wraps_whole(script: Script, node: ast.Call) -> bool:
    """Whether a call says how the whole model is sharded."""
    name = (script.name(node.func) or "").rpartition(".")[2]
    is_root = name == "fully_shard" and bool(node.args) and script.role(node.args[0]) == "model"
    return is_root or name == "FullyShardedDataParallelPlugin"


def _numerics(script: Script) -> str:
    """The `Numerics` that the script asks for, or ""."""
    for node in script.calls():
        if (script.name(node.func) or "").endswith((".MixedPrecisionPolicy", ".MixedPrecision")):
            return f"hp.Numerics({numerics_arguments(node)})"
    for node in script.calls():
        if script.name(node.func) == "accelerate.Accelerator":
            return next((_of_accelerator(given.value) for given in node.keywords if given.arg == "mixed_precision"), "")
    return ""


def _of_accelerator(precision: ast.expr) -> str:
    """The `Numerics` of ``Accelerator(mixed_precision=)``; a variable of the user's where it is not a constant."""
    if not isinstance(precision, ast.Constant):
        return "numerics"
    dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(str(precision.value))
    return f'hp.Numerics(param_dtype="{dtype}", cast_inputs=True)' if dtype else ""


def _slices(script: Script, found: _Backward) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """Statements that the loss depends on: those before the first that calls the model, and the others."""
    before = [statement for statement in found.before if not _goes_away(statement)]
    first = next((i for i, statement in enumerate(before) if _calls_model(script, statement)), len(before))
    needed = _names(found.loss)
    kept = []
    for i, statement in reversed(list(enumerate(before))):
        if _names(statement, ast.Store) & needed or _changes(statement) & needed:
            needed |= _names(statement)
            kept.append(i)
    return [before[i] for i in reversed(kept) if i < first], [before[i] for i in reversed(kept) if i >= first]


def _names(node: ast.AST, context: type[ast.expr_context] = ast.Load) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, context)}


def _changes(statement: ast.stmt) -> set[str]:
    """What a statement without a result may change, such as ``batch`` in ``batch.to(device)``."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return _names(call.func) if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else set()


def _arguments(found: _Backward, data: Sequence[ast.stmt], forward: Sequence[ast.stmt]) -> list[str]:
    """What the loss needs of what the loop binds before it."""
    bound = [found.loop.target] if isinstance(found.loop, ast.For) else []
    names = [
        node.id
        for part in [*bound, *data]
        for node in ast.walk(part)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    used = {name for part in [*forward, found.loss] for name in _names(part)}
    return [name for name in dict.fromkeys(names) if name in used]


class _Rewritten(ast.NodeTransformer):
    """Calls of the model as calls of `apply` with the weights, and what an accelerator knows as what a mesh does."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        function: ast.expr = ast.Name("apply", ast.Load())
        if _is_model_method(self._script, node):
            name = ast.Constant(cast(ast.Attribute, node.func).attr)
            function = ast.Call(ast.Attribute(function, "method", ast.Load()), [name], [])
        elif self._script.role(node.func) != "model":
            return node
        return ast.Call(function, [ast.Name("params", ast.Load()), *node.args], node.keywords)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        rule = accelerate_rules.ATTRIBUTES.get(node.attr)
        if self._script.role(node.value) != "accelerator" or rule is None or not rule.code:
            return node
        return ast.parse(rule.code, mode="eval").body


def _text(script: Script, node: ast.AST) -> list[str]:
    copy = ast.parse(ast.unparse(node)).body[0]
    return ast.unparse(ast.fix_missing_locations(_Rewritten(script).visit(copy))).splitlines()


def _header(loop: ast.For | ast.While) -> list[str]:
    if isinstance(loop, ast.For):
        return [f"for {ast.unparse(loop.target)} in {ast.unparse(loop.iter)}:"]
    return [f"while {ast.unparse(loop.test)}:"]


def _after(script: Script, found: _Backward) -> Iterator[str]:
    """Clipping, the optimizer's step and the scheduler's, and what a `while` needs to end."""
    calls = [node for statement in found.after for node in ast.walk(statement) if isinstance(node, ast.Call)]
    for node in calls:
        if _is_method(node, "clip_grad_norm_"):
            is_method = script.role(cast(ast.Attribute, node.func).value) == "model"
            values = [ast.unparse(value) for value in node.args[0 if is_method else 1 :][:1]]
            values += [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "max_norm"]
            limit = values[0] if values else "max_norm"
            yield f"grads = hp.clip_with_norm(grads, {limit}, hp.global_norm(grads))"
    yield "bound.set_grads(grads)"
    for statement in found.after:
        if isinstance(statement, ast.If) and any(_is_method(node, "step") for node in ast.walk(statement)):
            yield f"# The script steps only if {code(statement.test)}: hp.accumulate takes those batches together."
    if any(
        _is_method(node, "step") and any(script.role(given) == "optimizer" for given in node.args) for node in calls
    ):
        yield "# The script scales its loss: scale it in the loss, and see bound.unscale."
    yield f"{script.first('optimizer', 'optimizer')}.step()"
    for node in calls:
        if _is_method(node, "step") and script.role(cast(ast.Attribute, node.func).value) == "scheduler":
            yield ast.unparse(node)
    if isinstance(found.loop, ast.While):
        ends = _names(found.loop.test)
        yield from (ast.unparse(part) for part in found.after if _names(part, ast.Store) & ends)


def _calls_model(script: Script, statement: ast.stmt) -> bool:
    calls = (node for node in ast.walk(statement) if isinstance(node, ast.Call))
    return any(script.role(node.func) == "model" or _is_model_method(script, node) for node in calls)


def _is_model_method(script: Script, node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and script.role(node.func.value) == "model"


def _goes_away(statement: ast.stmt) -> bool:
    """Whether a statement only steers FSDP or clears gradients."""
    if isinstance(statement, ast.If | ast.With):
        return all(map(_goes_away, [*statement.body, *getattr(statement, "orelse", [])]))
    names = ("zero_grad", "unshard", "reshard", "train", "eval")
    return isinstance(statement, ast.Expr) and (
        _is_method(statement.value, *names) or _is_method(statement.value, prefix="set_")
    )


def _is_method(node: ast.AST, *names: str, prefix: str | None = None) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return node.func.attr in names or (prefix is not None and node.func.attr.startswith(prefix))
