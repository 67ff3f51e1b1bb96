"""Tells if a call is made at the top level of a program, where settings are set for the process.

Note [Top level]
    A call is at the top level if a statement of a module makes it, itself or through plain functions: a line of a script, of a module that
    is being imported, of a REPL, of a notebook cell. To find out, the frames are followed outwards to the first one that is not a plain
    function's. A module's: top level. A coroutine's or an asynchronous generator's: a task. One of asyncio's own: a callback. None at all:
    a thread. In the last three a setting belongs to the context of the running code, so that neither two tasks nor two threads disturb
    each other.

    The question cannot be answered by the running task: `python -m asyncio`, IPython and Jupyter compile a statement that contains ``await`` as a
    module's code that is a coroutine, and run it in a task of its own, in a copy of a context that is then dropped. Jupyter runs every
    cell inside a task.

Rejected: asking for the running task (see above); the names of REPLs (there is always another one).
"""

from __future__ import annotations

import inspect
import opcode
import sys
from types import FrameType

_IN_A_TASK = inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE | inspect.CO_ASYNC_GENERATOR

#: opcodes that follow a call if its value is not used: it is dropped, printed by a REPL, or the result of `eval`
_VALUE_UNUSED = frozenset({"POP_TOP", "PRINT_EXPR", "CALL_INTRINSIC_1"})


def is_top_level(depth: int = 1) -> bool:
    """True if the running code is at the top level, see Note [Top level].

    Args:
        depth: the number of calls between the code in question and this one.
    """
    frame: FrameType | None = sys._getframe(depth + 1)
    while frame is not None:
        if _is_of_module(frame):
            return True
        if frame.f_code.co_flags & _IN_A_TASK or frame.f_globals.get("__name__", "").partition(".")[0] == "asyncio":
            return False
        frame = frame.f_back
    return False


def is_statement(depth: int = 1) -> bool:
    """True if a call is a statement of its own and its value is not used, rather than, for instance, the operand of ``with``.

    Args:
        depth: the number of calls between the call in question and this one.
    """
    frame = sys._getframe(depth + 1)
    code, place = frame.f_code.co_code, frame.f_lasti + 2
    while opcode.opname[code[place]] == "CACHE":
        place += 2
    following = opcode.opname[code[place]]
    return following in _VALUE_UNUSED or (following.startswith("RETURN") and _is_of_module(frame))


def _is_of_module(frame: FrameType) -> bool:
    """True if a frame runs the code of a module rather than of a function or class."""
    return not frame.f_code.co_flags & inspect.CO_OPTIMIZED and frame.f_locals is frame.f_globals
