"""`NotATensor`: what only a tensor can do. An array refuses it, and shows the line to write instead."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from .._errors import ArrayAttributeError, UsageError, message
from .foreign_names import ARRAY, missing

_UNIT = "inside a unit it is a tensor"
_BINARY = {
    **{"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**", "matmul": "@"},
    **{"and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>"},
}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNARY = {
    **{"neg": ("-{}", "-a"), "invert": ("~{}", "~a"), "abs": ("abs({})", "abs(a)")},
    **{"pos": ("+{}", "a.clone()"), "round": ("round({})", "a.round()")},
}
_NUMBERS = {"float": "float", "int": "int", "complex": "complex", "index": "int"}

_GRADIENTS = "gradients are values: loss, grads = hpfunc.value_and_grad(loss_fn)(params, batch)"
_TRAINS = "hpfunc.freeze(tree) and hpfunc.unfreeze(tree) return arrays that do not train, or do; array.is_frozen tells"
_PLACE = "arrays lie on the device of their mesh, make_mesh(..., device='cuda'); array.full().{}(...) moves all values"
_DTYPE = "optree.tree_map(lambda a: a.{}(), array); to compute in another dtype: hpfunc.Numerics(param_dtype=...)"
_VALUES = "array.full().{}() is of all values, array.local.{}() of this rank's part"
_COPY = "copy.deepcopy(array) is an array with memory of its own"
_HINTS = {
    **dict.fromkeys(("grad", "backward", "grad_fn", "retain_grad", "register_hook"), _GRADIENTS),
    **dict.fromkeys(("requires_grad", "requires_grad_", "is_leaf"), _TRAINS),
    **dict.fromkeys(("cuda", "cpu", "npu", "xpu", "to"), _PLACE),
    **dict.fromkeys(("half", "bfloat16", "float", "double"), _DTYPE),
    **dict.fromkeys(("item", "tolist", "numpy", "asnumpy", "detach"), _VALUES),
    **dict.fromkeys(("clone", "copy"), _COPY),
    "data": "array.full() has all values, array.local this rank's part",
    "dim": "array.ndim is the number of dims",
    "type": "array.dtype is its dtype",
}

# Functions of torch that write an array into the text of an error, and functions that call them.
_SAYS_NOT_A_TENSOR = {("torch", "typename"), ("torch.nn.utils._named_member_accessor", "swap_tensor")}
_CALL = "hpfunc.unit(lambda params, x: torch.func.functional_call(module, params, x))(params, x)"
_HINTS_FOR_CALLERS = {
    "add_param_group": "bound = hpfunc.optim.bind(params); torch.optim.AdamW(bound.parameters, lr=1e-3)",
    **dict.fromkeys(("swap_submodule_tensor", "swap_tensor", "swap_tensors_dict"), f"{_UNIT}: {_CALL}"),
}


class Size(int):
    """A number of elements. To call it, as `size` of torch's tensors, is refused."""

    __slots__ = ()

    def __call__(self, dim: int | None = None) -> NoReturn:
        rule = "`size` is the number of elements, as in numpy and JAX"
        hint = f"array.shape{'' if dim is None else f'[{dim}]'} has the global sizes of its dims"
        raise UsageError(message("hpfunc.ShardedArray", rule, hint=hint))


