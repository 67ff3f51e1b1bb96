"""ArrayCode to text to functions: the only place of the compiler that calls ``compile``.

The text of a program is one file for `linecache`, so that tracebacks, debuggers and profilers show it. It consists of names made here and of rows'
names.
"""

from __future__ import annotations

import itertools
import linecache
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from aiograd.compiler.calls import ArrayCode, Call, Form, Memory, Ref
from aiograd.running.trees import leaves_of

#: bytes from which on a value that is not needed any more is dropped
DROPPED_BYTES = 1 << 14

#: numpy deprecates a positional `out` for these, and for no others
_OUT_BY_NAME = (np.maximum, np.minimum)

_numbers = itertools.count(1)


class SourceFile:
    """The text of a program, which grows by a function at a time; `linecache` knows it for as long as one of them lives.

    Attributes:
        name: of the file.
        text: all of it.
    """

    def __init__(self) -> None:
        self.name: str = f"<aiograd program {next(_numbers)}>"
        self.text: str = ""
        weakref.finalize(self, linecache.cache.pop, self.name, None).atexit = False

    def add(self, text: str) -> int:
        """Append a text after an empty line; returns the lines before it."""
        if self.text:
            self.text += "\n"
        before = self.text.count("\n")
        self.text += text
        linecache.cache[self.name] = (len(self.text), None, self.text.splitlines(keepends=True), self.name)
        return before


def load(code: ArrayCode, file: SourceFile) -> Callable[..., Any]:
    """The function that runs this code; its text is added to a file."""
    names = Names()
    return load_text(code.name, text_of(code, names), names, file)


def load_text(name: str, text: str, names: Names, file: SourceFile) -> Callable[..., Any]:
    """The function `name` of a text that is added to a file."""
    before = file.add(text)
    names.namespace["__file__"] = file
    exec(compile("\n" * before + text, file.name, "exec"), names.namespace)  # noqa: S102 - see the module
    function: Callable[..., Any] = names.namespace.pop(name)
    return function


def load_checks(name: str, text: str, names: Names) -> Callable[..., Any]:
    """The function `name` of a text that compares objects; no traceback goes through it, so it is not registered."""
    exec(compile(text, f"<aiograd checks {next(_numbers)}>", "exec"), names.namespace)  # noqa: S102 - see the module
    function: Callable[..., Any] = names.namespace[name]
    return function


def text_of(code: ArrayCode, names: Names) -> str:
    """The text of a function of straight-line calls, with a comment per statement."""
    heads = [parameter.name if isinstance(parameter, Ref) else parameter[0] for parameter in code.parameters]
    lines = [f"def {code.name}({', '.join(heads)}):"]
    for parameter in code.parameters:
        if not isinstance(parameter, Ref) and parameter[1]:
            lines.append(f"    {', '.join(ref.name for ref in parameter[1])}, = {parameter[0]}")
            if code.frees and parameter[0] == "saved":
                lines.append("    saved.clear()")
    drops = _drops(code)
    errors: tuple[tuple[str, str], ...] = ()
    for number, (call, handling) in enumerate(zip(code.calls, _handling(code), strict=True)):
        if handling != errors and handling:
            handled = ", ".join(f"{kind}={how!r}" for kind, how in handling)
            lines.append(f"    with {names.of('errstate', np.errstate)}({handled}):")
        errors = handling
        comment = f"  # {call.comment}" if call.comment else ""
        lines.append(f"{'        ' if errors else '    '}{_statement(call, names)}{comment}")
        if number in drops:
            lines.append(f"{'        ' if errors else '    '}del {', '.join(ref.name for ref in drops[number])}")
    lines.append(f"    return {_text(code.results, names)}")
    return "\n".join(lines) + "\n"


def _handling(code: ArrayCode) -> list[tuple[tuple[str, str], ...]]:
    """How each call's floating point errors are handled: where there can be none, as before and after it, since a change costs more than a call."""
    found: list[tuple[tuple[str, str], ...]] = [call.errors for call in code.calls]
    last = -1
    for number, call in enumerate(code.calls):
        if call.computes:
            if last >= 0 and found[last] == call.errors:
                found[last:number] = [call.errors] * (number - last)
            last = number
        else:
            found[number] = ()
    return found


