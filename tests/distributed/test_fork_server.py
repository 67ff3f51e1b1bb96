"""Workers that are forked: as those with an interpreter of their own, and nothing is left of the server that they are forked of."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import aiograd as ag
from aiograd.distributed.cluster import LocalCluster, WorkerProcess, forked
from aiograd.distributed.cluster.process import PROGRAM
from aiograd.errors import ArgumentError, DeadlineError, WorkerLostError
from aiograd.running.lasting import LASTING_DESCRIPTORS
from aiograd.testing import LeakCheck
from tests.support import cancel
from tests.sweeps import swept
from tests.watchdog import SECONDS

pytestmark = [pytest.mark.proc, pytest.mark.skipif(not forked.CAN_FORK, reason="workers are not forked here")]

SERVICE = "tests.distributed.fork_service:service"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def without_servers() -> Iterator[None]:
    """The test begins and ends without servers; others share them, as clusters do."""
    forked.SERVERS.close()
    yield
    forked.SERVERS.close()


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[LocalCluster]:
    async with LocalCluster(2, service=SERVICE, start="fork") as cluster:
        yield cluster


def servers() -> list[int]:
    """The processes of the servers that run."""
    return [process.pid for process in forked.SERVERS._processes if process.poll() is None]


def runs(pid: int) -> bool:
    """True if there is such a process, and no mere zombie of it."""
    try:
        return b") Z " not in Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def command(service: str = SERVICE) -> list[str]:
    return [*PROGRAM, "worker", "--managed", "--name", "w", "--service", service]


def environment() -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    return {**os.environ, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1", "AIOGRAD_SECRET": "0" * 64}


async def start(service: str = SERVICE, timeout: float = SECONDS) -> WorkerProcess:
    return await WorkerProcess.start("w", command(service), environment(), timeout, launch=forked.fork)


def server_of_starts() -> forked.ForkServer:
    """The server that `start` asks."""
    server = forked.SERVERS.get({name: value for name, value in environment().items() if name not in forked.OF_EACH})
    assert server is not None
    return server


#: signals that the process of the tests itself was started with as ignored
IGNORED_HERE = {number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN} - {signal.SIGPIPE, signal.SIGXFSZ}


# -------------------------------------------------------------------- as one with an interpreter of its own


async def test_a_forked_worker_differs_in_nothing_from_one_with_an_interpreter_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOGRAD_SECRET_FILE", "not this one")
    descriptions = []
    for how in ("spawn", "fork"):
        async with LocalCluster(2, service=SERVICE, start=how, environment={"OF_THE_WORKERS": "yes"}) as cluster:
            descriptions.append([await cluster.driver.call(name, "description") for name in cluster.workers])
            parents = {await cluster.driver.call(name, "parent") for name in cluster.workers}
            assert len(parents) == 1 and (parents == {os.getpid()}) == (how == "spawn")
            if how == "fork":
                (server,) = parents
                assert "Threads:\t1\n" in Path(f"/proc/{server}/status").read_text()
                comm = [Path(f"/proc/{pid}/comm").read_text() for pid in cluster.pids.values()]
                assert comm == ["worker0\n", "worker1\n"]
    (spawned, _), (first, second) = [[json.loads(each.replace("worker1", "worker0")) for each in some] for some in descriptions]
    assert second == first, "a child has nothing of the one before"
    there, here = spawned.pop("files"), first.pop("files")
    for described in (spawned, first):  # loops differ in whether they pass on that a signal is ignored, as below `nohup`
        described["words"] = [re.sub(r"^driver=http://127.0.0.1:\d+$", "driver", word) for word in described["words"]]
        described["signals"] = [each for number, each in enumerate(described["signals"], 1) if number not in IGNORED_HERE]
    assert first == spawned
    assert sum(here.values()) <= sum(there.values()), f"{here}, {there}: loops differ in the files that they pass on, but none is the server's"
    assert first["environment"]["OF_THE_WORKERS"] == "yes" and not {"AIOGRAD_SECRET", "AIOGRAD_SECRET_FILE"} & set(first["environment"])


async def test_products_are_those_of_a_process_that_was_not_forked(cluster: LocalCluster) -> None:
    left, right = (ag.tensor(np.random.default_rng(seed).standard_normal((70, 70))) for seed in (0, 1))
    async with LocalCluster(1, service=SERVICE, start="spawn") as other:
        wanted = await other.driver.call("worker0", "product", left, right)
    for name in cluster.workers:
        assert (await cluster.driver.call(name, "product", left, right)).numpy().tobytes() == wanted.numpy().tobytes()


async def test_random_numbers_and_secrets_are_fresh_in_each_child(cluster: LocalCluster) -> None:
    drawn = [await cluster.driver.call(name, "draws") for name in cluster.workers]
    await cluster.restart("worker1")
    drawn.append(await cluster.driver.call("worker1", "draws"))
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == 3, numbers


#: prints the modules that draw random numbers while a fork server imports them, and the random numbers of numpy's that come with it
DRAWING = """
import os, random, sys, traceback
drawing, draw = set(), os.urandom
def noted(count):
    names = [frame.f_globals.get("__name__", "?") for frame, _ in traceback.walk_stack(sys._getframe(1))]
    drawing.add(next(name for name in names if name not in ("random", "secrets", "uuid")))
    return draw(count)
