"""data-apis' conformance suite of the Python Array API on aiograd, and on numpy with the same settings.

The suite is no part of this project: its place is taken from ``ARRAY_API_TESTS``, else the pinned commit is cloned.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = "https://github.com/data-apis/array-api-tests"
COMMIT = "55fcc601"
VERSION = "2024.12"
#: a part of the id of a test that fails -> the reason
KNOWN: dict[str, str] = {
    "test_special_cases.py::test_unary[expm1(": "numpy's expm1 of complex infinities; its values are taken as they are",
    "test_special_cases.py::test_unary[tanh(real(x_i) is +infinity": "numpy's tanh of complex infinities",
    "floor_divide(": "numpy's floor_divide gives NaN for infinite dividends and -1 for infinite divisors",
    "__floordiv__(": "as floor_divide",
    "__ifloordiv__(": "as floor_divide",
    "::test_meshgrid": "the result is a tuple, as the standard says from 2025.12 on; the suite wants a list for 2024.12",
    "::test_broadcast_arrays": "as meshgrid",
}


_ADVICE = "set ARRAY_API_TESTS to a folder with a copy of the suite at that commit"


class Missing(Exception):
    """The suite is not there, and cannot be fetched; the message is one line."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The tests of one run of the suite that passed and those that failed."""

    passed: tuple[str, ...]
    failed: tuple[str, ...]

    @property
    def unexpected(self) -> list[str]:
        """Failures without an entry in `KNOWN`."""
        return [test for test in self.failed if not any(part in test for part in KNOWN)]


def place(folder: Path) -> Path:
    """A copy of the suite in `folder`, since a run writes beside it.

    Raises:
        Missing: it is not where ``ARRAY_API_TESTS`` says, or cannot be cloned.
    """
    target, given = folder.resolve() / "array-api-tests", os.environ.get("ARRAY_API_TESTS")
    if given:
        if not (Path(given) / "array_api_tests").is_dir():
            raise Missing(f"copying the Array API suite from ARRAY_API_TESTS={given}: found no folder array_api_tests in it; {_ADVICE}")
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(given, target, ignore=shutil.ignore_patterns(".git", "__pycache__"))
    elif not target.exists():
        git = shutil.which("git")
        if git is None:
            raise Missing(f"cloning the Array API suite from {REPOSITORY}: found no git; install it, or {_ADVICE}")
        shutil.rmtree(fresh := target.with_name("array-api-tests-cloning"), ignore_errors=True)
        within = [git, "-C", str(fresh)]
        for command in (
            [git, "clone", "--quiet", REPOSITORY, str(fresh)],
            [*within, "checkout", "--quiet", COMMIT],
            [*within, "submodule", "update", "--init", "--quiet"],
        ):
            done = subprocess.run(command, env={**os.environ, "GIT_TERMINAL_PROMPT": "0"}, stderr=subprocess.PIPE, text=True)
            if done.returncode:
                found = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
                raise Missing(f"cloning the Array API suite, commit {COMMIT} of {REPOSITORY}: found {found!r}; {_ADVICE}")
        fresh.rename(target)
    for path in (target, *target.rglob("*")):
        path.chmod(path.stat().st_mode | 0o200)
    return target


def run(suite: Path, module: str, examples: int) -> Outcome:
    """Run the suite on a namespace.

    Args:
        suite: the suite's folder.
        module: name of the namespace.
        examples: how many examples Hypothesis tries for each test.

    Raises:
        RuntimeError: the suite did not run to its end.
    """
    report = suite / f"report-{module}.json"
    report.unlink(missing_ok=True)
    environment = {**os.environ, "ARRAY_API_TESTS_MODULE": module, "ARRAY_API_TESTS_VERSION": VERSION}
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:pytest_aiograd", "-p", "no:asyncio", "-p", "no:benchmark", "-p",
            "no:cacheprovider", "--tb=no",
        "--disable-warnings", "--disable-deadline", "--derandomize", f"--max-examples={examples}", "--json-report", f"--json-report-file={report}",
        "array_api_tests",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=suite, env=environment, stdout=subprocess.DEVNULL)
    if done.returncode not in (0, 1) or not report.exists():
        raise RuntimeError(f"the suite ended with code {done.returncode} on {module}")
    tests = json.loads(report.read_text(encoding="utf-8"))["tests"]
    by = {outcome: tuple(test["nodeid"] for test in tests if test["outcome"] == outcome) for outcome in ("passed", "failed", "error")}
    return Outcome(by["passed"], (*by["failed"], *by["error"]))
