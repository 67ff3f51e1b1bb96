"""Rows of other releases: a worker of one beside a worker of this checkout, both ways, and its states read by this checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.matrix.rows import Result
from tests.releases import builds


def row(release: str) -> Result:
    """Run one release: a call, a pass and a step with it as server and as caller, and its states."""
    name = f"release {release}"
    command = f"python -m tests.matrix --rows --releases '{release}'"
    began = time.monotonic()
    try:
        folder = builds.package(release)
    except builds.NoSuchReleaseError as error:
        return Result(name, "", "", left_out=str(error))
    expected = builds.together(builds.ROOT, builds.ROOT)
    found = [
        builds.verdict(builds.together(folder, builds.ROOT), expected, told_which=True),
        builds.verdict(builds.together(builds.ROOT, folder), expected, told_which=False),
        _states(folder, builds.OUT / f"{folder.name}-states"),
    ]
    words = [f"{what}: {text}" for what, (_, text) in zip(("serves", "calls", "states"), found, strict=True)]
    failures = tuple(text for text, (right, _) in zip(words, found, strict=True) if not right)
    return Result(name, "; ".join(words), command, len(found) - len(failures), len(failures), 0, time.monotonic() - began, failures)


def _states(folder: Path, target: Path) -> tuple[bool, str]:
    shutil.rmtree(target, ignore_errors=True)
    scratch = target / "scratch"
    scratch.mkdir(parents=True)
    try:
        builds.written(folder, target)
    except subprocess.CalledProcessError as error:
        return False, f"were not written: {error.stderr.decode(errors='replace')[-500:]}"
    command = [sys.executable, "-m", "tests.releases.checks", str(target), str(scratch)]
    done = subprocess.run(command, cwd=builds.ROOT, check=False, capture_output=True, text=True)
    return (True, "read") if done.returncode == 0 else (False, f"were not read: {done.stderr[-500:]}")
