"""Workers that come by themselves: on a virtual clock, where each is a task; and in processes, as schedulers start them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.cluster import joining
from aiograd.distributed.cluster.joining import StopReason, serve_cluster, wait_for_way
from aiograd.errors import (
    ArgumentError,
    AuthenticationError,
    ClusterError,
    DeadlineError,
    EngineClosedError,
    NameTakenError,
    UnknownPeerError,
    VersionMismatch,
    WorkerLostError,
)
from aiograd.running.cli.demo.alone import rate
from aiograd.running.cli.demo.data import batches
from aiograd.running.cli.demo.training import Training
from aiograd.running.cli.worker import name_from_environment
from aiograd.testing.virtual_clock import VirtualClock
from tests.distributed.memory import MemoryTransport, Switchboard
from tests.distributed.workers import SECRET, simulate
from tests.support import run_by
from tests.watchdog import SECONDS

ROOT = Path(__file__).parents[2]
SERVICE = "tests.distributed.cluster_service:service"
service = dist.Service()


@service.function
def double(x: ag.Tensor) -> ag.Tensor:
    return x * 2.0


@service.function
async def double_at(peer: str, x: ag.Tensor) -> ag.Tensor:
    return await dist.current_worker().call(peer, "double", x)  # type: ignore[no-any-return]


# -------------------------------------------------------------------- on a virtual clock


class Joiner:
    """A worker that joins, as ``aiograd worker --join`` does, in a task."""

    def __init__(self, board: Switchboard, name: str, *, host: str | None = None, secret: bytes = SECRET, rejoin: float = 60.0) -> None:
        self.name = name
        self.transport: MemoryTransport = board.transport(host or name)
        self.stopping = asyncio.Event()
        self.worker = dist.Worker(name, service=service, secret=secret, transport=self.transport)
        self.ended = asyncio.create_task(self._serve(rejoin), name=f"joiner {name}")

    async def _serve(self, rejoin: float) -> StopReason:
        async with self.worker:
            return await serve_cluster(self.worker, "memory://driver", self.stopping, rejoin)

    async def crash(self) -> None:
        """As when the process is killed."""
        self.transport.crash()
        self.ended.cancel()
        await asyncio.wait((self.ended,))


class Scene:
    """A switchboard, the events of the clusters on it, and who has joined."""

    def __init__(self) -> None:
        self.board = Switchboard()
        self.events: list[tuple[str, str]] = []
        self.joiners: list[Joiner] = []

    def cluster(self, expect: int, **options: Any) -> dist.JoinCluster:
        made = dist.JoinCluster(
            expect, secret=SECRET, on_lost=lambda name, status: self.events.append(("lost", name)),
            on_return=lambda name, url: self.events.append(("back", name)), **options,
        )  # fmt: skip
        self.transport = self.board.transport("driver")
        made._worker = dist.Worker("driver", secret=SECRET, transport=self.transport)
        return made

    def join(self, name: str, **options: Any) -> Joiner:
        joiner = Joiner(self.board, name, **options)
        self.joiners.append(joiner)
        return joiner


def play(main: Callable[[Scene], Awaitable[None]]) -> float:
    """Run on virtual time; returns how many seconds it took."""

    async def played() -> None:
        await main(Scene())

    return simulate(played)


played = run_by(play)


async def each_knows_each(cluster: dist.JoinCluster) -> None:
    for near in cluster.workers:
        for far in cluster.workers:
            if near != far:
                assert (await cluster.driver.call(near, "double_at", far, ag.tensor([3.0]))).tolist() == [6.0], (near, far)


@played
async def test_workers_come_before_and_after_the_driver_and_end_with_the_cluster(scene: Scene) -> None:
    early = scene.join("b")
    await asyncio.sleep(10.0)
    cluster = scene.cluster(2)
    asyncio.get_running_loop().call_later(20.0, scene.join, "a")
    async with cluster:
        assert isinstance(cluster, dist.Cluster)
        assert cluster.workers == ("a", "b") and set(cluster.urls) == {"a", "b"}
        await each_knows_each(cluster)
        x = ag.tensor([1.0, 2.0], requires_grad=True)
        async with cluster.driver.context() as ctx:
            await ctx.backward((await cluster.driver.call("a", "double_at", "b", x)).sum())
            assert ctx.grads[x].tolist() == [2.0, 2.0]
    assert {await joiner.ended for joiner in scene.joiners} == {StopReason.DISMISSED}
    assert scene.events == [] and early in scene.joiners
    with pytest.raises(EngineClosedError):
        cluster.driver  # noqa: B018
    await cluster.aclose()
    assert 30 <= asyncio.get_running_loop().time() < 40


@played
async def test_all_that_come_at_once_know_each_other(scene: Scene) -> None:
    for name in "abcdef":
        scene.join(name)
    await asyncio.sleep(1.0)
    async with scene.cluster(6) as cluster:
        await each_knows_each(cluster)
    assert [await joiner.ended for joiner in scene.joiners] == [StopReason.DISMISSED] * 6


@played
async def test_too_few_in_time_is_an_error_that_names_those_who_came(scene: Scene) -> None:
    came = scene.join("a")
    with pytest.raises(
        DeadlineError, match=r"after 30 s at memory://driver only a had joined. Start the others with `aiograd worker --join memory:"
    ):
        await scene.cluster(2, timeout=30.0).__aenter__()
    assert await came.ended is StopReason.DISMISSED
    with pytest.raises(DeadlineError, match="no worker had joined"):
        await scene.cluster(1, timeout=5.0).__aenter__()
    assert 35 <= asyncio.get_running_loop().time() < 40


@played
async def test_one_too_many_is_told_so_and_asking_again_changes_nothing(scene: Scene) -> None:
    first = scene.join("a")
    async with scene.cluster(1) as cluster:
        with pytest.raises(ClusterError, match=r"has the 1 worker\(s\) that may join: a; b is one too many"):
            await scene.join("b").ended
        for _ in range(3):
            await first.worker.call_apart("driver", joining.JoinRequest.form.name, first.worker.url, joining.__version__)
        assert cluster.workers == ("a",) and scene.events == []
        adding = asyncio.create_task(cluster.add("c"))
        await asyncio.sleep(5.0)
        scene.join("c")
        await adding
        await each_knows_each(cluster)
        with pytest.raises(ArgumentError):
            await cluster.add("c")
    async with scene.cluster(0, at_most=1, timeout=2.0) as empty:
        with pytest.raises(DeadlineError, match="has not joined within 2 s"):
            await empty.add("nobody")


@played
async def test_two_of_one_name_are_one_and_an_error(scene: Scene) -> None:
    scene.join("a")
    async with scene.cluster(1) as cluster:
        with pytest.raises(NameTakenError, match="another worker named 'a'"):
            await scene.join("a", host="elsewhere").ended
        assert cluster.urls == {"a": "memory://a"} and scene.events == []
        assert (await cluster.driver.call("a", "double", ag.tensor([1.0]))).tolist() == [2.0]
    assert asyncio.get_running_loop().time() < 10


@played
async def test_another_secret_or_version_is_one_error_without_a_second_try(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene.cluster(0, at_most=3) as cluster:
        asked: list[str] = []
        take_in = cluster._take_in

        async def noted(*words: Any) -> None:
            asked.append(words[2])
            await take_in(*words)

        cluster.driver.membership.on_join = noted
        with pytest.raises(AuthenticationError):
            await scene.join("a", secret=b"x" * 32).ended
        with monkeypatch.context() as patch:
            patch.setattr(joining, "__version__", "0.0.9")
            with pytest.raises(VersionMismatch, match=r"worker b has aiograd 0\.0\.9, the coordinator .*: upgrade worker b"):
                await scene.join("b").ended
        assert asked == ["0.0.9"] and cluster.workers == ()
        scene.join("b")
        await cluster.wait_joined(1)


@played
async def test_a_worker_that_is_killed_comes_back_under_its_name_and_its_peers_are_told(scene: Scene) -> None:
    first, _ = scene.join("a"), scene.join("b")
    async with scene.cluster(2) as cluster:
        waiting = asyncio.create_task(cluster.wait_lost("a"))
        await asyncio.sleep(1.0)
        await first.crash()
        assert await waiting != 0 and scene.events == [("lost", "a")]
        with pytest.raises(WorkerLostError):
            await cluster.driver.call("a", "double", ag.tensor([1.0]), timeout=3.0)
        scene.join("a", host="elsewhere")
        await cluster.wait_running("a")
        assert scene.events == [("lost", "a"), ("back", "a")] and cluster.urls["a"] == "memory://elsewhere"
        await each_knows_each(cluster)


@played
async def test_a_restart_is_asked_for_and_waited_for(scene: Scene) -> None:
    first, _ = scene.join("a"), scene.join("b")
    async with scene.cluster(2, timeout=20.0) as cluster:
        restarting = [asyncio.create_task(cluster.restart("a")) for _ in range(2)]
        assert await first.ended is StopReason.RESTART
        scene.join("a")
        await asyncio.gather(*restarting)
        assert scene.events == [("back", "a")]
        await each_knows_each(cluster)
        with pytest.raises(DeadlineError, match="This cluster starts no processes"):
            await cluster.restart("b")
        with pytest.raises(UnknownPeerError):
            await cluster.restart("nobody")


@played
async def test_a_worker_that_is_removed_ends_and_its_name_is_free(scene: Scene) -> None:
    first, second = scene.join("a"), scene.join("b")
    async with scene.cluster(2) as cluster:
        await cluster.remove("a")
        assert await first.ended is StopReason.DISMISSED and cluster.workers == ("b",) and scene.events == []
        assert "a" not in second.worker.endpoint.peers or not second.worker.endpoint._urls
        with pytest.raises(UnknownPeerError):
            await cluster.remove("a")
        scene.join("a", host="elsewhere")
        await cluster.wait_joined(2)
        await each_knows_each(cluster)
        assert scene.events == []


@played
async def test_a_driver_that_is_lost_is_waited_for_and_another_one_taken(scene: Scene) -> None:
    loop = asyncio.get_running_loop()
    patient, hasty = scene.join("a", rejoin=60.0), scene.join("b", rejoin=5.0)
    cluster = scene.cluster(2)
    await cluster.__aenter__()
    scene.transport.crash()
    lost_at = loop.time()
    assert await hasty.ended is StopReason.ORPHANED and 5 <= loop.time() - lost_at < 30
    assert not patient.ended.done()
    async with scene.cluster(1) as other:
        assert other.workers == ("a",)
        assert (await other.driver.call("a", "double", ag.tensor([1.0]))).tolist() == [2.0]
    assert await patient.ended is StopReason.DISMISSED
    await cluster.aclose()


@played
async def test_a_worker_that_is_told_to_stop_stops_wherever_it_is(scene: Scene) -> None:
    waiting = scene.join("a")
    await asyncio.sleep(5.0)
    waiting.stopping.set()
    assert await waiting.ended is StopReason.STOPPED
    serving = scene.join("b")
    async with scene.cluster(1) as cluster:
        serving.stopping.set()
        assert await serving.ended is StopReason.STOPPED
        assert await cluster.wait_lost("b") != 0


async def test_a_driver_whose_name_is_not_known_yet_is_waited_for(virtual_clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    ways: list[str | None] = [None, None, None, "10.0.0.7"]

    async def way_to(url: str) -> str | None:
        assert url == "http://driver:7000"
        return ways.pop(0)
    monkeypatch.setattr(joining, "way_to", way_to)
    assert await wait_for_way("a", "http://driver:7000", asyncio.Event()) == "10.0.0.7" and not ways
    ways.extend([None] * 100)
    stopping = asyncio.Event()
    asyncio.get_running_loop().call_later(10.0, stopping.set)
    assert await wait_for_way("a", "http://driver:7000", stopping) is None
    assert 10 < virtual_clock.time() < 12


@pytest.mark.parametrize(
    "options", [{"expect": -1}, {"expect": 2, "at_most": 1}, {"expect": 0, "at_most": 0}, {"expect": 1, "timeout": 0.0}], ids=str
)
def test_impossible_clusters_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        dist.JoinCluster(**options)


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({}, None), ({"SLURM_PROCID": "3"}, "w3"), ({"RANK": "0"}, "w0"), ({"POD_NAME": "worker-1", "RANK": "7"}, "worker-1"),
        ({"AIOGRAD_NAME": "mine", "POD_NAME": "worker-1"}, "mine"), ({"AIOGRAD_NAME": "", "RANK": "2"}, "w2"),
    ],
)  # fmt: skip
def test_names_come_from_what_schedulers_say(environment: dict[str, str], name: str | None) -> None:
    assert name_from_environment(environment) == name


# -------------------------------------------------------------------- in processes


def free_port() -> int:
    """A port that nobody listens on, below those that the system gives to connections: of these one may be taken before it is used here."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(12_000, 32_000)))
            return int(probe.getsockname()[1])