class NotATensor:
    """Base of `ShardedArray`: operators, functions and attributes of tensors, each refused with a remedy."""

    __slots__ = ()

    def _refusal(self, rule: str, hint: str, error: type[UsageError] = UsageError) -> UsageError:
        refusal = error(message("hpfunc.ShardedArray", rule, [self._described()], hint=hint))
        refusal._array = self
        return refusal

    def _described(self) -> str:
        """Returns the array for an error text."""
        raise NotImplementedError

    def _refuse_to_torch(self) -> None:
        """Raises, if torch wants the text of an array: it has found that it is not a tensor, and is about to say so."""
        frame = sys._getframe(2)
        asked = (frame.f_globals.get("__name__"), frame.f_code.co_name)
        if asked in _SAYS_NOT_A_TENSOR and frame.f_back is not None:
            caller = frame.f_back.f_code.co_name
            hint = _HINTS_FOR_CALLERS.get(caller, "array.full() is a tensor of all values, array.local this rank's")
            raise self._refusal("torch takes tensors here, and an array is not one", hint)

    def _tensor_type(self) -> type:
        """Returns the type of the local part."""
        raise NotImplementedError

    if not TYPE_CHECKING:  # a type checker should find a wrong name by itself

        def __getattr__(self, name: str) -> Any:
            if name == "__qualname__":
                self._refuse_to_torch()
            of_tensors = None if name.startswith("_") else getattr(self._tensor_type(), name, None)
            if of_tensors is None and name in ARRAY:
                raise missing("hpfunc.ShardedArray", name, ARRAY)
            if of_tensors is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            if name in _HINTS:
                hint = _HINTS[name].format(name, name)
            elif name.endswith("_"):
                hint = f"arrays are immutable; a new one: array.with_local(array.local.{name.rstrip('_')}(...))"
            else:
                use, inside = (f"{name}(...)",) * 2 if callable(of_tensors) else (name, f"{name} ...")
                hint = f"{_UNIT}: hpfunc.unit(lambda a: a.{inside})(array); of all values: array.full().{use}"
            raise self._refusal(f"an array has no `{name}`: it is not a tensor", hint, ArrayAttributeError)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> NoReturn:
        """Torch calls this for its functions, and for operators whose first operand is a tensor."""
        of_torch = name = getattr(func, "__name__", str(func))
        names = _Names([*args, *(kwargs or {}).values()])
        given = [names.of(arg) for arg in args]
        given += [f"{key}={names.of(arg)}" for key, arg in (kwargs or {}).items() if names.knows(arg)]
        if hasattr(func, "__objclass__"):  # a method of tensors
            name, given = f"{given[0]}.{name}", given[1:]
        call = f"{name}({', '.join(given)})"
        hint = f"{_UNIT}: {names.in_unit(call)}"
        raise names.arrays[0]._refusal(f"`{of_torch}` of torch takes tensors, and an array is not one", hint)

    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        hint = "array.full().numpy() has all values, hpfunc.interop.to_numpy(array) this rank's part"
        raise self._refusal("an array is not a numpy array: this rank has a part of it only", hint)

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        hint = "a new one: part = array.local.clone(), write into this rank's part, then array.with_local(part)"
        raise self._refusal("`array[...] = value` would change an array, and arrays are immutable", hint)

    def __contains__(self, item: Any) -> NoReturn:
        raise self._refusal("`in` does not look at the values of an array", "ask `item in array.full()`")

    def __bool__(self) -> NoReturn:
        raise self._refusal(
            "an array has no truth value", "ask `array is not None`, or for a value: bool(array.full())"
        )

    def __format__(self, spec: str) -> str:
        if not spec:
            self._refuse_to_torch()
            return str(self)
        raise self._refusal(f"an array is not a number that {spec!r} could format", "format a value of array.full()")

    __hash__ = object.__hash__


