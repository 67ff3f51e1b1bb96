"""Recording arrays: a row's forward or rule, run on them, becomes the numpy calls that it makes.

This is the third reading of the op tables, beside host arrays and Tensors. A recording array has an array of the shape, dtype and strides of every
run, and passes for it: it has its ``__class__``, so functions that treat plain arrays in a way of their own do so here too.

Note [What cannot be traced]
    A function that asks for values, strides or memory, writes into an array that it did not make, or calls compiled kernels raises `Untraceable`;
    then the function itself is one call of the program. So nothing is lost but time. The same holds for a function of an array that is no recording
    one: its numbers may be others in the next run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from aiograd.compiler.calls import Call, Form, Ref
from aiograd.running.trees import leaves_of, map_tree

_FACTS = frozenset({"shape", "dtype", "ndim", "size", "itemsize", "nbytes"})
_ATTRIBUTES = frozenset({"T", "mT", "real", "imag"})
_NEW = frozenset({"astype", "copy", "repeat", "take"})
_METHODS = frozenset({"reshape", "transpose", "swapaxes", "ravel", "squeeze", "diagonal", "view", "conj", "conjugate"}) | _NEW
_WRITING = frozenset({np.copyto, np.put, np.place, np.putmask, np.put_along_axis, np.fill_diagonal})
_PLAIN = frozenset({np.shape, np.ndim, np.size, np.result_type, np.can_cast, np.iscomplexobj, np.isrealobj})
_REDUCTION = frozenset({"axis", "dtype", "keepdims"})
#: results of these are new arrays
_MAKING = frozenset({
    np.concatenate, np.stack, np.where, np.zeros_like, np.ones_like, np.full_like, np.empty_like, np.copy, np.tile, np.repeat, np.roll,
})  # fmt: skip

_NESTED = (tuple, list, dict, slice)
#: scalars have operators of their own for these
_OTHER_ON_SCALARS = frozenset({np.power, np.floor_divide, np.remainder})
#: numpy makes a new object each time it is asked for a ``reduce``
_REDUCES: dict[np.ufunc, Any] = {}


class Untraceable(Exception):
    """See Note [What cannot be traced]."""


class Recorded(NDArrayOperatorsMixin):
    """An array of a program that is being made.

    Args:
        tracer: the Tracer that notes every call on the array.
        ref: its name.
        value: an array like it.
        made: True if it owns its memory.
    """

    __slots__ = ("tracer", "ref", "value", "made")

    __aiograd_priority__ = 0

    def __init__(self, tracer: Tracer, ref: Ref, value: Any, made: bool) -> None:
        self.tracer = tracer
        self.ref = ref
        self.value = value
        self.made = made

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.value)

    def __getattr__(self, name: str) -> Any:
        if name in _FACTS:
            return getattr(self.value, name)
        if name in _ATTRIBUTES:
            self.made = False
            return self.tracer.add(Form.ATTRIBUTE, name, name, (self,), {}, getattr(self.value, name))
        if name in _METHODS:
            return lambda *args, **options: self._method(name, args, options)
        if name == "dot" and self.value.ndim == 2:
            return self._dot
        raise Untraceable(name)

    def _dot(self, other: Any) -> Any:
        if type(other) is not Recorded or other.value.ndim != 2:
            raise Untraceable("dot")
        result = np.dot(self.value, other.value)
        return self.tracer.add(Form.CALL, np.dot, "dot", (self, other), {}, result, fresh=True)

    def _method(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if name not in _NEW or options.get("copy", True) is not True:
            self.made = False
        result = getattr(self.value, name)(*map_tree(_value_of, args, Recorded), **options)
        return self.tracer.add(Form.METHOD, name, name, (self, *args), options, result, fresh=name in _NEW and not options)

    def __getitem__(self, index: Any) -> Any:
        self.made = False
        result = self.value[map_tree(_value_of, index, Recorded)]
        return self.tracer.add(Form.INDEX, None, "", (self, index), {}, result)

    def __len__(self) -> int:
        return len(self.value)

    def _refused(self, *args: Any, **options: Any) -> Any:
        raise Untraceable("a value is asked for")

    # an array takes short cuts for some exponents
    __pow__ = __rpow__ = __ipow__ = _refused
    __bool__ = __int__ = __float__ = __complex__ = __index__ = __iter__ = __array__ = __setitem__ = __contains__ = _refused
    __hash__ = None  # type: ignore[assignment]

    def __aiograd_op__(self, op: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return self.tracer.row(op, args, options)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        values = _values(inputs)
        if method == "reduce" and out is None and options.keys() <= _REDUCTION:
            axis, dtype, keepdims = options.get("axis", 0), options.get("dtype"), options.get("keepdims", False)
            reduce = _REDUCES.setdefault(ufunc, ufunc.reduce)
            result = reduce(*values, axis=axis, dtype=dtype, keepdims=keepdims)
            arguments = (*inputs, axis, dtype, None, keepdims) if dtype is not None or keepdims else (*inputs, axis)
            return self.tracer.add(Form.CALL, reduce, f"{ufunc.__name__}_reduce", arguments, {}, result, fresh=True)
        if method != "__call__" or options or ufunc.nout != 1:
            raise Untraceable(method)
        if out is None:
            result = ufunc(*values)
            if isinstance(result, np.generic) and (result.dtype.kind == "c" or ufunc in _OTHER_ON_SCALARS):
                raise Untraceable("an operator, on scalars, need not have the bits of the ufunc")
            return self.tracer.add(Form.CALL, ufunc, ufunc.__name__, inputs, {}, result, fresh=True)
        (target,) = out
        if type(target) is not Recorded or not target.made or type(target.value) is not np.ndarray:
            raise Untraceable("out")
        return self.tracer.write(ufunc, ufunc.__name__, inputs, target)

    def __array_function__(self, function: Callable[..., Any], types: Any, args: Any, options: Any) -> Any:
        if function in _WRITING or options.get("out") is not None:
            raise Untraceable(function.__name__)
        result = function(*_values(args), **map_tree(_value_of, options, Recorded))
        if function in _PLAIN:
            return result
        fresh = function in _MAKING
        if not fresh:
            for each in leaves_of((args, options), Recorded):
                each.made = False
        return self.tracer.add(Form.CALL, function, function.__name__, args, options, result, fresh=fresh)


def _value_of(recorded: Recorded) -> Any:
    return recorded.value


class Tracer:
    """Notes the calls of one `ArrayCode`.

    Args:
        prefix: the prefix of names that are made here for arrays without one.
        numbers: by name of a Ref, the array of a number that is the same in every run.

    Attributes:
        calls: the calls noted so far.
        comment: the comment of the calls that follow.
    """

    def __init__(self, prefix: str, numbers: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.calls: list[Call] = []
        self.comment = ""
        self._prefix = prefix
        self._numbers = numbers
        self._count = 0
        self._errors: Any = np.geterr()

    def trace(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any] | None = None) -> Any:
        """Run a function on recording arrays and note the calls that it makes; one that asks for a number is given it, if it is known.

        Raises:
            Untraceable: nothing was taken down.
        """
        options = options or {}
        if any([type(each) is np.ndarray for each in leaves_of((args, options), np.ndarray)]):
            raise Untraceable("an array with numbers that may change")
        try:
            return self._traced(function, args, options)
        except Untraceable:
            if not any([each.ref.name in self._numbers for each in leaves_of((args, options), Recorded)]):
                raise
        known: tuple[Any, Any] = map_tree(lambda each: self._numbers.get(each.ref.name, each), (args, options), Recorded)
        return self._traced(function, *known)

    def _traced(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        before = len(self.calls)
        try:
            return function(*args, **options)
        except Exception as error:
            del self.calls[before:]
            raise Untraceable(str(error)) from error

    def recorded(self, name: str, value: Any, *, made: bool = False) -> Recorded:
        """A recording array."""
        return Recorded(self, self.ref(name, value), value, made)

    def ref(self, name: str, value: Any) -> Ref:
        """A Ref like an array or scalar; without a name it gets the next one."""
        if not name:
            self._count += 1
            name = f"{self._prefix}{self._count}"
        if isinstance(value, (np.ndarray, np.generic)):
            return Ref(name, value.shape, value.dtype, value.strides)
        return Ref(name, value.shape, value.dtype) if hasattr(value, "__aiograd_device__") else Ref(name)

    def add(
        self,
        form: Form,
        function: Any,
        label: str,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        result: Any,
        *,
        fresh: bool = False,
        pure: bool = True,
        opaque: bool = False,
    ) -> Any:
        """Note a call with this result; returns the result as recording arrays.

        Args:
            opaque: the result may be anything: None, or no array.
        """
        unpacks = result.__class__ in (tuple, list) or isinstance(result, tuple)
        parts = [self._made(part, fresh, opaque) for part in (result if unpacks else (result,))]
        refs = tuple([part.ref for part in parts])
        named = map_tree(_ref_of, options, Recorded) if options else options
        self.calls.append(
            Call(
                form, function, label, _refs(arguments), refs, named, unpacks=unpacks, pure=pure, fresh=fresh, errors=self._handled(),
                comment=self.comment,
            )
        )
        given = [None if part.value is None else part for part in parts]
        return type(result)(given) if unpacks else given[0]

    def as_array(self, recorded: Recorded) -> Recorded:
        """An array of no axes in the place of a scalar."""
        if isinstance(recorded.value, np.ndarray):
            return recorded
        array: Recorded = self.add(Form.CALL, np.asarray, "asarray", (recorded,), {}, np.asarray(recorded.value))
        return array

    def _made(self, value: Any, fresh: bool, opaque: bool) -> Recorded:
        if not opaque and not isinstance(value, (np.ndarray, np.generic)):
            raise Untraceable(f"a {type(value).__name__}")
        return self.recorded("", value, made=fresh)

    def write(self, function: Callable[..., Any], label: str, arguments: tuple[Any, ...], out: Recorded) -> Recorded:
        """Note a call that writes its result into the memory of an array made here."""
        function(*_values(arguments), out=out.value)
        ref = self.ref("", out.value)
        self.calls.append(
            Call(
                Form.CALL, function, label, _refs(arguments), (ref,), out=out.ref, errors=self._handled(), comment=self.comment
            )
        )
        out.ref = ref
        return out

    def row(self, op: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Note a row that a rule calls: as the calls that it makes, or as one call."""
        try:
            return self.trace(op.forward, args, options)
        except Untraceable:
            result = op.forward(*_values(args), **map_tree(_value_of, options, Recorded))
            return self.add(Form.CALL, op.forward, op.name, args, options, result)

    def _handled(self) -> tuple[tuple[str, str], ...]:
        now: Any = np.geterr()
        return () if now == self._errors else tuple((kind, how) for kind, how in now.items() if self._errors[kind] != how)

    @contextlib.contextmanager
    def watching(self, errors: Any = None) -> Iterator[None]:
        """Floating point errors are handled so that a function's own `numpy.errstate` can be told from the errstate around it.

        Args:
            errors: the handling of floating point errors, as for `numpy.errstate`; None: all are ignored.
        """
        ways = dict.fromkeys(np.geterr(), "ignore") if errors is None else errors
        ways = {kind: "call" if how == "ignore" else how for kind, how in ways.items()}
        handler = np.geterrcall() if errors is not None and "call" in errors.values() else _ignored
        with np.errstate(call=handler, **ways):  # type: ignore[arg-type]
            self._errors = np.geterr()
            yield


def _ignored(kind: str, flag: int) -> None:
    """A floating point error happened."""


def _refs(arguments: Any) -> Any:
    """Arguments with Refs in the place of recording arrays."""
    if any([type(each) in _NESTED for each in arguments]):
        return map_tree(_ref_of, arguments, Recorded)
    return tuple([each.ref if type(each) is Recorded else each for each in arguments])


def _values(arguments: Any) -> Any:
    """Arguments with arrays in the place of recording arrays."""
    if any([type(each) in _NESTED for each in arguments]):
        return map_tree(_value_of, arguments, Recorded)
    return tuple([each.value if type(each) is Recorded else each for each in arguments])


def _ref_of(recorded: Recorded) -> Ref:
    return recorded.ref
