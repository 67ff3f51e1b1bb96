"""``aiograd why``, run as a user runs it, while workers wait for each other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from aiograd import distributed as dist
from aiograd.running import cli
from tests.distributed.workers import exposing

pytestmark = pytest.mark.net
ROOT = Path(__file__).parent.parent
KEY = bytes(range(32))
#: a loaded machine may take long to answer
PATIENCE = ("--timeout", "60")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file with a secret that its owner alone can read."""
    path = tmp_path / "cluster.key"
    path.touch(mode=0o600)
    path.write_text(KEY.hex())
    return path


class Scene:
    """Three workers; `ask_locked` calls another worker while it holds the lock of this one, which `locked` takes."""

    def __init__(self) -> None:
        self.locks = {name: asyncio.Lock() for name in ("left", "right", "driver")}
        self.arrived = asyncio.Semaphore(0)
        self.gate = asyncio.Event()

    async def ask_locked(self, peer: str) -> None:
        here = dist.current_worker()
        async with self.locks[here.name]:
            self.arrived.release()
            await self.gate.wait()
            await here.call(peer, "locked")

    async def locked(self) -> None:
        async with self.locks[dist.current_worker().name]:
            pass

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[tuple[dist.Worker, dist.Worker, dist.Worker]]:
        """`driver` knows `left` and `right`, which it has told of each other."""
        service = exposing(self.ask_locked, self.locked)
        async with dist.Worker("left", service=service, secret=KEY) as left, dist.Worker("right", service=service, secret=KEY) as right:
            async with dist.Worker("driver", secret=KEY, peers={"left": left.url, "right": right.url}) as driver:
                left.add_peer("right", right.url)
                right.add_peer("left", left.url)
                yield left, right, driver

    @contextlib.asynccontextmanager
    async def asking(self, driver: dist.Worker, *calls: tuple[str, str]) -> AsyncIterator[None]:
        """Calls of `ask_locked` on one worker, for another, that are under way."""
        tasks = [asyncio.ensure_future(driver.call(peer, "ask_locked", other)) for peer, other in calls]
        for _ in tasks:
            await self.arrived.acquire()
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


#: the first line of a report without waits; a busy machine holds loops up
NOTHING = re.compile(r"0 waits, 0 cycles(, \d loops? held up)?; asked in ")


async def why(*words: str) -> int:
    """Run the command beside this loop."""
    return await asyncio.to_thread(cli.main, ["why", *words])


async def test_nothing_waits(secret: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with Scene().open() as (left, *_):
        assert await why(left.url, "--secret-file", str(secret), *PATIENCE) == 0
        assert NOTHING.match(capsys.readouterr().out)
        assert await why("left", "--peer", f"left={left.url}", "--secret-file", str(secret), *PATIENCE) == 0
        assert NOTHING.match(capsys.readouterr().out)


async def test_what_waits_without_a_cycle_is_shown_with_status_0(secret: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scene = Scene()
    async with scene.open() as (_, _, driver), scene.asking(driver, ("left", "right")):
        assert await why(driver.url, "--secret-file", str(secret), *PATIENCE) == 0
        text = capsys.readouterr().out
        assert text.startswith("2 waits on 2 workers, 0 cycles") and "test_cli_why.py:" in text and "ask_locked" in text, text


async def test_a_cycle_over_workers_that_the_asked_one_knows(secret: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scene = Scene()
    async with scene.open() as (_, _, driver), scene.asking(driver, ("left", "right"), ("right", "left")):
        scene.gate.set()
        while not (await driver.why(timeout=60)).cycles:
            await asyncio.sleep(0)
        assert await why(driver.url, "--secret-file", str(secret), "--json", *PATIENCE) == 3
        report = dist.WaitReport.from_json(capsys.readouterr().out)
        assert {worker for worker, _ in report.cycles[0]} == {"left", "right"} and not report.silent
        assert {wait.worker for wait in report.waits} == {"left", "right", "driver"}


@pytest.mark.proc
async def test_as_a_process_that_watches(secret: Path) -> None:
    scene = Scene()
    async with scene.open() as (_, _, driver), scene.asking(driver, ("left", "right")):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "aiograd", "why", driver.url, "--json", "--watch", *PATIENCE, cwd=ROOT,
            env={**os.environ, "AIOGRAD_SECRET_FILE": str(secret)}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            for _ in range(2):
                assert len(json.loads(await process.stdout.readline())["waits"]) == 2
            process.send_signal(signal.SIGINT)
            _, complaints = await process.communicate()
            assert (process.returncode, complaints) == (130, b"")
        finally:
            if process.returncode is None:
                process.kill()


async def test_watching_ends_where_the_worker_has_gone(secret: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiograd.running.cli.why.WATCH_SECONDS", 0.01)
    async with Scene().open() as (left, *_):
        watching = asyncio.ensure_future(why(left.url, "--watch", "--secret-file", str(secret), *PATIENCE))
        printed = ""
        while printed.count("waits") < 2:
            printed += capsys.readouterr().out
            await asyncio.sleep(0)
    assert await watching == 1
    assert "aiograd why: " in capsys.readouterr().err


async def test_a_worker_that_cannot_be_reached(secret: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with Scene().open() as (left, *_):
        url = left.url
        wrong = secret.with_name("other.key")
        wrong.touch(mode=0o600)
        wrong.write_text(bytes(32).hex())
        for words, text in (
            ((url, "--secret-file", str(wrong)), "same secret"),
            (("left", "--peer", f"left={url}", "--secret-file", str(wrong)), "worker 'left' gave no report: AuthenticationError"),
            (("right", "--peer", f"right={url}", "--secret-file", str(secret)), "worker 'right' gave no report: AuthenticationError"),
        ):
            assert await why(*words, *PATIENCE) == 1
            captured = capsys.readouterr()
            assert captured.out == "" and captured.err.startswith("aiograd why: ") and text in captured.err and captured.err.count("\n") == 1
    for words, text in (((url,), "no process listens"), (("left", "--peer", f"left={url}"), "gave no report")):
        assert await why(*words, "--secret-file", str(secret), *PATIENCE) == 1
        captured = capsys.readouterr()
        assert captured.out == "" and text in captured.err and captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["left"], "--peer left=URL"),
        (["left", "--peer", "right=http://127.0.0.1:1"], "--peer names right"),
        (["left", "--peer", "left"], "expected NAME=URL"),
        (["http://"], "http://"),
        (["http://127.0.0.1:1", "--timeout", "0"], "--timeout=0"),
        (["http://127.0.0.1:1", "--timeout", "nan"], "--timeout=nan"),
        (["http://127.0.0.1:1", "--certificate", "x"], "--certificate and --key"),
        (["a b", "--peer", "a b=http://127.0.0.1:1"], "a b"),
    ],
)
def test_options_that_do_not_fit(words: list[str], text: str, secret: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["why", *words, "--secret-file", str(secret)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("aiograd why: ") and text in captured.err and captured.err.count("\n") == 1, captured.err


def test_without_a_key(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AIOGRAD_SECRET", "AIOGRAD_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["why", "http://127.0.0.1:1"]) == 2
    assert "there is no secret" in capsys.readouterr().err
