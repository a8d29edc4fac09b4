"""One architecture on one rank: three planned steps, judged by the same steps in one process."""

from __future__ import annotations

import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from math import isfinite
from typing import Any

import torch

import hpfunc as hp
from hpfunc.nn._choose import choose
from hpfunc.nn.torch.module import PARTS
from tests.helpers.ranks import mesh_of
from tests.helpers.zoo import bits
from tests.zoo import plain
from tests.zoo.architecture import Architecture
from tests.zoo.registry import find
from tests.zoo.verdict import Found, Tensors, Trained, Units, difference, judged

LARGEST = 40e6  # parameters: more takes too long on two processes that share a core


def examine(rank: int, name: str) -> Found:
    """Returns what this rank finds out about an architecture. Nothing that a model does raises here."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        started = time.perf_counter()
        try:
            architecture = find(name)
            dtype, module, want = _judge(architecture, rank)
        except Exception as error:
            return Found(name, "", "not built", f"{type(error).__name__}: {error}"[:600])
        facts: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch.")}
        start = {path: x.detach().clone() for path, x in module.named_parameters()}
        try:
            verdict, why = _compare(architecture, dtype, module, want, start, rank, facts)
        except hp.HpfuncError as error:
            verdict, why = "refused", f"{type(error).__name__}: {error}"
        except Exception:
            verdict, why = "error", traceback.format_exc()
        facts["warnings"] = sorted({str(x.message) for x in said if isinstance(x.message, hp.HpfuncWarning)})
        facts["seconds"] = round(time.perf_counter() - started, 1)
    return Found(name, architecture.kind, verdict, why, facts)


def examine_with_usual_size(rank: int, name: str) -> Found:
    """Returns the same, with the units of the model in its usual size."""
    found = examine(rank, name)
    if rank == 0 and found.verdict != "not built" and (build := find(name).full) is not None:
        found.facts["full"] = _full_units(build)
    return found


def _judge(architecture: Architecture, rank: int) -> tuple[torch.dtype, Any, Trained]:
    """The widest dtype in which the model runs, the model, and what training it in one process gives."""
    try:
        module = plain.built(architecture, torch.float64)
        if sum(x.numel() for x in module.parameters()) > LARGEST:
            raise ValueError("the model is not small")
        return torch.float64, module, plain.train(architecture, module, torch.float64, rank)
    except RuntimeError:  # two dtypes meet
        module = plain.built(architecture, torch.float32)
        return torch.float32, module, plain.train(architecture, module, torch.float32, rank)


def _compare(
    architecture: Architecture,
    dtype: torch.dtype,
    module: Any,
    want: Trained,
    start: Tensors,
    rank: int,
    facts: dict[str, Any],
) -> tuple[str, str]:
    if not all(map(isfinite, want.losses)) or not all(bool(x.isfinite().all()) for x in want.weights.values()):
        return "not built", "its numbers are not finite"
    apply, params = hp.from_module(module)
    facts |= {"text": str(apply), "small": asdict(units_of(module))}
    got, same_bits, facts["planned"] = _planned(architecture, dtype, apply, params, rank)
    if not same_bits:
        return "wrong", "a planned step has other bits than the recorded one"
    verdict, why = judged(got, want, start, 0.0)
    if verdict == "wrong":
        facts["rounding"] = plain.rounding(architecture, dtype)
        verdict, why = judged(got, want, start, facts["rounding"])
    facts["difference"] = difference(got, want, start)
    return verdict, why


def units_of(module: Any) -> Units:
    """Returns what the table says of the units of a module."""
    choice = choose(PARTS, module, None)
    counts = Counter(unit.kind for unit in choice.modules)
    kind, num = max(counts.items(), key=lambda item: item[1])
    largest = max(choice.modules, key=lambda unit: unit.size_bytes)
    inside = [x for x in module.get_submodule(largest.path).parameters() if x.dim() == 2]
    words = {part.num_embeddings for part in module.modules() if isinstance(part, torch.nn.Embedding)}
    is_of_words = any(x.shape[0] in words and 2 * PARTS.size_bytes(x) > largest.size_bytes for x in inside)
    return Units(
        len(choice.modules),
        f"{num} {kind}",
        largest.size_bytes / max(choice.total_bytes, 1),
        f"{largest.path or 'the whole module'} ({largest.kind})",
        is_of_words,
    )


def _full_units(build: Callable[[], Any]) -> dict[str, Any] | None:
    """Which units the model has in its usual size. It is built without data; some models cannot be."""
    try:
        with torch.device("meta"):
            return asdict(units_of(build()))
    except Exception:
        return None


def _planned(
    architecture: Architecture, dtype: torch.dtype, apply: Any, params: Any, rank: int
) -> tuple[Trained, bool, int]:
    """What planned steps give, whether the first has the bits of a recorded one, and how many followed their plan."""
    mesh = mesh_of((plain.NUM_RANKS,), ("shard",), timeout_s=60.0)
    optimizer = hp.optim.sgd(plain.RATE)
    first = hp.shard(params, mesh, hp.P("shard"))
    opt_state = optimizer.init(first)

    def step_fn(params: Any, buffers: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            outputs, after = apply.with_buffers(params, buffers, **batch)
            return architecture.loss(outputs), after

        (loss, after), grads = hp.value_and_grad(loss_fn, has_aux=True)(params)
        updates, _ = optimizer.update(grads, opt_state, params)
        return hp.apply_updates(params, updates), after, hp.pmean(loss, mesh.data_axes)

    step = hp.sharded(step_fn, mesh)

    def run(params: Any, buffers: Any, number: int) -> Any:
        batch = plain.batch_of(architecture, rank, number, dtype)
        plain.seeded(rank, number)
        return step(params, buffers, batch)

    recorded = run(first, dict(apply.buffers), 0)
    current, buffers, losses, num_planned, same = first, dict(apply.buffers), [], 0, True
    for number in range(plain.NUM_STEPS):
        current, buffers, loss = run(current, buffers, number)
        num_planned += step.followed_plan
        losses.append(float(loss))
        if number == 0:
            same = _same_bits((current, buffers, loss), recorded)
    return Trained(tuple(losses), hp.unshard(current), buffers), same, num_planned


def _same_bits(a: Any, b: Any) -> bool:
    ours, theirs = (
        {path: x.local for path, x in params.items()} | buffers | {"": loss} for params, buffers, loss in (a, b)
    )
    return all(torch.equal(bits(x), bits(theirs[path])) for path, x in ours.items())
