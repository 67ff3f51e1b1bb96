"""The kinds of reads: each an expression, as text for generated code and as a function, and the comparison of its values.

Note [Numbers by value, objects by identity]
    Numbers, flags and strings count by type and value, containers of the standard library by their items, everything else by identity. So an equal
    list may take the place of a list, since the same is read from both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from aiograd.tensors.accumulated import gradient_of

#: numbers, flags and strings
PLAIN: tuple[type[Any], ...] = (int, float, complex, str, bytes, np.generic)
CONTAINERS = (tuple, list, dict, set, frozenset, deque)
#: nothing under a name
ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "nothing"})()


class ReadKind(NamedTuple):
    """One way to read.

    Attributes:
        text: the expression, with ``{h}`` for the holder and ``{k}`` for the key.
        now: the same as a function of both.
        may_return: True if another value may well come back, of any type.
    """

    text: str
    now: Callable[[Any, Any], Any]
    may_return: bool = False


def member(cls: type[Any], name: str) -> Any:
    """The attribute of a class or its bases under a name, without the code of a descriptor."""
    for each in cls.__mro__:
        found = each.__dict__.get(name, ABSENT)
        if found is not ABSENT:
            return found
    return ABSENT


def _member_after(cls: type[Any], key: tuple[type[Any], str]) -> Any:
    bases = cls.__mro__
    for each in bases[bases.index(key[0]) + 1 :]:
        if key[1] in each.__dict__:
            return each.__dict__[key[1]]
    return ABSENT


def _is_missing(holder: Any, name: str) -> bool:
    bases = holder.__mro__ if isinstance(holder, type) else ()
    own = getattr(holder, "__dict__", ())
    return name not in own and member(type(holder), name) is ABSENT and not any(name in base.__dict__ for base in bases)


def items_of(container: Any) -> list[Any]:
    """The items of a container of the standard library, of a dict its keys and values, without code of a subclass."""
    if is_a(container, dict):
        return [*dict.__iter__(container), *dict.values(container)]
    kinds: tuple[Any, ...] = CONTAINERS
    for cls in kinds:
        if is_a(container, cls):
            return [*cls.__iter__(container)]
    if hasattr(container, "keys"):
        return [*container, *container.values()]
    return [*container]


def has_hooks(node: Any, input_nr: int) -> bool:
    """True if something is called with the gradient that arrives at an input of a node."""
    node, input_nr = node.place_of(input_nr)
    extra = None if node is None else node._extra
    return extra is not None and bool(extra.tensor_hooks.get(input_nr) or input_nr in extra.retain_hooks)


def _call(function: Any, key: tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]) -> Any:
    return function(*key[0], **dict(key[1]))


GLOBAL = ReadKind("{h}.get({k}, {absent})", lambda names, name: names.get(name, ABSENT))
CELL = ReadKind("{h}.cell_contents", lambda cell, _: cell.cell_contents)
ATTRIBUTE = ReadKind("{h}.{k}", getattr)
METHOD = ReadKind("{h}.{k}.__func__", lambda holder, name: getattr(holder, name).__func__)
#: of a class, for a descriptor with code that is watched when it runs
MEMBER = ReadKind("{member}({h}, {k})", member)
MISSING = ReadKind("{missing}({h}, {k})", _is_missing)
#: an attribute from the classes after a given one in the resolution order, as `super` finds it
SUPER = ReadKind("{after}({h}, {k})", _member_after)
#: of an object, for such a descriptor of its class that an attribute of its own would come before
NOT_OWN = ReadKind("({k} not in {h}.__dict__)", lambda holder, name: name not in holder.__dict__)
CLASS = ReadKind("{h}.__class__", lambda holder, _: holder.__class__)
ITEM = ReadKind("{h}[{k}]", lambda holder, key: holder[key])
CONTAINS = ReadKind("({k} in {h})", lambda holder, key: key in holder)
CONTENT = ReadKind("{items}({h})", lambda holder, _: items_of(holder))
LIST = ReadKind("[*{h}]", lambda holder, _: [*holder])
DICT = ReadKind("[*{h}, *{h}.values()]", lambda holder, _: [*holder, *holder.values()])
#: of a class, which gives a new view of its names each time
NAMES = ReadKind("[*{h}.__dict__, *{h}.__dict__.values()]", lambda cls, _: [*cls.__dict__, *cls.__dict__.values()])
BYTES = ReadKind("{h}.tobytes()", lambda holder, _: holder.tobytes())
BYTEARRAY = ReadKind("bytes({h})", lambda holder, _: bytes(holder))
ARRAY = ReadKind("({h}.shape, {h}.dtype, {h}.tobytes())", lambda holder, _: (holder.shape, holder.dtype, holder.tobytes()))
CALLED = ReadKind("{call}({h}, {k})", _call)
CONTEXT = ReadKind("{h}.get(*{k})", lambda holder, arguments: holder.get(*arguments), may_return=True)
#: of a Tensor, which may have become a leaf, or be one no more
HAS_GRADIENT = ReadKind(
    "(({h}._node.grad if {h}._node is not None else {h}._x and {h}._x.grad) is not None)", lambda tensor, _: gradient_of(tensor) is not None
)
HAS_HOOKS = ReadKind("{hooks}({h}, {k})", has_hooks)
IS_DEAD = ReadKind("({h}() is None)", lambda reference, _: reference() is None)

#: kinds with a copy of all items as their value; kinds that read one place, which the call may have set
CONTENTS = (CONTENT, LIST, DICT, NAMES)
OF_ONE = (GLOBAL, CELL, ATTRIBUTE, METHOD, MEMBER, MISSING, CLASS, ITEM)

#: by the names that the texts of kinds use
HELPERS = {"absent": ABSENT, "member": member, "after": _member_after, "missing": _is_missing, "items": items_of, "call": _call, "hooks": has_hooks}


def is_a(thing: Any, kind: type[Any] | tuple[type[Any], ...]) -> bool:
    """True for an object of a class; unlike `isinstance` it runs no code of the object."""
    return issubclass(type(thing), kind)


def is_same(a: Any, b: Any) -> bool:
    """True if two values count as one, see Note [Numbers by value, objects by identity]; 0.0 is another number than -0.0."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if is_a(a, PLAIN):
        return bool((a == b and (a != 0 or str(a) == str(b))) or (a != a and b != b))
    if is_a(a, CONTAINERS):
        try:
            return len(a) == len(b) and all(map(is_same, items_of(a), items_of(b)))
        except RecursionError:  # it holds itself
            return False
    return False
