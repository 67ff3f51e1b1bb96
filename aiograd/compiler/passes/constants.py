"""Constants: pure calls of constants are done once, when the program is made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aiograd.compiler.calls import Call, Code, Form, Memory, Ref
from aiograd.trees import map_tree


def with_constants(code: Code) -> Code:
    """The code with the results of calls that have no array among their arguments in the place of the calls.

    Arrays that are written into, or that others get to see, are made anew by every run.
    """
    memory = Memory(code)
    changing = {memory.of(ref) for ref in (*code.written(), *code.visible())}
    known: dict[Ref, Any] = {}
    calls: list[Call] = []
    for call in code.calls:
        arguments, options = map_tree(lambda ref: known.get(ref, ref), (call.arguments, call.options), Ref) if known else (call.arguments, call.options)
        if known:
            call = replace(call, arguments=arguments, options=options)
        if call.form is Form.CALL and call.pure and len(call.results) == 1 and not call.refs() and memory.of(call.results[0]) not in changing:
            known[call.results[0]] = call.function(*arguments, **options)
        else:
            calls.append(call)
    return replace(code, calls=tuple(calls)) if known else code
