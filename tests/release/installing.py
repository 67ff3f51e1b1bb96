"""An environment outside of the checkout with the wheel, and the tests of the sdist in it.

Note [The package comes from the wheel]
    The tests stand in a folder in which there is no ``aiograd``, so that every process they start finds the package that is installed. This module is
    also a plugin of pytest: each process of the run looks where the package comes from before its first test.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.release.building import Built, ReleaseError, run, unpack

#: tests that look at the sources or build the package, which are not there
OF_SOURCES = (
    "tests/cuda_driver", "tests/release", "tests/test_class_names.py", "tests/test_docstrings.py", "tests/test_layering.py", "tests/test_methods.py",
    "tests/test_packaging.py", "tests/test_prose.py", "tests/test_readme.py", "tests/test_words.py",
)  # fmt: skip
#: without options: every kind of promise, in a few minutes
CHOSEN = (
    "tests/engine", "tests/tensors", "tests/nn", "tests/optim", "tests/testing", "tests/transaction", "tests/test_cli.py",
    "tests/test_everyday_functions.py", "tests/test_functional.py", "tests/test_serialization.py", "tests/test_stability.py",
    "tests/test_top_level.py", "tests/test_training.py",
)  # fmt: skip
#: what a program does with the wheel alone
PROGRAM = """
import importlib.metadata, sys
import aiograd as ag

async def main():
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    await (x * x).sum().backward()
    assert x.grad.tolist() == [2.0, 4.0]

ag.run(main())
assert ag.__file__.startswith(sys.prefix), ag.__file__
assert not {"numba", "scipy", "pytest", "hypothesis"} & {each.metadata["Name"] for each in importlib.metadata.distributions()}
print(len(list(importlib.metadata.distributions())), ag.__version__, sep="\\n")
"""


def pytest_sessionstart(session: Any) -> None:
    """Refuse to test anything but an installed package."""
    import pytest
    import pytest_aiograd

    import aiograd

    for module in (aiograd, pytest_aiograd):
        path = Path(str(module.__file__)).resolve()
        if "site-packages" not in path.parts or not path.is_relative_to(Path(sys.prefix).resolve()):
            raise pytest.UsageError(f"{module.__name__} comes from {path}, not from the wheel in {sys.prefix}")


@contextmanager
def environment(wheel: Path) -> Iterator[Path]:
    """A new environment with a wheel and what it requires, in a folder of its own that is removed afterwards; gives its interpreter."""
    with tempfile.TemporaryDirectory(prefix="aiograd-release-") as folder:
        run([sys.executable, "-m", "venv", folder], Path(folder))
        python = Path(folder) / "bin" / "python"
        _install(python, str(wheel))
        yield python


def _install(python: Path, what: str) -> None:
    try:
        run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", what], python.parent)
    except ReleaseError as error:
        raise ReleaseError(f"{what} could not be installed; a package index has to be in reach (pip's --index-url).\n{error}") from error


def use_alone(python: Path) -> str:
    """Run a program and `aiograd doctor` with the wheel alone; returns how many distributions there are, and the version."""
    with tempfile.TemporaryDirectory() as folder:
        count, version = run([str(python), "-I", "-W", "error", "-c", PROGRAM], Path(folder)).split()
        run([str(python.parent / "aiograd"), "doctor"], Path(folder))
    return f"a backward pass and `aiograd doctor`, {version} with {count} distributions"


def run_tests(python: Path, built: Built, jobs: int, paths: Sequence[str], log: Path) -> str:
    """Install what the tests need, and run those of the sdist; returns pytest's count.

    Args:
        python: of an environment with the wheel.
        built: of which the sdist has the tests.
        jobs: processes.
        paths: of tests; all, but those that look at sources, if there are none.
        log: a file for what pytest prints.
    """
    _install(python, f"{built.wheel}[dev]")
    with tempfile.TemporaryDirectory(prefix="aiograd-release-") as folder:
        root = unpack(built.sdist, Path(folder))
        shutil.rmtree(root / "aiograd")
        ignored = [f"--ignore={path}" for path in OF_SOURCES]
        words = [str(python), "-m", "pytest", "-q", "-p", __name__, "-n", str(jobs), "--dist", "worksteal", "-m", "not sweep", *ignored, *paths]
        last = run(words, root, log=log).splitlines()[-1]
    if not re.search(r"\d{2,} passed", last):
        raise ReleaseError(f"no tests have run in the environment of the wheel: {last}")
    return last.strip("= ")
