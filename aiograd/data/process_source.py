"""ProcessSource: a sequence that lives in processes of its own, for reading that computes much in Python.

Note [What crosses]
    A process is told which object of which module is the source, and then indices; it answers with examples. Both sides speak frames of a length and
    bytes: examples travel as safetensors with their nesting beside them, as in files of `ag.save`, so nothing that arrives can be executed.
"""

from __future__ import annotations

import asyncio
import os
import sys
from types import TracebackType
from typing import Any, Self

from aiograd.data.frames import HEADER, SHOWN, index_frame, unpacked
from aiograd.errors import ArgumentError, DataError, ModeError


class ProcessSource:
    """A sequence of examples that other processes make; its ``source[i]`` is a coroutine, which `DataLoader` awaits.

    ::

        async with ag.data.ProcessSource("mine:images", 4) as source:
            async for batch in ag.data.DataLoader(source, 32, workers=0, prefetch=4):
                ...

    Args:
        name: ``module:object`` of a sequence, or of a function without arguments that returns one; importable in a new process.
        processes: how many; each makes one example at a time.

    Raises:
        ArgumentError: a name or number that makes no sense. On entering, ModeError: it is entered already; DataError: no such source.

    >>> async with ag.data.ProcessSource("string:ascii_letters", processes=1) as source:
    ...     print(len(source), await source[2])
    52 c
    """

    def __init__(self, name: str, processes: int = 2) -> None:
        if not isinstance(name, str) or name.count(":") != 1 or isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
            raise ArgumentError(f"ProcessSource({name!r}, {processes!r}): expected 'module:object' and at least one process")
        self.name = name
        self.processes = processes
        self._is_entered = False
        self._started: list[asyncio.subprocess.Process] = []
        self._idle: asyncio.Queue[asyncio.subprocess.Process] | None = None
        #: None until the processes have said it
        self._length: int | None = None
        #: requests without an answer, also where the caller was cancelled
        self._calls: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        if self._is_entered:
            raise ModeError(f"entering ProcessSource({self.name!r}), which is entered already: its processes run; share it, or make another one")
        self._is_entered = True
        path = os.pathsep.join([*(each or os.getcwd() for each in sys.path)])
        try:
            for _ in range(self.processes):
                self._started.append(
                    await asyncio.create_subprocess_exec(
                        sys.executable, "-m", "aiograd.data.serving", self.name, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                        env={**os.environ, "PYTHONPATH": path},
                    )
                )
            for process in self._started:
                self._length = await _answer(process, self.name, "its length")
        except BaseException:
            await self.aclose()
            raise
        self._idle = asyncio.Queue()
        for process in self._started:
            self._idle.put_nowait(process)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the processes and wait for them. Cancelled, it has killed them and no longer waits.

        >>> source = ag.data.ProcessSource("string:ascii_letters", processes=1)
        >>> await source.aclose()
        """
        started, self._started, self._idle, self._is_entered = self._started, [], None, False
        for process in started:
            if process.returncode is None:
                process.kill()
        if self._calls:  # two must not read from one process; the calls see its end
            await asyncio.wait(self._calls)
        for process in started:
            await process.communicate()

    def __len__(self) -> int:
        """How many examples there are; also after the processes have ended.

        Raises:
            DataError: no process has run yet.
        """
        if self._length is None:
            raise _not_running()
        return self._length

    async def __getitem__(self, index: int) -> Any:
        if self._idle is None:
            raise _not_running()
        idle = self._idle
        process = await idle.get()
        call = asyncio.ensure_future(_ask(process, self.name, index))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        call.add_done_callback(lambda _: idle.put_nowait(process))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            if not call.done():
                call.add_done_callback(lambda done: done.cancelled() or done.exception())  # its answer is read, and dropped
            raise


def _not_running() -> DataError:
    return DataError("ProcessSource: its processes do not run; use it in `async with ProcessSource(...) as source`")


async def _ask(process: asyncio.subprocess.Process, name: str, index: int) -> Any:
    stdin: Any = process.stdin
    stdin.write(index_frame(index))
    return await _answer(process, name, f"example {index}")


async def _answer(process: asyncio.subprocess.Process, name: str, what: str) -> Any:
    stdout: Any = process.stdout
    try:
        status, length = HEADER.unpack(await stdout.readexactly(HEADER.size))
        content = await stdout.readexactly(length)
    except asyncio.IncompleteReadError:
        raise DataError(f"ProcessSource({name!r}): the process that was asked for {what} has ended; its standard error says why") from None
    if status == SHOWN:
        raise DataError(f"ProcessSource({name!r}): {what}: {content.decode(errors='replace')}")
    return unpacked(content)