class Launcher:
    """Starts ``aiograd worker --join``, as a scheduler does."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.processes: list[asyncio.subprocess.Process] = []

    async def start(self, *words: str, code: str = "", **variables: str) -> asyncio.subprocess.Process:
        """A worker; `code` runs before."""
        clean = {name: value for name, value in os.environ.items() if not re.match("AIOGRAD_|RANK$|SLURM_|POD_NAME$", name)}
        settings = {"PYTHONPATH": str(ROOT), "AIOGRAD_JOIN": self.url, "AIOGRAD_SECRET": SECRET.hex(), "OPENBLAS_NUM_THREADS": "1"}
        command = ["-c", f"{code}\nimport sys; from aiograd.running.cli import main; sys.exit(main())"] if code else ["-m", "aiograd"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, "worker", "--service", SERVICE, *words, env={**clean, **settings, **variables},
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        self.processes.append(process)
        return process

    async def end(self, process: asyncio.subprocess.Process) -> tuple[int | None, str, str]:
        """Wait for the end; returns status, output and what it complained of."""
        output, complaints = await process.communicate()
        return process.returncode, output.decode(), complaints.decode()


@contextlib.asynccontextmanager
async def launcher(port: int) -> AsyncIterator[Launcher]:
    made = Launcher(port)
    try:
        yield made
    finally:
        for process in made.processes:
            if process.returncode is None:
                process.kill()
            await process.communicate()


def bits(weights: dict[str, Any]) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in sorted(weights.items())}


@pytest.mark.proc
async def test_training_over_workers_that_come_and_go_ends_with_the_bits_of_one_process() -> None:
    port = free_port()
    random = np.random.default_rng(0)
    images, labels = random.standard_normal((192, 1, 8, 8)).astype(np.float32), random.integers(0, 10, 192)
    epochs = 2
    words = ("--service", "aiograd.running.cli.demo.service:service")
    async with launcher(port) as launch:
        early = await launch.start(*words, RANK="0")
        assert early.stdout is not None and b"worker w0 listens on" in await early.stdout.readline()
        doomed = await launch.start(*words, SLURM_PROCID="1")
        events: list[str] = []
        async with dist.JoinCluster(2, port=port, secret=SECRET, on_lost=lambda *lost: events.append(lost[0])) as cluster:
            assert cluster.workers == ("w0", "w1")
            training = Training(cluster.driver, cluster.workers)
            await training.build()
            epoch, is_whole = 0, True
            while epoch < epochs:
                saved = await training.begin_epoch(epoch, rate(epoch, epochs))
                try:
                    for i, batch in enumerate(batches(len(labels), epoch)):
                        kill = doomed.kill if epoch == i == 1 and is_whole else None
                        await training.step(images[batch], labels[batch], midway=kill)
                    epoch += 1
                except ag.errors.DistributedError:
                    is_whole = False
                    assert await cluster.wait_lost("w1") != 0 and events == ["w1"]
                    again = await launch.start(*words, "--name", "w1")
                    await cluster.wait_running("w1")
                    await training.restore(saved, "w1")
            assert not is_whole
            alone = await cluster.driver.call("w0", "train_alone", 0, epochs, ag.asarray(images), ag.asarray(labels))
            assert bits(await training.weights()) == bits(alone)
        assert (await launch.end(doomed))[0] == -signal.SIGKILL
        for process in (early, again):
            status, output, complaints = await launch.end(process)
            assert status == 0 and "stops: the cluster was closed" in output and "Traceback" not in complaints, complaints


@pytest.mark.proc
async def test_processes_that_cannot_join_say_why_in_a_line_and_others_restart_and_leave() -> None:
    port = free_port()
    async with launcher(port) as launch, dist.JoinCluster(0, at_most=1, port=port, secret=SECRET) as cluster:
        first = await launch.start("--join", launch.url, "--name", "w0", "--listen", "127.0.0.1:0", AIOGRAD_JOIN="http://127.0.0.1:1")
        await cluster.wait_joined(1)
        version = "import aiograd.distributed.cluster.joining as joining; joining.__version__ = '0.0.9'"
        refused = {
            "w1 is one too many": await launch.start(AIOGRAD_NAME="w1"),
            "AIOGRAD_SECRET_FILE": await launch.start("--name", "w2", AIOGRAD_SECRET="ff" * 32),
            "has aiograd 0.0.9": await launch.start("--name", "w3", code=version),
            "another worker named 'w0'": await launch.start(POD_NAME="w0"),
        }
        for why, process in refused.items():
            status, _, complaints = await launch.end(process)
            lines = [line for line in complaints.splitlines() if line.startswith("aiograd worker: ")]
            assert status == 1 and len(lines) == 1 and why in lines[0] and "Traceback" not in complaints, complaints
        assert await cluster.driver.call("w0", "process") == first.pid
        counter = await cluster.driver.remote("w0", "Counter")
        await cluster.restart("w0")
        assert await cluster.driver.call("w0", "process") == first.pid, "the same process with another program in it"
        assert await cluster.driver.call("w0", "variable", "AIOGRAD_SECRET") is None
        with pytest.raises(ag.errors.ReferenceLostError):
            await counter.call("add", 1)
        await cluster.remove("w0")
        status, output, _ = await launch.end(first)
        assert status == 0 and output.count("listens on") == 2 and "stops: the cluster was closed" in output


#: a driver that is killed when its two workers have come
DRIVER = f"""
import asyncio, os, signal
from aiograd import distributed as dist
async def main():
    async with dist.JoinCluster(2, port=int(os.environ["PORT"]), secret=bytes.fromhex("{SECRET.hex()}")):
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


