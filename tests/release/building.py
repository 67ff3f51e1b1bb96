"""Builds sdist and wheel from a copy of the commit, and looks at what is in them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

#: the name of the bill of materials in ``.dist-info/sboms``; `tests.release.sbom`, which writes it, is imported by hatchling alone
BILL = "sbom.cdx.json"
#: the folders of the wheel with the dashboard's page, and with that of `aiograd.viz.step`
PAGE, STEPS_PAGE = "aiograd/dashboard/static", "aiograd/viz/static"
#: endings of files that a user needs, in the package and in the folder of the page
CODE, OF_THE_PAGE = (".py", ".pyi", "/py.typed"), (".html", ".css", ".js", ".svg")
ABOUT = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", f"sboms/{BILL}")
#: folders that no distribution has
UNWANTED = {"__pycache__", "tests", "examples", "docs", "node_modules", "out", "build"}


class ReleaseError(Exception):
    """A check that fails, or something that it needs and that is missing; the text says what to do."""


def run(words: list[str], folder: Path, *, umask: int = -1, log: Path | None = None, **environment: str) -> str:
    """Run a program in a folder, without the shell's `PYTHONPATH`; returns what it prints.

    Args:
        words: program and arguments.
        folder: where it runs.
        umask: of the program.
        log: a file that has what the program prints, while it runs and afterwards.
        **environment: variables, beside those of this process.

    Raises:
        ReleaseError: it ends with an error; the text has the end of its output.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "PYTEST_"))}
    with open(log, "w+") if log is not None else tempfile.TemporaryFile("w+") as output:
        done = subprocess.run(words, cwd=folder, env=environ | environment, umask=umask, stdout=output, stderr=subprocess.STDOUT, check=False)
        output.seek(0)
        text = output.read()
    if done.returncode:
        last = "\n".join(text.splitlines()[-40:])
        raise ReleaseError(f"`{' '.join(words)}` ends with {done.returncode}{f', see {log}' if log else ''}:\n{last}")
    return text


@dataclass(frozen=True)
class Commit:
    """A commit, and the files built from it.

    Attributes:
        name: the hash.
        epoch: its time, in seconds since 1970, as text.
        changed: files of the checkout that are not as in the commit.
    """

    name: str
    epoch: str
    changed: tuple[str, ...]

    @classmethod
    def of(cls, root: Path) -> Commit:
        """The commit of a checkout.

        Raises:
            ReleaseError: it is no checkout, or there is no git.
        """
        if shutil.which("git") is None:
            raise ReleaseError("git is missing, from which the time of the build and the list of files come: apt-get install git")
        if not (root / ".git").exists():
            raise ReleaseError(f"{root} is no checkout: a release is built from a clone of the repository")
        name, epoch = run(["git", "log", "-1", "--format=%h %ct"], root).split()
        changed = run(["git", "status", "--porcelain", "--no-renames"], root).splitlines()
        return cls(name, epoch, tuple(line[3:] for line in changed))


def copy(root: Path, folder: Path) -> None:
    """Copy the files that git knows, as they are in the checkout, without what lies beside them."""
    for name in run(["git", "ls-files", "-z"], root).split("\0"):
        if name and (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, folder / name)


@dataclass(frozen=True)
class Built:
    """The two files of a build."""

    sdist: Path
    wheel: Path


def build(source: Path, folder: Path, epoch: str, *, umask: int = 0o022, **environment: str) -> Built:
    """Build the sdist of a copy, unpack it, and build the wheel from what was unpacked.

    Args:
        source: the copy.
        folder: empty, for the files.
        epoch: ``SOURCE_DATE_EPOCH``.
        umask: of the programs that build.
        **environment: their variables.
    """
    environment["SOURCE_DATE_EPOCH"] = epoch
    hatchling = [sys.executable, "-m", "hatchling", "build", "-d", str(folder), "-t"]
    run([*hatchling, "sdist"], source, umask=umask, **environment)
    (sdist,) = folder.glob("*.tar.gz")
    run([*hatchling, "wheel"], unpack(sdist, folder / "unpacked"), umask=umask, **environment)
    (wheel,) = folder.glob("*.whl")
    return Built(sdist, wheel)


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack an sdist; returns its root."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (root,) = folder.iterdir()
    return root


def sizes(wheel: Path) -> dict[str, int]:
    """The files of a wheel, with their bytes."""
    with zipfile.ZipFile(wheel) as archive:
        return {each.filename: each.file_size for each in archive.infolist()}


def bill_of(wheel: Path) -> str:
    """The bill of materials in a wheel.

    Raises:
        ReleaseError: there is none.
    """
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(f".dist-info/sboms/{BILL}"):
                return archive.read(name).decode()
    raise ReleaseError(f"{wheel.name} has no sboms/{BILL}: see [tool.hatch.build.targets.wheel.hooks.custom] in pyproject.toml")


def unneeded(names: Iterable[str], version: str) -> Iterator[str]:
    """A message for each file in a wheel that no user needs, and for each that is missing."""
    names = set(names)
    info = f"aiograd-{version}.dist-info"
    for name in sorted(names):
        folder, _, file = name.rpartition("/")
        is_code = name.startswith("aiograd/") and f"/{file}".endswith(CODE)
        is_page = folder in (PAGE, STEPS_PAGE) and file.endswith(OF_THE_PAGE)
        is_about = name.startswith(f"{info}/") and name.removeprefix(f"{info}/") in ABOUT
        if UNWANTED & {*folder.split("/")} or not (is_code or is_page or is_about or name == "pytest_aiograd.py"):
            yield f"{name} is in the wheel, and no user needs it"
    for name in ("aiograd/__init__.py", "aiograd/py.typed", "pytest_aiograd.py", f"{PAGE}/index.html", *(f"{info}/{each}" for each in ABOUT)):
        if name not in names:
            yield f"{name} is not in the wheel"


def by_folder(files: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Name, number of files and bytes of each top folder and of each folder of the package, the largest first."""
    counts, total = Counter[str](), Counter[str]()
    for name, size in files.items():
        parts = name.split("/")
        for folder in {parts[0], "/".join(parts[:2]) if parts[0] == "aiograd" and len(parts) > 2 else parts[0]}:
            counts[folder] += 1
            total[folder] += size
    return [(name, counts[name], size) for name, size in sorted(total.items(), key=lambda item: (-item[1], item[0]))]
