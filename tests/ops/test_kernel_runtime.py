"""How kernels are chosen, kept on disk and spread over threads."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiograd import kernels
from aiograd.errors import ArgumentError
from aiograd.kernels import cache, pool, selection
from aiograd.testing.leaks import LeakCheck
from tests.support import assert_raises

BIG = selection.THRESHOLD
X = np.zeros(1, np.float32)


class FakeModule:
    """Stands for the compiled kernels, so that nothing is compiled here."""

    compilations = 0

    @classmethod
    def compile_all(cls) -> None:
        cls.compilations += 1


@pytest.fixture(autouse=True)
def _unchosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIOGRAD_KERNELS", raising=False)
    monkeypatch.setattr(selection, "_chosen", None)
    monkeypatch.setattr(selection, "_module", None)
    monkeypatch.setattr(selection, "_found", lambda: "installed")
    monkeypatch.setattr(selection, "_load", lambda: FakeModule)
    monkeypatch.setattr(FakeModule, "compilations", 0)


def test_without_warm_up_the_first_use_chooses_numpy_for_good() -> None:
    assert selection.selected() is None
    assert selection.compiled(BIG, X) is None
    assert selection.selected() == "numpy"
    assert selection.warm_up() == "numpy"
    assert selection.compiled(BIG, X) is None
    assert FakeModule.compilations == 0


def test_after_warm_up_large_arrays_take_compiled_kernels() -> None:
    assert selection.warm_up() == "numba"
    assert selection.warm_up() == "numba"
    assert FakeModule.compilations == 1
    assert selection.compiled(BIG, X, None, X) is FakeModule
    assert selection.compiled(BIG, X.astype(np.float64)) is FakeModule


@pytest.mark.parametrize("arrays", [(X.astype(np.float16),), (X.astype(np.int64),), (X, X.astype(np.float64)), (X.astype(">f4"),), (X + 0j,)])
def test_other_dtypes_and_mixtures_take_numpy(arrays: tuple[Any, ...]) -> None:
    selection.warm_up()
    assert selection.compiled(BIG, *arrays) is None


def test_small_arrays_take_numpy_and_choose_nothing() -> None:
    assert selection.compiled(BIG - 1, X) is None
    assert selection.selected() is None
    selection.warm_up()
    assert selection.compiled(BIG - 1, X) is None


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOGRAD_KERNELS", "numba")
    assert selection.compiled(BIG, X) is FakeModule
    monkeypatch.setattr(selection, "_chosen", None)
    monkeypatch.setenv("AIOGRAD_KERNELS", "numpy")
    assert not selection.available()
    assert selection.warm_up() == "numpy"
    assert_raises(ArgumentError, "AIOGRAD_KERNELS is 'numpy'", selection.use, "numba")
    monkeypatch.setattr(selection, "_chosen", None)
    monkeypatch.setenv("AIOGRAD_KERNELS", "fast")
    assert_raises(ArgumentError, "'auto', 'numpy' or 'numba'", selection.compiled, BIG, X)


def test_a_setting_that_cannot_be_is_said_when_the_package_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    spec: Any = importlib.util.spec_from_file_location("selection_of_kernels", selection.__file__)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    monkeypatch.setenv("AIOGRAD_KERNELS", "bogus")
    with pytest.warns(UserWarning, match="AIOGRAD_KERNELS='bogus': expected 'auto', 'numpy' or 'numba'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_found", lambda: "not installed")
    assert not selection.available()
    assert selection.warm_up() == "numpy"
    monkeypatch.setenv("AIOGRAD_KERNELS", "numba")
    monkeypatch.setattr(selection, "_chosen", None)
    assert_raises(ArgumentError, "numba is not installed", selection.compiled, BIG, X)


def test_a_choice_can_be_made_by_name() -> None:
    selection.use("numpy")
    assert selection.selected() == "numpy"
    selection.use("numba")
    assert selection.compiled(BIG, X) is FakeModule
    assert_raises(ArgumentError, "'numpy' or 'numba'", selection.use, "cython")


def test_the_choice_is_described(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AIOGRAD_CACHE_DIR", str(tmp_path))
    assert "numpy until warm_up" in selection.describe()
    monkeypatch.setenv("AIOGRAD_KERNELS", "numba")
    assert "compiled at first use" in selection.describe()
    selection.warm_up()
    assert f"in use), {pool.thread_count()} threads, cache in {tmp_path}" in selection.describe()
    monkeypatch.setattr(selection, "_chosen", "numpy")
    assert selection.describe().startswith("numpy")
    monkeypatch.setenv("AIOGRAD_KERNELS", "numpy")
    assert "'numpy'" in selection.describe()


# The directory.


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AIOGRAD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_cache_directory_is_made_private(base: Path) -> None:
    assert cache.private_directory() == base / "kernels"
    assert (base / "kernels").stat().st_mode & 0o777 == 0o700
    assert cache.private_directory() == base / "kernels"


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o755])
def test_a_directory_that_others_may_enter_is_not_used(base: Path, mode: int) -> None:
    (base / "kernels").mkdir(parents=True)
    (base / "kernels").chmod(mode)
    assert cache.private_directory() is None


def test_a_link_is_not_used(base: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    base.mkdir()
    (base / "kernels").symlink_to(tmp_path / "elsewhere")
    assert cache.private_directory() is None


def test_a_parent_that_others_may_write_to_is_not_trusted_unless_sticky(base: Path) -> None:
    base.mkdir()
    base.chmod(0o777)
    assert cache.private_directory() is None
    base.chmod(0o1777)
    assert cache.private_directory() is not None


def test_a_file_in_the_way_is_no_error(base: Path) -> None:
    base.write_text("")
    assert cache.private_directory() is None


def test_the_platform_has_a_place_for_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIOGRAD_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache.cache_base() == Path("/somewhere/aiograd")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache.cache_base() == Path.home() / "Library" / "Caches" / "aiograd"


_ONE_KERNEL = """
import numba, numpy as np
from numba import types
from aiograd.kernels.compiled import jit
from aiograd.kernels.compiled.reduction import row_sum
specs = next(specs for dispatcher, specs in jit._kernels if dispatcher is row_sum)
row_sum.compile(tuple(spec(types.float32) for spec in specs))
row_sum.disable_compile()
out = np.empty(2, np.float32)
row_sum(np.ones((2, 3), np.float32), out, 0, 0, 2)
assert out.tolist() == [3.0, 3.0]
assert not numba.config.CACHE_DIR
print(sum(row_sum.stats.cache_hits.values()), sum(row_sum.stats.cache_misses.values()))
"""


@pytest.mark.proc
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")
def test_compiled_code_is_kept_in_the_directory_and_found_again(base: Path) -> None:
    runs = [subprocess.run([sys.executable, "-c", _ONE_KERNEL], capture_output=True, text=True, check=True).stdout.split() for _ in range(2)]
    assert runs == [["0", "1"], ["1", "0"]]
    assert list((base / "kernels").glob("reduction.row_sum*.nbc"))


# The threads.


@pytest.mark.parametrize(("count", "work"), [(0, 0), (1, 10**9), (7, 10), (1000, 10**6), (5, 10**9), (10**6, 10**9)])
def test_blocks_cover_the_rows(count: int, work: int) -> None:
    blocks, step = pool.partition(count, work)
    assert blocks * step >= count > (blocks - 1) * step
    assert blocks <= min(max(count, 0), pool.MOST_BLOCKS)


@contextlib.contextmanager
def pool_of(threads: int) -> Iterator[pool.KernelThreadPool]:
    """A pool of its own, which leaves no threads."""
    one = pool.KernelThreadPool(threads)
    try:
        yield one
    finally:
        one.stop()


def named_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("aiograd-kernels-")]


def meet(one: pool.KernelThreadPool, parties: int = 2) -> None:
    """Run as many blocks as there are parties; they wait for each other, so each needs a thread of its own."""
    meeting = threading.Barrier(parties)
    one.run(lambda block, low, high: meeting.wait(20), parties, 1)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_block_runs_once_in_some_thread(threads: int) -> None:
    seen: list[tuple[Any, ...]] = []
    with pool_of(threads) as one:
        one.run(lambda *args: seen.append(args), 23, 5, "first", "second")
    assert sorted(seen) == [("first", "second", b, 5 * b, min(23, 5 * b + 5)) for b in range(5)]


@pytest.mark.parametrize("threads", [1, 3])
def test_every_block_of_a_batch_of_calls_runs_once(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    batch = pool.KernelBatch()
    with pool_of(threads) as one:
        monkeypatch.setattr(pool, "_pool", one)
        batch.add(lambda *args: seen.append(args), 5, 40 * pool.GRAIN, "first")
        batch.add(lambda *args: seen.append(args), 0, 0, "nothing")
        batch.add(lambda *args: seen.append(args), 4, 16 * pool.GRAIN, "second")
        assert seen == []
        batch.run()
        batch.run()
    assert sorted(seen) == [*(("first", b, b, b + 1) for b in range(5)), ("second", 0, 0, 2), ("second", 1, 2, 4)]


def test_threads_go_on_from_one_call_of_a_batch_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of one block keeps one thread; the other is at the next call meanwhile."""
    meeting = threading.Barrier(2)
    batch = pool.KernelBatch()
    with pool_of(2) as one:
        monkeypatch.setattr(pool, "_pool", one)
        for _ in range(2):
            batch.add(lambda block, low, high: meeting.wait(20), 1, 1)
        batch.run()