@pytest.mark.proc
async def test_processes_whose_driver_was_killed_wait_for_another_one_for_a_while() -> None:
    port = free_port()
    async with launcher(port) as launch:
        hasty, patient = await launch.start("--name", "a", "--rejoin-seconds", "0.1"), await launch.start("--name", "b")
        driver = await asyncio.create_subprocess_exec(
            sys.executable, "-c", DRIVER, env={**os.environ, "PYTHONPATH": str(ROOT), "PORT": str(port)}, stderr=asyncio.subprocess.PIPE
        )
        assert (await driver.communicate(), driver.returncode)[1] == -signal.SIGKILL
        status, output, _ = await launch.end(hasty)
        assert status == 1 and "stops: its coordinator was lost" in output
        async with dist.JoinCluster(1, port=port, secret=SECRET) as cluster:
            assert await cluster.driver.call("b", "process") == patient.pid
        assert (await launch.end(patient))[0] == 0


@pytest.mark.proc
async def test_a_process_whose_driver_has_no_address_yet_waits_until_it_is_told_to_stop() -> None:
    async with launcher(1) as launch:
        process = await launch.start("--name", "a", AIOGRAD_JOIN="http://no-such-host.invalid:7000")
        assert process.stderr is not None
        assert b"worker a waits for the coordinator at http://no-such-host.invalid:7000" in await process.stderr.readline()
        process.terminate()
        status, output, complaints = await launch.end(process)
        assert (status, output) == (0, "") and "Traceback" not in complaints


@pytest.mark.proc
def test_the_launch_script_runs() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AIOGRAD_")}
    environment |= {"PYTHON": sys.executable, "PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
    script = ROOT / "examples" / "launch" / "local.sh"
    done = subprocess.run([str(shutil.which("bash")), script, "2"], env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    assert "joined: w0, w1" in done.stdout and re.search(r"loss \S+ -> \S+ after 100 steps over 2 workers", done.stdout)
    assert done.stdout.count("stops: the cluster was closed") == 2


@pytest.mark.parametrize("name", ["local.sh", "slurm.sbatch"])
def test_launch_scripts_are_bash(name: str) -> None:
    done = subprocess.run([str(shutil.which("bash")), "-n", ROOT / "examples" / "launch" / name], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
