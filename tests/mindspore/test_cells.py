"""What `from_module` makes of a cell, besides that it trains: the questions of `tests/nn/test_function.py`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hpfunc as hp
from tests.helpers.frameworks import needs_mindspore
from tests.helpers.ranks import Pool, mesh_of, outcome

pytestmark = [pytest.mark.processes, needs_mindspore]
FSDP: Any = ((4,), ("shard",))


def same(a: Any, b: Any) -> bool:
    """Not to the last bit: that depends on where in memory a tensor begins, too."""
    pairs = zip(a, b, strict=True) if isinstance(a, list | tuple) else [(a, b)]
    return all(np.allclose(x.asnumpy(), y.asnumpy(), rtol=1e-5, atol=1e-6) for x, y in pairs)


def values(cell: Any) -> dict[str, Any]:
    return {path: x.asnumpy().copy() for path, x in cell.parameters_and_names()}


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[path], b[path]) for path in a)


def statistics(rank: int) -> dict[str, Any]:
    """The cell is not changed, no statistics are lost, and weights go back."""
    from tests.mindspore import cells

    mesh, case = mesh_of(*FSDP), cells.CASES["convolutional"]
    cell, x, found = case.cell(), case.call(0, 0), {}
    cell(x)  # sets marks of MindSpore's own
    before, attributes = values(cell), [dict(vars(part)) for _, part in cell.cells_and_names()]
    apply, params = hp.from_module(cell)
    arrays = hp.shard(params, mesh, hp.P("shard"))
    start = {path: b.asnumpy().copy() for path, b in apply.buffers.items()}
    found["lost"] = outcome(apply, arrays, x)
    first, buffers = apply.with_buffers(arrays, apply.buffers, x)
    second, buffers = apply.with_buffers(arrays, buffers, x + 1)
    evaluated = apply.eval().with_buffers(arrays, buffers, x)[0]
    found["unchanged"] = equal(values(cell), before)
    found["attributes"] = [dict(vars(part)) for _, part in cell.cells_and_names()] == attributes
    found["start"] = equal(start, {path: b.asnumpy() for path, b in apply.buffers.items()})
    found["outputs"] = same([first, second], [cell(x), cell(x + 1)])
    after = values(cell)
    found["statistics"] = all(np.allclose(b.asnumpy(), after[path], rtol=1e-5) for path, b in buffers.items())
    found["all of them"] = sorted(buffers) == [path for path in sorted(after) if "moving" in path]
    found["evaluation"] = same(evaluated, cell.set_train(False)(x))
    other = hp.to_module(arrays, cells.Convolutional().set_train(False), buffers)
    found["back"] = same(other(x), cell(x))
    kept = params["head.weight"].asnumpy().copy()
    hp.to_module(params, other).head.weight.set_data(other.head.weight + 1)
    found["own memory"] = np.array_equal(params["head.weight"].asnumpy(), kept)
    found["text"] = str(apply)
    return found


def test_statistics_come_back_and_the_cell_is_not_changed(pool: Callable[..., Pool]) -> None:
    for found in pool(4, "mindspore").run(statistics):
        assert re.sub(r" \[.*?%( each)?\]", "", found.pop("text")) == (
            "Convolutional.construct: 5 units: 1 Conv2d (stem.0), 1 BatchNorm2d (stem.1), "
            "2 Residual (layer.0 to layer.1), 1 Dense (head)"
        )
        assert found.pop("lost").startswith(
            "UsageError: hpfunc.ModuleFunction: the call changes buffers of the module, and would lose them\n"
            "  layer.0.bn1.moving_mean\n  layer.0.bn1.moving_variance\n"
        )
        assert [name for name, is_right in found.items() if is_right is not True] == []


def behaviour(rank: int) -> dict[str, Any]:
    """Plain and sharded weights, keyword arguments, another method, hooks, modes, dropout, `init_module`."""
    import mindspore

    from tests.mindspore import cells

    mesh, case = mesh_of(*FSDP), cells.CASES["transformer"]
    cell, tokens, found = case.cell(), case.call(0, 0), {}
    apply, params = hp.from_module(cell)
    arrays = hp.shard(params, mesh, hp.P("shard"))
    found["plain"] = same(apply(params, tokens, scale=2.0), cell(tokens, scale=2.0))
    found["sharded"] = same(apply(arrays, tokens, scale=2.0), cell(tokens, scale=2.0))
    found["method"] = same(apply.method("twice")(arrays, tokens), cell.twice(tokens))
    seen: list[Any] = []
    cell.blocks[1].attention.register_forward_hook(lambda part, args, out: seen.append(out.shape) or out * 2)
    cell.embed.embedding_table.requires_grad = False
    apply, params = hp.from_module(cell, units=cells.Attention)
    found["hooks"] = same(apply(arrays, tokens), cell(tokens)) and seen == [(3, 5, 8)] * 2
    frozen = hp.partition(params, lambda path, w: not w.requires_grad)[0]
    found["frozen"] = [path for path, w in frozen.items() if w is not None] == ["embed.embedding_table"]
    found["choice"] = str(apply).startswith("Transformer.construct: 11 units: 1 Embedding (embed) [")

    mindspore.set_seed(4)  # the same cell on all ranks
    cell = cells.Transformer(0.5).set_train(True)
    apply, params = hp.from_module(cell)
    arrays = hp.shard(params, mesh, hp.P("shard"))
    again = apply.eval().train()  # no seed makes nn.Dropout repeat itself
    found["dropout"] = not same(again(arrays, tokens)[0], again(arrays, tokens)[0])
    found["no dropout"] = same(apply.eval()(arrays, tokens), cell.set_train(False)(tokens))

    mindspore.set_seed(5)
    whole = cells.Convolutional()
    mindspore.set_seed(5)
    made, arrays = hp.init_module(cells.Convolutional, mesh, hp.P("shard"))
    images = cells.CASES["convolutional"].call(0, 0)
    found["init"] = same(made(arrays, images), whole(images))
    return found


def test_a_cell_as_a_function(pool: Callable[..., Pool]) -> None:
    for found in pool(4, "mindspore").run(behaviour):
        assert [name for name, is_right in found.items() if is_right is not True] == []


def misused(rank: int) -> dict[str, str]:
    from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

    from tests.mindspore import cells

    class Writer(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.w = Parameter(Tensor(np.ones(4, np.float32)), name="w")
            self.register_buffer("count", Tensor(np.zeros(4, np.float32)))

        def construct(self, x: Any, how: str) -> Any:
            if how == "assign":
                ops.assign(self.w, x + 1)
            elif how == "set":
                self.w = x
            elif how == "replace":
                self.w = Parameter(x, name="w")
            else:
                ops.assign(self.count, self.count + x)
            return x * self.w

    class Listed(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.ws = ParameterTuple([Parameter(Tensor([1.0]), name="a"), Parameter(Tensor([2.0]), name="b")])

    class User(nn.Dense):
        def construct(self, x: Any) -> Any:
            return super().construct(x) + self.of[0].embedding_table.sum()

    class Crossing(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.user = nn.Embedding(4, 4), User(4, 4)
            self.user.of = [self.table]

        def construct(self, x: Any) -> Any:
            return self.user(x)

    mesh, x = mesh_of(*FSDP), Tensor(np.ones(4, np.float32))
    apply, params = hp.from_module(Writer())
    arrays = hp.shard(params, mesh, hp.P("shard"))
    found = {how: outcome(apply, arrays, x, how) for how in ("assign", "set", "replace", "count")}
    buffers = apply.with_buffers(arrays, apply.buffers, x, "count")[1]
    buffers = apply.with_buffers(arrays, buffers, x, "count")[1]
    found["counted"] = str([t.asnumpy().tolist() for t in (buffers["count"], apply.buffers["count"], params["w"])])
    found["listed"] = outcome(hp.from_module, Listed())
    recomputing = cells.Block()
    recomputing.recompute()
    found["recomputing"] = outcome(hp.from_module, recomputing)
    apply, params = hp.from_module(Crossing())
    found["crossing"] = outcome(apply, hp.shard(params, mesh, hp.P("shard")), x[None])
    found["paths"] = outcome(apply, {"user.weight": params["user.weight"]}, x[None])
    found["nothing"] = outcome(hp.from_module, cells.Transformer(), "block.*")
    found["overlap"] = outcome(hp.from_module, cells.Transformer(), [cells.Block, cells.Attention])
    found["list"] = outcome(hp.from_module, cells.Transformer(), nn.CellList)
    with nn.no_init_parameters():
        late = nn.Dense(2, 2)
    found["dropout"] = outcome(hp.from_module, cells.Transformer(0.1), remat=True)
    found["late"] = outcome(hp.from_module, late)
    found["shape"] = outcome(hp.to_module, {"weight": x, "bias": x}, nn.Dense(4, 4))
    found["init"] = outcome(hp.init_module, nn.Dense(2, 2), mesh, hp.P("shard"))
    found["no cell"] = outcome(hp.init_module, lambda: 3, mesh, hp.P("shard"))
    return found


def test_misuse_is_named(pool: Callable[..., Pool]) -> None:
    writes = "UsageError: hpfunc.from_module: the module writes into a parameter\n  "
    for found in pool(4, "mindspore").run(misused):
        assert found["assign"].startswith(f"{writes}w\n")
        assert found["set"].startswith(writes)
        assert found["replace"].startswith(f"{writes}w\n")
        assert "would lose them\n  count\n" in found["count"]
        assert found["counted"] == "[[2.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]"
        assert "ws: parameters in a list, tuple or dict" in found["listed"]
        assert "from_module(cell, remat=True)" in found["recomputing"]
        assert "the unit 'user' uses a parameter of another module" in found["crossing"]
        assert "  table.embedding_table\n" in found["crossing"]
        assert "params are not those of the module\n" in found["paths"]
        assert "  table.embedding_table: missing\n" in found["paths"]
        assert "an entry of units selects no module\n  pattern 'block.*'" in found["nothing"]
        assert "units overlap\n  'blocks.0.attention' is part of 'blocks.0'" in found["overlap"]
        assert "a unit has no construct\n  blocks: CellList" in found["list"]
        assert "dropout would draw other numbers in backward" in found["dropout"]
        assert "  blocks.0.dropout: Dropout\n" in found["dropout"]
        assert "parameters are not initialised yet\n  weight\n  bias" in found["late"]
        assert "weight: shape (4,), the module has (4, 4)" in found["shape"]
        assert "takes a function that builds the cell, only" in found["init"]
        assert "a mindspore.nn.Cell is wanted, got int" in found["no cell"]
