"""Workers as forks of a fork server, see `fork_server`: the side of the process that starts them.

Note [One server for equal starts]
    A worker that is forked shall be as one that an interpreter of its own has started. Much is settled before a worker's command is read: the
    threads of BLAS, the locale, ``sys.path``, limits of the system, the processors that may be used. So a server is asked only for starts that
    would inherit what it has inherited: the same environment, apart from `OF_EACH`, and the same `_inherited`.

Note [The life of a server]
    A server outlives the cluster that it was started for, since the next one is often of the same kind. It ends with this process, however that
    ends; when it was idle for a while; and after its last child when `MOST` others have been used since. Here it holds one descriptor, which a leak
    check passes over.

    Where there can be none, as it has threads (Note [One thread] there) or ends while it starts, interpreters are started instead. One that is
    killed leaves its children running; their statuses are then unknown, and 255 stands for them, as asyncio has it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from aiograd.distributed.cluster.process import PROGRAM, WorkerProcess, spawn, through_cancellation
from aiograd.running.lasting import LASTING_DESCRIPTORS
from aiograd.running.log_fields import structured_logger

log = structured_logger("aiograd.distributed")

#: True where workers are forked; macOS has frameworks that do not survive it
CAN_FORK = sys.platform == "linux" and hasattr(os, "pidfd_open")
#: variables that nothing reads before a worker's command is read: each worker is given its own
OF_EACH = ("AIOGRAD_SECRET", "PYTEST_CURRENT_TEST")
#: parts of aiograd, by their modules, which workers are likely to need where this process has imported them
PARTS = {
    "aiograd.nn": "nn",
    "aiograd.distributed.data_parallel": "distributed.DataParallel",
    "aiograd.pipeline": "pipeline",
    "aiograd.dashboard": "dashboard",
}
#: the servers that are kept, the last used ones
MOST = 4
#: lines of a thread's status that say what a process which it starts inherits
INHERITED = ("Umask", "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "Cap", "NoNewPrivs", "Seccomp", "Cpus_allowed", "Mems_allowed")
#: seconds until a server that has too many requests is asked again
FULL_PAUSE = 0.01

#: bytes of a report at most
REPORT_BYTES = 64

Key = tuple[Any, ...]


async def fork(process: WorkerProcess, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start the process of a worker as a fork, or with an interpreter of its own where that cannot be. A `Launch`.

    Cancelled before the process is known to `process`, it leaves none.
    """
    arguments = command[len(PROGRAM) :]
    if CAN_FORK and [*PROGRAM, *arguments] == list(command):
        common = {name: value for name, value in environment.items() if name not in OF_EACH}
        request = {
            "name": process.name,
            "words": arguments,
            "environment": {name: environment[name] for name in OF_EACH if name in environment},
        }
        for _ in range(2):  # one that was idle may be about to end
            server = SERVERS.get(common)
            if server is None:
                break
            if await server.fork(process, request):
                return
            SERVERS.drop(server)
    await spawn(process, command, environment)