os.urandom = random._urandom = noted
from operator import attrgetter
from aiograd.distributed.cluster import forked
from aiograd.running.cli import fork_server
for part in forked.PARTS.values():
    attrgetter(part)(fork_server.aiograd)
print(*sorted(drawing))
"""


def test_what_a_server_imports_draws_nothing_that_is_not_drawn_again() -> None:
    done = subprocess.run([sys.executable, "-c", DRAWING], cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
    redrawn = {"aiograd.distributed.rpc.keyring_file", "aiograd.running.scalars"}  # see the test above
    numpy = {name for name in done.stdout.split() if name.startswith("numpy.")}
    assert set(done.stdout.split()) - numpy - {"importlib._bootstrap"} == redrawn


@pytest.mark.parametrize(("status", "end"), [(3, 3), (0, signal.SIGTERM), (-signal.SIGKILL, signal.SIGKILL)])
async def test_its_exit_status_is_known(cluster: LocalCluster, status: int, end: int) -> None:
    pid = cluster.pids["worker0"]
    if isinstance(end, signal.Signals):
        os.kill(pid, end)
    else:
        with pytest.raises(WorkerLostError):
            await cluster.driver.call("worker0", "end", end)
    assert await cluster.wait_lost("worker0") == status
    assert not Path(f"/proc/{pid}").exists(), "it has been buried"
    assert await cluster.driver.call("worker1", "process") == cluster.pids["worker1"]


async def test_the_story_of_one_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "never_there.py").write_text("raise RuntimeError('as it is imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(WorkerLostError, match=r"exit status 1(.|\n)*RuntimeError: as it is imported"):
        await start("never_there:service")
    (tmp_path / "slow_to_come.py").write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(DeadlineError, match=r"within 1 s"):
        await start("slow_to_come:service", timeout=1.0)
    await until(lambda: not any(children(pid) for pid in servers()))


# -------------------------------------------------------------------- one server for equal starts


async def parents_of(start: str = "fork", **options: Any) -> set[int]:
    async with LocalCluster(1, service=SERVICE, start=start, **options) as cluster:
        return {await cluster.driver.call(name, "parent") for name in cluster.workers}


@pytest.mark.parametrize("changed", swept(["environment", "folder", "umask"]))
async def test_equal_starts_share_a_server_and_others_do_not(changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    first = await parents_of()
    assert first == await parents_of() <= set(servers())
    with monkeypatch.context() as patch, contextlib.ExitStack() as stack:
        if changed == "environment":
            patch.setenv("SOME_LIBRARY_READS_THIS", "1")
        elif changed == "folder":
            patch.chdir(tmp_path)
        else:
            stack.callback(os.umask, os.umask(0o077))
        assert (await parents_of()).isdisjoint(first)
    assert first == await parents_of(), "it is there for the next one"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="BLAS has no threads where there is one processor")
async def test_threads_of_blas_are_as_the_environment_says() -> None:
    """They are read when numpy is imported, and there are no forks of a process with threads."""
    for threads in (2, 1):
        async with LocalCluster(1, service=SERVICE, start="fork", environment={"OPENBLAS_NUM_THREADS": str(threads)}) as cluster:
            description = json.loads(await cluster.driver.call("worker0", "description"))
            assert (await cluster.driver.call("worker0", "parent") == os.getpid()) == (threads == 2)
        assert description["threads"] == 1 + threads, "the main thread, that of the watchdog, and the second one of BLAS"
    tried = len(forked.SERVERS._processes)
    assert await parents_of(environment={"OPENBLAS_NUM_THREADS": "2"}) == {os.getpid()}
    assert len(forked.SERVERS._processes) <= tried, "it is not tried again"


async def test_where_nothing_is_forked_each_has_an_interpreter_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "CAN_FORK", False)  # that one asked for is spawned is seen above
    assert await parents_of() == {os.getpid()}
    monkeypatch.undo()
    monkeypatch.setattr(forked, "_inherited", _raise)
    assert await parents_of() == {os.getpid()}
    with pytest.raises(ArgumentError, match="expected one of fork, spawn"):
        LocalCluster(1, service=SERVICE, start="thread")


def _raise() -> Any:
    raise OSError("no /proc")


@pytest.mark.usefixtures("without_servers")
async def test_of_many_servers_the_last_used_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "MOST", 1)
    lost: list[int] = []
    async with LocalCluster(1, service=SERVICE, start="fork", on_lost=lambda name, status: lost.append(status)) as cluster:
        (first,) = servers()
        async with LocalCluster(1, service=SERVICE, start="fork", environment={"ANOTHER": "1"}):
            assert len(servers()) == 2
            assert await cluster.driver.call("worker0", "process") == cluster.pids["worker0"]
            os.kill(cluster.pids["worker0"], signal.SIGKILL)
            assert await cluster.wait_lost("worker0") == -signal.SIGKILL
            await until(lambda: first not in servers())
    assert lost == [-signal.SIGKILL] and len(servers()) == 1


@pytest.mark.usefixtures("without_servers")
async def test_a_server_that_has_more_requests_than_it_takes_is_asked_again() -> None:
    server = server_of_starts()
    server._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    os.kill(server.process.pid, signal.SIGSTOP)
    starts = [asyncio.create_task(WorkerProcess.start("w", command(), environment(), SECONDS, launch=forked.fork)) for _ in range(12)]
    await asyncio.sleep(0.05)
    with pytest.raises(BlockingIOError), socket.socket() as some:
        socket.send_fds(server._control, [b"f"], [some.fileno()] * 4)
    os.kill(server.process.pid, signal.SIGCONT)
    processes = await asyncio.gather(*starts)
    assert {process.pid for process in processes} == set(children(server.process.pid)) and len({each.url for each in processes}) == 12
    await asyncio.gather(*(process.stop(SECONDS) for process in processes))


# -------------------------------------------------------------------- nothing is left


async def test_cancelled_at_any_turn_of_its_start_it_is_gone() -> None:
    server = server_of_starts().process.pid
    process = await start()
    assert children(server) == [process.pid]
    await process.stop(SECONDS)
    for turns in range(25):
        task = asyncio.create_task(start())
        for _ in range(turns):
            await asyncio.sleep(0)
        await cancel(task)
        await until(lambda: not children(server))
    assert server in servers()


async def test_a_request_that_is_given_up_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaves_a_mark.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    server = server_of_starts()
    process = WorkerProcess("w")
    os.kill(server.process.pid, signal.SIGSTOP)
    task = asyncio.create_task(server.fork(process, {"name": "w", "words": command("leaves_a_mark:service")[len(PROGRAM) :], "environment": {}}))
    await asyncio.sleep(0)
    await cancel(task)
    os.kill(server.process.pid, signal.SIGCONT)
    other = await start()  # requests are served in their order
    assert children(server.process.pid) == [other.pid] and process.pid == 0
    await other.stop(SECONDS)
    assert not (tmp_path / "mark").exists()


@pytest.mark.usefixtures("without_servers")
async def test_a_server_is_no_leak_and_a_worker_that_is_left_would_be() -> None:
    check = LeakCheck()

    def left() -> list[str]:
        return [each for each in check.find().descriptors if each != "/dev/null"]  # which libuv opens with the first pipe of a loop

    process = await start()
    assert len(left()) == 5, "of the worker: three pipes, the socket for reports and the descriptor of the process"
    await process.stop(SECONDS)
    assert servers() and not left()
    forked.SERVERS.close()
    assert not servers() and not left() and not LASTING_DESCRIPTORS


@pytest.mark.usefixtures("without_servers")
async def test_the_end_of_a_server_is_no_end_of_its_children(cluster: LocalCluster) -> None:
    (server,) = servers()
    pids = cluster.pids
    os.kill(server, signal.SIGKILL)
    await until(lambda: not servers())
    for name in cluster.workers:
        assert await cluster.driver.call(name, "process") == pids[name]
    os.kill(pids["worker0"], signal.SIGKILL)
    assert await cluster.wait_lost("worker0") == 255, "the one that knew it is gone"
    await cluster.restart("worker0")
    assert servers() and servers() != [server] and await cluster.driver.call("worker0", "parent") == servers()[0]
    await cluster.restart("worker1")
    assert not runs(pids["worker1"]) and await cluster.driver.call("worker1", "process") == cluster.pids["worker1"]


@pytest.mark.usefixtures("without_servers")
async def test_a_server_that_ended_idle_has_a_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = await parents_of()
    os.kill(first, signal.SIGTERM)
    monkeypatch.setattr(subprocess.Popen, "poll", lambda self: self.returncode)  # it is not known yet that it has ended
    (second,) = await parents_of()
    assert second != first and second != os.getpid()


def test_a_server_that_is_idle_ends() -> None:
    code = "from aiograd.distributed.cluster import fork_server\nfork_server.IDLE_SECONDS = 0.01\nfork_server.serve_forks()"
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        done = subprocess.run([sys.executable, "-c", code], stdin=theirs, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


#: a program that prints the numbers of its processes, and ends in the way of its argument
PARENT = f"""
import asyncio, atexit, json, os, signal, sys
from aiograd.distributed.cluster import LocalCluster, forked
from aiograd.running.lasting import LASTING_DESCRIPTORS

