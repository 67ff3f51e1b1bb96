"""The log: what is promoted survives restarts, crashes at every system call and damage of every byte; nothing else is ever served."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn, serving
from aiograd.errors import ArgumentError, ArgumentTypeError, RejectedVersionError, ServingError, VersionLogError, VersionNotFoundError
from aiograd.running.digest import state_digest
from aiograd.testing import simulated_run
from tests.serving.arrays import bits_of, version_of
from tests.serving.models import Two, ones, state, values
from tests.serving.system_calls import FailingCalls
from tests.support import assert_awaiting_raises, assert_raises, cancel, held_up


def filled(folder: Path, count: int = 3, keep: int = 10) -> serving.VersionLog:
    """A log of promoted versions 1 to `count`, of which the n-th holds n."""
    log = serving.VersionLog(folder, keep=keep)
    for n in range(1, count + 1):
        log.append(version_of(n, state(n)), promote=True)
    return log


def held(version: serving.Version | None) -> float:
    """The number in both weights of a version, which is whole and has its own digest."""
    assert version is not None and version.digest == state_digest(version.state)
    assert version.state["first"] == version.state["second"]
    return float(version.state["first"][0])


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


# ---------------------------------------------------------------- versions in a folder


def test_a_version_comes_back_to_the_bit(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    drawn: dict[str, Any] = {
        "b.weight": rng.integers(0, 1 << 32, (3, 5), np.uint32).view(np.float32),  # NaNs of all kinds among them
        "a": np.array(-0.0),
        "empty": np.zeros((0, 4), np.float16),
        "é": rng.integers(0, 2, 7).astype(bool),
        "count": np.array(3, np.int64),
        "complex": np.array([1 + 2j], np.complex64),
    }
    if importlib.util.find_spec("ml_dtypes") is not None:
        drawn["half"] = rng.standard_normal(4).astype("bfloat16")
    version = version_of(7, drawn, parent=3, metrics={"loss": 0.1, "worst": float("inf")}, created=1.7e9 + 0.1)
    log = serving.VersionLog(tmp_path / "deep" / "log")
    assert log.numbers() == [] and log.last() is None and log.promoted is None and log._highest() == 0
    log.append(version)
    assert log.numbers() == [7] and log._highest() == 7 and log.last() is None, "a candidate"
    log.promote(7)
    found = log.last()
    assert found is not None and log.promoted == 7
    assert bits_of(found.state) == bits_of(version.state), "in the same order"
    names = ("number", "digest", "parent", "metrics", "created", "is_finite")
    assert [getattr(found, name) for name in names] == [getattr(version, name) for name in names]
    assert not any(array.flags.writeable for array in found.state.values())


async def test_a_restart_serves_what_was_promoted(tmp_path: Path) -> None:
    model = Two(1.0)
    async with serving.Server(model, log=tmp_path) as server:
        model.set(2.0)
        published = await server.publish(metrics={"loss": 0.5})
        model.set(9.0)
        candidate = await server.publish(promote=False)
    for n in range(2):
        other = Two(5.0)
        async with serving.Server(other, log=serving.VersionLog(tmp_path)) as server:
            found = server.current
            assert (found.number, found.digest, found.parent, dict(found.metrics)) == (2, published.digest, 1, {"loss": 0.5})
            assert values(await server.predict(ones())) == {2.0}
            assert other.first.item() == other.second.item() == 2.0, "it is loaded into the model"
            assert (await server.publish(promote=False)).number == candidate.number + 1 + n, "numbers are never given twice"


async def test_rollbacks_and_promotions_survive_a_restart(tmp_path: Path) -> None:
    model = Two(1.0)
    async with serving.Server(model, log=tmp_path) as server:
        for n in (2, 3):
            model.set(n)
            await server.publish(promote=n != 3)
        server.promote(3)
        server.rollback()
        server.rollback()
    async with serving.Server(model, log=tmp_path) as server:
        assert (server.current.number, model.first.item()) == (1, 1.0)
        model.set(4.0)
        await server.publish(promote=False)
        server.promote(4)
        server.rollback(1)
        server.promote(4)
    log = serving.VersionLog(tmp_path)
    assert log.promoted == 4 and held(log.last()) == 4.0 and log.numbers() == [1, 2, 3, 4]


async def test_as_many_versions_stay_in_the_folder_as_in_memory(tmp_path: Path) -> None:
    model = Two(0.0)
    async with serving.Server(model, keep=2, log=tmp_path) as server:
        for n in range(1, 10):
            model.set(n)
            await server.publish(promote=n < 4)
            if n == 3:
                server.split({3: 0.5, 4: 0.5})
            assert serving.VersionLog(tmp_path).numbers() == [version.number for version in server.versions]
        assert [version.number for version in server.versions] == [3, 4, 9, 10]
        server.promote(3)
    assert serving.VersionLog(tmp_path).promoted == 3


def test_versions_that_served_before_stand_in_for_a_damaged_one_and_others_where_there_is_none(tmp_path: Path) -> None:
    """A candidate and a version that was rolled back come last."""
    log = filled(tmp_path, 3)
    log.promote(2)  # a rollback from 3
    for number in (4, 5):
        log.append(version_of(number, state(number)), promote=number == 5)
    (tmp_path / "00000005.safetensors").unlink()
    with pytest.warns(UserWarning, match="version 2, which was promoted before, is taken instead .* has no version 5"):
        assert held(log.last()) == 2.0
    (tmp_path / "00000002.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match="version 1, "):
        assert held(log.last()) == 1.0
    (tmp_path / "00000001.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match="version 4, which was not promoted before"):
        assert held(log.last()) == 4.0
    (tmp_path / "00000004.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match="version 3, which was not promoted before"):
        assert held(log.last()) == 3.0
    (tmp_path / "00000003.safetensors").write_bytes(b"")
    assert_raises(VersionLogError, "no whole version up to the promoted one: .* no version 5", log.last)
    log.append(version_of(6, state(6)), promote=True)
    assert held(log.last()) == 6.0


async def test_a_server_starts_from_the_version_before_a_damaged_one(tmp_path: Path) -> None:
    filled(tmp_path, 3)
    path = tmp_path / "00000003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    model = Two(0.0)
    with pytest.warns(UserWarning, match="version 2, which was promoted before, is taken"):
        async with serving.Server(model, log=tmp_path) as server:
            assert (server.current.number, model.first.item()) == (2, 2.0)
            assert (await server.publish()).number == 4
    assert held(serving.VersionLog(tmp_path).last()) == 2.0 and serving.VersionLog(tmp_path).promoted == 4


def test_files_of_a_crash_are_removed_and_others_stay(tmp_path: Path) -> None:
    log = filled(tmp_path, 1)
    unfinished = [tmp_path / f".{name}.0123456789abcdef.tmp" for name in ("00000002.safetensors", "manifest.json")]
    others = [tmp_path / name for name in (".mine.tmp", ".manifest.x.tmp", "readme")]
    for path in (*unfinished, *others):
        path.touch()
    assert log._open()[0] is not None
    log._close()
    assert not any(path.exists() for path in unfinished) and all(path.exists() for path in others)


def test_what_a_log_refuses(tmp_path: Path) -> None:
    log = filled(tmp_path, 2)
    before = files(tmp_path)
    for keep in (0, -1, 1.5, True, "3", None):
        assert_raises(ArgumentError, r"VersionLog\(keep=", serving.VersionLog, tmp_path, keep=keep)
    for number in (0, 1, 2):
        assert_raises(VersionLogError, f"version {number} was to be written, but numbers up to 2 are taken", log.append, version_of(number, state(0)))
    for number in (0, 3, -1, "1", None, 1.5):
        assert_raises(VersionNotFoundError, "has no version", log.load, number)
        assert_raises(VersionNotFoundError, "has no version", log.promote, number)
    assert_raises(ArgumentTypeError, "complex128", log.append, version_of(3, {"w": np.zeros(1, complex)}))
    assert files(tmp_path) == before
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "format": 2}))
    assert_raises(VersionLogError, "has format 2, expected 1; update aiograd", log.last)


# ---------------------------------------------------------------- servers and their folders


async def test_a_log_belongs_to_one_server(tmp_path: Path) -> None:
    shared = serving.VersionLog(tmp_path)
    async with serving.Server(Two(1.0), log=shared) as server:
        for log in (tmp_path, str(tmp_path), serving.VersionLog(tmp_path), shared):
            await assert_awaiting_raises(VersionLogError, "in use by another server; give each", serving.Server(Two(2.0), log=log).__aenter__())
        assert_raises(VersionLogError, "in use by another server", serving.VersionLog(tmp_path).append, version_of(9, state(9)))
        assert_raises(VersionLogError, "in use by another server", serving.VersionLog(tmp_path).promote, 1)
        assert (await server.publish()).number == 2, "the first one keeps it"
    async with serving.Server(Two(3.0), log=shared) as server:
        assert server.current.number == 2, "and then it is free"


async def test_a_log_of_another_model(tmp_path: Path) -> None:
    async with serving.Server(Two(1.0), log=tmp_path):
        pass
    other = nn.Linear(2, 1)
    before = other.weight.numpy().copy()
    entering = serving.Server(other, log=tmp_path).__aenter__()
    await assert_awaiting_raises(VersionLogError, "belongs to another model than Linear: .*'weight'", entering)
    assert np.array_equal(other.weight.numpy(), before)
    async with serving.Server(Two(2.0), log=tmp_path) as server:
        assert server.current.number == 1, "the lock is free"


async def test_a_model_with_its_paths_in_another_order(tmp_path: Path) -> None:
    """The digest covers the order; versions that follow compare with it."""

    class Reordered(Two):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.second = nn.Parameter(ag.tensor([0.0]))
            self.first = nn.Parameter(ag.tensor([0.0]))

    model = Two()
    with ag.no_grad():
        model.second.fill_(2.0)
    async with serving.Server(model, log=tmp_path) as server:
        digest = server.current.digest
    async with serving.Server(Reordered(), log=tmp_path) as server:
        version = server.current
        assert list(version.state) == ["second", "first"] and version.digest == state_digest(version.state) != digest
        assert (await server.publish()).digest == version.digest


async def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    for folder in (blocked, blocked / "log"):
        server = serving.Server(Two(), log=folder)
        await assert_awaiting_raises(VersionLogError, f"the log {folder}: cannot open it: .*{folder}", server.__aenter__())
        assert_raises(ServingError, "after it was closed", server.promote, 1)
    refused = FailingCalls(1, error=lambda: PermissionError(errno.EACCES, "Permission denied"))
    with refused.installed():
        await assert_awaiting_raises(VersionLogError, "cannot open it: .*Permission denied", serving.Server(Two(), log=tmp_path / "log").__aenter__())
    for n in range(1, 40):
        with (failing := FailingCalls(n, error=lambda: OSError(errno.EIO, "Input/output error"))).installed():
            server = serving.Server(Two(1.0), log=tmp_path / "log")
            try:
                async with server:
                    pass
            except VersionLogError as error:
                assert "Input/output error" in str(error)
        if n > len(failing.calls):
            break
    async with serving.Server(Two(2.0), log=tmp_path / "log"):
        pass  # the lock is free after each


async def test_a_log_does_not_bring_back_what_may_not_serve(tmp_path: Path) -> None:
    log = serving.VersionLog(tmp_path)
    log.append(version_of(1, state(np.nan)), promote=True)
    await assert_awaiting_raises(RejectedVersionError, "version 1 may not serve", serving.Server(Two(), log=log).__aenter__())


# ---------------------------------------------------------------- cancelling and closing


def test_a_publication_with_a_log_is_cancelled_whole_or_not_at_all(tmp_path: Path) -> None:
    """At every turn of the loop: the log and the server agree, and the next publication gets the next number."""
    outcomes = set()

    async def main(folder: Path) -> None:
        model, log = Two(1.0), serving.VersionLog(folder)
        async with serving.Server(model, log=folder) as server:
            try:
                model.set(2.0)
                await server.publish()
                await server.publish(promote=False)
            finally:
                highest = server.versions[-1].number
                assert (log.promoted, log._highest()) == (server.current.number, highest)
                outcomes.add(highest)
                assert (await server.publish()).number == highest + 1
        assert log.promoted == highest + 1

    steps = simulated_run(main, tmp_path / "0").steps
    for n in range(1, steps):
        with contextlib.suppress(asyncio.CancelledError):
            simulated_run(main, tmp_path / f"{n}", cancel_at=n)
        log = serving.VersionLog(tmp_path / f"{n}")
        log._open()
        log._close()
    assert outcomes == {1, 2, 3}, "before the first is written, after it, after both"


async def test_cancelling_while_the_version_is_written_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Two(1.0)
    async with serving.Server(model, log=tmp_path) as server:
        slow, begun, go = held_up(serving.VersionLog.append)
        monkeypatch.setattr(serving.VersionLog, "append", slow)
        model.set(2.0)
        publishing = asyncio.create_task(server.publish())
        while not begun.is_set():
            await asyncio.sleep(0.001)
        assert values(await server.predict(ones())) == {1.0}, "not before it is durable"
        for _ in range(3):
            publishing.cancel()
            await asyncio.sleep(0)
        assert not publishing.done()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        assert server.current.number == 2 == serving.VersionLog(tmp_path).promoted


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_leaving_that_is_cancelled_frees_the_log(tmp_path: Path, times: int) -> None:
    """While requests are answered, and while the batch that runs is awaited."""
    running = asyncio.Event()

    async def forward(module: Any, x: Any) -> Any:
        running.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            raise

    async def serve() -> None:
        async with serving.Server(Two(1.0), forward=forward, log=tmp_path) as server:
            asking.append(asyncio.create_task(server.predict(ones())))
            await running.wait()

    asking: list[asyncio.Task[Any]] = []
    leaving = asyncio.create_task(serve())
    await running.wait()
    for _ in range(times):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    with pytest.raises((ServingError, asyncio.CancelledError)):
        await asking[0]
    async with serving.Server(Two(1.0), log=tmp_path):
        pass


async def test_closing_waits_for_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    write = serving.VersionLog._write_manifest

    def slow(self: Any, *args: Any) -> None:
        threading.Event().wait(0.02)
        write(self, *args)
        order.append("written")

    model = Two(1.0)
    async with serving.Server(model, log=tmp_path) as server:
        await server.publish()
        await server.publish()
        monkeypatch.setattr(serving.VersionLog, "_write_manifest", slow)
        server.rollback()
        server.rollback()
        server.promote(2)
        publishing = asyncio.create_task(server.publish())
        await asyncio.sleep(0)
        server.rollback(1)
        assert not order
        await publishing
        assert server.current.number == 4
        server.rollback(1)
    assert serving.VersionLog(tmp_path).promoted == 1 and order
    await assert_awaiting_raises(ServingError, "after it was closed", server.publish())
    server = await serving.Server(model, log=tmp_path).__aenter__()
    await server.publish()
    server.rollback()
    closing = asyncio.create_task(server.aclose())
    while server._state != "closed":
        await asyncio.sleep(0)
    await cancel(closing)
    late = serving.Server(model, log=tmp_path)
    async with late:
        publishing = asyncio.create_task(late.publish())
        closing = asyncio.create_task(late.aclose())
        found = await asyncio.gather(publishing, closing, return_exceptions=True)
    log = serving.VersionLog(tmp_path)
    assert isinstance(found[0], ServingError) or log.promoted == found[0].number
    assert log._open()[0] is not None
    log._close()
