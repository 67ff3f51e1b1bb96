"""The instructions of a function that read or change something beside its local variables, with the places of their operands.

A pure function of a code object: `watched_in` makes a table from the offset of an instruction to an `Instruction`, which has its effect and the
places of its operands (see Note [Reading the stack] in `aiograd.compiler.watching.stack`).

Note [Counters]
    ``self.calls += 1`` reads an attribute and changes it, but the value that is read goes nowhere else. It is found in the code: that value stays on
    the stack until a binary operation takes it, and the operation's result is stored at once under the same name. Such a read has no influence on the
    function's results, so it need not be the same at the next call.
"""

from __future__ import annotations

import dis
import enum
import functools
import sys
from types import CodeType
from typing import Any, NamedTuple

from aiograd.compiler.watching.stack import bottom_of, depths_of


class Does(enum.Enum):
    """The kinds of instructions, with the operands that `Instruction.places` names, and `Instruction.argument`."""

    #: reads a global or built-in name: none; the name
    GLOBAL = enum.auto()
    #: reads a name of a class body or of text that is executed: none; the name
    NAME = enum.auto()
    #: reads a variable of an enclosing function: its cell
    CELL = enum.auto()
    #: reads an attribute: the object; its name
    ATTRIBUTE = enum.auto()
    #: reads an attribute of a base class: the class, the object; its name
    SUPER = enum.auto()
    #: reads an item: the container, the key
    ITEM = enum.auto()
    #: takes a part of a sequence: this
    SLICE = enum.auto()
    #: looks for an item: the key, the container
    CONTAINS = enum.auto()
    #: computes from objects: these
    OPERANDS = enum.auto()
    #: looks if two objects are one: these
    IS = enum.auto()
    #: computes from two objects and may change the first
    IN_PLACE = enum.auto()
    #: looks if an object is empty: the object
    TRUTH = enum.auto()
    #: reads all items: the object
    CONTENT = enum.auto()
    #: reads the attributes that a pattern names: the object, the class, the names; the number of those without name
    MATCH = enum.auto()
    #: calls: the callable, then the positional and named arguments
    CALL = enum.auto()
    #: calls with arguments in a tuple and a dict: the callable, the tuple, the dict if there is one
    CALL_UNPACKED = enum.auto()
    #: imports a module: the number of packages to go up; its name
    IMPORT = enum.auto()
    #: sets a global name: the value; the name
    SET_GLOBAL = enum.auto()
    #: sets a name of a class body or of text that is executed: none; the name
    SET_NAME = enum.auto()
    #: sets a variable of an enclosing function: its cell, the value
    SET_CELL = enum.auto()
    #: sets an attribute: the object, the value; its name
    SET_ATTRIBUTE = enum.auto()
    #: sets an item: the container, the key, the value
    SET_ITEM = enum.auto()
    #: changes many items: the container
    SET_CONTENT = enum.auto()


class Instruction(NamedTuple):
    """One instruction that is watched.

    Attributes:
        does: see `Does`.
        places: the places of the operands among the frame's variables.
        argument: a name, or a number.
        counts: True if the value goes only into the place that it came from, see Note [Counters].
    """

    does: Does
    places: tuple[int, ...]
    argument: Any = None
    counts: bool = False


#: by name of an instruction: its effect, and the depths of its operands below the top of the stack
_FIXED: dict[str, tuple[Does, tuple[int, ...]]] = {
    "LOAD_ATTR": (Does.ATTRIBUTE, (1,)),
    "LOAD_METHOD": (Does.ATTRIBUTE, (1,)),
    "IMPORT_FROM": (Does.ATTRIBUTE, (1,)),
    "LOAD_SUPER_ATTR": (Does.SUPER, (2, 1)),
    "LOAD_GLOBAL": (Does.GLOBAL, ()),
    "LOAD_NAME": (Does.NAME, ()),
    "LOAD_FROM_DICT_OR_GLOBALS": (Does.GLOBAL, ()),
    "BINARY_SUBSCR": (Does.ITEM, (2, 1)),
    "BINARY_SLICE": (Does.SLICE, (3,)),
    "CONTAINS_OP": (Does.CONTAINS, (2, 1)),
    "IS_OP": (Does.IS, (2, 1)),
    "COMPARE_OP": (Does.OPERANDS, (2, 1)),
    "BINARY_OP": (Does.OPERANDS, (2, 1)),
    "UNARY_NEGATIVE": (Does.OPERANDS, (1,)),
    "UNARY_POSITIVE": (Does.OPERANDS, (1,)),
    "UNARY_INVERT": (Does.OPERANDS, (1,)),
    "UNARY_NOT": (Does.TRUTH, (1,)),
    "TO_BOOL": (Does.TRUTH, (1,)),
    "GET_LEN": (Does.CONTENT, (1,)),
    "GET_ITER": (Does.CONTENT, (1,)),
    "GET_YIELD_FROM_ITER": (Does.CONTENT, (1,)),
    "UNPACK_SEQUENCE": (Does.CONTENT, (1,)),
    "UNPACK_EX": (Does.CONTENT, (1,)),
    "LIST_EXTEND": (Does.CONTENT, (1,)),
    "SET_UPDATE": (Does.CONTENT, (1,)),
    "DICT_UPDATE": (Does.CONTENT, (1,)),
    "DICT_MERGE": (Does.CONTENT, (1,)),
    "FORMAT_SIMPLE": (Does.CONTENT, (1,)),
    "CONVERT_VALUE": (Does.CONTENT, (1,)),
    "FORMAT_WITH_SPEC": (Does.CONTENT, (2,)),
    "MATCH_KEYS": (Does.CONTENT, (2,)),
    "MATCH_CLASS": (Does.MATCH, (3, 2, 1)),
    "IMPORT_NAME": (Does.IMPORT, (2,)),
    "STORE_NAME": (Does.SET_NAME, ()),
    "DELETE_NAME": (Does.SET_NAME, ()),
    "STORE_GLOBAL": (Does.SET_GLOBAL, (1,)),
    "DELETE_GLOBAL": (Does.SET_GLOBAL, ()),
    "STORE_ATTR": (Does.SET_ATTRIBUTE, (1, 2)),
    "DELETE_ATTR": (Does.SET_ATTRIBUTE, (1,)),
    "STORE_SUBSCR": (Does.SET_ITEM, (2, 1, 3)),
    "DELETE_SUBSCR": (Does.SET_ITEM, (2, 1)),
    "STORE_SLICE": (Does.SET_CONTENT, (3,)),
}
_CELLS = {
    **dict.fromkeys(("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"), Does.CELL),
    **dict.fromkeys(("STORE_DEREF", "DELETE_DEREF"), Does.SET_CELL),
}
#: 3.11 counts the arguments of a call as gone before the call itself
_CALLS = ("PRECALL" if sys.version_info < (3, 12) else "CALL", "CALL_KW", "CALL_FUNCTION_EX")
#: from which argument on a binary operation is one in place
_FIRST_IN_PLACE = 13
_STORES = {"LOAD_ATTR": "STORE_ATTR", "LOAD_GLOBAL": "STORE_GLOBAL", "LOAD_DEREF": "STORE_DEREF", "BINARY_SUBSCR": "STORE_SUBSCR"}


