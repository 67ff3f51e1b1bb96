"""An event loop in a thread of its own, and calls of coroutines from threads that no loop runs in: torch's, JAX's, a script's.

Note [Context of a call]
    A coroutine that a thread hands to a loop runs in a copy of that thread's context: it has its distributed context, default dtype and log fields.
    Three things stay behind. The running pass: the thread may be in a rule of one, and a pass that starts on the loop is none within that; it
    records as code outside of a rule does.
    Recording for others: of a compiled function, an isolated call, a profile. And the engine: see the next Note.

Note [No circle of waiting]
    The thread waits, the loop does not wait for the thread. Where the thread is one of an engine's executor, it is not there for rules meanwhile, and
    all threads of an executor might wait so for passes that need one of them. Such a call gets an engine of its own.
    A call from the thread that runs the loop itself is refused, or goes to another loop.

Note [End of a loop]
    A call to a loop that ends before the answer raises `LoopError`: its task is cancelled when the loop is closed, and where the loop was just
    left, never to run again, the caller notices by looking at it from time to time.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import contextvars
import os
import threading
import weakref
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

from aiograd.engine.executors import is_executor_thread
from aiograd.engine.run import Engine, run, running_loop
from aiograd.errors import ArgumentTypeError, LoopError
from aiograd.graph.current import CURRENT
from aiograd.running.modes import ModeScope

T = TypeVar("T")

#: name of the task that a background loop runs for
_SERVING = "aiograd:background-loop"

#: seconds between two looks at a loop that does not answer
LOOK_SECONDS = 1.0


def run_on(loop: asyncio.AbstractEventLoop, main: Coroutine[Any, Any, Any], context: contextvars.Context | None = None) -> Any:
    """Run a coroutine on a loop of another thread and wait for it.

    An exception in this thread, such as KeyboardInterrupt, cancels the coroutine.

    Args:
        loop: a running loop.
        main: the coroutine.
        context: the context in which the coroutine runs, in place of the caller's; see Note [Context of a call].

    Returns:
        Its result.

    Raises:
        LoopError: the loop is this thread's own, or ended before the coroutine did.
    """
    future = _begin(loop, main, context)
    try:
        return _result(loop, future)
    finally:
        future.cancel()  # nothing, where it is done


def _begin(loop: asyncio.AbstractEventLoop, main: Coroutine[Any, Any, Any], context: contextvars.Context | None) -> concurrent.futures.Future[Any]:
    if running_loop() is loop:
        main.close()
        raise LoopError("waiting for a coroutine in the thread of its own event loop, which could not go on meanwhile: call this in another thread")
    within = contextvars.copy_context() if context is None else context.copy()
    in_pass = within.get(CURRENT) is not None
    within.run(CURRENT.set, None)
    wrapped = _apart(main, {"grad": True} if in_pass else {}, is_executor_thread())
    try:
        return within.run(asyncio.run_coroutine_threadsafe, wrapped, loop)
    except RuntimeError:
        wrapped.close()
        main.close()
        raise LoopError("the event loop on which this runs has been closed") from None


def _result(loop: asyncio.AbstractEventLoop, future: concurrent.futures.Future[Any]) -> Any:
    """Wait for a future that the loop resolves. See Note [End of a loop]."""
    was_running = True
    try:
        while not concurrent.futures.wait([future], LOOK_SECONDS).done:
            if not (loop.is_running() or was_running):
                raise LoopError("the event loop on which this runs has stopped before it was done")
            was_running = loop.is_running()
        return future.result()
    except concurrent.futures.CancelledError:
        raise LoopError("the event loop on which this runs was closed, or its task cancelled, before it was done") from None


async def _apart(main: Coroutine[Any, Any, Any], mode: Mapping[str, Any], needs_engine: bool) -> Any:
    try:
        with ModeScope(trace=None, collect=None, profiler=None, **mode):
            if not needs_engine:
                return await main
            async with Engine():
                return await main
    finally:
        owner = _owners.get(asyncio.get_running_loop())
        background = None if owner is None else owner()
        if background is not None:
            background._last()


class BackgroundLoop:
    """An event loop in a daemon thread, for programs that run none: torch and JAX scripts.

    The thread is started with the first call, and ends with `close`, with the ``with`` block, or when the object is referred to no more and no task
    runs on the loop that a call has left there, such as the tasks of an open Worker. In a forked child it is started again::

        with interop.BackgroundLoop() as loop, loop.entered(dist.Worker("trainer", peers=peers)) as worker:
            layer = interop.torch.function(remote_layer, loop=loop)

    >>> with ag.interop.BackgroundLoop() as loop:
    ...     loop.run(asyncio.sleep(0, result=2))
    2
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_closed = False
        self._pid = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._end: weakref.finalize[Any, Any] | None = None
        #: the tasks that keep this object alive
        self._tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"<BackgroundLoop: {'closed' if self._is_closed else 'not started' if self._loop is None else 'running'}>"

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop, which runs.

        Raises:
            LoopError: `close` has been called.
        """
        with self._lock:
            if self._is_closed:
                raise LoopError("this BackgroundLoop has been closed; make another")
            if self._loop is None or self._pid != os.getpid():
                self._start()
            return self._loop  # type: ignore[return-value]

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the loop and wait for it.

        An exception in the waiting thread, such as KeyboardInterrupt, cancels it.

        Args:
            main: the coroutine.

        Returns:
            Its result; its exception is raised.

        Raises:
            ArgumentTypeError: `main` is no coroutine. LoopError: the loop has been closed, or is the one that runs this code.
        """
        if not asyncio.iscoroutine(main):
            raise ArgumentTypeError(f"BackgroundLoop.run: expected a coroutine, as in loop.run(main()), found {type(main).__name__}")
        try:
            loop = self.loop
        except LoopError:
            main.close()
            raise
        return run_on(loop, main)

    @contextlib.contextmanager
    def entered(self, manager: AbstractAsyncContextManager[T]) -> Iterator[T]:
        """An asynchronous context manager, entered and left on the loop by one task, for a ``with`` block of this thread.

        Args:
            manager: such as a `Worker` or a distributed context.

        Returns:
            A context manager; it gives what `manager` gives, and `manager` is told of an exception of the block.

        Raises:
            LoopError: the loop has been closed, or is the one that runs this code.
        """
        loop = self.loop
        opened: concurrent.futures.Future[tuple[T, asyncio.Future[None]]] = concurrent.futures.Future()

        async def hold() -> None:
            try:
                async with manager as value:
                    block = loop.create_future()
                    opened.set_result((value, block))
                    await block
            except BaseException as error:
                if not opened.done():
                    opened.set_exception(error)
                raise

        held = _begin(loop, hold(), None)
        value, block = _result(loop, opened)
        try:
            yield value
        except Exception as error:
            loop.call_soon_threadsafe(block.set_exception, error)
            _result(loop, held)
        except BaseException:
            loop.call_soon_threadsafe(block.cancel)
            concurrent.futures.wait([held])
            raise
        else:
            loop.call_soon_threadsafe(block.set_result, None)
            _result(loop, held)

    def close(self) -> None:
        """Cancel all tasks of the loop, close its default engine, and wait for the thread. Idempotent."""
        with self._lock:
            self._is_closed = True
            end, self._end = self._end, None
        if end is not None and self._pid == os.getpid():
            end()
            if threading.current_thread() is not self._thread and self._thread is not None:
                self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        if self._end is not None:
            self._end.detach()  # of the parent process
        started: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = concurrent.futures.Future()
        # a thread starts in an empty context, whichever the starting thread is in
        self._thread = threading.Thread(target=_serve, args=(started,), name="aiograd-background-loop", daemon=True)
        self._thread.start()
        self._loop, stop = started.result()
        _owners[self._loop] = weakref.ref(self)
        self._pid = os.getpid()
        self._end = weakref.finalize(self, _stop, self._loop, stop)
        self._end.atexit = False
        atexit.register(_at_exit, weakref.ref(self))


    def _last(self, _: Any = None) -> None:
        """Keep the loop until every task on it has ended, later tasks included. Called on the loop, by a task or at its end."""
        own = asyncio.current_task()
        for task in asyncio.all_tasks(self._loop):
            if task is not own and task not in self._tasks and task.get_name() != _SERVING:
                self._tasks.add(task)
                task.add_done_callback(self._last)


