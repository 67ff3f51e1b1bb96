"""Runs benchmarks and prints their tables, each benchmark in a process of its own.

A process per benchmark, so that one's garbage, threads and compiled kernels are not in the other's figures.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import time

from tests.benchmarks import NAMES
from tests.benchmarks.harness import Settings, installed_peers, machine


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"which to run: {', '.join(NAMES)} (all by default)")
    parser.add_argument("--tiny", action="store_true", help="whether they run, not how fast they are")
    parser.add_argument("--alone", action="store_true", help="without peers")
    options = parser.parse_args()
    unknown = set(options.names) - set(NAMES)
    if unknown:
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    names = options.names or list(NAMES)
    if len(names) == 1:
        _run(names[0], Settings(tiny=options.tiny, peers=() if options.alone else installed_peers()))
        return 0
    flags = [flag for flag, wanted in (("--tiny", options.tiny), ("--alone", options.alone)) if wanted]
    worst = 0
    for name in names:
        worst = max(worst, subprocess.run([sys.executable, "-m", "tests.benchmarks", name, *flags], check=False, env=os.environ).returncode)
    return worst


def _run(name: str, settings: Settings) -> None:
    started = time.perf_counter()
    print(f"== {name}\n{machine()}\n", flush=True)
    for table in importlib.import_module(f"tests.benchmarks.{name}").run(settings):
        print(table.text(), end="\n\n", flush=True)
    print(f"({name}: {time.perf_counter() - started:.0f} s)\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
