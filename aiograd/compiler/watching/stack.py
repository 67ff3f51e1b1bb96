"""The evaluation stack of a running frame, read in memory: the only module that knows the layout of CPython's frames.

Note [Reading the stack]
    A trace function is told which instruction comes next, not its operands. They lie in the frame's array of local variables, behind the variables,
    and the depth of the stack at an instruction follows from the code alone (`depths_of`), as CPython's compiler computes it. The offsets of four
    fields are facts of a minor version of CPython; on any other interpreter `is_readable` is False, and no function is watched.

Rejected: an interpreter of bytecode in Python (fifty times slower, thousands of lines); functions rewritten with a call around each read (a function
that C code calls, such as a key of `sorted` or a property, would not be rewritten).
"""

from __future__ import annotations

import ctypes
import dis
import sys
import sysconfig
from types import CodeType, FrameType
from typing import Any

_VERSION = sys.version_info[:2]
#: per minor version, where a frame has its function
_FUNCTION = {(3, 11): 0, (3, 12): 16, (3, 13): 16}.get(_VERSION, 0)
#: where a frame object has its frame, and that has its local variables
_FRAME, _LOCALS = 24, 72
_POINTER = 8
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_ENDS = frozenset(
    ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "INTERPRETER_EXIT")
)


def is_readable() -> bool:
    """True on an interpreter with the known layout of frames."""
    return (
        sys.implementation.name == "cpython"
        and (3, 11) <= _VERSION <= (3, 13)
        and ctypes.sizeof(ctypes.c_void_p) == _POINTER
        and not hasattr(sys, "gettotalrefcount")  # a debug build
        and not sysconfig.get_config_var("Py_GIL_DISABLED")
    )


def locals_of(frame: FrameType) -> int:
    """The address of a running frame's local variables; valid while the frame runs."""
    address = ctypes.c_void_p.from_address(id(frame) + _FRAME).value
    return (address or 0) + _LOCALS


def function_of(frame: FrameType) -> Any:
    """The function that a frame runs."""
    address = ctypes.c_void_p.from_address(id(frame) + _FRAME).value
    return ctypes.py_object.from_address((address or 0) + _FUNCTION).value


def at(address: int, index: int) -> Any:
    """The object in one place of a frame's variables or stack.

    Raises:
        ValueError: the place is empty.
    """
    return ctypes.py_object.from_address(address + _POINTER * index).value


def is_empty(address: int, index: int) -> bool:
    """True if no object is in one place of a frame's variables or stack."""
    return ctypes.c_void_p.from_address(address + _POINTER * index).value is None


def bottom_of(code: CodeType) -> int:
    """The place of the stack's lowest item among a frame's variables."""
    return len({*code.co_varnames, *code.co_cellvars}) + len(code.co_freevars)


def depths_of(code: CodeType, instructions: list[dis.Instruction]) -> dict[int, int]:
    """By offset of an instruction that can be reached, the number of items on the stack before it.

    Raises:
        ValueError: two ways to an instruction give two numbers, so the layout is another than the known one.
    """
    places = {instruction.offset: place for place, instruction in enumerate(instructions)}
    found: dict[int, int] = {}
    waiting = [(0, 0)]
    waiting += [(entry.target, entry.depth + 1 + entry.lasti) for entry in dis.Bytecode(code).exception_entries]  # type: ignore[attr-defined]
    while waiting:
        offset, depth = waiting.pop()
        for instruction in instructions[places[offset] :]:
            if instruction.offset in found:
                if found[instruction.offset] != depth:
                    raise ValueError(f"{code.co_qualname}: two depths of the stack at offset {instruction.offset}")
                break
            found[instruction.offset] = depth
            argument = instruction.arg if instruction.opcode >= dis.HAVE_ARGUMENT else None
            if instruction.opcode in _JUMPS:
                waiting.append((instruction.argval, depth + dis.stack_effect(instruction.opcode, argument, jump=True)))
            if instruction.opname in _ENDS:
                break
            depth += dis.stack_effect(instruction.opcode, argument, jump=False)
            if instruction.opname == "RETURN_GENERATOR" and _VERSION < (3, 13):
                depth += 1  # a resumed generator finds the sent value on its stack; 3.13 counts it by itself
    return found
