"""``python -m tests.release``: builds a release from the commit and looks at it, with a table; the files are left in ``dist``.

``renew`` writes the description of the public surface anew, as it is after a release. ``changelog`` makes the fragments a section of the changelog.

Exits with 1 where something is not as it has to be.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import aiograd
from tests.release.building import ReleaseError, run
from tests.release.checks import BIN, CHECKS, ROOT, Release, run_checks
from tests.release.fragments import read
from tests.release.surface import STORED, describe, store


def renew() -> None:
    """Write ``api.json``."""
    surface = describe()
    STORED.write_text(store(surface, aiograd.__version__))
    print(f"{STORED.relative_to(ROOT)} has {sum(map(len, surface.values())):,} names of {aiograd.__version__}")


def changelog() -> None:
    """Write the section of this version into the changelog, and remove the fragments."""
    if not read():
        raise ReleaseError("there is no fragment in docs/changes, so there is nothing to write into the changelog")
    towncrier = BIN / "towncrier"
    if not towncrier.exists():
        raise ReleaseError("towncrier is missing: `make .venv-release/.installed-dev,release VENV=.venv-release` installs it")
    print(run([str(towncrier), "build", "--yes", "--version", aiograd.__version__], ROOT))


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", nargs="?", choices=("check", "renew", "changelog"), default="check")
    parser.add_argument("--small", action="store_true", help="without the environment of the wheel, which is the longest part")
    parser.add_argument("--all", action="store_true", help="every test but sweeps against the wheel, where else a chosen part runs")
    parser.add_argument("--only", nargs="+", choices=CHECKS, metavar="CHECK", help=f"some of: {', '.join(CHECKS)}")
    parser.add_argument("--since", metavar="REVISION", help="a change of the package after it has to come with a fragment")
    parser.add_argument("--jobs", type=int, default=2, help="processes that run tests (2)")
    options = parser.parse_args()
    try:
        if options.action != "check":
            (renew if options.action == "renew" else changelog)()
            return 0
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 1
    names = options.only or [name for name in CHECKS if name != "installed" or not options.small]
    with tempfile.TemporaryDirectory(prefix="aiograd-release-") as folder:
        release = Release(Path(folder), ROOT / "dist", options.since, options.jobs, options.all)
        return 0 if run_checks(release, {name: check for name, check in CHECKS.items() if name in names}) else 1


if __name__ == "__main__":
    sys.exit(main())
