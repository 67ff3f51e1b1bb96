"""A system for the tests of the supervisor: it sleeps, and calls that a step. With ``--on ends`` rank 0 ends at times, with ``fails`` all do."""

from __future__ import annotations

import itertools
import os
import time

from tests.faults import task


def main() -> None:
    """Sleep until the process is ended."""
    options = task.options(__doc__ or "")
    if options.on == "fails":
        raise RuntimeError("it cannot")
    lines = task.Lines(options.lines, f"rank{options.rank}")
    lines.runs(f"rank{options.rank}", os.getpid())
    for step in itertools.count():
        if options.on == "ends" and options.rank == 0 and step == 30:
            return
        began = time.monotonic()
        time.sleep(options.work)
        lines.step(began, step, *task.share(step, options.rank % options.replicas, options.replicas))


if __name__ == "__main__":
    main()
