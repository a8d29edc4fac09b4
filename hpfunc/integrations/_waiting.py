"""A functional step that waits in its middle, for loops that call a model in one place and differentiate in another."""

from __future__ import annotations

from collections.abc import Callable
from threading import Semaphore, Thread
from typing import Any

import torch

from .._errors import UsageError, message
from ..backends.torch import private

Tensor = torch.Tensor


class Waiting:
    """One step, between its forward and its backward.

    # Note [A step that waits]
    A functional step cannot be left in the middle, but a loop may call the model, then a loss of its own, then a
    backward. So the step runs in a thread of its own, which waits where the model has returned, until the loop has the
    gradient of what was returned. The loop waits too while the step runs: only one of both is active, and both are
    always in the same order.
    """

    def __init__(self, function: str) -> None:
        self._function = function
        self._at_loop, self._at_step = Semaphore(0), Semaphore(0)
        self._leaves: list[Tensor] = []
        self._outputs: Any = None
        self._result: Any = None
        self._error: BaseException | None = None

    # --- in the loop --------------------------------------------------------------------------------------------------
    def begin(self, step: Callable[[], Any]) -> Any:
        """Runs a step until it calls `between`; returns what it was given there, as leaves of the loop's own graph."""
        Thread(target=self._run, args=(step,), daemon=True, name="hpfunc step").start()
        self._wait()
        return private.tree_map_only(Tensor, self._leaf, self._outputs)

    def finish(self) -> Any:
        """Lets the step go on with the gradients that the leaves have now, and returns its result.

        Raises:
            UsageError: no leaf has a gradient.
        """
        if all(leaf.grad is None for leaf in self._leaves):
            rule, hint = "the loss does not depend on what the model has returned", "return what the loss is made of"
            self._error = UsageError(message(self._function, rule, hint=hint))
        self._at_step.release()
        self._wait()
        return self._result

    def _leaf(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x.detach()
        self._leaves.append(x.detach().requires_grad_())
        return self._leaves[-1]

    def _wait(self) -> None:
        self._at_loop.acquire()
        if self._error is not None:
            raise self._error

    # --- in the step --------------------------------------------------------------------------------------------------
    def _run(self, step: Callable[[], Any]) -> None:
        try:
            self._result = step()
        except BaseException as error:
            self._error = error
        self._at_loop.release()

    def between(self, outputs: Any) -> Tensor:
        """Hands outputs to the loop, and returns a number whose gradient is that of the loop's loss."""
        self._outputs = outputs
        self._at_loop.release()
        self._at_step.acquire()
        if self._error is not None:
            raise self._error
        found = [x for x in private.tree_flatten(outputs)[0] if isinstance(x, Tensor) and x.is_floating_point()]
        pairs = [(x, leaf.grad) for x, leaf in zip(found, self._leaves, strict=True)]
        return torch.stack([(x * grad).sum().float() for x, grad in pairs if grad is not None]).sum()