async def main(how):
    cluster = LocalCluster(2, service={SERVICE!r}, start="fork")
    await cluster.__aenter__()
    server = [process.pid for process in forked.SERVERS._processes]
    print(json.dumps([*server, *cluster.pids.values()]), flush=True)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "closed":
        child = os.fork()
        if child == 0:
            kept = len(forked.SERVERS._servers) + len(LASTING_DESCRIPTORS)
            atexit._run_exitfuncs()  # at the end of a fork of this process
            os._exit(kept)
        assert os.waitpid(child, 0)[1] == 0
        assert [await cluster.driver.call("worker0", "parent")] == server
        await cluster.restart("worker0")
        assert [await cluster.driver.call("worker0", "parent")] == server
    if how != "open":
        await cluster.aclose()

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize(("how", "status"), [("killed", -signal.SIGKILL), ("open", 0), ("closed", 0)])
def test_with_the_process_everything_ends(how: str, status: int) -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", PARENT, how], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert how == "open" or not done.stderr
    pids = json.loads(done.stdout)
    assert how == "killed" or not Path(f"/proc/{pids[0]}").exists(), "the server has been waited for"
    deadline = time.monotonic() + SECONDS
    while (left := [pid for pid in pids if runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(pids) == 3 and not left


async def test_a_signal_does_not_reach_another_process_of_the_same_number() -> None:
    process = await start()
    transport: Any = process._transport
    os.kill(process.pid, signal.SIGKILL)
    while runs(process.pid):
        time.sleep(0.005)  # noqa: ASYNC251 - the loop shall not hear of the end
    with subprocess.Popen(["sleep", str(2 * SECONDS)]) as other:  # noqa: S607, ASYNC220
        transport._number = other.pid  # as if the system had given it the number
        with contextlib.suppress(ProcessLookupError):
            transport.kill()
        assert process.status is None
        assert await process.wait() == -signal.SIGKILL
        with pytest.raises(ProcessLookupError):
            transport.kill()
        other.terminate()
        assert other.wait() == -signal.SIGTERM
    await process.wait_closed()


async def test_another_program_than_this_one_is_spawned() -> None:
    code = "import json, os, sys; print(json.dumps({'url': str(os.getppid()), 'incarnation': ''}), flush=True); sys.stdin.read()"
    process = await WorkerProcess.start("w", [sys.executable, "-c", code], os.environ, SECONDS, launch=forked.fork)
    assert process.url == str(os.getpid())
    await process.stop(SECONDS)
