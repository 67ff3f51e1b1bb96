"""The shards of one step: dealt to replicas in contiguous runs; and ShardGradients, the losses and gradients of one replica. Pure.

Note [By shard]
    Gradients are added up by shard, ((shard 0 + shard 1) + shard 2) + ..., whichever replica computes them. The replica with the first shards adds
    each to its total as soon as it is complete, so it needs no more memory for many shards than for two. The other replicas keep gradients apart
    until the sum of the shards before arrives.

    Where lost replicas are absorbed, everything that is complete is kept until a step is committed: an attempt that fails is followed by one with
    other runs, in which each shard is computed only where it is missing. A shard is in the total or apart, and so never counts twice.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from aiograd.running.types import Array


class ShardGradients:
    """Losses and gradients of shards. See Note [By shard].

    Args:
        total: by parameter the gradients to which those of the shards are added; None: there are none.
    """

    def __init__(self, total: Sequence[Array | None]) -> None:
        #: of the shards that are computed, by index
        self.losses: dict[int, Any] = {}
        #: buffers as shard 0 has left them
        self.statistics: list[Array] = []
        self._total = list(total)
        #: shards in the total
        self._summed = 0
        #: the other gradients by shard and parameter
        self._apart: dict[int, list[Array | None]] = {}

    def begin(self, shard: int) -> list[Array | None]:
        """The place for the gradients of a shard that is about to be computed, by parameter; they count once its loss is there."""
        place = self._apart[shard] = [None] * len(self._total)
        return place

    def add_up(self) -> None:
        """Add the gradients of the first shards to the total, as far as they are complete."""
        while self._summed in self.losses:
            self._total = list(map(sum_of, self._total, self._apart.pop(self._summed)))
            self._summed += 1

    def addends(self, parameter: int, shards: range, *, is_one: bool, is_kept: bool) -> list[Array | None]:
        """The gradients of a parameter for a run of shards.

        Args:
            parameter: its index.
            shards: the run.
            is_one: added up, beginning with the total.
            is_kept: False: they are taken out.
        """
        found = [self._apart[shard][parameter] for shard in shards if shard in self._apart] or [None]
        if is_one:
            found = [functools.reduce(sum_of, found, self._total[parameter])]
        if not is_kept:
            for each in (self._total, *self._apart.values()):
                each[parameter] = None
        return found


def sum_of(first: Any, second: Any) -> Any:
    """The sum of two gradients, each of which may be missing."""
    return second if first is None else first if second is None else first + second


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
