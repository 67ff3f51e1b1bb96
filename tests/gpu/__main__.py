"""Correctness, then speed, on the GPU of this machine: a summary and the tables in out/gpu.md, all output in out/gpu.log. ``make gpu``.

Each test file and each benchmark has a process of its own and a limit of time: one that crashes or hangs costs its own results and no others.
Without a GPU it says what is missing and ends well: there is nothing to measure.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

from aiograd.cuda import discovery
from tests.gpu import processes
from tests.gpu.processes import ROOT, Tested

BENCHMARKS = ("latency", "bandwidth", "products", "training")
#: the file whose tests are many and independent: it runs in several processes at once
IN_PARTS = "test_rows"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"which benchmarks: {', '.join(BENCHMARKS)} (all by default)")
    parser.add_argument("--tiny", action="store_true", help="whether they run, not how fast they are; in the simulator too")
    parser.add_argument("--no-tests", action="store_true", help="benchmarks only")
    parser.add_argument("--no-benchmarks", action="store_true", help="tests only")
    parser.add_argument("--tests", nargs="+", metavar="FILE", type=Path, help="which files of tests (all of tests/gpu by default)")
    parser.add_argument("--no-torch", action="store_true", help="measure without PyTorch")
    parser.add_argument("--seconds", type=float, default=300, help="limit for each file of tests and each benchmark (300)")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help=f"processes for {IN_PARTS}, the longest file (8 at most)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu.md", help="where the tables go; the log goes beside them")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    missing = discovery.why_not()
    if missing is not None:
        print(f"no GPU, so nothing is tested or measured: {missing}")
        return 0
    options.out.parent.mkdir(parents=True, exist_ok=True)
    log = options.out.with_suffix(".log")
    with options.out.open("w", encoding="utf-8") as tables, log.open("w", encoding="utf-8") as file:
        summary = Report(options, tables, file).run()
    print(f"\n{summary}written to {options.out} and {log}")
    return int("WRONG" in summary)


class Report:
    """A run: what it finds goes to the tables at once, all that is printed to the log."""

    def __init__(self, options: argparse.Namespace, tables: TextIO, log: TextIO) -> None:
        self._options = options
        self._tables = tables
        self._log = log

    def run(self) -> str:
        """Run tests and benchmarks; a line for each of them."""
        options = self._options
        self._benchmark("machine")
        summary = []
        if not options.no_tests:
            self._write("## Tests\n\n")
            for path in options.tests or sorted(Path(__file__).parent.glob("test_*.py")):
                summary.append(_line(self._test(path)))
                print(summary[-1], end="", flush=True)
                self._write(f"- {summary[-1]}")
            self._write("\n")
        if not options.no_benchmarks:
            summary += [self._benchmark(name) for name in options.names or BENCHMARKS]
        return "".join(summary)

    def _test(self, path: Path) -> Tested:
        parts = self._options.jobs if path.stem == IN_PARTS else 1
        notes = [self._options.out.with_suffix(f".{path.stem}-{number}.progress") for number in range(parts)]
        with ThreadPoolExecutor(parts) as pool:
            calls = [
                pool.submit(processes.test, path, self._options.seconds, self._log_line, note, f"{number}/{parts}")
                for number, note in enumerate(notes)
            ]
            tested = [call.result() for call in calls]
        for note in notes:
            note.unlink(missing_ok=True)
        return _joined(path.stem, tested)

    def _benchmark(self, name: str) -> str:
        options = self._options
        flags = [flag for flag, is_set in (("--tiny", options.tiny), ("--no-torch", options.no_torch)) if is_set]

        def tell(line: str) -> None:
            self._log_line(line)
            print(line, end="", flush=True)

        ended = processes.run([sys.executable, "-m", "tests.gpu.benchmark", name, *flags], options.seconds, tell)
        self._write("".join(line for line in ended.text.splitlines(keepends=True) if not line.startswith("(")))  # remarks are for the log
        state = f"WRONG: took longer than {options.seconds:.0f} s" if ended.timed_out else f"WRONG: ended with {ended.code}" if ended.code else "well"
        return f"{name}: {state}, {ended.seconds:.0f} s\n"

    def _log_line(self, line: str) -> None:
        self._log.write(line)
        self._log.flush()

    def _write(self, text: str) -> None:
        self._tables.write(text)
        self._tables.flush()


def _joined(name: str, parts: Sequence[Tested]) -> Tested:
    """The parts of a file as one."""
    whole = Tested(name, max(part.seconds for part in parts), any(part.timed_out for part in parts))
    for part in parts:
        whole.outcomes.update(part.outcomes)
        whole.broken = whole.broken or part.broken
    return whole


def _line(tested: Tested) -> str:
    counts = [f"{tested.count(outcome)} {outcome}" for outcome in ("passed", "failed", "crashed", "skipped") if tested.count(outcome)]
    if tested.timed_out:
        counts.append("timed out")
    if tested.broken:
        counts.append(f"did not run ({tested.broken.splitlines()[-1][:150]})")
    names = [name.rpartition("::")[2] for name, outcome in tested.outcomes.items() if outcome in ("failed", "crashed")]
    listed = f": {', '.join(names[:20])}{' ...' if len(names) > 20 else ''}" if names else ""
    return f"{tested.name}: {'' if tested.is_well else 'WRONG: '}{', '.join(counts) or 'no tests'}, {tested.seconds:.0f} s{listed}\n"


if __name__ == "__main__":
    sys.exit(main())
