"""Other Pythons on this machine, each with an environment of its own under ``out/cpus``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

VERSIONS = ("3.11", "3.12", "3.13")
ROOT = Path(__file__).parents[2]
SUPPORTS = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))"


def _candidates(version: str) -> Iterator[str]:
    on_path = shutil.which(f"python{version}")
    if on_path is not None:
        yield on_path
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    for folder in sorted(pyenv.glob(f"{version}.*")):
        yield str(folder / "bin" / "python")


def find(version: str) -> str | None:
    """A Python of this version that can make environments, or None."""
    for python in _candidates(version):
        try:
            if subprocess.run([python, "-c", SUPPORTS], check=False, capture_output=True, timeout=60).returncode == 0:
                return python
        except (OSError, subprocess.TimeoutExpired):
            continue
    return None


def environment(version: str) -> str | None:
    """The interpreter of an environment with this checkout and what its tests need; made on first use. None where there is no such Python."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    folder = ROOT / "out" / "cpus" / f"python{version}"
    interpreter, stamp = folder / "bin" / "python", folder / ".installed"
    if not stamp.exists() or stamp.stat().st_mtime < (ROOT / "pyproject.toml").stat().st_mtime:
        python = find(version)
        if python is None:
            return None
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(interpreter), "-m", "pip", "install", "--quiet", "--editable", ".[dev]"], check=True, cwd=ROOT)
        stamp.touch()
    return str(interpreter)
