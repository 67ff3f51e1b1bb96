"""Packages of commits in folders of their own, and two workers with different packages at work together."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import secrets
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OUT = ROOT / "out" / "matrix" / "releases"
HERE = Path(__file__).parent
#: where there is no tag of a release: a commit that speaks today's version of the protocol, and the last one that speaks the version before
UNTAGGED = ("d8c46b84", "3e8af9d2^")


class NoSuchReleaseError(Exception):
    """A commit or wheel that is not to be had here; says why."""


def releases() -> tuple[str, ...]:
    """The last tag; without tags, `UNTAGGED`."""
    found = _git("describe", "--tags", "--abbrev=0")
    return (found.stdout.decode().strip(),) if found.returncode == 0 else UNTAGGED


def package(release: str) -> Path:
    """A folder with the package of a release: of a wheel, by its path, or of a commit or tag. It is made on first use.

    Raises:
        NoSuchReleaseError: there is no such wheel, and git knows no such commit.
    """
    if release.endswith(".whl"):
        if not Path(release).is_file():
            raise NoSuchReleaseError(f"there is no wheel {release}")
        return _unpacked(Path(release), OUT / Path(release).stem)
    commit = _git("rev-parse", "--verify", "--quiet", f"{release}^{{commit}}").stdout.decode().strip()
    if not commit:
        raise NoSuchReleaseError(f"git has no commit {release} here; a shallow clone gets it with `git fetch --unshallow`")
    folder = OUT / commit[:12]
    if not (folder / "aiograd").is_dir():
        source = OUT / f"{commit[:12]}-source"
        _unpacked(io.BytesIO(_git("archive", "--format=zip", commit).stdout), source)
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(source / "dist")]
        subprocess.run(command, cwd=source, check=True, capture_output=True)
        (wheel,) = (source / "dist").glob("*.whl")
        _unpacked(wheel, folder)
    return folder


def _unpacked(file: Path | io.BytesIO, folder: Path) -> Path:
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder)
    return folder


def _git(*words: str) -> subprocess.CompletedProcess[bytes]:
    command = ["git", *words]
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True)


# -------------------------------------------------------------------- at work together


def environment(folder: Path, secret: str = "") -> dict[str, str]:
    """The variables of a process that runs a module of this folder with the package in `folder`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "AIOGRAD_"))}
    return {**kept, "PYTHONPATH": os.pathsep.join((str(folder), str(HERE))), "PYTHONSAFEPATH": "1", "AIOGRAD_SECRET": secret}


@contextlib.contextmanager
def serving(folder: Path, secret: str) -> Iterator[str]:
    """A process that serves `peer.service` with the package in `folder`: its URL."""
    command = [sys.executable, "-m", "aiograd", "worker", "--name", "server", "--service", "peer:service", "--log-level", "error"]
    process = subprocess.Popen(command, env=environment(folder, secret), cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        found = re.search(r"listens on (\S+)", line)
        if found is None:
            raise RuntimeError(f"a worker with the package in {folder} did not start: {line}{process.communicate()[1]}")
        yield found[1]
    finally:
        process.terminate()
        process.communicate()


def together(server: Path, caller: Path) -> dict[str, Any]:
    """The answers that a worker with the package in `caller` gets from one with the package in `server`, see `peer.call`."""
    secret = secrets.token_hex(32)
    with serving(server, secret) as url:
        command = [sys.executable, str(HERE / "peer.py"), url]
        done = subprocess.run(command, env=environment(caller, secret), cwd=HERE, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"a worker with the package in {caller} failed: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    if not Path(found.pop("package")).is_relative_to(caller):
        raise RuntimeError(f"a worker did not run with the package in {caller}")
    return found


def written(folder: Path, target: Path) -> None:
    """Let the package in `folder` write its states into `target`, see `states`."""
    subprocess.run([sys.executable, str(HERE / "states.py"), str(target)], env=environment(folder), cwd=HERE, check=True, capture_output=True)


def verdict(found: dict[str, Any], expected: dict[str, Any], *, told_which: bool) -> tuple[bool, str]:
    """True if two workers worked together as two of one release do, or refused by version; and the outcome in words.

    Args:
        found, expected: of `together`.
        told_which: the error has to say which side to upgrade: the caller is of this checkout.
    """
    if found.get("refused") == "VersionMismatch":
        names = re.search(r"upgrade aiograd where worker '(caller|server)' runs", found["text"])
        return (bool(names) or not told_which, f"refused: {found['text'].partition('; ')[2] or found['text']}")
    if "refused" in found:
        return False, f"failed with {found['refused']}: {found['text']}"
    return (found == expected, "work together" if found == expected else f"other numbers: {found}, expected {expected}")
