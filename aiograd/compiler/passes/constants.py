"""Constants: pure calls of constants are done once, when the program is made; numbers become arrays then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from aiograd.compiler.calls import ArrayCode, Call, Form, Memory, Ref


def with_constants(code: ArrayCode) -> ArrayCode:
    """The code with the results of calls that have no array among their arguments in the place of the calls.

    Arrays that are written into, or that others get to see, are made anew by every run.
    """
    memory = Memory(code)
    changing = {memory.of(ref) for ref in (*code.written(), *code.visible())}
    known: dict[Ref, Any] = {}
    calls: list[Call] = []
    for call in code.calls:
        call = _with_arrays(call.replaced(known))
        if call.form is Form.CALL and call.pure and len(call.results) == 1 and not call.refs() and memory.of(call.results[0]) not in changing:
            known[call.results[0]] = call.function(*call.arguments, **call.options)
        else:
            calls.append(call)
    return replace(code, calls=tuple(calls))


def _with_arrays(call: Call) -> Call:
    """A call of a ufunc with arrays of no axes in the place of numbers, which cost more. Beside arrays a number takes their dtype."""
    if not call.is_elementwise or not any([argument.__class__ in (int, float) for argument in call.arguments]):
        return call
    dtypes = {ref.dtype for ref in call.reads}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    if dtype is None or dtype.char not in "fd" or any([ref.shape == () for ref in call.reads]):
        return call
    arguments = tuple([np.array(each, dtype) if each.__class__ in (int, float) and _fits(each, dtype) else each for each in call.arguments])
    return call.but(arguments=arguments)


def _fits(number: float, dtype: np.dtype[Any]) -> bool:
    return bool(abs(number) <= np.finfo(dtype).max)