def test_other_threads_take_blocks() -> None:
    with pool_of(2) as one:
        meet(one)


def test_threads_have_names_and_end_with_their_pool() -> None:
    before = named_threads()
    with pool_of(4) as one:
        assert not one.workers, "they start with the first job"
        one.run(lambda *args: None, 1, 1)
        assert not one.workers, "one block needs no thread"
        meet(one, 4)
        workers = one.workers
        assert [worker.name for worker in workers] == [f"aiograd-kernels-{index}" for index in range(3)]
        assert all(worker.daemon for worker in workers) and set(named_threads()) == {*before, *workers}
        one.stop()
        assert not any(worker.is_alive() for worker in workers) and named_threads() == before and not one.workers
        one.stop()
        meet(one, 4)
        assert len(one.workers) == 3 and not set(one.workers) & set(workers), "the next job starts new ones"
    assert named_threads() == before


def test_a_job_that_runs_while_the_threads_are_stopped_is_finished_by_its_caller() -> None:
    seen: list[int] = []
    with pool_of(2) as one:

        def kernel(block: int, low: int, high: int) -> None:
            if threading.current_thread() is threading.main_thread() and not stopped:
                stopped.append(one.workers)
                one.stop()
            seen.append(block)

        stopped: list[tuple[threading.Thread, ...]] = []
        one.run(kernel, 500, 1)
        assert sorted(seen) == list(range(500)) and not any(worker.is_alive() for worker in stopped[0])


