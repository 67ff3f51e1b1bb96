"""Worker processes: started, introduced to each other, watched, restarted, and gone afterwards, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import pytest_asyncio

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed import Encoding, Limits
from aiograd.distributed.cluster import LocalCluster, WorkerProcess
from aiograd.distributed.messages.library import SetPeers
from aiograd.errors import ArgumentError, DeadlineError, EngineClosedError, ReferenceLostError, RemoteError, UnknownPeerError, WorkerLostError
from tests.support import cancel
from tests.watchdog import SECONDS

pytestmark = pytest.mark.proc

SERVICE = "tests.distributed.cluster_service:service"
#: a worker as far as its parent can see
PLAIN_CHILD = """
import json, signal, sys
print(json.dumps({"name": "w", "url": "http://127.0.0.1:1", "incarnation": "00" * 16}), flush=True)
sys.stdin.read()
"""


def is_running(pid: int, *, is_ours: bool = True) -> bool:
    """True if there is such a process. A zombie counts, unless it is somebody else's to bury."""
    try:
        os.kill(pid, 0)
        return is_ours or b") Z " not in Path(f"/proc/{pid}/stat").read_bytes()
    except (ProcessLookupError, FileNotFoundError):
        return False


async def start(code: str, timeout: float = 10.0, **options: Any) -> WorkerProcess:
    return await WorkerProcess.start("w", [sys.executable, "-c", code], os.environ, timeout, **options)


# -------------------------------------------------------------------- one process


async def test_a_process_listens_and_ends() -> None:
    ended: list[WorkerProcess] = []
    process = await start(PLAIN_CHILD, on_exit=ended.append)
    assert process.url == "http://127.0.0.1:1" and is_running(process.pid) and process.status is None
    assert await process.stop(5.0) == -signal.SIGTERM
    assert ended == [process] and not is_running(process.pid)


async def test_a_process_that_does_not_listen_is_an_error_that_tells_its_story(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WorkerLostError, match=r"exit status 3") as lost:
        await start("import sys; print('no such thing', file=sys.stderr); sys.exit(3)")
    assert "no such thing" in str(lost.value) and lost.value.worker == "w"
    assert "[w] no such thing" in capsys.readouterr().err
    with pytest.raises(DeadlineError, match=r"0\.3 s"):
        await start("import time; time.sleep(60)", timeout=0.3)


