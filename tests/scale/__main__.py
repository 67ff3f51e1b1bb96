"""``python -m tests.scale``: clusters of many workers on the simulated network, and tables of what they cost.

``--train`` trains a pipeline of 16 stages in 32 replicas on 512 of 1,000 workers, undisturbed and then with a worker lost every 10 virtual seconds,
and compares the parameters to the bit. ``--grow`` lets 100, 300 and 1,000 workers join one driver, take part in one backward pass, and do nothing.
Both by default. ``--small`` does less of it. Time in tables is virtual unless they say otherwise.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

from aiograd.testing import simulated_run
from tests.scale.growth import grow
from tests.scale.report import growth_table, training_table
from tests.scale.training import CHURN, Size, prepare, run_training


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.scale", description=__doc__)
    for part in ("train", "grow", "small"):
        parser.add_argument(f"--{part}", action="store_true")
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    everything = not (options.train or options.grow)
    is_right = True
    if options.grow or everything:
        prepare()
        print(growth_table([simulated_run(grow, count, seed=0).value for count in ((30, 100) if options.small else (100, 300, 1000))]), flush=True)
    if options.train or everything:
        size = Size(4, 20, 100, 2, 10) if options.small else Size(16, 32, 1000, 4, options.steps)
        sizes = (size, size._replace(churn=CHURN / 3 if options.small else CHURN, unconfirmed=2))
        with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
            undisturbed, disturbed = pool.map(run_training, sizes)
        print(training_table([undisturbed, disturbed]))
        is_right = undisturbed.digests == disturbed.digests
        print("the parameters on every worker are those of the undisturbed run, to the bit" if is_right else "THE PARAMETERS DIFFER")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
