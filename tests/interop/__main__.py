"""Runs the conformance suite of the Array API, with a table, and the tests beside this file: bridges to torch and JAX, and others.

Exits with 1 where something is not as expected.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import pytest

from tests.interop.array_api import KNOWN, Missing, place, run

#: what the tests beside this file need; where one is missing they are skipped, except here
LIBRARIES = ("torch", "jax", "einops", "opt_einsum", "array_api_compat", "scipy", "sklearn")


def conforms(folder: Path, examples: int) -> bool:
    """True if aiograd passes at least as many tests of the suite as numpy, and fails only those that are known to fail."""
    suite = place(folder)
    ours, theirs = run(suite, "aiograd", examples), run(suite, "numpy", examples)
    print(f"{'Array API suite':30}{'passed':>8}{'failed':>8}")
    for name, outcome in (("aiograd", ours), ("numpy", theirs)):
        print(f"{name:30}{len(outcome.passed):8}{len(outcome.failed):8}")
    for part, reason in KNOWN.items():
        print(f"    {sum(part in test for test in ours.failed):3} known to fail: {part.split('::')[-1]}...: {reason}")
    for test in ours.unexpected:
        print(f"    UNEXPECTED failure: {test}")
    return not ours.unexpected and len(ours.passed) >= len(theirs.passed)


def main() -> int:
    """Run everything, or the suite or the tests alone."""
    parser = argparse.ArgumentParser(prog="python -m tests.interop", description=__doc__)
    parser.add_argument("--examples", type=int, default=20, help="examples that Hypothesis tries for each test of the suite (20)")
    parser.add_argument("--folder", type=Path, default=Path("out") / "interop", help="where the suite is copied to")
    parser.add_argument("--jobs", type=int, default=2, help="processes that run the tests (2)")
    parser.add_argument("--only", choices=("suite", "tests"), help="one of the two")
    options = parser.parse_args()
    fine = True
    if options.only != "tests":
        options.folder.mkdir(parents=True, exist_ok=True)
        try:
            fine = conforms(options.folder, options.examples)
        except Missing as error:
            fine = False
            print(f"    MISSING: {error}")
    if options.only != "suite":
        here = Path(__file__).parent
        missing = [library for library in LIBRARIES if importlib.util.find_spec(library) is None]
        if missing:
            print(f"    MISSING: {', '.join(missing)}, so their tests would be skipped; `make interop` installs them")
        guides = ["-k", "interop or guide_of_a_bridge", str(here.parent / "test_documentation.py")]
        tests = pytest.main(["-q", "-n", str(options.jobs), "--dist", "worksteal", str(here), *guides])
        fine = tests == 0 and not missing and fine
    print("everything is as expected" if fine else "something is NOT as expected, see above")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
