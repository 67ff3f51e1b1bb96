"""Counts the instructions of small passes below valgrind, and compares them with those in counts.json; ``make counts``.

A change of more than 3 % is marked, and is status 1 where the file is of the same Python and packages; --renew keeps the new counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.counts.counting import changes, count, document, environment, missing, table
from tests.counts.programs import LINK, NAMES

FILE = Path(__file__).with_name("counts.json")


def main(arguments: Sequence[str] | None = None) -> int:
    """Count what was asked for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.counts", description=__doc__)
    parser.add_argument("--names", nargs="+", metavar="name", default=list(NAMES), help="of programs (default: all)")
    parser.add_argument("--renew", action="store_true", help="keep the new counts in counts.json")
    parser.add_argument("--list", action="store_true", help="name the programs and end")
    options = parser.parse_args(arguments)
    if options.list:
        print(*NAMES, sep="\n")
        return 0
    unknown = [name for name in options.names if name not in NAMES]
    if unknown:
        parser.error(f"no program is called {', '.join(unknown)}; there are {', '.join(NAMES)}")
    lacks = missing()
    if lacks:
        print(f"nothing was counted: this machine lacks {lacks}")
        return 0
    return compare(count(options.names), json.loads(FILE.read_text()) if FILE.exists() else {}, renew=options.renew)


def compare(counts: dict[str, float], kept: dict[str, Any], *, renew: bool) -> int:
    """Print counts beside the kept ones, and keep them if `renew`; returns the exit status."""
    before: dict[str, float] = kept.get("counts", {})
    found = changes({name: value for name, value in before.items() if name in counts or (name not in NAMES and name != LINK[0])}, counts)
    print(table(found))
    here, there = environment(), kept.get("environment", {})
    if renew:
        together = {**before, **counts} if here == there else counts
        FILE.write_text(json.dumps(document({name: together[name] for name in (*NAMES, LINK[0]) if name in together}), indent=1) + "\n")
        print(f"kept in {FILE}")
        return 0
    if here != there:
        print(f"the kept counts are of {there or 'nothing'}, these of {here}: changes count for nothing; --renew keeps these")
        return 0
    return int(any(each.is_beyond for each in found))


if __name__ == "__main__":
    sys.exit(main())
