"""Checks types as users of the package see them, with an installed aiograd, pyright and mypy.

Prints how many public names have a type that is completely known (``pyright --verifytypes``), and checks the programs in
``tests/types/programs`` with pyright and mypy, both strict. Exits with 1 where a public name is not complete, or a checker complains.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from aiograd.running.stability import stability_of
from tests.types.completeness import Annotations, complaints, incomplete, places, table, typed_names

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
BIN = Path(sys.executable).parent
OUT = ROOT / "out" / "types.json"


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a checker, which finds the interpreter whose packages it reads as a shell would."""
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}", "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    return subprocess.run([str(BIN / command[0]), *command[1:]], cwd=PROGRAMS, env=environment, capture_output=True, text=True)


def verified() -> dict[str, Any]:
    """The report of pyright about the installed package."""
    result = _run("pyright", "--verifytypes", "aiograd", "--ignoreexternal", "--outputjson")
    report: dict[str, Any] = json.loads(result.stdout)
    problems = [each["message"] for each in report["generalDiagnostics"]]
    if problems or not report["typeCompleteness"]["symbols"]:
        raise SystemExit(f"pyright cannot read the installed aiograd: {'; '.join(problems) or 'it found no symbols'}")
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(result.stdout, encoding="utf-8")
    return report


def names_are_complete() -> bool:
    """True if the types of all public names are complete; gaps are printed."""
    names = typed_names(verified(), places(), stability_of, Annotations(ROOT))
    print(table(names))
    found = incomplete(names)
    if found:
        print(f"\n{len(found)} names are not complete:\n{complaints(found)}")
    return not found


def programs_are_typed() -> bool:
    """True if both checkers accept the programs."""
    fine = True
    for command in (("pyright", "--project", "."), ("mypy", "--strict", "--no-incremental", ".")):
        result = _run(*command)
        fine = fine and result.returncode == 0
        print(f"\n{' '.join(command)}: {result.stdout.strip()}{result.stderr.strip()}")
    return fine


def main() -> int:
    """Run everything."""
    argparse.ArgumentParser(prog="python -m tests.types", description=__doc__).parse_args()
    complete = names_are_complete()
    return 0 if programs_are_typed() and complete else 1


if __name__ == "__main__":
    sys.exit(main())