def _statement(call: Call, names: Names) -> str:
    arguments = [_text(argument, names) for argument in call.arguments]
    if call.form is Form.STORE and call.out is not None:
        return f"{call.out.name}[{arguments[1]}] = {arguments[0]}"
    if call.form is Form.INDEX:
        text = f"{arguments[0]}[{arguments[1]}]"
    elif call.form is Form.ATTRIBUTE:
        text = f"{arguments[0]}.{call.function}"
    else:
        function = names.of(call.label, call.function)
        if call.form is Form.METHOD:
            function = f"{arguments.pop(0)}.{call.function}"
        if call.out is not None:
            arguments.append(f"out={call.out.name}" if call.function in _OUT_BY_NAME else call.out.name)
        arguments += [f"{name}={_text(value, names)}" for name, value in call.options.items()]
        text = f"{function}({', '.join(arguments)})"
    if not call.results:
        return text
    targets = [ref.name for ref in call.results]
    if call.nested:
        targets = [f"({', '.join(targets[: call.nested])},)", *targets[call.nested :]]
    return f"{', '.join(targets)}{',' if call.unpacks else ''} = {text}"


def _drops(code: ArrayCode) -> dict[int, list[Ref]]:
    """By call: large values that are needed no more after it; all of them where the code `frees`."""
    if code.frees:
        ends: dict[int, list[Ref]] = {}
        returned = {ref.name for ref in leaves_of(code.results, Ref)}
        names = {ref.name: number for number, call in enumerate(code.calls) for ref in (*call.refs(), *call.results)}
        every = {ref.name: ref for call in code.calls for ref in (*call.refs(), *call.results)}
        for name, number in names.items():
            if name not in returned:
                ends.setdefault(number, []).append(every[name])
        return ends
    if not any([ref.nbytes >= DROPPED_BYTES for call in code.calls for ref in call.results]):
        return {}
    memory = Memory(code)
    # an array that stores fill is another Ref behind each store, under the same name
    last = {ref.name: (number, ref) for number, call in enumerate(code.calls) for ref in (*call.refs(), *call.results)}
    kept = {memory.of(ref) for ref in (*code.given(), *leaves_of(code.results, Ref))}
    found: dict[int, list[Ref]] = {}
    for number, ref in last.values():
        if ref.nbytes >= DROPPED_BYTES and memory.of(ref) not in kept:
            found.setdefault(number, []).append(ref)
    return found


def _text(value: Any, names: Names) -> str:
    """Text of an argument."""
    if isinstance(value, Ref):
        return value.name
    cls = value.__class__
    if value is None or cls in (bool, int, str) or (cls is float and math.isfinite(value)):
        return repr(value)
    if cls is tuple and not _has_slices(value):
        return f"({', '.join([_text(item, names) for item in value])}{',' if value else ''})"
    if cls is list:
        return f"[{', '.join([_text(item, names) for item in value])}]"
    if leaves_of(value, Ref):
        if cls is slice:
            return f"slice({_text(value.start, names)}, {_text(value.stop, names)}, {_text(value.step, names)})"
        return f"({', '.join([_text(item, names) for item in value])},)"
    return names.constant(value)


def _has_slices(value: tuple[Any, ...]) -> bool:
    return any(item.__class__ is slice for item in value)


class Names:
    """Names for the objects that a program's text refers to."""

    def __init__(self) -> None:
        self.namespace: dict[str, Any] = {"__name__": __name__}
        self._known: dict[Any, str] = {}
        self._counts: dict[str, int] = {}

    def of(self, prefix: str, thing: Any, key: Any = None) -> str:
        """The name of an object, the same each time: `prefix`, with a number where the prefix is taken."""
        key = (prefix, id(thing) if key is None else key)
        name = self._known.get(key)
        if name is None:
            name = prefix
            while name in self.namespace:
                self._counts[prefix] = number = self._counts.get(prefix, 1) + 1
                name = f"{prefix}_{number}"
            self.namespace[name] = thing
            self._known[key] = name
        return name

    def constant(self, value: Any) -> str:
        """The name of a constant; equal indices have one name."""
        return self.of("k", value, repr(value) if value.__class__ in (slice, tuple) and not leaves_of(value, np.ndarray) else None)
