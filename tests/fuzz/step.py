"""From a case to its step with hpfunc, inside of a rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch.utils.checkpoint import checkpoint

import hpfunc as hp
from tests.fuzz.build import batch_of, forward, num_microbatches, unit_function, whole
from tests.fuzz.cases import Case, Ref, Unit
from tests.fuzz.judge import LEARNING_RATE, MOMENTUM
from tests.helpers.ranks import mesh_of

Tensor = torch.Tensor
TIMEOUT_S = 30.0


class ShardedWorld:
    """A loss whose arrays are sharded."""

    def __init__(self, case: Case, units: list[Callable[..., Any]], arrays: dict[str, Any]) -> None:
        self.case, self.units, self.arrays = case, units, arrays

    def psum(self, x: Tensor) -> Tensor:
        return hp.psum(x, "tp")

    def pvary(self, x: Tensor) -> Tensor:
        return hp.pvary(x, "tp")

    def weight(self, ref: Ref, unit: Unit) -> Any:
        array = self.arrays[ref.array]
        for row in ref.rows:
            array = array[row]
        return array.with_local(array.local * 2) if ref.is_made else array

    def call(self, unit: int, weights: Any, x: Tensor) -> Any:
        return self.units[unit](weights, x)

    def checkpoint(self, fn: Callable[[Tensor], Tensor], x: Tensor) -> Any:
        return checkpoint(fn, x, use_reentrant=False)

    def inner_checkpoint(self, fn: Callable[..., Any], weights: Any, x: Tensor) -> Any:
        return checkpoint(fn, weights, x, use_reentrant=False)

    def whole(self, name: str) -> Tensor:
        return hp.unshard(self.arrays[name])

    def own(self, name: str) -> Tensor:
        value = self.arrays[name]
        return value.local if isinstance(value, hp.ShardedArray) else value


class Step:
    """The step of a case: its function, and the arguments of its first call."""

    def __init__(self, case: Case, rank: int) -> None:
        grid = case.grid
        self.case = case
        self.mesh = mesh_of(grid.sizes, grid.names, grid.data_axes if grid.given else None, TIMEOUT_S)
        self.units = [self._unit(i) for i in range(len(case.units))]
        arrays = self._arrays()
        groups = {group: self._group(arrays, group) for group in ("a", "b", "frozen", "closure")}
        self.closure = groups.pop("closure")
        self.batch = batch_of(case, grid.data_index(rank))
        self.optimizer = hp.optim.sgd(LEARNING_RATE, MOMENTUM if case.around.update == "momentum" else 0.0)
        state = self.optimizer.init(groups["a"]) if case.around.update in ("sgd", "momentum") else ()
        self.args = (groups["a"], groups["frozen"], groups["b"], self.batch, state)
        self.kept_arguments = [leaf for leaf in optree.tree_leaves((self.args, self.closure)) if torch.is_tensor(leaf)]

    def _unit(self, index: int) -> Callable[..., Any]:
        unit = self.case.units[index]
        # The world of a unit needs no arrays: collectives only.
        fn = unit_function(self.case, unit, ShardedWorld(self.case, [], {}))
        axes = [axis for axis in self.case.grid.data_axes if axis != "ep"] if unit.is_expert else None
        return hp.unit(fn, name=f"unit{index}", remat=unit.remat, axes=axes)

    def _arrays(self) -> dict[str, Any]:
        cut = [array for array in self.case.arrays if array.kind != "plain"]
        values = {array.name: whole(self.case, array) for array in cut}
        arrays = hp.shard(values, self.mesh, {array.name: hp.P(*array.spec) for array in cut})
        return arrays | {array.name: whole(self.case, array) for array in self.case.arrays if array.kind == "plain"}

    def _group(self, arrays: dict[str, Any], group: str) -> dict[str, Any]:
        return {array.name: arrays[array.name] for array in self.case.arrays if array.group == group}

    def numerics(self) -> hp.Numerics:
        around = self.case.around
        casts = {"param_dtype": around.param_dtype, "cast_inputs": True, "output_dtype": "float64"}
        reduce_dtype = around.reduce_dtype or None
        return hp.Numerics(
            reduce_op=around.reduce_op,
            reduce_dtype=reduce_dtype,
            accum_dtype=around.accum_dtype or None,
            **(casts if around.param_dtype else {}),
        )

    def _together(self, *trees: Any) -> dict[str, Any]:
        found = {name: value for tree in trees for name, value in tree.items() if value is not None}
        return self.closure | found

    # --- the function -----------------------------------------------------------------------------------------------
    def _loss(self, factor: float) -> Callable[..., Any]:
        case = self.case

        def loss(a: Any, frozen: Any, b: Any, x: Tensor) -> Any:
            if case.around.is_partitioned:
                a = hp.combine(a, frozen)
                frozen = {}
            value, aux = forward(ShardedWorld(case, self.units, self._together(a, frozen, b)), x)
            return (factor * value, aux) if case.around.has_aux else factor * value

        around = case.around
        transform = hp.grad if around.returns == "grad" else hp.value_and_grad
        argnums = (0, 2) if len(case.trained_groups) == 2 else 0
        found = transform(loss, argnums, has_aux=around.has_aux, numerics=self.numerics())
        if around.accumulate:
            found = hp.accumulate(found, num_microbatches(case), mode=around.accumulate, batch_argnums=3)
        return found

    def function(self) -> Callable[..., Any]:
        """Returns the step: it takes and returns trees."""
        around = self.case.around
        passes = [self._loss(1.0), *([self._loss(0.5)] if around.twice else [])]

        def step(a: Any, frozen: Any, b: Any, x: Tensor, state: Any) -> Any:
            if around.is_remade:
                a = optree.tree_map(lambda t: 2 * t, a)
            first, second = a, frozen
            if around.is_partitioned:
                first, second = hp.partition(a | frozen, lambda path, leaf: path in a)
            results = [self._results(fn(first, second, b, x)) for fn in passes]
            if around.evaluates:
                with torch.no_grad():
                    world = ShardedWorld(self.case, self.units, self._together(a, frozen, b))
                    results.append({"loss": forward(world, x)[0], "gradients": {}, "aux": []})
            if not around.update:
                return results, None, None
            gradients = {name: value for name, value in results[0]["gradients"].items() if name in a}
            if around.update == "by hand":
                return results, optree.tree_map(lambda p, g: p - LEARNING_RATE * g, a, gradients), ()
            updates, state = self.optimizer.update(gradients, state, a)
            return results, hp.apply_updates(a, updates), state

        return step

    def _results(self, returned: Any) -> dict[str, Any]:
        """Returns loss, gradients by name and aux, whatever the transform returned."""
        around = self.case.around
        loss, aux = None, []
        if around.returns == "grad":
            gradients, aux = returned if around.has_aux else (returned, [])
        elif around.has_aux:
            (loss, aux), gradients = returned
        else:
            loss, gradients = returned
        trees = gradients if isinstance(gradients, tuple) else (gradients,)
        flat = {name: value for tree in trees for name, value in tree.items() if value is not None}
        return {"loss": loss, "gradients": flat, "aux": aux}

    def eager(self) -> Callable[..., Any]:
        """Returns the step, run op by op."""
        function = self.function()

        def call(*args: Any) -> Any:
            with hp.use_mesh(self.mesh):
                return function(*args)

        return self._outer(call)

    def planned(self) -> tuple[Callable[..., Any], Any]:
        """Returns the step, run by a plan from its second call on, and the object that has the plan."""
        around = self.case.around
        donated = ((0, 4) if around.update != "by hand" else (0,)) if around.is_donated else ()
        policy = hp.Policy(**dict(around.policy))
        step = hp.sharded(self.function(), self.mesh, policy=policy, debug=around.debug, donate_argnums=donated)
        return self._outer(step), step

    def _outer(self, call: Callable[..., Any]) -> Callable[..., Any]:
        mode = {"": None, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[self.case.around.outer]
        if mode is None:
            return call

        @functools.wraps(call)
        def inside(*args: Any) -> Any:
            with mode():
                return call(*args)

        return inside


def own_part(value: Any) -> Tensor:
    """Returns the tensor of a leaf."""
    return value.local if isinstance(value, hp.ShardedArray) else value