@functools.lru_cache(4096)
def watched_in(code: CodeType) -> dict[int, Instruction]:
    """By offset, the instructions of a function that are watched.

    Raises:
        ValueError: see `depths_of`.
    """
    instructions = list(dis.get_instructions(code))
    depths = depths_of(code, instructions)
    bottom = bottom_of(code)
    found: dict[int, Instruction] = {}
    for number, instruction in enumerate(instructions):
        depth = depths.get(instruction.offset)
        if depth is not None:
            watched = _watched(code, instruction, bottom + depth)
            if watched is not None:
                counts = instruction.opname in _STORES and _counts(instructions, depths, number)
                found[instruction.offset] = watched._replace(counts=True) if counts else watched
    return found


def _watched(code: CodeType, instruction: dis.Instruction, top: int) -> Instruction | None:
    name, argument = instruction.opname, instruction.arg or 0
    if name in _CELLS:
        first_free = bottom_of(code) - len(code.co_freevars)
        if argument < first_free:
            return None  # a variable of the function itself
        return Instruction(_CELLS[name], (argument, top - 1) if name == "STORE_DEREF" else (argument,))
    if name in _CALLS:
        return _call(name, argument, top)
    if "JUMP_IF_TRUE" in name or "JUMP_IF_FALSE" in name:
        return Instruction(Does.TRUTH, (top - 1,))
    if name == "FORMAT_VALUE":
        return Instruction(Does.CONTENT, (top - (2 if argument & 4 else 1),))
    if name == "BINARY_OP" and argument >= _FIRST_IN_PLACE:
        return Instruction(Does.IN_PLACE, (top - 2, top - 1))
    if name not in _FIXED:
        return None
    does, below = _FIXED[name]
    return Instruction(does, tuple([top - each for each in below]), argument if name == "MATCH_CLASS" else instruction.argval)


def _call(name: str, argument: int, top: int) -> Instruction:
    """A call; 3.13 has the callable first and then the object that it is a method of, earlier ones an empty place or the function before that."""
    if name == "CALL_FUNCTION_EX":
        named = argument & 1
        callable_ = top - 2 - named - (sys.version_info >= (3, 13))
        return Instruction(Does.CALL_UNPACKED, (callable_, top - 1 - named, *((top - 1,) if named else ())))
    first = top - argument - 2 - (name == "CALL_KW")
    return Instruction(Does.CALL, tuple(range(first, first + argument + 2)))


def _counts(instructions: list[dis.Instruction], depths: dict[int, int], number: int) -> bool:
    """True if the value that an instruction reads goes only into the place that it came from."""
    read = instructions[number]
    after = iter(instructions[number + 1 :])
    kept = depths.get(instructions[number + 1].offset)
    for instruction in after:
        if instruction.opname == "BINARY_OP" and kept is not None and depths.get(instruction.offset) == kept + 1:
            break
        if instruction.opcode in dis.hasjrel or instruction.opname in ("SWAP", "COPY", "RETURN_VALUE", "RETURN_CONST"):
            return False
    left = [instruction for _, instruction in zip(range(3), after, strict=False)]
    while left and left[0].opname == "SWAP":
        left.pop(0)
    if left and left[0].opname == "LOAD_FAST" and instructions[number - 1].argval == left[0].argval and read.opname == "LOAD_ATTR":
        left.pop(0)  # self.calls = self.calls + 1
    return bool(left) and left[0].opname == _STORES[read.opname] and (read.opname == "BINARY_SUBSCR" or left[0].argval == read.argval)