async def test_one_that_ignores_the_request_to_end_is_killed() -> None:
    process = await start("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + PLAIN_CHILD)
    assert await process.stop(0.1) == -signal.SIGKILL
    assert not is_running(process.pid)


async def test_cancelled_while_it_starts_it_is_gone(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    task = asyncio.create_task(start(f"import os, time; open({str(marker)!r}, 'w').write(str(os.getpid())); time.sleep(60)"))
    while not (marker.exists() and marker.read_text()):
        await asyncio.sleep(0.01)
    await cancel(task)
    assert not is_running(int(marker.read_text()))


async def test_cancelled_at_any_turn_of_its_start_it_is_gone(tmp_path: Path) -> None:
    for turns in range(25):
        mark = f"{tmp_path.name} after {turns} turns"
        task = asyncio.create_task(start(f"import time; time.sleep(60)  # {mark}"))
        for _ in range(turns):
            await asyncio.sleep(0)
        await cancel(task)
        for command in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # the process may end while it is looked at
                assert mark.encode() not in command.read_bytes(), f"cancelled {mark} its process runs"


async def test_what_is_left_of_it_may_hold_its_pipes_but_not_us() -> None:
    process = await start(f"import subprocess; subprocess.Popen(['sleep', '{2 * SECONDS}'])" + PLAIN_CHILD)
    assert await process.stop(5.0) == -signal.SIGTERM


async def test_lines_are_passed_on_whole_and_whatever_they_are_made_of(capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 200_000
    code = f"import sys; sys.stderr.buffer.write(b'\\xff bytes\\n' + b'x' * 200000 + b'\\nlast'); sys.stderr.flush(){PLAIN_CHILD}"
    process = await start(code)
    await process.stop(5.0)
    text = capsys.readouterr().err
    assert "[w] \ufffd bytes\n" in text and text.replace("\n[w] ", "").count(long) == 1 and "[w] last" in text


# -------------------------------------------------------------------- a cluster


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[LocalCluster]:
    async with LocalCluster(2, service=SERVICE) as cluster:
        pids = cluster.pids
        yield cluster
        pids |= cluster.pids
    assert not [pid for pid in pids.values() if is_running(pid)]


async def test_the_driver_calls_workers_and_they_call_each_other(cluster: LocalCluster) -> None:
    assert cluster.workers == ("worker0", "worker1")
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    async with cluster.driver.context() as ctx:
        loss = (await cluster.driver.call("worker0", "double_at", "worker1", x)).sum()
        await ctx.backward(loss)
        assert ctx.grads[x].tolist() == [2.0, 2.0]
    for name in cluster.workers:
        assert await cluster.driver.call(name, "process") == cluster.pids[name]
        assert await cluster.driver.call(name, "variable", "OPENBLAS_NUM_THREADS") == os.environ.get("OPENBLAS_NUM_THREADS", "1")
        assert await cluster.driver.call(name, "variable", "AIOGRAD_SECRET") is None, "the secret stays in the environment"


async def test_a_killed_worker_is_noticed_and_can_be_restarted(cluster: LocalCluster) -> None:
    driver = cluster.driver
    counter = await driver.remote("worker1", "Counter")
    assert await counter.call("add", 2) == 2
    waiting = asyncio.create_task(driver.call("worker1", "wait_forever"))
    await driver.call("worker1", "process")
    first = cluster.pids["worker1"]
    os.kill(first, signal.SIGKILL)
    with pytest.raises(WorkerLostError) as lost:
        await waiting
    assert lost.value.worker == "worker1"
    assert await cluster.wait_lost("worker1") == -signal.SIGKILL
    with pytest.raises(WorkerLostError, match="nothing restarts it"):
        await cluster.wait_running("worker1")
    await cluster.restart("worker1")
    assert cluster.pids["worker1"] != first
    assert await driver.call("worker1", "process") == cluster.pids["worker1"]
    assert (await driver.call("worker0", "double_at", "worker1", ag.tensor([3.0]))).tolist() == [6.0], "the others know where it is"
    with pytest.raises(ReferenceLostError):
        await counter.call("add", 1)


async def test_a_running_worker_can_be_restarted(cluster: LocalCluster) -> None:
    first = cluster.pids["worker0"]
    await cluster.restart("worker0")
    assert not is_running(first)
    assert await cluster.driver.call("worker0", "process") == cluster.pids["worker0"] != first
    assert (await cluster.driver.call("worker0", "double_at", "worker1", ag.tensor([3.0]))).tolist() == [6.0], "it knows where the others are"
    with pytest.raises(UnknownPeerError):
        await cluster.restart("worker7")


async def test_a_restarted_worker_knows_the_others_before_it_is_introduced(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    introduce = cluster._introduce

    async def late(name: str) -> None:
        process = cluster._processes[name]
        cluster.driver.membership.set_peers(SetPeers({name: process.url}, {name: process.incarnation}))
        assert (await cluster.driver.call(name, "double_at", "worker1", ag.tensor([3.0]))).tolist() == [6.0]
        await introduce(name)

    monkeypatch.setattr(cluster, "_introduce", late)
    await cluster.restart("worker0")


async def test_restarts_that_are_asked_for_at_the_same_time_are_one(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    start = cluster._start

    async def noted(name: str) -> None:
        started.append(name)
        await start(name)

    monkeypatch.setattr(cluster, "_start", noted)
    first = cluster.pids["worker0"]
    await asyncio.gather(*(cluster.restart("worker0") for _ in range(3)))
    assert started == ["worker0"] and cluster.pids["worker0"] != first
    assert await cluster.driver.call("worker0", "process") == cluster.pids["worker0"]
    await cluster.restart("worker0")
    assert started == ["worker0"] * 2, "one that is asked for afterwards is another"


async def test_a_restart_that_fails_or_is_given_up_is_tried_again_by_who_waits_for_it(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    start, tries = cluster._start, 0

    async def failing(name: str) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise WorkerLostError("it ended at once", worker=name)
        await start(name)

    monkeypatch.setattr(cluster, "_start", failing)
    ended = await asyncio.gather(*(cluster.restart("worker0") for _ in range(3)), return_exceptions=True)
    assert [type(each) for each in ended] == [WorkerLostError, type(None), type(None)] and tries == 2
    assert await cluster.driver.call("worker0", "process") == cluster.pids["worker0"]


async def test_workers_are_added_and_removed(cluster: LocalCluster) -> None:
    assert isinstance(cluster, dist.Cluster)
    await cluster.add("late")
    assert cluster.workers == ("worker0", "worker1", "late") == tuple(cluster.urls) == tuple(cluster.pids)
    x = ag.tensor([3.0])
    for near, far in (("late", "worker0"), ("worker1", "late")):
        assert (await cluster.driver.call(near, "double_at", far, x)).tolist() == [6.0], f"{near} knows where {far} is"
    for name in ("late", "driver"):
        with pytest.raises(ArgumentError):
            await cluster.add(name)
    waiting = asyncio.create_task(cluster.wait_lost("worker0"))
    await asyncio.sleep(0)
    first = cluster.pids["worker0"]
    await cluster.remove("worker0")
    assert cluster.workers == ("worker1", "late") and not is_running(first)
    assert await waiting == 0
    for asking in (cluster.remove, cluster.restart, cluster.wait_lost, cluster.wait_running):
        with pytest.raises(UnknownPeerError, match="it has worker1, late"):
            await asking("worker0")
    with pytest.raises(UnknownPeerError):
        await cluster.driver.call("worker0", "process")
    with pytest.raises(UnknownPeerError, match="worker 'late' knows no worker 'worker0'"):
        await cluster.driver.call("late", "double_at", "worker0", x)
    await cluster.add("worker0")
    assert cluster.pids["worker0"] != first and (await cluster.driver.call("late", "double_at", "worker0", x)).tolist() == [6.0]


async def test_a_worker_that_cannot_be_added_leaves_nothing_behind(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_service", "tests.no_such_module:service")
    with pytest.raises(WorkerLostError, match="no module tests.no_such_module"):
        await cluster.add("late")
    assert cluster.workers == ("worker0", "worker1") == tuple(cluster.pids)
    monkeypatch.undo()
    await cluster.add("late")
    assert await cluster.driver.call("late", "process") == cluster.pids["late"]


async def test_a_worker_that_is_removed_while_it_is_restarted_does_not_come_back() -> None:
    async with LocalCluster(2, service=SERVICE, max_restarts=1) as cluster:
        os.kill(cluster.pids["worker1"], signal.SIGKILL)
        await cluster.wait_lost("worker1")
        await cluster.remove("worker1")
        assert cluster.workers == ("worker0",) == tuple(cluster.pids)
        await cluster.driver.call("worker0", "process")


async def test_a_cluster_can_be_closed_early_and_again() -> None:
    cluster = LocalCluster(1, service=SERVICE)
    async with cluster:
        pids = cluster.pids
        await cluster.aclose()
        assert not [pid for pid in pids.values() if is_running(pid)]
        with pytest.raises(EngineClosedError):
            cluster.driver  # noqa: B018
        await cluster.aclose()
    with pytest.raises(EngineClosedError, match="entered twice"):
        await cluster.__aenter__()


async def test_loss_and_return_are_reported_a_restart_that_was_asked_for_is_no_loss() -> None:
    events: list[tuple[str, str, object]] = []
    report: dict[str, Any] = {f"on_{what}": lambda name, value, what=what: events.append((what, name, value)) for what in ("lost", "return")}
    async with LocalCluster(2, service=SERVICE, max_restarts=1, **report) as cluster:
        assert events == []
        os.kill(cluster.pids["worker1"], signal.SIGKILL)
        await cluster.wait_lost("worker1")
        await cluster.wait_running("worker1")
        assert events == [("lost", "worker1", -signal.SIGKILL), ("return", "worker1", cluster.urls["worker1"])]
        await cluster.restart("worker0")
        assert events[2:] == [("return", "worker0", cluster.urls["worker0"])]
        await cluster.add("late")
        await cluster.remove("late")
        assert len(events) == 3


async def test_a_lost_worker_is_restarted_as_often_as_allowed() -> None:
    lost: list[tuple[str, int]] = []
    options: dict[str, Any] = {"limits": Limits(contexts=7), "environment": {"OF_THE_WORKERS": "yes"}}
    async with LocalCluster(1, service=SERVICE, max_restarts=1, on_lost=lambda name, status: lost.append((name, status)), **options) as cluster:
        assert await cluster.driver.call("worker0", "limit_on_contexts") == cluster.driver.limits.contexts == 7
        assert await cluster.driver.call("worker0", "variable", "OF_THE_WORKERS") == "yes"
        first = cluster.pids["worker0"]
        os.kill(first, signal.SIGKILL)
        await cluster.wait_lost("worker0")
        await cluster.wait_running("worker0")
        second = cluster.pids["worker0"]
        assert second != first and await cluster.driver.call("worker0", "process") == second
        os.kill(second, signal.SIGKILL)
        await cluster.wait_lost("worker0")
        with pytest.raises(WorkerLostError):
            await cluster.wait_running("worker0")
    assert lost == [("worker0", -signal.SIGKILL)] * 2


async def test_what_a_worker_prints_is_passed_on_with_its_name(cluster: LocalCluster, capsys: pytest.CaptureFixture[str]) -> None:
    like_ours = '{"peer": "worker0", "url": "nowhere"}'
    await cluster.driver.call("worker1", "complain", like_ours)
    await cluster.restart("worker1")  # after its end everything is there
    assert capsys.readouterr().err.count(f"[worker1] {like_ours}\n") == 2


async def test_leaving_while_a_worker_is_busy_takes_no_longer_than_the_grace() -> None:
    async with LocalCluster(2, service=SERVICE) as cluster:
        pids = cluster.pids
        calls = [asyncio.create_task(cluster.driver.call("worker0", *words)) for words in (("wait_forever",), ("sleep_in_a_thread", 10 * SECONDS))]
        await cluster.driver.call("worker0", "process")
    assert not [pid for pid in pids.values() if is_running(pid)]
    assert all(isinstance(result, Exception) for result in await asyncio.gather(*calls, return_exceptions=True))


async def test_cancelled_inside_it_leaves_nothing_behind() -> None:
    pids: dict[str, int] = {}
    entered = asyncio.Event()

    async def use() -> None:
        async with LocalCluster(2, service=SERVICE) as cluster:
            pids.update(cluster.pids)
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(use())
    await entered.wait()
    await cancel(task)
    assert pids and not [pid for pid in pids.values() if is_running(pid)]


async def test_where_one_worker_cannot_start_none_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    (tmp_path / "service_that_fails.py").write_text(
        f"import os, pathlib, sys, time\npathlib.Path({str(pids)!r}, str(os.getpid())).touch()\n"
        "if 'worker1' in sys.argv: time.sleep(60)\nsys.exit('no luck')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(WorkerLostError, match="no luck"):
        async with LocalCluster(2, service="service_that_fails:service"):
            pass
    assert list(pids.iterdir()) and not [path for path in pids.iterdir() if is_running(int(path.name))]


def test_no_worker_outlives_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, json, os, signal\n"
        "from aiograd.distributed.cluster import LocalCluster\n"
        "async def main():\n"
        f"    async with LocalCluster(2, service={SERVICE!r}) as cluster:\n"
        "        print(json.dumps(cluster.pids), flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    root = str(Path(__file__).parent.parent.parent)
    done = subprocess.run([sys.executable, script], env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = json.loads(done.stdout).values()
    deadline = time.monotonic() + SECONDS
    while (left := [pid for pid in pids if is_running(pid, is_ours=False)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


@pytest.mark.parametrize(
    "options",
    [
        {"n": 0},
        {"n": 2, "names": ["a"]},
        {"names": ["a", "a"]},
        {"names": ["a", "driver"]},
        {"service": "module"},
        {"max_restarts": -1},
        {"start_timeout": 0.0},
        {"log_level": "loud"},
    ],
    ids=str,
)
def test_impossible_clusters_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        LocalCluster(**{"service": SERVICE, **options})


async def test_tracebacks_of_functions_that_raise_come_with_the_name_of_their_worker(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[RemoteError] = []
    for options in ({}, {"log_level": "error"}):
        async with LocalCluster(1, service=SERVICE, **options) as cluster:  # type: ignore[arg-type]
            with pytest.raises(RemoteError, match="^Error on Node worker0: boom: KeyError: 'abc'$") as caught:
                await cluster.driver.call("worker0", "boom", "abc")
            told.append(caught.value)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("[worker0] ")]
    said = "\n".join(lines)
    assert f"(correlation id {told[0].correlation_id})" in said and "[worker0] Traceback (most recent call last):" in said
    assert any("in boom" in line for line in lines) and said.count("Traceback") == 1
    assert told[1].correlation_id not in said, "logged from errors on"


@pytest.mark.parametrize("restarts", [0, 1])
async def test_waiting_for_a_worker_that_has_just_died_sees_that_it_has(restarts: int) -> None:
    async with LocalCluster(1, service=SERVICE, max_restarts=restarts) as cluster:
        await cluster.wait_running("worker0")
        first = cluster.pids["worker0"]
        os.kill(first, signal.SIGKILL)
        if restarts:
            await cluster.wait_running("worker0")
            assert cluster.pids["worker0"] != first
            assert await cluster.driver.call("worker0", "process") == cluster.pids["worker0"]
        else:
            with pytest.raises(WorkerLostError, match="nothing restarts it"):
                await cluster.wait_running("worker0")


async def test_a_worker_that_is_busy_counts_as_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiograd.distributed.cluster.local.ASK_SECONDS", 0.1)
    async with LocalCluster(1, service=SERVICE) as cluster:
        busy = asyncio.create_task(cluster.driver.call("worker0", "hold_the_loop_up", 0.6))
        await cluster.driver.call("worker0", "process")
        await cluster.wait_running("worker0")
        await asyncio.gather(busy, return_exceptions=True)
        await cluster.wait_running("worker0")


@pytest.mark.parametrize(("ends", "seconds"), [(False, 0.1), (False, 0.5), (True, 0.5)])
async def test_waiting_for_a_worker_that_was_only_silent_ends_when_it_answers(ends: bool, seconds: float) -> None:
    """A request is given up before or after the worker is lost once more.

    Its process is suspended, and the driver has lost it by its silence; then the process runs on, or ends.
    """
    async with LocalCluster(1, service=SERVICE, limits=Limits(heartbeat=0.05)) as cluster:
        pid = cluster.pids["worker0"]
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(WorkerLostError, match="nothing was heard from it"):
            await cluster.driver.call("worker0", "wait_forever")
        asked: asyncio.Queue[None] = asyncio.Queue()
        ask = cluster._open().ask

        async def asking(name: str, message: Any) -> Any:
            asked.put_nowait(None)
            return await ask(name, message)

        with mock.patch.object(cluster._open(), "ask", asking), mock.patch("aiograd.distributed.cluster.local.ASK_SECONDS", seconds):
            waiting = asyncio.create_task(cluster.wait_running("worker0"))
            for _ in range(4):  # three have had no answer
                await asked.get()
            assert not waiting.done()
            os.kill(pid, signal.SIGKILL if ends else signal.SIGCONT)
            if ends:
                with pytest.raises(WorkerLostError, match="nothing restarts it"):
                    await waiting
                return
            await waiting
        assert await cluster.driver.call("worker0", "process") == pid


async def test_encodings_are_those_of_all() -> None:
    async with LocalCluster(1, service=SERVICE, encoding=Encoding.BFLOAT16, gradient_encoding=Encoding.BLOCK8) as cluster:
        x = ag.tensor([1.0, 1.00001], requires_grad=True)
        async with cluster.driver.context():
            y = await cluster.driver.call("worker0", "double", x)
        assert y.tolist() == [2.0, 2.0]
        assert await cluster.driver.call("worker0", "encodings") == ["BFLOAT16", "BLOCK8"]
        assert (cluster.driver._core.encoding, cluster.driver._core.gradient_encoding) == (Encoding.BFLOAT16, Encoding.BLOCK8)