def test_a_closed_pool_works_in_the_caller_alone() -> None:
    with pool_of(3) as one:
        meet(one, 3)
        one.close()
        callers = set()
        one.run(lambda *args: callers.add(threading.current_thread()), 8, 1)
        assert callers == {threading.current_thread()} and not one.workers


def test_the_kernel_set_owns_the_threads_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with pool_of(3) as one, monkeypatch.context() as patch:
        patch.setattr(pool, "_pool", one)
        meet(one, 3)
        workers = kernels.owned_threads()
        assert workers == one.workers and len(workers) == 2
        kernels.stop_threads()
        assert not any(worker.is_alive() for worker in workers) and kernels.owned_threads() == ()
        meet(one, 3)
        workers = kernels.owned_threads()
        assert selection._chosen is None
        patch.setattr(selection, "_chosen", "numba")
        kernels.use("numpy")
        assert not any(worker.is_alive() for worker in workers), "the set that is left takes its threads along"


def test_a_leak_check_counts_all_threads_but_those_of_the_kernel_set(monkeypatch: pytest.MonkeyPatch) -> None:
    check = LeakCheck(grace=0.0)
    with pool_of(2) as one:
        meet(one)
        assert check.find().threads
        monkeypatch.setattr(pool, "_pool", one)
        assert not check.find().threads
    monkeypatch.undo()


