"""``python -m tests.gpu`` in the simulator, on files of tests that pass, fail, crash and hang: what one does costs the others nothing."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from aiograd.running import devices
from aiograd.running.devices import unregister_device
from tests.gpu import host, progress
from tests.gpu.conftest import of_the_driver

ROOT = Path(__file__).parents[2]

FILES = {
    "test_crash.py": """
import os, pytest
def test_before(): pass
def test_abort(): os.abort()
def test_between(): assert 1 == 2, "seen in the log"
def test_exit(): os._exit(0)
@pytest.fixture
def late():
    yield
    raise RuntimeError("at the end")
def test_late(late): pass
""",
    "test_hang.py": """
import signal, time
def test_quick(): pass
def test_slow(): time.sleep(1000)
def test_deaf():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(1000)
def test_never(): pass
""",
    "test_rows.py": """
import pytest
@pytest.mark.parametrize("n", range(7))
def test_one(n): pass
def test_missing(): pytest.importorskip("no_such_package")
""",
    "test_broken.py": "import no_such_package\n",
}


@pytest.mark.proc
def test_files_that_crash_or_hang_cost_their_own_results(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    out = tmp_path / "out" / "gpu.md"
    command = [sys.executable, "-m", "tests.gpu", "latency", "--tiny", "--no-torch", "--seconds", "15", "--jobs", "2", "--out", str(out)]
    command += ["--tests", *[str(tmp_path / name) for name in sorted(FILES)]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    tables, log = out.read_text(), out.with_suffix(".log").read_text()
    assert done.returncode == 1, done.stderr[-2000:]
    for text in (done.stdout, tables):
        assert "test_crash: WRONG: 1 passed, 2 failed, 2 crashed" in text, text
        assert ": test_abort, test_between, test_exit, test_late\n" in text, text
        assert "test_hang: WRONG: 1 passed, 1 failed, 1 crashed, timed out" in text, text
        assert "test_rows: 7 passed, 1 skipped" in text, text
        assert "test_broken: WRONG: did not run (" in text, text
    assert "latency: well" in done.stdout.splitlines()[-2]
    assert "seen in the log" in log and "time.sleep(1000)" in log and "No module named 'no_such_package'" in log
    assert log.count('File "' + str(tmp_path / "test_hang.py")) >= 1, "the place where it hung"
    assert "| element-wise operation on 64 elements, launched | " in tables
    assert sorted(path.name for path in out.parent.iterdir()) == ["gpu.log", "gpu.md"]


def test_parts_are_the_whole() -> None:
    names = [f"test_{number}" for number in range(11)]
    parts = [progress.of_part(names, f"{number}/4") for number in range(4)]
    assert set().union(*parts) == set(names) and sum(map(len, parts)) == len(names)


def test_files_that_the_driver_opens_are_its_own() -> None:
    assert all(map(of_the_driver, ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm", "anon_inode:[eventfd]")))
    assert not any(map(of_the_driver, ("/home/file", "socket:[123]", "pipe:[9]", "anon_inode:[eventpoll]")))


def test_the_cost_in_python_is_measured_without_a_device() -> None:
    try:
        lines = list(host.run(tiny=True))
    finally:
        devices.device("cuda:0").close()
        unregister_device("cuda:0")
    assert [line for line in lines if line.startswith("| m @ m")]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("aiograd-cuda")]
