"""The log after crashes and errors of system calls, and with damaged files."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import serving
from aiograd.errors import VersionLogError
from tests.serving.arrays import bits_of, version_of
from tests.serving.models import Two, ones, state, values
from tests.serving.system_calls import Crash, FailingCalls, count_calls
from tests.serving.test_log import filled, held
from tests.support import assert_awaiting_raises, assert_raises
from tests.sweeps import swept

ROOT = Path(__file__).parents[2]


# ---------------------------------------------------------------- crashes


def _append(number: int, promote: bool) -> Callable[[Path], None]:
    return lambda folder: serving.VersionLog(folder, keep=2).append(version_of(number, state(number)), promote=promote)


ACTIONS: dict[str, tuple[Callable[[Path], None], float]] = {
    "append and promote": (_append(4, True), 4.0),
    "append a candidate": (_append(4, False), 3.0),
    "promote": (lambda folder: serving.VersionLog(folder).promote(2), 2.0),
}


@pytest.mark.parametrize("action", ACTIONS)
async def test_a_crash_at_every_system_call_leaves_the_version_before_or_the_new_one(tmp_path: Path, action: str) -> None:
    act, after = ACTIONS[action]
    filled(tmp_path / "log", keep=2)
    shutil.copytree(tmp_path / "log", tmp_path / "whole")
    calls = count_calls(lambda: act(tmp_path / "whole"))
    seen = set()
    for n in range(1, len(calls) + 1):
        folder = tmp_path / f"{n}"
        shutil.copytree(tmp_path / "log", folder)
        failing = FailingCalls(n)
        with failing.installed(), pytest.raises(Crash):
            act(folder)
        assert failing.calls[:n] == calls[:n]
        found = held(serving.VersionLog(folder).last())
        assert found in (3.0, after), calls[n - 1]
        seen.add(found)
        model, highest = Two(0.0), serving.VersionLog(folder)._highest()
        async with serving.Server(model, log=folder) as server:
            assert model.first.item() == found and not list(folder.glob(".*.tmp"))
            assert (await server.publish()).number == highest + 1, "a number that was written is not given again"
    assert seen == {3.0, after}
    assert len(calls) >= 5


def test_an_interruption_at_every_system_call_loses_no_version(tmp_path: Path) -> None:
    """As a crash, but with clean-up code that runs."""
    log = filled(tmp_path, 1)
    for number in range(2, 100):
        failing = FailingCalls(number - 1, 1, KeyboardInterrupt)
        with failing.installed(), contextlib.suppress(KeyboardInterrupt):
            log.append(version_of(number, state(number)), promote=True)
        promoted = log.promoted
        assert held(log.last()) == promoted in (number - 1, number) and not list(tmp_path.glob(".*.tmp"))
        if number - 1 > len(failing.calls):
            break
        if promoted != number:
            log.append(version_of(number, state(number)), promote=True)
    assert 20 < number < 99


def test_a_file_is_on_the_disk_before_its_name_and_its_name_before_the_manifest(tmp_path: Path) -> None:
    calls = count_calls(lambda: filled(tmp_path, 1))
    order = [call for call in calls if call in ("write", "fsync", "replace")]
    assert order == ["write", "write", "fsync", "replace", "fsync"] * 2


@pytest.mark.parametrize("count", [1, 1 << 30], ids=["once", "until there is room"])
@pytest.mark.parametrize("code", swept([errno.ENOSPC, errno.EIO, errno.EACCES]))
async def test_an_error_at_every_system_call_leaves_everything_as_it_was(tmp_path: Path, count: int, code: int) -> None:
    """The publication succeeds or fails as a whole, serving goes on, and the next one works."""
    filled(tmp_path / "log", keep=2)
    failed = 0
    for n in range(1, 100):
        folder, model = tmp_path / str(n), Two(0.0)
        shutil.copytree(tmp_path / "log", folder)
        async with serving.Server(model, log=folder, keep=2) as server:
            model.set(4.0)
            before, versions, statistics = server.current, server.versions, server.statistics()
            failing = FailingCalls(n, count, lambda: OSError(code, os.strerror(code)))
            with failing.installed():
                try:
                    await server.publish()
                except VersionLogError as error:
                    assert os.strerror(code) in str(error) and "version 4" in str(error)
                    assert (server.current, server.versions, server.statistics()) == (before, versions, statistics)
                    assert values(await server.predict(ones())) == {3.0}
                    is_published = False
                    failed += 1
                else:
                    is_published = True
            assert held(serving.VersionLog(folder).last()) == (4.0 if is_published else 3.0)
            model.set(5.0)
            published = await server.publish()
            assert published.number == (5 if is_published else 4)
            assert count > 1 or not list(folder.glob(".*.tmp"))
            assert held(serving.VersionLog(folder).last()) == 5.0
        if len(failing.calls) < n:
            break
    assert 8 <= failed < n, "and errors of what follows the commit are none"


async def test_a_promotion_that_cannot_be_written_is_told_and_written_later(tmp_path: Path) -> None:
    model = Two(1.0)

    async def failed_rollback(server: serving.Server) -> None:
        full = FailingCalls(1, error=lambda: OSError(errno.ENOSPC, "No space left on device"))
        with full.installed(), pytest.warns(UserWarning, match="version 1 serves, but after a restart another one would: .*No space left"):
            assert server.rollback().number == 1
            while full.calls == [] or server._log_error is None:
                await asyncio.sleep(0)
        assert serving.VersionLog(tmp_path).promoted == 2 and server.current.number == 1

    async with serving.Server(model, log=tmp_path) as server:
        await server.publish()
        await failed_rollback(server)
        await server.publish(promote=False)
        while serving.VersionLog(tmp_path).promoted != 1:
            await asyncio.sleep(0)
        server.promote(2)
        await asyncio.sleep(0)
        await server._log_task  # type: ignore[misc]
        await failed_rollback(server)
    assert serving.VersionLog(tmp_path).promoted == 1, "or when the server closes"


KILLED = """
import asyncio, sys
from aiograd import serving
from tests.serving.models import Two

