"""aiograd.tune_malloc: memory that a step has freed is there for the next one, whichever thread frees and allocates."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import aiograd as ag
from aiograd.errors import ArgumentError
from tests.support import assert_raises

IS_GLIBC = sys.platform == "linux" and (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
pytestmark = [pytest.mark.proc, pytest.mark.skipif(not IS_GLIBC, reason="the allocator is not glibc's")]

PROGRAM = """
import resource, sys, threading
import numpy as np
import aiograd as ag

def step():
    held = [np.ones(300_000, np.float64) for _ in range(20)]

def on_a_thread():
    thread = threading.Thread(target=step)
    thread.start()
    thread.join()

async def main():
    for _ in range(3):
        step()
        on_a_thread()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        step()
        on_a_thread()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

ag.run(main(), tune_malloc=sys.argv[1] == "tuned")
"""
#: of one step's arrays
PAGES = 20 * 300_000 * 8 // 4096


def faults(argument: str, **environment: str) -> int:
    """Page faults of six steps of 48 MB each, three of them on a thread of their own."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", PROGRAM, argument]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, env={**plain, **environment})
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_steps_of_a_run_do_not_fetch_memory_anew() -> None:
    assert faults("tuned") < PAGES / 10


def test_a_run_leaves_the_allocator_alone_when_told_to() -> None:
    assert faults("as it is", MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072") > 3 * PAGES


def test_what_the_environment_sets_stays() -> None:
    assert faults("tuned", MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072") > 3 * PAGES


def test_where_the_allocator_is_another_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ag.tune_malloc()
    monkeypatch.setattr(os, "confstr", lambda name: None)
    assert not ag.tune_malloc()


@pytest.mark.parametrize("kept", [0, -1, 1 << 31])
def test_an_amount_out_of_range_is_refused(kept: int) -> None:
    assert_raises(ArgumentError, "expected 1 MB to 2 GB", ag.tune_malloc, kept)
