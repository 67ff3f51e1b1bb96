"""Compiled functions on small graphs, one thread: the workloads of `small_graphs` with their forward compiled, beside the eager peers.

The first step records; it is not timed, as no warm-up of any side is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import aiograd as ag
from tests.benchmarks.harness import Settings, Table, compare, threads
from tests.benchmarks.small_graphs import chain, lstm, mlp, wide


def run(settings: Settings) -> Iterator[Table]:
    """Time all of them."""
    with threads(1):
        yield ag.run(_run(settings))


async def _run(settings: Settings) -> Table:
    length = settings.of(1000, 20)
    workloads = [
        replace(chain(settings, length, every_leaf=False, compiled=True), target=0.12, beyond=0.06),
        replace(chain(settings, length, every_leaf=True, compiled=True), target=0.12, beyond=0.06),
        replace(wide(settings, length, own_leaves=True, compiled=True), target=0.20, beyond=0.10),
        replace(wide(settings, length, own_leaves=False, compiled=True), target=0.20, beyond=0.10),
        replace(mlp(settings, by_optim=False, compiled=True), target=0.45, beyond=0.35),
        replace(mlp(settings, by_optim=True, compiled=True), target=0.45, beyond=0.35),
        replace(mlp(settings, by_optim=False, compiled=True, as_step=True), target=0.45, beyond=0.35),
        replace(mlp(settings, by_optim=True, compiled=True, as_step=True), target=0.45, beyond=0.35),
        replace(lstm(settings, settings.of(100, 3), compiled=True), target=0.35, beyond=0.25),
    ]
    return await compare("Compiled small graphs, 1 thread: forward + backward + free", workloads, settings)