async def main():
    model = Two(0.0)
    async with serving.Server(model, log=serving.VersionLog(sys.argv[1], keep=3)) as server:
        print("first", server.current.number, model.first.item(), flush=True)
        while True:
            model.set(server.versions[-1].number + 1)
            version = await server.publish()
            print(version.number, flush=True)
            if version.number % 5 == 0:
                server.rollback()

asyncio.run(main())
"""


@pytest.mark.proc
@pytest.mark.parametrize("rounds", [2, pytest.param(12, marks=pytest.mark.sweep)])
def test_a_process_that_is_killed_loses_no_version_that_it_has_reported(tmp_path: Path, rounds: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    reported, rng = 0, np.random.default_rng(0)
    for round_ in range(rounds):
        command = [sys.executable, "-c", KILLED, str(tmp_path)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            word, number, value = child.stdout.readline().split()
            assert word == "first" and float(value) == (float(number) if round_ else 0.0), "whole"
            assert int(number) >= reported - 1, "a version that was reported, or the one before it after a rollback"
            for _ in range(rng.integers(5, 30)):
                reported = int(child.stdout.readline())
            assert_raises(VersionLogError, "in use by another server", serving.VersionLog(tmp_path)._open)
            child.send_signal(signal.SIGKILL)
            reported = max([reported, *(int(line) for line in child.stdout.read().split("\n")[:-1])])
        last = serving.VersionLog(tmp_path).last()
        assert last is not None and last.number >= reported - 1 and held(last) == last.number


# ---------------------------------------------------------------- damage


def _damaged(content: bytes, step: int) -> Any:
    """The content cut at every byte, and altered in every byte."""
    for place in range(0, len(content), step):
        yield content[:place]
        for mask in (0x01, 0x80, 0xFF):
            yield content[:place] + bytes([content[place] ^ mask]) + content[place + 1 :]
    yield content + b"\0"
    yield b""


@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.sweep)])
def test_damage_of_any_byte_of_a_version_gives_the_version_before(tmp_path: Path, step: int) -> None:
    log = filled(tmp_path, 2)
    path = tmp_path / "00000002.safetensors"
    whole, bits = path.read_bytes(), bits_of(log.load(2).state)
    spared = 0
    for content in _damaged(whole, step):
        path.write_bytes(content)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            version = log.last()
        assert version is not None
        if version.number == 2:  # such as spaces around the header
            assert bits_of(version.state) == bits and not caught
            spared += 1
        else:
            assert version.number == 1 and held(version) == 1.0 and "damaged or cannot be read" in str(caught[0].message)
            assert_raises(VersionLogError, "00000002.safetensors is damaged or cannot be read", log.load, 2)
    assert spared < 0.02 * len(whole)


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.sweep)])
async def test_damage_of_any_byte_of_the_manifest_is_an_error(tmp_path: Path, step: int) -> None:
    log = filled(tmp_path, 3)
    path = tmp_path / "manifest.json"
    whole = path.read_bytes()
    for content in (*_damaged(whole, step), b"[]", b"null", b"3", b"{}", b"[" * 10_000, b"\xff"):
        path.write_bytes(content)
        for read in (log.last, lambda: log.promoted, log._highest, lambda: log.promote(1), lambda: log.append(version_of(4, state(4)))):
            assert_raises(VersionLogError, "manifest.json is damaged or cannot be read|has format", read)
    model = Two(8.0)
    server = serving.Server(model, log=tmp_path)
    await assert_awaiting_raises(VersionLogError, "manifest.json", server.__aenter__())
    assert log.numbers() == [1, 2, 3]
    path.unlink()
    async with serving.Server(model, log=tmp_path) as server:
        assert server.current.number == 4 and values(await server.predict(ones())) == {8.0}, "as the message says"
    assert log.numbers() == [1, 2, 3, 4]


def test_a_version_under_another_number_is_damaged(tmp_path: Path) -> None:
    log = filled(tmp_path, 2)
    shutil.copy(tmp_path / "00000001.safetensors", tmp_path / "00000002.safetensors")
    assert_raises(VersionLogError, "00000002.safetensors is damaged", log.load, 2)
    content = (tmp_path / "00000001.safetensors").read_bytes()
    (tmp_path / "00000001.safetensors").write_bytes(content.replace(b'created\\": 0.0', b'created\\": 9.0'))
    assert_raises(VersionLogError, "00000001.safetensors is damaged .* description has another checksum", log.load, 1)
    ag.save({"first": np.ones(1)}, tmp_path / "00000002.safetensors")
    assert_raises(VersionLogError, "00000002.safetensors is damaged", log.load, 2)
