"""WorkerProcess: one ``aiograd worker`` as a child of this process.

Note [Parent and child]
    The child is started with ``--managed``. It writes one line of JSON to its standard output when it listens,
    ``{"name", "url", "pid", "incarnation"}``; everything after that goes through the worker itself. Output of the service goes to standard error and
    is passed on with a prefix. When the child's standard input closes, it ends: a parent that was killed leaves no workers behind. The child has a
    session of its own, so that Ctrl-C at a terminal reaches the coordinator alone, which then ends its workers in order.

The class is an asyncio subprocess protocol, not streams: nothing waits in tasks, and the end of the process is known when it happens, not
when the last of its pipes is closed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

from aiograd.distributed.cluster.roster import describe_status
from aiograd.errors import DeadlineError, WorkerLostError

#: seconds that pipes may stay open after the process has ended (something it has started may hold them)
PIPES_GRACE = 1.0
#: the last lines a process wrote are part of the error that says how it ended
LAST_LINES = 12
#: a longer line is passed on in parts
LINE_BYTES = 1 << 16
#: the words that start this package's program with an interpreter of its own
PROGRAM = [sys.executable, "-m", "aiograd"]


class WorkerProcess(asyncio.SubprocessProtocol):
    """A worker in a process of its own. Made by `start`.

    Args:
        name: the worker's.
        on_exit: called once, on the loop, when the process has ended, however it did.
    """

    #: number of the process
    pid: int
    #: where the worker listens, and its incarnation, see `PeerIdentity`; empty until it does
    url: str
    incarnation: bytes

    def __init__(self, name: str, on_exit: Callable[[WorkerProcess], None] | None = None) -> None:
        self.name = name
        self.pid = 0
        self.url, self.incarnation = "", b""
        self._on_exit = on_exit
        loop = asyncio.get_running_loop()
        self._transport: asyncio.SubprocessTransport | None = None
        self._ready: asyncio.Future[None] = loop.create_future()
        self._exited: asyncio.Future[int] = loop.create_future()
        self._closed: asyncio.Future[None] = loop.create_future()
        self._pending = {1: bytearray(), 2: bytearray()}
        self._last: deque[str] = deque(maxlen=LAST_LINES)

    @classmethod
    async def start(
        cls,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        timeout: float,
        on_exit: Callable[[WorkerProcess], None] | None = None,
        launch: Launch | None = None,
    ) -> WorkerProcess:
        """Start the process and wait until its worker listens. Cancelled, it kills the process and waits for its end.

        Args:
            name: the worker's.
            command: program and arguments.
            environment: all of its environment variables.
            timeout: seconds until it has to listen.
            on_exit: as in the constructor; not called for a process that did not get as far as listening.
            launch: how the process is started; `spawn` by default.

        Raises:
            WorkerLostError: it ended instead. DeadlineError: it did not listen in time. OSError: it could not be started.
        """
        self = cls(name)
        try:
            async with asyncio.timeout(timeout) as limit:
                await (launch or spawn)(self, command, environment)
                await asyncio.wait((self._ready, self._exited), return_when=asyncio.FIRST_COMPLETED)
        except BaseException as error:
            if self._transport is not None:
                await self.stop(0.0)
            if not (isinstance(error, TimeoutError) and limit.expired()):
                raise
            raise DeadlineError(
                f"worker {name} did not listen within {timeout:g} s of its start: raise start_timeout, or see what its service does when it is "
                f"imported{self._story()}"
            ) from None
        if self._exited.done():
            await self.wait_closed()
            status = describe_status(self._exited.result())
            raise WorkerLostError(f"worker {name} ended while it was being started ({status}){self._story()}", worker=name, stage="start")
        self._on_exit = on_exit
        return self

    # ---------------------------------------------------------------- its life

    @property
    def status(self) -> int | None:
        """Exit status (negative: the number of the signal that ended it), None while it runs."""
        return self._exited.result() if self._exited.done() else None

    async def wait(self) -> int:
        """Wait for the end of the process; returns its exit status. Cancelling changes nothing."""
        return await asyncio.shield(self._exited)

    def terminate(self) -> None:
        """Ask the process to end (SIGTERM); nothing if it has."""
        self._signal("terminate")

    def kill(self) -> None:
        """End the process at once (SIGKILL); nothing if it has ended."""
        self._signal("kill")

    async def stop(self, grace: float) -> int:
        """Ask the process to end, kill it where it does not within `grace` seconds, and wait until it is gone; returns its exit status.

        Cancelled, it kills the process, still waits for its end, which is then a matter of milliseconds, and raises.
        """
        try:
            if grace > 0 and not self._exited.done():
                self.terminate()
                await asyncio.wait((self._exited,), timeout=grace)
        finally:
            self.kill()
            await through_cancellation(self.wait_closed())
        return self._exited.result()

    async def wait_closed(self) -> None:
        """Wait for the end of the process and until its pipes are closed and everything it wrote has been passed on."""
        await asyncio.shield(self._exited)
        await asyncio.wait((self._closed,), timeout=PIPES_GRACE)
        if self._transport is not None:
            self._transport.close()
        await asyncio.shield(self._closed)

    def _signal(self, what: str) -> None:
        if not self._exited.done() and self._transport is not None:
            try:
                getattr(self._transport, what)()
            except ProcessLookupError:
                pass  # it has ended and the loop has yet to notice

    def _story(self) -> str:
        return "".join(f"\n  {line}" for line in self._last)

    # ---------------------------------------------------------------- called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.SubprocessTransport", transport)
        self.pid = self._transport.get_pid() or 0

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        pending = self._pending[fd]
        pending += data
        if b"\n" not in data and len(pending) < LINE_BYTES:
            return
        *lines, rest = bytes(pending).split(b"\n")
        if len(rest) >= LINE_BYTES:
            lines.append(rest)
            rest = b""
        self._pending[fd] = bytearray(rest)
        for line in lines:
            self._take_line(fd, line)

    def _take_line(self, fd: int, line: bytes) -> None:
        if fd == 1:
            try:
                ready = json.loads(line)
                self.url, self.incarnation = str(ready["url"]), bytes.fromhex(ready["incarnation"])
                if not self._ready.done():
                    self._ready.set_result(None)
                return
            except (ValueError, TypeError, KeyError):
                pass  # no line of ours: something else got hold of the pipe; people want to see it
        self._pass_on(line.decode("utf-8", "replace").rstrip("\r"))

    def _pass_on(self, line: str) -> None:
        self._last.append(line)
        out = sys.stderr
        encoding = getattr(out, "encoding", None) or "utf-8"
        try:
            out.write(f"[{self.name}] {line}\n".encode(encoding, "backslashreplace").decode(encoding))
            out.flush()
        except (AttributeError, OSError, ValueError):
            pass  # there is no standard error, or it has no reader; no reason to disturb the loop

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        rest = self._pending.get(fd)
        if rest:
            self._pending[fd] = bytearray()
            self._take_line(fd, bytes(rest))

    def process_exited(self) -> None:
        status = None if self._transport is None else self._transport.get_returncode()
        self._exited.set_result(255 if status is None else status)
        if self._on_exit is not None:
            self._on_exit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._closed.done():
            self._closed.set_result(None)


#: starts the process of a worker, given the command and all of its environment, and connects it; raises OSError where it cannot.
Launch = Callable[[WorkerProcess, Sequence[str], Mapping[str, str]], Awaitable[None]]


async def spawn(process: WorkerProcess, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start the process of a worker with a program of its own, as a child of this process. A `Launch`. Cancelled, it has started the process."""
    pipe = asyncio.subprocess.PIPE
    options: Any = {"stdin": pipe, "stdout": pipe, "stderr": pipe, "env": dict(environment), "start_new_session": True}
    # a loop that is cancelled here may let go of a process that it has begun
    await through_cancellation(asyncio.get_running_loop().subprocess_exec(lambda: process, *command, **options))


async def through_cancellation(waiting: Awaitable[Any]) -> None:
    """Await to the end even when cancelled; the cancellation is raised afterwards."""
    task = asyncio.ensure_future(waiting)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled
