"""Runs each test of the network and of processes ten times beside four busy processes; a table in out/flaky says which fail. ``make flaky``.

Every file once is a round; rounds follow each other. What is done for a commit is kept: the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.ledger import LineFile, current_commit
from tests.flaky.runs import MARKERS, ROOT, busy, files, run, table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.flaky", description=__doc__)
    parser.add_argument("--tests", nargs="+", default=["tests"], metavar="path", help="folders or files (default: all)")
    parser.add_argument("--markers", default=MARKERS, help=f"which of their tests (default: {MARKERS})")
    parser.add_argument("--times", type=int, default=10, help="rounds (10)")
    parser.add_argument("--busy", type=int, default=4, help="busy processes (4)")
    parser.add_argument("--seconds", type=float, help="begin no further file after so many")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "flaky")
    parser.add_argument("--anew", action="store_true", help="forget what is done for this commit")
    options = parser.parse_args(arguments)
    if options.times < 1 or options.busy < 0:
        parser.error("expected --times from 1 and --busy from 0")
    commit = current_commit()
    path = options.out / f"{commit[:12] or 'unknown'}{'-dirty' if commit.endswith('-dirty') else ''}.jsonl"
    if options.anew:
        path.unlink(missing_ok=True)
    ledger = LineFile(path, {"commit": commit, "markers": options.markers, "busy": options.busy})
    began = time.monotonic()
    named = files(options.tests, options.markers)
    todo = ledger.todo([name, number] for number in range(options.times) for name in named)
    print(f"{len(named)} files, {options.times} rounds, {len(todo)} runs of a file to do, {len(ledger.lines)} done", flush=True)
    with busy(options.busy):
        for name, number in todo:
            if options.seconds is not None and time.monotonic() - began > options.seconds:
                print(f"stopped after {options.seconds:g} s; the same command goes on")
                break
            line = run(name, options.markers, path.with_suffix("") / f"{Path(name).stem}-{number}.log")
            ledger.add({"piece": [name, number], **line})
            for failure in line["failures"]:
                print(f"round {number + 1}: {failure}", flush=True)
    text = table(ledger.lines)
    path.with_suffix(".txt").write_text(text + "\n")
    print(text)
    return int(any(line["failures"] for line in ledger.lines))


if __name__ == "__main__":
    sys.exit(main())