class _Names:
    """Names for the values of an expression: the weights of a unit are its first argument, tensors are others.

    Attributes:
        arrays: the arrays among the values.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        flat = list(_flat(values))
        self.arrays = [value for value in flat if isinstance(value, NotATensor)]
        self._tensors = [value for value in flat if _is_tensor(value)]

    def knows(self, value: Any) -> bool:
        """Returns whether a value has an array or a tensor in it."""
        return any(isinstance(each, NotATensor) or _is_tensor(each) for each in _flat([value]))

    def of(self, value: Any) -> str:
        """Returns a value as it is written inside of the unit."""
        if isinstance(value, list | tuple) and self.knows(value):
            inside = ", ".join(map(self.of, value))
            return f"[{inside}]" if isinstance(value, list) else f"({inside},)"
        if isinstance(value, NotATensor):
            return "a" if len(self.arrays) == 1 else f"w[{_place(value, self.arrays)}]"
        return "xyzuv"[_place(value, self._tensors)] if _is_tensor(value) else _short(value)

    def in_unit(self, expression: str) -> str:
        """Returns the call of a unit that computes an expression of these names."""
        alone, tensors = len(self.arrays) == 1, [self.of(value) for value in self._tensors]
        weights = "array" if alone else f"[{', '.join(_outer(self.arrays))}]"
        inside, outside = (", ".join([first, *tensors]) for first in ("a" if alone else "w", weights))
        return f"hpfunc.unit(lambda {inside}: {expression})({outside})"

    def on_parts(self, expression: str) -> str:
        """Returns the same for each element alone, if all values are arrays of one spec, or numbers."""
        letters = "abcdefgh"[: len(self.arrays)]
        for i, letter in enumerate(letters):
            expression = expression.replace(f"w[{i}]", letter)
        return f"optree.tree_map(lambda {', '.join(letters)}: {expression}, {', '.join(_outer(self.arrays))})"


def _is_tensor(value: Any) -> bool:
    return not isinstance(value, NotATensor) and hasattr(value, "shape")


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


def _place(value: Any, values: Sequence[Any]) -> int:
    return next(i for i, each in enumerate(values) if each is value)


def _outer(arrays: Sequence[Any]) -> list[str]:
    return ["array", *(["other"] if len(arrays) == 2 else map("array{}".format, range(2, len(arrays) + 1)))]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 30 else "..."


def shortened(text: str) -> str:
    """Returns a text of an object for one line of a message."""
    first, *others = text.splitlines() or [""]
    return f"{first[:80]}..." if others or len(first) > 80 else first


def named(fn: Any) -> str:
    """Returns the name of a function, for a text that shows it."""
    return getattr(fn, "__name__", None) or shortened(repr(fn))


def _remedy(form: str, *values: Any, new: bool = False) -> str:
    """Returns the lines for an expression: a unit, and if it is one of elements, the map over this rank's parts.

    Args:
        form: the expression, with a place for each value.
        values: the array, and other values.
        new: whether an array is wanted, and not a tensor.
    """
    names = _Names(values)
    expression = form.format(*map(names.of, values))
    in_unit = f"{_UNIT}: {names.in_unit(expression)}"
    if "@" in form or any(map(_is_tensor, values)):
        return in_unit
    on_parts = f"on each rank's part: {'array = ' * new}{names.on_parts(expression)}"
    return on_parts if new else f"{in_unit}; {on_parts}"


def _shown(form: str, array: Any, other: Any) -> str:
    """Returns an expression in the words of the caller."""
    word = "other" if isinstance(other, NotATensor) else "x" if _is_tensor(other) else _short(other)
    return form.format("array", "array" if other is array else word)


def _refuse_binary(symbol: str, *, reflected: bool = False) -> Callable[[Any, Any], NoReturn]:
    def refuse(self: Any, other: Any) -> NoReturn:
        form = f"{{1}} {symbol} {{0}}" if reflected else f"{{0}} {symbol} {{1}}"
        rule = f"`{_shown(form, self, other)}` needs tensors, and an array is not one"
        raise self._refusal(rule, _remedy(form, self, other))

    return refuse


def _refuse_in_place(symbol: str) -> Callable[[Any, Any], NoReturn]:
    def refuse(self: Any, other: Any) -> NoReturn:
        rule = f"`{_shown(f'{{0}} {symbol}= {{1}}', self, other)}` would change an array, and arrays are immutable"
        raise self._refusal(rule, f"make a new one; {_remedy(f'{{0}} {symbol} {{1}}', self, other, new=True)}")

    return refuse


def _refuse_comparison(symbol: str) -> Callable[[Any, Any], Any]:
    def refuse(self: Any, other: Any) -> Any:
        if self is other and symbol in ("==", "!="):
            return symbol == "=="
        has_values = isinstance(other, NotATensor | int | float | complex) or _is_tensor(other)
        if symbol in ("==", "!=") and not has_values:
            return NotImplemented  # as for None: not equal
        form = f"{{0}} {symbol} {{1}}"
        rule = f"`{_shown(form, self, other)}` does not look at the values of an array"
        raise self._refusal(rule, f"`is` compares arrays as objects; {_remedy(form, self, other)}")

    return refuse


def _refuse_unary(shown: str, expression: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *_: Any) -> NoReturn:
        rule = f"`{shown.format('array')}` needs a tensor, and an array is not one"
        raise self._refusal(rule, _remedy(expression, self))

    return refuse


def _refuse_number(name: str) -> Callable[[Any], NoReturn]:
    def refuse(self: Any) -> NoReturn:
        raise self._refusal(f"`{name}(array)` needs a number", f"{name}(array.full()), if it has one element")

    return refuse


def _operators() -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {}
    for name, symbol in _BINARY.items():
        found |= {name: _refuse_binary(symbol), f"r{name}": _refuse_binary(symbol, reflected=True)}
        found[f"i{name}"] = _refuse_in_place(symbol)
    found |= {name: _refuse_comparison(symbol) for name, symbol in _COMPARISONS.items()}
    found |= {name: _refuse_unary(*forms) for name, forms in _UNARY.items()}
    return found | {name: _refuse_number(kind) for name, kind in _NUMBERS.items()}


for _name, _function in _operators().items():
    setattr(NotATensor, f"__{_name}__", _function)