def _serve(started: concurrent.futures.Future[Any]) -> None:
    async def main() -> None:
        stop = asyncio.Event()
        asyncio.current_task().set_name(_SERVING)  # type: ignore[union-attr]
        started.set_result((asyncio.get_running_loop(), stop))
        await stop.wait()

    contextvars.Context().run(run, main(), tune_gc=False)


def _stop(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # closed already
        loop.call_soon_threadsafe(stop.set, context=contextvars.Context())


def _at_exit(reference: weakref.ref[BackgroundLoop]) -> None:
    background = reference()
    if background is not None:
        background.close()


#: the BackgroundLoops by their loops
_owners: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.ref[BackgroundLoop]] = weakref.WeakKeyDictionary()
_shared: weakref.ref[BackgroundLoop] | None = None
_sharing = threading.Lock()


def shared_loop() -> BackgroundLoop:
    """The process's own background loop, which lasts as long as it is referred to, or tasks of calls run on it."""
    global _shared
    with _sharing:
        found = None if _shared is None else _shared()
        if found is None or found._is_closed:
            found = BackgroundLoop()
            _shared = weakref.ref(found)
        return found


#: where a bridged function may be told to run
AnyLoop: TypeAlias = "BackgroundLoop | asyncio.AbstractEventLoop"


class LoopChoice:
    """The loop for the calls of one bridged function.

    Calls run on the loop that was named, else `at_home`: on the one in which the function was made, where the connections are that it uses, as long
    as that runs. A call from that loop's own thread, and a function made outside of any loop, use the process's background loop.

    Args:
        loop: the loop that was named.
        at_home: False: the loop in which the function was made is none to choose.
    """

    __slots__ = ("_named", "_home", "_background")

    def __init__(self, loop: AnyLoop | None, *, at_home: bool = True) -> None:
        if loop is not None and not isinstance(loop, (BackgroundLoop, asyncio.AbstractEventLoop)):
            raise ArgumentTypeError(f"loop: expected a BackgroundLoop or an event loop, found {type(loop).__name__}")
        self._named = loop
        home = running_loop() if at_home else None
        self._home = None if home is None else weakref.ref(home)
        self._background: BackgroundLoop | None = None

    def pick(self) -> asyncio.AbstractEventLoop:
        """The loop for a call from this thread.

        Returns:
            A running loop, unless one was named that does not run.
        """
        if isinstance(self._named, BackgroundLoop):
            return self._named.loop
        if self._named is not None:
            return self._named
        home = None if self._home is None else self._home()
        if home is not None and home.is_running() and running_loop() is not home:
            return home
        if self._background is None or self._background._is_closed:
            self._background = shared_loop()
        return self._background.loop
