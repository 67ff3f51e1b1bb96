"""Machine code in memory and on disk."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from aiograd.compiler.native import cache
from aiograd.compiler.native.cache import CodeCache
from aiograd.compiler.native.tiers import native_problem

TEXT = "define i64 @f() {\n  ret i64 7\n}\n"


class Compiler:
    """Stands for LLVM: the code of a text is made of it, and counted."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, text: str) -> bytes:
        self.texts.append(text)
        return b"code of " + text.encode()


def made(directory: Path | None, compiled: Compiler, target: str = "this CPU") -> CodeCache:
    """A cache as another process would make it."""
    return CodeCache(lambda: directory, compiled, lambda: target)


@pytest.fixture
def compiled() -> Compiler:
    return Compiler()


def test_code_is_made_once_in_a_process_and_read_by_the_next(tmp_path: Path, compiled: Compiler) -> None:
    first = made(tmp_path, compiled)
    code, was_there = first.code_of(TEXT)
    assert not was_there and first.code_of(TEXT) == (code, True)
    assert made(tmp_path, compiled).code_of(TEXT) == (code, True)
    assert compiled.texts == [TEXT]


def test_another_text_cpu_or_version_has_entries_of_its_own(tmp_path: Path, compiled: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path, compiled).code_of(TEXT)
    assert not made(tmp_path, compiled).code_of(TEXT + "\n")[1]
    assert not made(tmp_path, compiled, "another CPU").code_of(TEXT)[1]
    monkeypatch.setattr(cache, "VERSION", cache.VERSION + 1)
    assert not made(tmp_path, compiled).code_of(TEXT)[1]
    monkeypatch.setattr("numpy.__version__", "0.1")
    assert not made(tmp_path, compiled).code_of(TEXT)[1]


def _flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    "damage",
    [
        _flipped, lambda content: content[:-1], lambda content: content[:10], lambda content: b"", lambda content: content + b"x",
        lambda content: b"x" + content,
    ],
    ids=["flipped", "cut off", "begin only", "empty", "longer", "moved"],
)
def test_a_damaged_entry_is_compiled_anew_and_put_right(tmp_path: Path, compiled: Compiler, damage: object) -> None:
    code, _ = made(tmp_path, compiled).code_of(TEXT)
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(damage(entry.read_bytes()))  # type: ignore[operator]
    assert made(tmp_path, compiled).code_of(TEXT) == (code, False)
    assert made(tmp_path, compiled).code_of(TEXT) == (code, True)


def test_the_entry_of_another_text_is_not_loaded(tmp_path: Path, compiled: Compiler) -> None:
    code, _ = made(tmp_path, compiled).code_of(TEXT)
    (entry,) = tmp_path.iterdir()
    made(tmp_path, compiled).code_of("another")
    (other,) = set(tmp_path.iterdir()) - {entry}
    os.replace(other, entry)
    assert made(tmp_path, compiled).code_of(TEXT) == (code, False)


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "writable"])
def test_only_a_file_of_the_user_is_read(tmp_path: Path, compiled: Compiler, kind: str) -> None:
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o700)
    code, _ = made(directory, compiled).code_of(TEXT)
    (entry,) = directory.iterdir()
    if kind == "writable":
        entry.chmod(0o666)
    else:
        entry.rename(tmp_path / "elsewhere")
        {"link": lambda: entry.symlink_to(tmp_path / "elsewhere"), "folder": entry.mkdir, "pipe": lambda: os.mkfifo(entry)}[kind]()
    assert made(directory, compiled).code_of(TEXT) == (code, False)


def test_without_a_directory_code_is_kept_in_memory_only(tmp_path: Path, compiled: Compiler) -> None:
    for directory in (None, tmp_path / "missing"):
        alone = made(directory, compiled)
        assert [alone.code_of(TEXT)[1] for _ in range(2)] == [False, True]
    assert len(compiled.texts) == 2 and not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, compiled: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", refuse)
    assert made(tmp_path, compiled).code_of(TEXT)[0].startswith(b"code of")
    assert not list(tmp_path.iterdir())


def test_the_directory_keeps_what_was_used_last(tmp_path: Path, compiled: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for number in range(3):
        before = set(tmp_path.iterdir())
        made(tmp_path, compiled).code_of(f"text {number}")
        (entry,) = set(tmp_path.iterdir()) - before
        os.utime(entry, (number + 1, number + 1))
        names.append(entry.name)
    assert made(tmp_path, compiled).code_of("text 0")[1]  # used again: now the newest
    monkeypatch.setattr(cache, "MOST_ON_DISK", 3 * entry.stat().st_size)
    monkeypatch.setattr(cache, "TRIMMING", 1)
    made(tmp_path, compiled).code_of("text 3")
    left = {entry.name for entry in tmp_path.iterdir()}
    assert len(left) == 3 and names[0] in left and names[1] not in left


def test_few_of_many_new_entries_have_the_directory_looked_through(tmp_path: Path, compiled: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Path] = []
    monkeypatch.setattr(cache, "_trim", looks.append)
    filled = made(tmp_path, compiled)
    for number in range(400):
        filled.code_of(f"text {number}")
    assert 2 <= len(looks) <= 40


def test_memory_keeps_what_was_used_last(compiled: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST_IN_MEMORY", 2 * len(b"code of a"))
    alone = made(None, compiled)
    assert [alone.code_of(text)[1] for text in "abacba"] == [False, False, True, False, False, False]


def test_one_text_at_once_in_two_threads_is_compiled_once(compiled: Compiler) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(text: str) -> bytes:
        begun.set()
        go_on.wait(10.0)
        return compiled(text)

    shared = CodeCache(lambda: None, slow, lambda: "")
    threads = [threading.Thread(target=shared.code_of, args=(TEXT,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert begun.wait(10.0)
    go_on.set()
    for thread in threads:
        thread.join()
    assert compiled.texts == [TEXT]


PROCESS = textwrap.dedent(
    """
    import numpy as np
    import aiograd as ag

    @ag.compile(tier="native")
    def f(x):
        return (x * 2.0 + 1.0) * x

    x = ag.tensor(np.arange(5.0))
    f(x)
    assert (f(x).numpy() == (np.arange(5.0) * 2.0 + 1.0) * np.arange(5.0)).all()
    statistics = f.statistics()
    print(statistics.native_programs, statistics.cache_hits)
    """
)


def processes(directory: Path, count: int) -> list[str]:
    """The output of so many processes that run at the same time."""
    environment = {**os.environ, "AIOGRAD_CACHE_DIR": str(directory)}
    started = [subprocess.Popen([sys.executable, "-c", PROCESS], stdout=subprocess.PIPE, text=True, env=environment) for _ in range(count)]
    printed = [process.communicate(timeout=120)[0].strip() for process in started]
    assert not any(process.returncode for process in started)
    return printed


@pytest.mark.skipif(native_problem() is not None, reason=str(native_problem()))
def test_processes_share_entries_and_survive_damage(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert set(processes(tmp_path, 2)) <= {"1 0", "1 1"}
    assert processes(tmp_path, 1) == ["1 1"]
    directory = tmp_path / "kernels" / "native"
    entries = [*directory.iterdir()]  # the program's, and the one of the function that compares guards
    assert directory.stat().st_mode & 0o777 == 0o700 and {entry.stat().st_mode & 0o777 for entry in entries} == {0o600}
    for entry in entries:
        entry.write_bytes(_flipped(entry.read_bytes()))
    assert processes(tmp_path, 1) == ["1 0"]
    assert processes(tmp_path, 1) == ["1 1"]
