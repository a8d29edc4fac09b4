"""`ModuleFunction`: a module as a pure function of its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from .._errors import LeafError, UsageError, message
from .._running.context import current_run, current_session
from .._running.warn_once import warn_once
from .._values.array import is_sharded
from .._values.foreign_names import MODULE_FUNCTION, missing
from ._choose import Choice

Tensor = Any
_NAME = "hpfunc.ModuleFunction"


class Skeleton(Protocol):
    """A module's copy without its weights; see Note [The copy] in `nn.torch.skeleton`.

    Attributes:
        module: the copy.
        choice: its units.
        params: the paths of its parameters, and `frozen` of those that the module does not train.
        modes: of each part, whether it trains.
    """

    module: Any
    choice: Choice
    params: tuple[str, ...]
    frozen: frozenset[str]
    modes: tuple[bool, ...]

    def modes_after(self, modes: tuple[bool, ...], change: str) -> tuple[bool, ...]:
        """Returns the modes after "train" or "eval"."""
        ...

    def call(self, params: Mapping[str, Any], modes: tuple[bool, ...]) -> Any:
        """Returns a call with these parameters, which has not begun."""
        ...

    def run(
        self, call: Any, buffers: Mapping[str, Tensor], entry: str, args: Any, kwargs: Any
    ) -> tuple[Any, dict[str, Tensor]]:
        """Returns the outputs and the buffers after the call.

        Raises:
            UsageError: the module writes into a parameter.
        """
        ...

    def trained(self, params: Mapping[str, Any], leaves: Sequence[Tensor] | None) -> list[str]:
        """Returns the paths of plain parameters for which gradients are recorded.

        `leaves` are the tensors that `value_and_grad` differentiates; None: any tensor that requires a gradient.
        """
        ...

    def lost(self, call: Any, entry: str, before: Mapping[str, Tensor], after: dict[str, Tensor]) -> list[str]:
        """Returns the paths of buffers that a call changed."""
        ...


@dataclass(frozen=True, slots=True, repr=False)
class ModuleFunction:
    """A module as a pure function of its parameters: ``apply(params, *args, **kwargs)`` returns its outputs.

    Get one from `from_module` or `init_module`. ``print(apply)`` lists its units. The function has a copy of the
    module; Python attributes that the module sets while it runs stay in that copy.

    Attributes:
        buffers: the module's buffers at the start, by path: plain tensors, each rank's own.
    """

    _skeleton: Skeleton
    buffers: Mapping[str, Tensor]
    _modes: tuple[bool, ...]
    _entry: str

    if not TYPE_CHECKING:  # a type checker should find a wrong name by itself

        def __getattr__(self, name: str) -> Any:
            raise missing("hpfunc.ModuleFunction", name, MODULE_FUNCTION, dir(type(self)))

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleFunction:
        """Returns itself, as for any function."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        hint = "pickle the module, and call hpfunc.from_module there"
        raise UsageError(message(_NAME, "a module's function cannot be pickled", hint=hint))

    def __call__(self, params: Mapping[str, Any], /, *args: Any, **kwargs: Any) -> Any:
        """Returns the outputs of the module, with the buffers of the start.

        Args:
            params: `ShardedArray` or plain tensors by path, as `from_module` gives them.
            args: go to the module.
            kwargs: go to the module.

        Raises:
            UsageError: the call changes a buffer; the module writes into a parameter; a step on several ranks would
                train plain parameters on each rank alone; or a frozen parameter of the module would be trained.
            LeafError: the parameters are not those of the module.

        Communication: that of its units.
        """
        call, outputs, after = self._run(params, self.buffers, args, kwargs)
        if lost := self._skeleton.lost(call, self._entry, self.buffers, after):
            rule = "the call changes buffers of the module, and would lose them"
            hint = "outputs, buffers = apply.with_buffers(params, buffers, ...) returns them; or use apply.eval()"
            raise UsageError(message(_NAME, rule, lost, hint=hint))
        return outputs

    def with_buffers(
        self, params: Mapping[str, Any], buffers: Mapping[str, Tensor], /, *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Tensor]]:
        """Returns the outputs of the module and its buffers after the call. The given buffers are not changed.

        Args:
            params: as for a call.
            buffers: as in `buffers`, or as the last call returned them.
            args: go to the module.
            kwargs: go to the module.

        Raises:
            UsageError: the module writes into a parameter.
            LeafError: parameters or buffers are not those of the module.

        Communication: that of its units. Statistics are each rank's own: `pmean` them if they should agree.
        """
        _check_paths("buffers", buffers, self.buffers)
        _, outputs, after = self._run(params, buffers, args, kwargs)
        return outputs, after

    def _run(
        self, params: Any, buffers: Mapping[str, Tensor], args: Any, kwargs: Any
    ) -> tuple[Any, Any, dict[str, Tensor]]:
        _check_paths("params", params, self._skeleton.params)
        _refuse_wrong_training(self._skeleton, params)
        _warn_about_units(self._skeleton.choice, params)
        call = self._skeleton.call(params, self._modes)
        return call, *self._skeleton.run(call, buffers, self._entry, args, kwargs)

    def train(self) -> ModuleFunction:
        """Returns the function of the module in training mode.

        Communication: none.
        """
        return replace(self, _modes=self._skeleton.modes_after(self._modes, "train"))

    def eval(self) -> ModuleFunction:
        """Returns the function of the module in evaluation mode.

        Communication: none.
        """
        return replace(self, _modes=self._skeleton.modes_after(self._modes, "eval"))

    def method(self, name: str) -> ModuleFunction:
        """Returns the function of another method of the module, such as ``"generate"``.

        Raises:
            UsageError: there is no such method.

        Communication: none.
        """
        if not callable(getattr(self._skeleton.module, name, None)):
            kind = type(self._skeleton.module).__name__
            raise UsageError(message(_NAME, f"{kind} has no method {name!r}"))
        return replace(self, _entry=name)

    def __repr__(self) -> str:
        return f"{type(self._skeleton.module).__name__}.{self._entry}: {self._skeleton.choice}"