def test_an_error_in_a_block_reaches_the_caller() -> None:
    def kernel(block: int, low: int, high: int) -> None:
        if block == 2:
            raise ZeroDivisionError("in a block")

    with pool_of(3) as one:
        for _ in range(3):
            assert_raises(ZeroDivisionError, "in a block", one.run, kernel, 8, 1)
        one.run(lambda *args: None, 8, 1)


def test_arguments_are_let_go() -> None:
    class Held:
        pass

    held = Held()
    with pool_of(2) as one:
        meeting = threading.Barrier(2)
        one.run(lambda argument, block, low, high: meeting.wait(20), 2, 1, held)
        gone = weakref.ref(held)
        del held
        meet(one)  # the thread has taken its next job, so it has left the first
        assert gone() is None


@pytest.mark.parametrize("value", ["0", "two", "-1"])
def test_the_number_of_threads_is_checked(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOGRAD_KERNEL_THREADS", "3")
    assert pool.thread_count() == 3
    monkeypatch.setenv("AIOGRAD_KERNEL_THREADS", value)
    assert_raises(ArgumentError, "whole number", pool.thread_count)


_PROCESS = """
import os, threading
from aiograd import kernels
from aiograd.kernels import pool
def meet():
    meeting = threading.Barrier(3)
    pool._pool.run(lambda *args: meeting.wait(20), 3, 1)
    assert sum(thread.name.startswith("aiograd-kernels-") for thread in threading.enumerate()) == 2
meet()
"""

#: what a process does once its pool works, and what it prints at the end
_ENDS = {
    "with threads that wait": ("", ""),
    "after a fork": (
        """
child = os.fork()
if child == 0:
    assert not kernels.owned_threads() and threading.active_count() == 1
    meet()
    kernels.stop_threads()
    assert threading.active_count() == 1
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
meet()
""",
        "",
    ),
    "while a thread is in a long block": (
        """
entered, never = threading.Barrier(3), threading.Event()
def block(*args):
    entered.wait(20)
    never.wait()
threading.Thread(target=lambda: pool._pool.run(block, 2, 1), daemon=True).start()
entered.wait(20)
""",
        "",
    ),
    "with a kernel in a later step of the shutdown": (
        """
import atexit
workers = kernels.owned_threads()
pool.atexit.unregister(pool._at_exit)
@atexit.register
def later():
    assert not any(worker.is_alive() for worker in workers)
    blocks = []
    pool._pool.run(lambda *args: blocks.append(args), 3, 1)
    print(len(blocks), "blocks,", threading.active_count(), "thread")
atexit.register(pool._at_exit)
""",
        "3 blocks, 1 thread\n",
    ),
}


@pytest.mark.proc
@pytest.mark.parametrize("end", _ENDS)
def test_a_process_with_kernel_threads_ends_without_hanging(end: str) -> None:
    if "fork" in end and not hasattr(os, "fork"):
        pytest.skip("the platform does not fork")
    code, output = _ENDS[end]
    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-W", "ignore:This process:DeprecationWarning", "-c", _PROCESS + code],
        env={**os.environ, "AIOGRAD_KERNEL_THREADS": "3"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, output, "")
