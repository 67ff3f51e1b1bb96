"""Runs tests in other environments, and workers of other releases beside those of this checkout; a table in out/matrix. ``make matrix``.

Environments are made on first use and kept. What cannot be had here is a row that says why.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence

from tests.cpus.__main__ import read_outcome
from tests.matrix import environments, releases
from tests.matrix.environments import OUT, ROOT, LeftOutError
from tests.matrix.rows import ROWS, SAMPLE, SAMPLE_TESTS, TESTS, Result, Row, described, table
from tests.releases import builds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--rows", nargs="*", metavar="row", help="names of rows (default: all; --list names them; none: only releases)")
    parser.add_argument("--tests", nargs="+", default=list(TESTS), metavar="path", help="what each row runs, as pytest takes it")
    parser.add_argument("--releases", nargs="*", metavar="release", help="commits, tags or wheels (default: the last tag; none: no releases)")
    parser.add_argument("--jobs", type=int, default=2, help="processes of each row")
    parser.add_argument("--small", action="store_true", help="the sample of .ci/run: about a minute on two quiet cores")
    parser.add_argument("--renew", action="store_true", help="resolve the highest versions anew")
    parser.add_argument("--list", action="store_true", help="name the rows and end")
    options = parser.parse_args(arguments)
    if options.list:
        print(*(row.name for row in ROWS), *(f"release {each}" for each in builds.releases()), sep="\n")
        return 0
    if options.small:
        options.rows, options.tests = options.rows or list(SAMPLE), list(SAMPLE_TESTS)
        options.releases = builds.releases()[:1] if options.releases is None else options.releases
    unknown = set(options.rows or ()) - {row.name for row in ROWS}
    if unknown:
        parser.error(f"no row is called {', '.join(sorted(unknown))}; there are {', '.join(row.name for row in ROWS)}")
    OUT.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    for row in ROWS:
        if options.rows is None or row.name in options.rows:
            results.append(run(row, options.tests, options.jobs, renew=options.renew))
            print(table(results[-1:]).splitlines()[2], flush=True)
    for release in builds.releases() if options.releases is None else options.releases:
        results.append(releases.row(release))
        print(table(results[-1:]).splitlines()[2], flush=True)
    (OUT / "matrix.md").write_text(table(results) + "\n")
    (OUT / "results.json").write_text(json.dumps([result._asdict() for result in results], indent=1) + "\n")
    print(f"\n{table(results)}")
    passed, failed, skipped = (sum(getattr(result, name) for result in results) for name in ("passed", "failed", "skipped"))
    print(f"\n{passed} passed, {failed} failed, {skipped} skipped")
    return int(failed > 0 or not passed)


def run(row: Row, tests: Sequence[str], jobs: int, *, renew: bool = False) -> Result:
    """One row; its whole output is in out/matrix."""
    began = time.monotonic()
    try:
        python = environments.interpreter(row.environment, renew=renew)
        versions = described(environments.versions(python, row.environment))
    except LeftOutError as error:
        return Result(row.name, "", "", left_out=str(error))
    words = ["-m", "pytest", "-q", "-rfE", "--tb=short", "-p", "no:cacheprovider", "-m", "not sweep"]
    folder, reason = row.ignored
    words += [*([f"--ignore={folder}"] if folder else []), "-n", str(jobs), "--dist", "worksteal", *tests]
    variables = " ".join(f"{name}={value}" for name, value in row.variables.items())
    log = OUT / f"{row.name.replace(' ', '-')}.log"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHONPATH", "VIRTUAL_ENV"))}
    with log.open("w") as output:
        done = subprocess.run([str(python), *words], check=False, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env={**kept, **row.variables})
    outcome = read_outcome(log.read_text(errors="replace"), done.returncode, time.monotonic() - began, f"see {log}")
    command = f"{variables} {shlex.join((str(python), *words))}".strip()
    numbers = (outcome.passed, outcome.failed, outcome.skipped, outcome.seconds)
    environment = ", ".join(filter(None, (versions, variables, reason and f"without {folder}: {reason}")))
    return Result(row.name, environment, command, *numbers, tuple(outcome.failures))


if __name__ == "__main__":
    sys.exit(main())
