"""The pieces of a run: each test file once in each round."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cpus.__main__ import read_outcome

ROOT = Path(__file__).parents[2]
#: tests that open sockets or start processes
MARKERS = "(net or proc) and not sweep"
#: turns until its parent is gone
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(1_000_000):\n        pass\n"


@contextlib.contextmanager
def busy(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """So many processes compute; they end with the block."""
    processes = [subprocess.Popen([sys.executable, "-S", "-c", BUSY]) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def files(paths: Sequence[str], markers: str = MARKERS) -> list[str]:
    """The test files below these paths that have tests of these markers, in pytest's order.

    Raises:
        RuntimeError: pytest cannot collect them.
    """
    done = pytest_run("--collect-only", "-q", "-m", markers, *paths)
    if done.returncode not in (0, 5):
        raise RuntimeError(f"collecting {' '.join(paths)}: {done.stdout[-2000:]}{done.stderr[-500:]}")
    named = dict.fromkeys(line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line)
    # of paths outside of the project pytest tells names that begin there
    return [name if (ROOT / name).exists() else next(str(Path(path) / name) for path in paths if (Path(path) / name).exists()) for name in named]


def run(path: str, markers: str, log: Path) -> dict[str, Any]:
    """Run one file; how many of its tests ran, which failed, and the seconds. The output is kept where one failed."""
    began = time.monotonic()
    done = pytest_run("-q", "-rfE", "--tb=short", "-m", markers, path)
    seconds = time.monotonic() - began
    outcome = read_outcome(done.stdout, done.returncode, seconds, f"see {log}")
    if outcome.failures:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(done.stdout + done.stderr)
    return {"ran": outcome.passed + outcome.failed, "failures": outcome.failures, "seconds": round(seconds, 1)}


def pytest_run(*words: str) -> subprocess.CompletedProcess[str]:
    """Pytest in a process of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "--rootdir", str(ROOT), "-p", "no:cacheprovider", "-p", "no:xdist", *words]
    return subprocess.run(command, cwd=ROOT, env=kept, check=False, capture_output=True, text=True)


def table(lines: Iterable[Mapping[str, Any]]) -> str:
    """Pieces that are done, by folder; below, each test that failed: how often, of how many runs of its file, and how it failed last."""
    listed = list(lines)
    rounds = Counter(line["piece"][0] for line in listed)
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0, 0, 0.0])
    failed: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    for line in listed:
        path = line["piece"][0]
        row = sums[str(Path(path).parent)]
        for i, value in enumerate((1, line["ran"], len(line["failures"]), line["seconds"])):
            row[i] += value
        for failure in line["failures"]:
            test, _, reason = failure.partition(" - ")
            name = f"{path}::{test.partition('::')[2]}" if "::" in test else f"{path}: {test}"
            failed[name] += 1
            reasons[name] = reason
    rows = [f"{'folder':<36} {'runs of files':>13} {'tests run':>10} {'failures':>9} {'seconds':>8}"]
    rows += [f"{folder:<36} {row[0]:>13} {row[1]:>10} {row[2]:>9} {row[3]:>8.0f}" for folder, row in sums.items()]
    for name, count in failed.most_common():
        path = name.partition("::")[0].partition(": ")[0]
        rows.append(f"{count} of {rounds[path]}: {name}" + (f" - {reasons[name]}" if reasons[name] else ""))
    return "\n".join(rows)
