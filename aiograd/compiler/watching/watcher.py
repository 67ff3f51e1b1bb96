"""Watcher: a trace function that notes the reads of the functions that run while a program is recorded.

The interpreter calls it before each of their instructions. It finds the operands on the stack (`aiograd.compiler.watching.stack`) and leaves to
`aiograd.compiler.watching.objects` and `aiograd.compiler.watching.calls` the noting of the instruction's reads. A trace function that was set before,
such as a debugger's, is called as well.

Note [Frames of 3.12]
    CPython 3.12 calls the trace function of a thread that has none, where another thread traces instructions and a frame asks for them. So no frame
    asks for them but while it runs under a watcher, a generator's from when it goes on to its next ``yield``. That any frame does it wants to know
    before a trace function is set; a generator that never runs tells it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CellType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np

from aiograd.compiler.lines import described_line, user_line
from aiograd.compiler.watching import kinds
from aiograd.compiler.watching.calls import call, imported
from aiograd.compiler.watching.instructions import Does, Instruction, watched_in
from aiograd.compiler.watching.kinds import ABSENT, is_a, member
from aiograd.compiler.watching.objects import attribute, contains, is_simple, item, items, operand
from aiograd.compiler.watching.reads import Reads
from aiograd.compiler.watching.scope import has_own_names, is_standard, is_watched, tells
from aiograd.compiler.watching.stack import at, function_of, is_empty, is_readable, locals_of
from aiograd.running.trees import leaves_of
from aiograd.tensors.core import TensorCore

_CONTAINERS = (list, dict, set)
#: operands that are neither containers nor arrays
_NOT_READ = (TensorCore, int, float, str)
_CAN_PAUSE = sys.version_info < (3, 12)
_IS_3_12 = sys.version_info[:2] == (3, 12)
_NEVER_RUN: Any = (None for _ in ())
_NEVER_RUN.gi_frame.f_trace_opcodes = True
_CALLABLE_FIRST = sys.version_info >= (3, 13)


class Watcher:
    """The trace function of one recorded call.

    Args:
        reads: the object that notes the reads.
    """

    def __init__(self, reads: Reads) -> None:
        self.reads = reads
        #: by code, the trace function of its frames; None: they are not watched
        self._tracers: dict[CodeType, Callable[..., Any] | None] = {}
        #: the frame in which a call began that is left alone with all that it calls
        self._left: FrameType | None = None
        #: the line of the user's code, see `described`
        self.where: Any = None
        #: False while a function runs with global names and modules that are taken as constant
        self.has_names = True
        self._before: Any = None
        #: the trace function of the watched thread
        self._own: Any = None
        #: True while functions are watched and the trace function may be taken away for a while
        self.can_pause = False
        self._lines: dict[Any, tuple[str, str]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what runs on this thread inside of the block."""
        if not is_readable():
            self.reads.refuse(None, f"what a function reads is watched on CPython 3.11 to 3.13 only, this is {sys.version.split()[0]}", None)
            yield
            return
        before = self._before = sys.gettrace()
        self._own = self._tracer()
        self.can_pause = _CAN_PAUSE and before is None
        sys.settrace(self._own)
        try:
            yield
        finally:
            self.can_pause = False
            sys.settrace(before)

    def pauses(self) -> Any:
        """Stop to watch; returns the trace function to go on with, None where this thread is not watched.

        An interpreter that looks for a trace function executes every instruction of every function slowly. From 3.12 on to change the trace
        function costs more than it saves.
        """
        if sys.gettrace() is not self._own:
            return None
        sys.settrace(None)
        return self._own

    def ends(self) -> None:
        """Forget the trace functions, which refer to this object."""
        self._tracers.clear()
        self._before = self._left = self._own = None

    def line(self) -> tuple[str, str]:
        """The user's line that runs, by its place and its text."""
        where = self.where
        if where is None:
            return user_line()
        found = self._lines.get(where[:2])
        if found is None:
            found = self._lines[where[:2]] = _described(where)
        return found

    def begins(self, function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Note what calling the compiled function itself reads, and that its signature compares the containers among its arguments."""
        self.reads.given.update(map(id, _containers((args, named))))
        call(self.reads, function, args, named, None)

    # ---------------------------------------------------------------- called by the interpreter

    def _tracer(self) -> Callable[[FrameType, str, Any], Any]:
        """The trace function of the thread, called when a function begins or a generator resumes."""
        tracers, leaves, before = self._tracers, self._leaves, self._before

        def begins(frame: FrameType, event: str, argument: Any) -> Any:
            code = frame.f_code
            try:
                tracer = tracers[code]
            except KeyError:
                tracer = tracers[code] = self._tracer_of(code, frame.f_globals)
            others = None if before is None else before(frame, event, argument)
            if tracer is None or self._left is not None:
                return others
            if tracer == leaves:
                self._left = frame
            elif is_standard(code) and not _is_watched(frame.f_back):
                return others
            else:
                self._enters(frame)
            frame.f_trace_lines = others is not None
            frame.f_trace = tracer = tracer if others is None else _both(tracer, others)
            frame.f_trace_opcodes = True  # 3.13 heeds it of a frame that has a trace function
            return tracer

        return begins

    def _leaves(self, frame: FrameType, event: str, argument: Any) -> Any:
        """The trace function of a frame that is left alone with all that it calls, until it ends."""
        if event == "return":
            self._left = None
        return self._leaves

    def _tracer_of(self, code: CodeType, names: dict[str, Any]) -> Callable[..., Any] | None:
        if tells(code, names) or code.co_name == "__del__" or any([_code_of(callback) is code for callback in gc.callbacks]):
            return self._leaves
        if not is_watched(code, names):
            return None
        try:
            instructions = watched_in(code)
        except ValueError as error:
            self.reads.refuse(None, f"the instructions of a function cannot be followed ({error})", self.where)
            return None
        has_names, is_own = has_own_names(code, names), str(names.get("__name__", "")).startswith("aiograd.")
        if not has_names:
            instructions = {offset: each for offset, each in instructions.items() if each.does is not Does.GLOBAL}
        watched, reads = instructions.get, self.reads

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            if self._left is not None:
                if self._left is not frame:
                    return trace
                self._left = None
            if event == "opcode":
                offset = frame.f_lasti
                instruction = watched(offset)
                if instruction is not None:
                    reads.takes_arrays = not is_own
                    self.has_names = has_names
                    if has_names:
                        self.where = code, offset, names
                    try:
                        _HANDLERS[instruction.does](self, reads, frame, locals_of(frame), instruction)
                    except Exception as error:
                        reads.refuse(None, f"an instruction cannot be watched ({type(error).__name__}: {error})", self.where)
            elif event == "return":
                self.where = None  # until an instruction of the caller's
                if _IS_3_12:
                    frame.f_trace_opcodes = False  # see Note [Frames of 3.12]
            return trace

        return trace

    def _enters(self, frame: FrameType) -> None:
        """Note a function that begins: guards its code, its default values, and the class's entry of a special method."""
        code, reads = frame.f_code, self.reads
        function = function_of(frame)
        if not isinstance(function, FunctionType):
            return
        if has_own_names(code, frame.f_globals):
            reads.add(kinds.ATTRIBUTE, function, "__code__", code, self.where)
            for name in ("__defaults__", "__kwdefaults__"):
                found = getattr(function, name)
                if found is not None:
                    reads.add(kinds.ATTRIBUTE, function, name, found, self.where)
                    items(reads, found, self.where)
        if code.co_name.startswith("__") and code.co_name.endswith("__") and code.co_argcount:
            owner = at(locals_of(frame), 0)
            if type(owner) is CellType and code.co_varnames[0] in code.co_cellvars:
                owner = owner.cell_contents
            for cls in (type(owner), owner):
                if is_a(cls, type) and getattr(member(cls, code.co_name), "__func__", member(cls, code.co_name)) is function:
                    kind = kinds.ATTRIBUTE if getattr(cls, code.co_name) is function else kinds.METHOD
                    reads.add(kind, cls, code.co_name, function, self.where)
                    break


def described(where: Any) -> tuple[str, str] | None:
    """The line of the user's code that `Watcher.where` stands for, by its place and its text."""
    return None if where is None else _described(where)


def _described(where: Any) -> tuple[str, str]:
    code, offset, names = where
    positions = [*code.co_positions()]
    line = positions[offset // 2][0]
    return described_line(code.co_filename, line or code.co_firstlineno, names)


def _is_watched(frame: FrameType | None) -> bool:
    """True for the frame of a function with watched instructions; calls of the standard library by the rest of the package are not watched."""
    return frame is not None and frame.f_trace is not None


def _code_of(function: Any) -> Any:
    return getattr(getattr(function, "__func__", function), "__code__", None)


def _both(one: Any, other: Any) -> Any:
    """A trace function that calls two others."""

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        one(frame, event, argument)
        if event != "opcode":
            other(frame, event, argument)
        return trace

    return trace


def _containers(tree: Any) -> Iterator[Any]:
    if isinstance(tree, _CONTAINERS):
        yield tree
    if isinstance(tree, (tuple, *_CONTAINERS)):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from _containers(each)


# -------------------------------------------------------------------- instructions


def _global(watcher: Watcher, reads: Reads, frame: FrameType, address: int, instruction: Instruction) -> None:
    names = frame.f_globals
    reads.add(kinds.GLOBAL, names, instruction.argument, names.get(instruction.argument, ABSENT), watcher.where, counts=instruction.counts)


def _name(watcher: Watcher, reads: Reads, frame: FrameType, address: int, instruction: Instruction) -> None:
    names = frame.f_locals if instruction.argument in frame.f_locals else frame.f_globals
    reads.add(kinds.GLOBAL, names, instruction.argument, names.get(instruction.argument, ABSENT), watcher.where)


def _cell(watcher: Watcher, reads: Reads, frame: FrameType, address: int, instruction: Instruction) -> None:
    cell = at(address, instruction.places[0])
    try:
        value = cell.cell_contents
    except ValueError:  # not set yet: the instruction raises
        return
    reads.add(kinds.CELL, cell, None, value, watcher.where, counts=instruction.counts)


def _attribute(watcher: Watcher, reads: Reads, frame: FrameType, address: int, instruction: Instruction) -> None:
    holder = at(address, instruction.places[0])
    if watcher.has_names or not is_a(holder, ModuleType):
        attribute(reads, holder, instruction.argument, watcher.where, counts=instruction.counts)


def _super(watcher: Watcher, reads: Reads, frame: FrameType, address: int, instruction: Instruction) -> None:
    cls, thing = (at(address, place) for place in instruction.places)
    attribute(reads, super(cls, thing), instruction.argument, watcher.where)


def _item(watcher: Watcher, reads: Reads, frame: FrameType, address: int, instruction: Instruction) -> None:
    holder, key = (at(address, place) for place in instruction.places)
    item(reads, holder, key, watcher.where, counts=instruction.counts)


def _contains(watcher: Watcher, reads: Reads, frame: FrameType, address: int, instruction: Instruction) -> None:
    key, holder = (at(address, place) for place in instruction.places)
    contains(reads, key, holder, watcher.where)


def _operands(watcher: Watcher, reads: Reads, frame: FrameType, address: int, instruction: Instruction) -> None:
    first, *rest = instruction.places
    one = at(address, first)
    other = at(address, rest[0]) if rest else None
    has_tensor = is_a(one, TensorCore) or is_a(other, TensorCore)
    for each in (one, other):
        if each is not None and not is_a(each, _NOT_READ):
            operand(reads, each, watcher.where, arrays=not has_tensor)


def _is(watcher: Watcher, reads: Reads, frame: FrameType, address: int, instruction: Instruction) -> None:
    one, other = (at(address, place) for place in instruction.places)
    if watcher.has_names and type(one) is type(other) and is_a(one, _CONTAINERS):
        for each in (one, other):  # an equal one may take its place
            reads.refuse(each, f"it looks if two objects are the same {type(one).__name__}", watcher.where)


def _in_place(watcher: Watcher, reads: Reads, frame: FrameType, address: int, instruction: Instruction) -> None:
    _operands(watcher, reads, frame, address, instruction)
    changed = at(address, instruction.places[0])
    if is_a(changed, (*_CONTAINERS, np.ndarray)):
        reads.changes(changed)


def _content(watcher: Watcher, reads: Reads, frame: FrameType, address: int, instruction: Instruction) -> None:
    items(reads, at(address, instruction.places[0]), watcher.where)


def _slice(watcher: Watcher, reads: Reads, frame: FrameType, address: int, instruction: Instruction) -> None:
    holder = at(address, instruction.places[0])
    if not is_a(holder, np.ndarray):  # of which it is a view, read when something is computed from it
        items(reads, holder, watcher.where)


def _match(watcher: Watcher, reads: Reads, frame: FrameType, address: int, instruction: Instruction) -> None:
    thing, cls, names = (at(address, place) for place in instruction.places)
    for name in (*getattr(cls, "__match_args__", ())[: instruction.argument], *names):
        attribute(reads, thing, name, watcher.where)


def _call(watcher: Watcher, reads: Reads, frame: FrameType, address: int, instruction: Instruction) -> None:
    first, second, *rest = instruction.places
    args = tuple([at(address, place) for place in rest])
    if _CALLABLE_FIRST:
        function = at(address, first)
        if not is_empty(address, second):
            args = (at(address, second), *args)
    elif is_empty(address, first):
        function = at(address, second)
    else:
        function, args = at(address, first), (at(address, second), *args)
    if call(reads, function, args, {}, watcher.where):
        watcher._left = frame


def _call_unpacked(watcher: Watcher, reads: Reads, frame: FrameType, address: int, instruction: Instruction) -> None:
    function, args, *named = (at(address, place) for place in instruction.places)
    if not isinstance(args, tuple):
        items(reads, args, watcher.where)
    for each in named:
        items(reads, each, watcher.where)
    if call(reads, function, tuple(args) if isinstance(args, (tuple, list)) else (), dict(*named), watcher.where):
        watcher._left = frame


def _import(watcher: Watcher, reads: Reads, frame: FrameType, address: int, instruction: Instruction) -> None:
    if watcher.has_names:
        package = frame.f_globals.get("__package__")
        imported(reads, "." * at(address, instruction.places[0]) + instruction.argument, package, watcher.where)
    watcher._left = frame


def _set_global(watcher: Watcher, reads: Reads, frame: FrameType, address: int, instruction: Instruction) -> None:
    reads.sets(kinds.GLOBAL, frame.f_globals, instruction.argument, watcher.where)


def _set_name(watcher: Watcher, reads: Reads, frame: FrameType, address: int, instruction: Instruction) -> None:
    reads.sets(kinds.GLOBAL, frame.f_locals, instruction.argument, watcher.where)


def _set_cell(watcher: Watcher, reads: Reads, frame: FrameType, address: int, instruction: Instruction) -> None:
    reads.sets(kinds.CELL, at(address, instruction.places[0]), None, watcher.where)


def _set_attribute(watcher: Watcher, reads: Reads, frame: FrameType, address: int, instruction: Instruction) -> None:
    holder = at(address, instruction.places[0])
    if not is_a(holder, TensorCore):
        reads.sets(kinds.ATTRIBUTE, holder, instruction.argument, watcher.where)


def _set_item(watcher: Watcher, reads: Reads, frame: FrameType, address: int, instruction: Instruction) -> None:
    holder, key = (at(address, place) for place in instruction.places[:2])
    if is_a(holder, TensorCore):
        for place in instruction.places[1:]:
            operand(reads, at(address, place), watcher.where, arrays=False)
    elif is_simple(key):
        reads.sets(kinds.ITEM, holder, key, watcher.where)
    else:
        reads.changes(holder)
        if leaves_of([at(address, place) for place in instruction.places[2:]], TensorCore):
            reads.refuse(holder, f"it keeps a tensor in a {type(holder).__name__}", watcher.where)


def _set_content(watcher: Watcher, reads: Reads, frame: FrameType, address: int, instruction: Instruction) -> None:
    reads.changes(at(address, instruction.places[0]))


_HANDLERS: dict[Does, Callable[[Watcher, Reads, FrameType, int, Instruction], None]] = {
    Does.GLOBAL: _global,
    Does.NAME: _name,
    Does.CELL: _cell,
    Does.ATTRIBUTE: _attribute,
    Does.SUPER: _super,
    Does.ITEM: _item,
    Does.CONTAINS: _contains,
    Does.OPERANDS: _operands,
    Does.IS: _is,
    Does.IN_PLACE: _in_place,
    Does.SLICE: _slice,
    Does.TRUTH: _content,
    Does.CONTENT: _content,
    Does.MATCH: _match,
    Does.CALL: _call,
    Does.CALL_UNPACKED: _call_unpacked,
    Does.IMPORT: _import,
    Does.SET_GLOBAL: _set_global,
    Does.SET_NAME: _set_name,
    Does.SET_CELL: _set_cell,
    Does.SET_ATTRIBUTE: _set_attribute,
    Does.SET_ITEM: _set_item,
    Does.SET_CONTENT: _set_content,
}