class ForkServer:
    """A fork server, started by this constructor.

    Args:
        key: see `ForkServers.get`.
        environment: its environment.

    Raises:
        OSError: it could not be started.
    """

    def __init__(self, key: Key, environment: Mapping[str, str]) -> None:
        self.key = key
        self.has_forked = False
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        reader, sink = os.pipe()  # it says nothing; /dev/null would be taken for a file, in which one can seek
        os.close(reader)
        command = [*PROGRAM, "fork-server", *(part for module, part in PARTS.items() if module in sys.modules)]
        files: Any = {"stdin": theirs.fileno(), "stdout": sink, "stderr": sink}
        try:
            self.process = subprocess.Popen(command, **files, env=dict(environment), start_new_session=True)  # noqa: S603
        except OSError:
            self._control.close()
            raise
        finally:
            theirs.close()
            os.close(sink)
        LASTING_DESCRIPTORS.add(self._control.fileno())

    async def fork(self, process: WorkerProcess, request: Mapping[str, Any]) -> bool:
        """Fork a child for `process`; returns False, with nothing done, where the server has ended or cannot fork.

        Cancelled before the child is known to `process`, it leaves none.

        Args:
            process: the protocol of the child.
            request: the worker's name, the words of its command, and variables of its environment.
        """
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            report, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.enter_context(report)
            theirs.enter_context(there)
            report.setblocking(False)
            files: list[FileIO] = []
            passed = [there.fileno()]
            for mode in ("wb", "rb", "rb"):
                reader, writer = os.pipe()
                near, far = (reader, writer) if mode == "rb" else (writer, reader)
                files.append(ours.enter_context(FileIO(near, mode)))
                theirs.callback(os.close, far)
                passed.append(far)
            is_asked = await self._ask(passed)
            theirs.close()
            answer = await _answer(report) if is_asked else None
            if answer is None:
                return False
            self.has_forked = True
            number, descriptor = answer
            files.append(ours.enter_context(FileIO(descriptor, "rb")))
            report.send(json.dumps({**request, "folder": os.getcwd()}).encode())  # now it runs
            child = ForkedProcess(process, number, report, files, ours.pop_all())
        await through_cancellation(child.connect())
        return True

    async def _ask(self, descriptors: Sequence[int]) -> bool:
        while True:
            try:
                socket.send_fds(self._control, [b"f"], descriptors)
                return True
            except BlockingIOError:
                await asyncio.sleep(FULL_PAUSE)
            except OSError:
                return False

    def close(self) -> None:
        """Ask it for no more children: it ends with its last one. Idempotent."""
        LASTING_DESCRIPTORS.discard(self._control.fileno())
        self._control.close()


async def _answer(report: socket.socket) -> tuple[int, int] | None:
    """The number of the child and a descriptor of its process, as the server reports them; None: there is none."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(report.fileno(), readable.cancel)
    try:
        await asyncio.wait((readable,))
    finally:
        loop.remove_reader(report.fileno())
    text, descriptors, _, _ = socket.recv_fds(report, REPORT_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    return (int(text), descriptors[0]) if descriptors else None


class ForkedProcess(asyncio.SubprocessTransport):
    """The process of a forked worker, as the transport of its `WorkerProcess`.

    Args:
        protocol: the `WorkerProcess`.
        number: of the process.
        report: the socket on which the server reports the end.
        files: our ends of its standard input, output and error, and the descriptor of the process.
        exits: closes all of these.
    """

    def __init__(
        self, protocol: asyncio.SubprocessProtocol, number: int, report: socket.socket, files: Sequence[FileIO], exits: contextlib.ExitStack
    ) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._protocol = protocol
        self._number = number
        self._report = report
        self._input, *self._outputs, self._process = files
        self._exits = exits
        self._pipes: list[asyncio.ReadTransport] = []
        #: outputs that have not ended
        self._open = len(self._outputs)
        self._status: int | None = None
        self._has_ended = False
        self._loop.add_reader(report.fileno(), self._take_report)
        protocol.connection_made(self)

    async def connect(self) -> None:
        """Begin to read the output of the process."""
        try:
            for number, file in enumerate(self._outputs, 1):
                pipe, _ = await self._loop.connect_read_pipe(functools.partial(_Output, self, number), file)
                self._pipes.append(pipe)
        except BaseException:
            self._open -= len(self._outputs) - len(self._pipes)
            raise

    # ---------------------------------------------------------------- of a transport

    def get_pid(self) -> int:
        return self._number

    def get_returncode(self) -> int | None:
        return self._status

    def send_signal(self, number: int) -> None:
        if self._has_ended:
            raise ProcessLookupError
        signal.pidfd_send_signal(self._process.fileno(), number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Close the pipes, and kill the process if it runs. Idempotent."""
        if not self._has_ended:
            with contextlib.suppress(ProcessLookupError):
                self.kill()
        self._input.close()
        for pipe in self._pipes:
            pipe.close()

    # ---------------------------------------------------------------- called by the loop

    def _take_report(self) -> None:
        try:
            text = self._report.recv(REPORT_BYTES)
        except OSError:
            text = b""
        self._loop.remove_reader(self._report.fileno())
        if text:
            self._status = int(text)
            self._end()
        else:  # the server has ended: the descriptor of the process is readable when the process has
            self._loop.add_reader(self._process.fileno(), self._end)

    def _end(self) -> None:
        self._loop.remove_reader(self._process.fileno())
        self._has_ended = True
        self._protocol.process_exited()
        self._close_if_over()

    def _output_ended(self) -> None:
        self._open -= 1
        self._close_if_over()

    def _close_if_over(self) -> None:
        if self._has_ended and not self._open:
            self._exits.close()
            self._protocol.connection_lost(None)


