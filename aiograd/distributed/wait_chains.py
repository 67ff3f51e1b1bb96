"""Chains of awaits: the coroutines, futures and locks that a suspended task waits for, as asyncio and the interpreter keep them anyway.

Note [Nothing is recorded]
    A task knows the future that it waits for, and a future the callbacks that wake its tasks: asyncio shows both in the text of a task, and calls
    them `_fut_waiter` and `_callbacks`. A suspended coroutine refers to the coroutine that it awaits, to its variables, and, inside an ``async with``
    block, to the method that leaves the block. `gc.get_referents` reads these references one object at a time, keeps none of them alive and does not
    look at the rest of the memory. So nothing is written down before the question comes, and the question changes nothing.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from types import AsyncGeneratorType, CellType, CoroutineType, FrameType, FunctionType, GeneratorType, MethodType
from typing import Any, TypeAlias

from aiograd.distributed.service import Exposed
from aiograd.engine.executors import _executors
from aiograd.engine.run.in_flight import FuturesInFlight
from aiograd.engine.run.runner import PassRunner
from aiograd.graph.node import Node
from aiograd.running.caller import _users, short_place

Chain: TypeAlias = list[Any]

_SUSPENDED = (CoroutineType, GeneratorType, AsyncGeneratorType)
_STANDARD = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
Lock: TypeAlias = asyncio.Lock | asyncio.Semaphore

_LOCKS = (asyncio.Lock, asyncio.Semaphore)
_ACQUIRE = tuple(each.acquire.__code__ for each in _LOCKS)
_RESULT_OF = PassRunner.result_of.__code__
#: coroutines of a chain, and tasks one above the other, that are looked at
DEEPEST = 1000


def coroutines(task: asyncio.Task[Any]) -> Chain:
    """The coroutines and generators of a task, from the outermost to the one that waits."""
    chain: Chain = []
    each: Any = task.get_coro()
    while each is not None and len(chain) < DEEPEST:
        awaited = next((found for name in ("cr_await", "gi_yieldfrom", "ag_await") if (found := getattr(each, name, None)) is not None), None)
        if isinstance(each, _SUSPENDED):
            chain.append(each)
        if awaited is None and not isinstance(each, CoroutineType):  # it steps another one by hand, or stands for an asynchronous generator
            awaited = next((found for found in gc.get_referents(each) if isinstance(found, _SUSPENDED) and found not in chain), None)
        each = awaited
    return chain


def _frame_of(each: Any) -> FrameType | None:
    return next((found for name in ("cr_frame", "gi_frame", "ag_frame") if (found := getattr(each, name, None)) is not None), None)


def _is_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return _users(frame) is frame and (file.startswith(_INSTALLED) or not file.startswith(_STANDARD))


def name_of(each: Any) -> str:
    """The name of the function of a coroutine or generator."""
    return str(each.__qualname__).partition(", called at ")[0]  # see `CallName`


def place_of(chain: Chain) -> tuple[str, str]:
    """The innermost line of the user's code in a chain, and the function or node that waits there; "" for what is not known."""
    line = what = ""
    for each in chain:
        frame = _frame_of(each)
        if frame is not None and _is_users(frame):
            line, what = short_place(frame.f_code.co_filename, frame.f_lineno), name_of(each)
        elif isinstance(each, CoroutineType) and each.cr_code is _RESULT_OF and isinstance(node := _local(each, Node), Node):
            line, what = line or line_of(node), node.name
        elif isinstance(each, CoroutineType) and isinstance(exposed := _local(each, Exposed), Exposed):  # a ``def`` has no coroutine of its own
            what = exposed.name
        elif not line and ", called at " in (called := str(each.__qualname__)):  # see `CallName`
            file, _, number = called.partition(", called at ")[2].rpartition(":")
            line = short_place(file, number)
    return line, what


def line_of(node: Node) -> str:
    """The line of the forward that has recorded a node, where it is known."""
    file, _, number = (getattr(node, "forward_line", None) or "").rpartition(":")
    return short_place(file, number) if file else ""


def line_of_thread(future: asyncio.Future[Any]) -> str | None:
    """The innermost line of the user's code in a job of an executor; None: no thread runs it yet, or it is none."""
    for executor in list(_executors):
        for thread in list(executor._threads):
            if thread.future is future:
                frame = sys._current_frames().get(thread.ident or 0)
                while frame is not None and not _is_users(frame):
                    frame = frame.f_back
                return "" if frame is None else short_place(frame.f_code.co_filename, frame.f_lineno)
    return None


def waiter_of(task: asyncio.Task[Any]) -> asyncio.Future[Any] | None:
    """The future that a task waits for; None if it is ready to run."""
    waiter: asyncio.Future[Any] | None = getattr(task, "_fut_waiter", None)
    return waiter


def awaited_by(task: asyncio.Task[Any], chain: Chain) -> Iterator[tuple[asyncio.Future[Any], Node | None]]:
    """The futures that a task waits for, with the node of a pass that each belongs to: the one that it waits for, or those behind that one."""
    inner = chain[-1] if chain else None
    in_flight = _local(inner, FuturesInFlight)
    if in_flight is not None:
        for future, then in list(in_flight.callbacks.items()):
            node = next(iter(getattr(then, "args", ())), None)
            yield future, node if isinstance(node, Node) else None
        return
    if (waiter := waiter_of(task)) is not None:
        yield waiter, None
    if isinstance(inner, CoroutineType) and inner.cr_frame is not None and not _is_users(inner.cr_frame):
        for future in _tasks_in(gc.get_referents(inner)):
            if future is not task:
                yield future, None


def behind(future: asyncio.Future[Any]) -> Iterator[asyncio.Future[Any]]:
    """The futures that a future is made of: by `asyncio.gather`, or by `asyncio.shield`."""
    yield from getattr(future, "_children", ())
    for callback, _ in getattr(future, "_callbacks", None) or ():
        if isinstance(callback, FunctionType) and callback.__qualname__.startswith("shield."):
            yield from (each for each in _contents(callback.__closure__ or ()) if asyncio.isfuture(each) and each is not future)


def _tasks_in(values: Iterable[Any]) -> Iterator[asyncio.Future[Any]]:
    """The tasks among the variables of a function of the library or of asyncio that waits for them, such as `asyncio.wait`."""
    for value in _contents(values):
        if isinstance(value, asyncio.TaskGroup):
            yield from list(value._tasks)
        elif isinstance(value, asyncio.Task):
            yield value
        elif isinstance(value, (list, set, tuple, type({}.values()))):
            found = list(value)
            if all(map(asyncio.isfuture, found)):
                yield from found


def _contents(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, CellType):
            try:
                value = value.cell_contents
            except ValueError:
                continue
        yield value


def waking(future: asyncio.Future[Any]) -> asyncio.Task[Any] | None:
    """The outermost task that waits for a future, by way of other tasks or not; None: there is none."""
    found: asyncio.Task[Any] | None = None
    seen: set[int] = set()
    stack: list[asyncio.Future[Any]] = [future]
    while stack and len(seen) < DEEPEST:
        each = stack.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        for callback, _ in getattr(each, "_callbacks", None) or ():
            owner = getattr(callback, "__self__", None)
            if isinstance(callback, FunctionType | functools.partial):
                values = callback.args if isinstance(callback, functools.partial) else callback.__closure__ or ()
                stack += [each for each in _contents(values) if asyncio.isfuture(each) and not each.done()]
            elif isinstance(owner, asyncio.TaskGroup):
                owner = getattr(owner, "_parent_task", None)
            if isinstance(owner, asyncio.Task) and not owner.done():
                found = owner
                stack.append(owner)
    return found


# ---------------------------------------------------------------- locks


def lock_awaited(chain: Chain) -> Lock | None:
    """The lock that a chain waits for."""
    inner = chain[-1] if chain else None
    if isinstance(inner, CoroutineType) and inner.cr_code in _ACQUIRE:
        lock: Lock | None = _local(inner, _LOCKS)
        return lock
    return None


def locks_held(chain: Chain) -> set[Lock]:
    """The locks in ``async with`` blocks of a chain, also of asynchronous context managers that wait at their ``yield``."""
    found: list[Lock] = []
    stack = list(chain)
    while stack:
        referents = gc.get_referents(stack.pop())
        exits = [each for each in referents if getattr(each, "__name__", "") == "__aexit__" and isinstance(each, (MethodType, FunctionType))]
        for leave in exits:  # Python 3.14 keeps the function and the object apart
            owner = getattr(leave, "__self__", None)
            owners = [each for each in referents if getattr(type(each), "__aexit__", 0) is leave] if owner is None else [owner]
            found += [owner for owner in owners if isinstance(owner, _LOCKS)]
            stack += [owner.gen for owner in owners if isinstance(getattr(owner, "gen", None), AsyncGeneratorType)]
    awaited = lock_awaited(chain)
    if awaited in found:
        found.remove(awaited)  # the block that is being entered; another one of the same lock has it
    return set(found)


def _local(each: Any, cls: type[Any] | tuple[type[Any], ...]) -> Any:
    """A variable of this class in a suspended coroutine; None if it has none."""
    found: Sequence[Any] = gc.get_referents(each) if isinstance(each, _SUSPENDED) else ()
    return next((value for value in found if isinstance(value, cls)), None)
