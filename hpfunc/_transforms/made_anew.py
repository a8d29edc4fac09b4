"""A step that is made anew for every call, such as in the body of a loop: it never runs by a plan, and that is told."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

from .._errors import message
from .._running.warn_once import warn_once
from .._values.mesh import Mesh
from .._values.not_a_tensor import named
from .arguments import Known

_LIMIT = 5  # a few in a row may be meant: models, meshes or policies that are compared
_last: WeakKeyDictionary[CodeType, tuple[int, Mapping[object, Known]]] = WeakKeyDictionary()


def note_first_call(fn: Callable[..., Any], known: Mapping[object, Known], mesh: Mesh) -> None:
    """Warns if this is the first call of yet another step around the same code, and the steps before had one call each.

    Args:
        fn: the function of the step.
        known: the calls of the step, by structure of their arguments.
        mesh: that of the step.
    """
    code = getattr(inspect.unwrap(fn), "__code__", None)
    if code is None:
        return
    count, before = _last.get(code, (0, {}))
    had_one_call = sum(len(each.history) for each in before.values()) == 1
    count = count + 1 if had_one_call else 1
    _last[code] = count, known
    if count == _LIMIT:
        rule = (
            f"the step of {named(fn)} is made anew for each call: {_LIMIT} in a row had one call, so none ran by a plan"
        )
        hint = f"make it once, before the loop: step = hpfunc.sharded({named(fn)}, mesh); and call `step` in the loop"
        warn_once(message("hpfunc.sharded", rule, hint=hint), mesh)
