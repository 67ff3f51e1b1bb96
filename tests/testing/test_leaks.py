"""The leak check catches what it should, and nothing else."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from aiograd.testing import LeakCheck, LeakError, Leaks
from aiograd.testing.leaks import refuse
from tests.support import assert_raises


async def test_a_leaked_task_is_named_with_the_place_where_it_waits() -> None:
    async def forgotten() -> None:
        await asyncio.Event().wait()

    check = LeakCheck()
    task = asyncio.create_task(forgotten(), name="stray")
    try:
        leaks = await check.find_tasks()
        assert len(leaks.tasks) == 1
        assert leaks.tasks[0].startswith("stray (test_a_leaked_task") and "waits at locks.py" in leaks.tasks[0]
        assert_raises(LeakError, r"^tasks left behind \(1\):\n  stray", refuse, leaks)
    finally:
        task.cancel()
    assert not await check.find_tasks(), "a cancelled task is given a few turns to end"


async def test_tasks_from_before_are_no_leak() -> None:
    done = asyncio.Event()
    task = asyncio.create_task(done.wait())
    async with LeakCheck():
        await asyncio.sleep(0)
    done.set()
    await task


def test_a_leaked_thread_is_named_with_the_place_where_it_is() -> None:
    release = threading.Event()
    check = LeakCheck(grace=0.01)
    thread = threading.Thread(target=release.wait, name="stuck", daemon=True)
    thread.start()
    try:
        leaks = check.find()
        assert len(leaks.threads) == 1
        assert leaks.threads[0].startswith("stuck (daemon) at threading.py:")
        assert_raises(LeakError, r"^threads left behind \(1\):\n  stuck", refuse, leaks)
    finally:
        release.set()
        thread.join()
    assert not check.find()


def test_a_thread_on_its_way_out_is_waited_for() -> None:
    with LeakCheck():
        threading.Thread(target=lambda: sum(range(300_000))).start()


@pytest.mark.skipif(not Path("/proc/self/fd").exists() and not Path("/dev/fd").exists(), reason="this system does not list descriptors")
def test_leaked_descriptors_are_shown_by_what_they_point_to(tmp_path: Path) -> None:
    check = LeakCheck()
    number = os.open(tmp_path / "left-open", os.O_CREAT | os.O_RDWR)
    left, right = socket.socketpair()
    try:
        leaks = check.find()
        assert len(leaks.descriptors) == 3
        assert any("left-open" in line or line == f"descriptor {number}" for line in leaks.descriptors)
        assert_raises(LeakError, r"file descriptors left behind \(3\)", refuse, leaks)
    finally:
        os.close(number)
        left.close()
        right.close()
    assert not check.find()


def test_a_descriptor_opened_again_is_no_leak(tmp_path: Path) -> None:
    path = tmp_path / "file"
    first = os.open(path, os.O_CREAT | os.O_RDWR)
    check = LeakCheck()
    second = os.open(path, os.O_RDWR)
    os.close(first)
    try:
        assert not check.find()
    finally:
        os.close(second)


def test_an_error_inside_is_not_hidden_by_the_leaks_it_caused() -> None:
    number = -1
    with pytest.raises(ValueError, match="cause"), LeakCheck():
        number = os.open("/dev/null", os.O_RDONLY)
        raise ValueError("cause")
    os.close(number)


def test_the_report_lists_each_kind() -> None:
    assert str(Leaks()) == "nothing left behind" and not Leaks()
    assert str(Leaks(tasks=("a", "b"), descriptors=("c",))) == "tasks left behind (2):\n  a\n  b\nfile descriptors left behind (1):\n  c"


@pytest.mark.proc
def test_the_first_run_on_uvloop_of_a_process_is_no_leak() -> None:
    """Its pipe for signals stays open as long as the process."""
    pytest.importorskip("uvloop")
    program = """
import aiograd as ag

async def main():
    pass

with ag.testing.LeakCheck():
    ag.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
