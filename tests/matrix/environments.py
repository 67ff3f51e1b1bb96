"""Environments of rows, made by uv, which has an environment of its own; all are under ``out/matrix``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

from tests.cpus import pythons
from tests.matrix.bounds import ROOT, lowest, project, requirements, tools
from tests.matrix.rows import Environment

OUT = ROOT / "out" / "matrix"
THIS = f"{sys.version_info.major}.{sys.version_info.minor}"

PROBE = """
import importlib.metadata, json, platform, sys
found = {"Python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found[name] = ""
print(json.dumps(found))
"""


class LeftOutError(Exception):
    """An environment that cannot be made here; says why."""


def interpreter(environment: Environment | None, *, renew: bool = False) -> Path:
    """The Python of an environment, which is made on first use, and anew where its requirements have changed.

    Args:
        environment: None for the one that runs this.
        renew: True to resolve the highest versions again.

    Raises:
        LeftOutError: there is no such Python here, or versions that go together were not found.
    """
    if environment is None:
        return Path(sys.executable)
    version = environment.python or THIS
    base = pythons.find(version)
    if base is None:
        raise LeftOutError(f"no Python {version} on the path or in pyenv; `uv python install {version}` or `pyenv install {version}` brings it")
    which = (*environment.extras, *(f"no_{each}" for each in environment.without))
    folder = OUT / "-".join((version, "lowest" if environment.lowest else "highest", *which))
    python, stamp, wanted = folder / "bin" / "python", folder / ".installed", words(environment, version)
    if renew or not stamp.exists() or json.loads(stamp.read_text()) != wanted:
        stamp.unlink(missing_ok=True)
        _uv("venv", "--quiet", "--clear", "--python", base, str(folder))
        _uv("pip", "install", "--quiet", "--upgrade", "--python", str(python), *wanted)
        if environment.without:
            _uv("pip", "uninstall", "--quiet", "--python", str(python), *environment.without)
        stamp.write_text(json.dumps(wanted))
    return python


def words(environment: Environment, version: str) -> list[str]:
    """The requirements of an environment: this checkout, what runs tests, and pins where the lowest versions are asked for."""
    table = project()
    this = f"{ROOT}[{','.join(environment.extras)}]" if environment.extras else str(ROOT)
    return ["--editable", this, *tools(table), *(lowest(requirements(table, environment.extras, version)) if environment.lowest else ())]


def versions(python: Path, environment: Environment | None) -> dict[str, Any]:
    """The versions of Python, of the package's dependencies, and of those of the extras."""
    extras = ("kernels",) if environment is None else environment.extras
    names = [requirement.name for requirement in requirements(project(), extras, THIS)]
    done = subprocess.run([str(python), "-c", PROBE, *names], check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _uv(*arguments: str) -> None:
    folder = OUT / "uv"
    if not (folder / "bin" / "uv").exists():
        venv.create(folder, with_pip=True)
        subprocess.run([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "uv"], check=True)
    kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    done = subprocess.run([str(folder / "bin" / "uv"), *arguments], env=kept, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode:
        raise LeftOutError(f"uv {arguments[0]} failed: {' '.join(done.stderr.split())[-300:]}")
