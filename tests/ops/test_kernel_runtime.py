"""How kernels are chosen, kept on disk and spread over threads."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiograd.errors import ArgumentError
from aiograd.kernels import cache, pool, selection

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
    with pytest.raises(ArgumentError, match="AIOGRAD_KERNELS is 'numpy'"):
        selection.select("numba")
    monkeypatch.setattr(selection, "_chosen", None)
    monkeypatch.setenv("AIOGRAD_KERNELS", "fast")
    with pytest.raises(ArgumentError, match="'auto', 'numpy' or 'numba'"):
        selection.compiled(BIG, X)


def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_found", lambda: "not installed")
    assert not selection.available()
    assert selection.warm_up() == "numpy"
    monkeypatch.setenv("AIOGRAD_KERNELS", "numba")
    monkeypatch.setattr(selection, "_chosen", None)
    with pytest.raises(ArgumentError, match="numba is not installed"):
        selection.compiled(BIG, X)


def test_a_choice_can_be_made_by_name() -> None:
    selection.select("numpy")
    assert selection.selected() == "numpy"
    selection.select("numba")
    assert selection.compiled(BIG, X) is FakeModule
    with pytest.raises(ArgumentError, match="'numpy' or 'numba'"):
        selection.select("cython")  # type: ignore[arg-type]


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


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_block_runs_once_in_some_thread(threads: int) -> None:
    seen: list[tuple[Any, ...]] = []
    pool.Pool(threads).run(lambda *args: seen.append(args), 23, 5, "first", "second")
    assert sorted(seen) == [("first", "second", b, 5 * b, min(23, 5 * b + 5)) for b in range(5)]


def test_other_threads_take_blocks() -> None:
    meeting = threading.Barrier(2)  # two blocks that wait for each other can only end in two threads
    pool.Pool(2).run(lambda block, low, high: meeting.wait(20), 2, 1)


def test_an_error_in_a_block_reaches_the_caller() -> None:
    def kernel(block: int, low: int, high: int) -> None:
        if block == 2:
            raise ZeroDivisionError("in a block")

    one = pool.Pool(3)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError, match="in a block"):
            one.run(kernel, 8, 1)
    one.run(lambda *args: None, 8, 1)


def test_arguments_are_let_go() -> None:
    class Held:
        pass

    one, held = pool.Pool(2), Held()
    meeting = threading.Barrier(2)
    one.run(lambda argument, block, low, high: meeting.wait(20), 2, 1, held)
    gone = weakref.ref(held)
    del held
    again = threading.Barrier(2)
    one.run(lambda block, low, high: again.wait(20), 2, 1)  # the thread has taken its next job, so it has left the first
    assert gone() is None


@pytest.mark.parametrize("value", ["0", "two", "-1"])
def test_the_number_of_threads_is_checked(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOGRAD_KERNEL_THREADS", "3")
    assert pool.thread_count() == 3
    monkeypatch.setenv("AIOGRAD_KERNEL_THREADS", value)
    with pytest.raises(ArgumentError, match="whole number"):
        pool.thread_count()


_FORK = """
import os, threading
from aiograd.kernels import pool
meet = threading.Barrier(2)
pool._pool = pool.Pool(2)
pool._pool.run(lambda *args: meet.wait(20), 2, 1)
child = os.fork()
if child == 0:
    meet = threading.Barrier(2)
    pool._pool.run(lambda *args: meet.wait(20), 2, 1)
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


@pytest.mark.proc
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform does not fork")
def test_a_forked_child_has_threads_of_its_own() -> None:
    subprocess.run([sys.executable, "-W", "ignore::DeprecationWarning", "-c", _FORK], check=True, timeout=60)