def _refuse_wrong_training(skeleton: Skeleton, params: Mapping[str, Any]) -> None:
    """Refuses a step that would train each rank alone, or parameters that are frozen in the module."""
    run = current_run()
    session = current_session() if run is None else run.session
    if session is None:
        return
    alone = skeleton.trained(params, None if run is None else run.tape.leaves)
    if alone and session.mesh.axis_size(session.mesh.data_axes) > 1:
        rule = (
            "plain parameters are differentiated in a step on several ranks: each rank would train a model of its own"
        )
        hint = (
            "params = hpfunc.shard(params, mesh, hpfunc.P('shard')) before the step; "
            "a module that does not train is called without gradients (torch.no_grad())"
        )
        raise UsageError(message(_NAME, rule, alone, mesh=session.mesh, hint=hint))
    # An array knows whether it trains, unless it was made from tensors that do not know (by `.to()`, a state dict).
    unsaid = [path for path, x in params.items() if is_sharded(x) and x._tracker is not None and x._trains is None]
    if run is not None and (bad := sorted(skeleton.frozen.intersection(unsaid + alone))):
        rule = "parameters that are frozen in the module (requires_grad=False) would be trained"
        hint = (
            "hpfunc.freeze(params, paths) keeps them as they are, hpfunc.unfreeze(params, paths) trains them; "
            "what is cut of the tensors that from_module gives is marked"
        )
        raise UsageError(message(_NAME, rule, bad, hint=hint))


def _warn_about_units(choice: Choice, params: Mapping[str, Any]) -> None:
    if choice.advice and (sharded := next(filter(is_sharded, params.values()), None)) is not None:
        for text in choice.advice:
            warn_once(text, sharded.mesh)


def _check_paths(name: str, tree: Any, wanted: Any) -> None:
    if not isinstance(tree, Mapping):
        hint = "they are a dict by path, as from_module gives them"
        raise LeafError(message(_NAME, f"{name} is a {type(tree).__name__}", hint=hint))
    missing = [f"{path}: missing" for path in wanted if tree.get(path) is None]
    unexpected = [f"{path}: unexpected" for path in tree if path not in wanted]
    if missing or unexpected:
        hint = "hpfunc.combine puts the parts of a partition together" if name == "params" else None
        raise LeafError(message(_NAME, f"{name} are not those of the module", missing + unexpected, hint=hint))
