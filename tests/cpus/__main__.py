"""Runs the numeric tests under the code paths of this CPU (see `tests.cpus.paths`) and prints which of them really ran and what failed.

Nothing but the child processes gets the variables. The whole output is in out/cpus. A code path that the machine lacks is left out with a line,
and so is one that turns out to be another's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.cpus import pythons
from tests.cpus.paths import OTHER_CPU, OUT, CodePath, Machine, paths

ROOT = Path(__file__).parents[2]

#: what compares numbers
PARTS: dict[str, Sequence[str]] = {
    "ops": ["tests/ops"],
    "nn": ["tests/nn"],
    "tensors": ["tests/tensors"],
    "engine": ["tests/engine", "tests/graph"],
    "optim": ["tests/optim"],
    "parallel": ["tests/parallel"],
    "pipeline": ["tests/pipeline"],
    "distributed": [f"tests/distributed/{name}" for name in "test_backward.py test_bitwise.py test_create_graph.py test_encodings.py moe".split()],
    "programs": [
        f"tests/test_{name}.py"
        for name in "array_functions checkpointing demo examples function functional gradient_check random recipes serialization training".split()
    ],
    "cuda": ["tests/cuda"],
}
VARIABLES: dict[str, Mapping[str, str]] = {"cuda": {"NUMBA_ENABLE_CUDASIM": "1"}}


class Outcome(NamedTuple):
    """The outcome of one part."""

    passed: int
    failed: int
    #: names of the tests, or what else went wrong
    failures: list[str]
    seconds: float
    skipped: int = 0


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.cpus", description=__doc__)
    parser.add_argument("--paths", nargs="+", metavar="path", help="code paths (default: all that this machine has; --list names them)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="of the suite (default: all)")
    parser.add_argument("--pythons", nargs="*", metavar="version", help="Pythons to run the default path on as well (all, unless paths are named)")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--list", action="store_true", help="name the code paths and end")
    options = parser.parse_args(arguments)
    machine = machine_of(probe(sys.executable, {}))
    known = paths(machine)
    if options.list:
        for path in known:
            variables = " ".join(f"{name}={value!r}" for name, value in path.environment.items())
            print(f"{path.name:<16} {f'left out: {path.without}' if path.without else variables}")
        return 0
    unknown = set(options.paths or ()) - {path.name for path in known}
    if unknown:
        parser.error(f"no code path is called {', '.join(sorted(unknown))}; there are {', '.join(path.name for path in known)}")
    chosen = [path for path in known if not options.paths or path.name in options.paths]
    if any(path.name == "other-cpu" and not path.without for path in chosen):
        build_other_cpu(machine.compiler)
    rows: list[str] = []
    failures: list[str] = []
    seen: dict[str, str] = {}
    versions = options.pythons if options.pythons is not None else [] if options.paths else pythons.VERSIONS
    for name, interpreter, path in runs(chosen, versions):
        if path.without:
            rows.append(f"{name:<16} left out: {path.without}")
            continue
        real = described(probe(interpreter, path.environment))
        if real in seen:
            rows.append(f"{name:<16} left out: it is {seen[real]}")
            continue
        seen[real] = name
        total = Outcome(0, 0, [], 0.0)
        for part in options.parts:
            outcome = run(interpreter, name, path, part, options.jobs)
            print(f"{name} {part}: {outcome.passed} passed, {outcome.failed} failed, {outcome.seconds:.0f} s", flush=True)
            print(*(f"  {failure}" for failure in outcome.failures), sep="\n", end="\n" if outcome.failures else "", flush=True)
            total = Outcome(*(sum_ + each for sum_, each in zip(total, outcome, strict=True)))  # type: ignore[operator]
        rows.append(f"{name:<16} {real} {total.passed:>7} {total.failed:>6} {total.seconds:>7.0f}")
        failures += [f"{name}: {failure}" for failure in total.failures]
    print(f"\n{'code path':<16} {HEADINGS} {'passed':>7} {'failed':>6} {'seconds':>7}", *rows, *failures, sep="\n")
    return 1 if failures or not seen else 0


def runs(chosen: Sequence[CodePath], versions: Sequence[str]) -> list[tuple[str, str, CodePath]]:
    """Name, interpreter and code path of every run: the paths on this Python, and the default one on the others."""
    found = [(path.name, sys.executable, path) for path in chosen]
    for version in versions:
        interpreter = pythons.environment(version)
        name = f"python{version}"
        found.append((name, interpreter or "", CodePath(name, {}, "" if interpreter else "no such Python with venv and ensurepip was found")))
    return found


def probe(interpreter: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """The findings of `tests.cpus.probe` in a process with these variables."""
    command = [interpreter, "-m", "tests.cpus.probe"]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **environment})
    return json.loads(found.stdout)  # type: ignore[no-any-return]


def machine_of(found: Mapping[str, Any]) -> Machine:
    """The features of the default path, which are those to choose from."""
    return Machine(*(found[field] for field in Machine._fields))


def build_other_cpu(compiler: str) -> None:
    """Compile ``other_cpu.c``."""
    OUT.mkdir(parents=True, exist_ok=True)
    options = ["-O2", "-ffp-contract=off", "-fno-builtin", "-shared", "-fPIC", "-o", str(OTHER_CPU), "-ldl", "-lm"]
    subprocess.run([compiler, str(Path(__file__).with_name("other_cpu.c")), *options], check=True)


HEADINGS = f"{'Python':<8} {'numpy':<7} {'its loops for':<26} {'BLAS kernels':<24} {'threads':>7} {'numba for':<16}"


def described(found: Mapping[str, Any]) -> str:
    """A code path as it is in the table."""
    loops = found["dispatched"][-1] if found["dispatched"] else "the baseline"
    kernels = f"{found['blas']} {found['core']}"
    return f"{found['python']:<8} {found['numpy']:<7} {loops:<26} {kernels:<24} {found['threads']:>7} {found['numba']:<16}"


def run(interpreter: str, name: str, path: CodePath, part: str, jobs: int) -> Outcome:
    """One part of the suite in a process of its own; its output goes to a file."""
    command = [interpreter, "-m", "pytest", "-q", "-rfE", "--tb=short", "-p", "tests.cpus.threads", "-p", "no:cacheprovider"]
    command += ["-n", str(jobs), "--dist", "worksteal", *PARTS[part]]
    began = time.monotonic()
    OUT.mkdir(parents=True, exist_ok=True)
    log = OUT / f"{name}-{part}.log"
    with log.open("w") as output:
        environment = {**os.environ, **VARIABLES.get(part, {}), **path.environment}
        status = subprocess.run(command, check=False, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment).returncode
    return read_outcome(log.read_text(errors="replace"), status, time.monotonic() - began, f"see {log}")


def read_outcome(text: str, status: int, seconds: float, where: str) -> Outcome:
    """The last line of pytest and its list of failures."""
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error|skipped)", text.rstrip().rpartition("\n")[2])}
    failures = [line.partition(" ")[2] for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if status and not failures:
        failures = [f"pytest ended with status {status}, {where}"]
    failed = max(counts.get("failed", 0) + counts.get("error", 0), len(failures))
    return Outcome(counts.get("passed", 0), failed, failures, seconds, counts.get("skipped", 0))


if __name__ == "__main__":
    sys.exit(main())