class _Output(asyncio.Protocol):
    """The standard output or error of the process."""

    def __init__(self, child: ForkedProcess, number: int) -> None:
        self._child = child
        self._number = number

    def data_received(self, data: bytes) -> None:
        self._child._protocol.pipe_data_received(self._number, data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._child._protocol.pipe_connection_lost(self._number, exc)
        self._child._output_ended()


class ForkServers:
    """The fork servers of a process. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: the last used one last
        self._servers: dict[Key, ForkServer] = {}
        #: hashes of keys for which there can be none
        self._impossible: set[int] = set()
        #: that may still run
        self._processes: list[subprocess.Popen[bytes]] = []

    def get(self, environment: Mapping[str, str]) -> ForkServer | None:
        """The server whose children inherit the same as a process that is started here and now; None: there can be none."""
        with self._lock:
            self._processes = [process for process in self._processes if process.poll() is None]
            try:
                key = (*_inherited(), *sorted(environment.items()))
                server = self._servers.pop(key, None)
                if server is not None and server.process.returncode is not None:
                    server.close()
                    server = None
                if server is None and hash(key) not in self._impossible:
                    server = ForkServer(key, environment)
                    self._processes.append(server.process)
            except OSError as error:
                log.debug("there is no fork server: %s", error)
                return None
            if server is not None:
                self._servers[key] = server
            while len(self._servers) > MOST:
                self._servers.pop(next(iter(self._servers))).close()
            return server

    def drop(self, server: ForkServer) -> None:
        """Use a server no more, and start no other in its place if it has never forked."""
        with self._lock:
            server.close()
            if self._servers.get(server.key) is server:
                del self._servers[server.key]
            if not server.has_forked:
                self._impossible.add(hash(server.key))
                log.debug("a fork server has ended before it forked: workers are started with an interpreter of their own")

    def close(self) -> None:
        """End all of them; children see the ends of their standard input, as after any end of this process."""
        with self._lock:
            for server in self._servers.values():
                server.close()
            for process in self._processes:
                process.kill()
                process.wait()
            self._servers, self._processes = {}, []

    def forget(self) -> None:
        """In a fork of this process: they are the parent's."""
        self._lock = threading.Lock()
        for server in self._servers.values():
            server.close()
        for process in self._processes:
            process.returncode = 0  # no child of this process, which has no use for a warning that it runs
        self._servers, self._processes = {}, []


def _inherited() -> Key:
    """Properties beside the environment that a process inherits when it starts."""
    thread = Path("/proc/thread-self")
    status = [line for line in (thread / "status").read_text().splitlines() if line.startswith(INHERITED)]
    files = [(thread / name).read_text() for name in ("limits", "cgroup", "oom_score_adj")]
    spaces = [os.readlink(space) for space in sorted((thread / "ns").iterdir())]
    return os.getcwd(), os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), *status, *files, *spaces


SERVERS = ForkServers()
atexit.register(SERVERS.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=SERVERS.forget)
