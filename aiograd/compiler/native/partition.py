"""ArrayCode to a function of which as much as possible is native.

Where every call has a native form the function is one native function. Otherwise it stays Python, with a native function in the place of each run of
calls that have a native form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from aiograd.compiler.calls import ArrayCode, Call, Form, Memory, Ref
from aiograd.compiler.native.build import NativeText, load_native, native_text
from aiograd.compiler.native.expansions import EXPANSIONS
from aiograd.compiler.native.lowering import reason_against
from aiograd.compiler.native.placing import Unsupported
from aiograd.compiler.native.turns import in_turns
from aiograd.compiler.source import SourceFile, load
from aiograd.running.trees import leaves_of

#: calls that compute, below which a run of calls stays Python
FEWEST = 2


class LateFunction:
    """The numpy function of a code, made when it is first called."""

    def __init__(self, code: ArrayCode, file: SourceFile) -> None:
        self._code = code
        self._file = file
        self._function: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        function = self._function
        if function is None:
            function = self._function = load(self._code, self._file)
        return function(*arguments)


@dataclass
class NativeParts:
    """The native parts of a function.

    Attributes:
        texts: of its native functions.
        fallbacks: by call that stays Python, the reason.
        is_dynamic: True if its texts are without sizes, see `aiograd.compiler.native.writer`.
    """

    texts: list[NativeText] = field(default_factory=list)
    fallbacks: dict[str, str] = field(default_factory=dict)
    is_dynamic: bool = False


def native_function(code: ArrayCode, file: SourceFile, parts: NativeParts) -> Callable[..., Any] | None:
    """The function of a code, as native as possible; None if none of it is worth it.

    Args:
        code: the code.
        file: that the text of Python functions is added to.
        parts: receives the texts and the reasons.
    """
    whole = ""
    if _computing(code.calls) >= 1 and not any(map(_is_opaque, code.calls)):
        try:
            return _native(code, frozenset(code.arena), file, parts)
        except Unsupported as error:
            whole = str(error)
    written = frozenset((*code.arena, *_empty(code.calls)))
    reasons = [reason_against(call, written) for call in in_turns(code.calls)]
    for call, reason in zip(code.calls, reasons, strict=True):
        if reason:
            parts.fallbacks.setdefault(f"{call.label or call.form.name.lower()}: {reason}", call.comment)
    if not any(reasons):
        if whole:
            parts.fallbacks.setdefault(whole, "")
        return None
    calls: list[Call] = []
    found = False
    last = {ref: number for number, call in enumerate(code.calls) for ref in call.refs()}
    last.update(dict.fromkeys(leaves_of(code.results, Ref), len(code.calls)))
    for begin, end, is_native in _runs(reasons):
        run = code.calls[begin:end]
        made = _segment(written, run, end, last, file, parts) if is_native and _computing(run) >= FEWEST else None
        found = found or made is not None
        calls += made or run
    return load(replace(code, calls=tuple(calls)), file) if found else None


def _is_opaque(call: Call) -> bool:
    """True for a call with results that are no arrays, as far as is known; no native function makes it."""
    return any([ref.dtype is None for ref in call.results]) and (call.function.__hash__ is None or call.function not in EXPANSIONS)


def _empty(calls: tuple[Call, ...]) -> set[Ref]:
    """Arrays that are made empty, and filled by stores: these can be done again."""
    found: set[Ref] = set()
    for call in calls:
        if call.function is np.empty or (call.form is Form.STORE and call.out in found):
            found.update(call.results)
    return found


def _runs(reasons: list[str]) -> Iterator[tuple[int, int, bool]]:
    begin = 0
    for number in range(1, len(reasons) + 1):
        if number == len(reasons) or bool(reasons[number]) is not bool(reasons[begin]):
            yield begin, number, not reasons[begin]
            begin = number


def _computing(calls: tuple[Call, ...]) -> int:
    return sum([call.computes or call.form is Form.STORE for call in calls])


def _native(code: ArrayCode, written: frozenset[Ref], file: SourceFile, parts: NativeParts) -> Callable[..., Any]:
    text = native_text(code, written, is_dynamic=parts.is_dynamic)
    parts.texts.append(text)
    return load_native(text, LateFunction(code, file))


def _segment(
    written: frozenset[Ref], run: tuple[Call, ...], end: int, last: dict[Ref, int], file: SourceFile, parts: NativeParts
) -> tuple[Call, ...] | None:
    """One call in the place of several; None if it cannot be."""
    made = {ref for call in run for ref in call.results}
    given = tuple(dict.fromkeys([ref for call in run for ref in call.refs() if ref not in made]))
    results = tuple([ref for call in run for ref in call.results if last.get(ref, -1) >= end])
    if not results:
        return None
    memory = Memory(ArrayCode("", given, run, results))
    inside = ArrayCode(f"native_{len(parts.texts) + 1}", given, run, results)
    try:
        function = _native(inside, written, file, parts)
    except Unsupported as reason:
        parts.fallbacks.setdefault(str(reason), run[0].comment)
        return None
    scalars = _scalars(run)
    fresh = not memory.shared(results, given)
    kept = tuple([Ref(f"{ref.name}_array", ref.shape, ref.dtype, ref.strides) if ref in scalars else ref for ref in results])
    call = Call(Form.CALL, function, inside.name, given, kept, unpacks=True, fresh=fresh, comment=run[0].comment)
    numbers = [Call(Form.INDEX, None, "", (array, ()), (ref,)) for array, ref in zip(kept, results, strict=True) if ref in scalars]
    return call, *numbers


def _scalars(run: tuple[Call, ...]) -> set[Ref]:
    """The results that numpy gives as numbers, not as arrays of no axes."""
    found: set[Ref] = set()
    for call in run:
        for ref in call.results:
            if ref.shape != () or call.out is not None or call.function is np.asarray:
                continue
            is_number = call.form is Form.CALL and call.fresh
            if call.form is Form.METHOD:
                is_number = call.arguments[0] in found
            if call.form is Form.INDEX:
                index = call.arguments[1] if call.arguments[1].__class__ is tuple else (call.arguments[1],)
                is_number = ... not in index
            if is_number and call.function not in (np.empty, np.zeros, np.ones, np.where):
                found.add(ref)
    return found
