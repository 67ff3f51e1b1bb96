"""The shards of a step in contiguous runs, one for each replica. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def dealt(count: int, size: int) -> list[range]:
    """Runs of shards, as even as possible; the first ones have one more.

    Args:
        count: of the shards.
        size: the number of replicas.
    """
    even, longer = divmod(count, size)
    begins = [even * rank + min(rank, longer) for rank in range(size + 1)]
    return [range(*each) for each in itertools.pairwise(begins)]


def dealt_again(runs: Sequence[range], count: int) -> list[range]:
    """Runs of the replicas that are left, which keep their shards: those in between go to the two beside them, so that these have equally many.

    Args:
        runs: of these replicas, in order; at least one.
        count: of all shards.
    """
    found, begin = [], 0
    for run, after in itertools.pairwise(runs):
        gap = after.start - run.stop
        taken = min(max((len(after) + gap - (run.stop - begin) + 1) // 2, 0), gap)
        found.append(range(begin, run.stop + taken))
        begin = run.stop + taken
    return [*found, range(begin, count)]
