"""Common subexpressions: a pure call of the same arguments is done once.

Note [Arrays that may be shared]
    Results of the program are separate arrays in the eager call, so they are not shared; nor are arrays that are written into. A call
    with an effect may change arrays, so nothing is shared across it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from aiograd.compiler.calls import ArrayCode, Call, Form, Memory, Ref
from aiograd.ops.indexing import is_basic
from aiograd.running.trees import map_tree


def with_common_calls_once(code: ArrayCode) -> ArrayCode:
    """The code with the results of the first of several equal calls in the place of the others'."""
    memory = Memory(code)
    seen = {*code.written(), *code.visible()}
    apart = {memory.of(ref) for ref in seen}
    names: dict[Ref, Ref] = {}
    known: dict[Any, tuple[Ref, ...]] = {}
    calls: list[Call] = []
    for call in code.calls:
        call = call.replaced(names)
        if not call.pure:
            known.clear()
        elif call.out is None and not any(ref in seen if _is_view(call) else memory.of(ref) in apart for ref in call.results):
            key = (call.form, _key(call.function), _key(call.arguments), _key(call.options), call.errors)
            same = known.setdefault(key, call.results)
            if same is not call.results:
                names.update(zip(call.results, same, strict=True))
                continue
        calls.append(call)
    return replace(code, calls=tuple(calls), results=map_tree(lambda ref: names.get(ref, ref), code.results, Ref)) if names else code


def _is_view(call: Call) -> bool:
    """True for a call that returns a view: two equal views show the same memory anyway."""
    return call.form is Form.ATTRIBUTE or (call.form is Form.INDEX and is_basic(call.arguments[1]))


def _key(value: Any) -> Hashable:
    if value.__class__ is Ref:
        return id(value)
    if isinstance(value, (tuple, list)):
        return tuple([_key(item) for item in value])
    if isinstance(value, dict):
        return tuple([(name, _key(item)) for name, item in value.items()])
    if isinstance(value, slice):
        return slice, _key(value.start), _key(value.stop), _key(value.step)
    if value is None or value.__class__ in (bool, int, str):
        return value.__class__, value
    return id(value)
