"""A plugin of pytest that writes down the progress of a run, so that what a crash leaves over runs in another process.

The file named by AIOGRAD_GPU_PROGRESS gets a line when a test starts and one for its outcome. Tests that stand there already are left out.
AIOGRAD_GPU_PART, as in ``2/8``, leaves the tests of all other parts out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

STARTED = "started"
#: outcomes, the worst last: a test that passes and fails at its end has failed
OUTCOMES = ("skipped", "passed", "failed")


def _path() -> Path | None:
    name = os.environ.get("AIOGRAD_GPU_PROGRESS")
    return Path(name) if name else None


def _write(word: str, test: str) -> None:
    path = _path()
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{word}\t{test}\n")


def read(path: Path) -> dict[str, str]:
    """Test -> its outcome so far, `STARTED` for one that came to no end."""
    found: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        word, _, test = line.partition("\t")
        if word == STARTED:
            found.setdefault(test, word)
        elif found.get(test) not in OUTCOMES or OUTCOMES.index(word) > OUTCOMES.index(found[test]):
            found[test] = word
    return found


def of_part(names: Iterable[str], part: str) -> set[str]:
    """The names of a part such as ``2/8``."""
    number, parts = map(int, part.split("/"))
    return {name for place, name in enumerate(names) if place % parts == number}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of other parts, and tests that were started before."""
    path = _path()
    mine = of_part([item.nodeid for item in items], os.environ.get("AIOGRAD_GPU_PART") or "0/1")
    left = mine - (set() if path is None else read(path).keys())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in left])
    items[:] = [item for item in items if item.nodeid in left]


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note a test before anything of it runs."""
    _write(STARTED, nodeid)


class Reporter:
    """Notes outcomes, and prints failures when they happen, since a process that crashes later prints no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome of a test, and of its setup and teardown where they did not pass."""
        if report.when == "call" or not report.passed:
            _write(report.outcome, report.nodeid)
        if report.failed:
            self._print(f"{report.nodeid}, {report.when}:\n{report.longreprtext}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported."""
        if report.failed:
            self._print(f"{report.nodeid}:\n{report.longreprtext}")

    def _print(self, text: str) -> None:
        writer = self._config.get_terminal_writer()
        writer.line(f"\n{text}")
        writer.flush()


def pytest_configure(config: pytest.Config) -> None:
    """Report to the run's terminal."""
    config.pluginmanager.register(Reporter(config))
