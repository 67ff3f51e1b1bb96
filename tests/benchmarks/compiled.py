"""Compiled functions beside the eager peers: the workloads of `small_graphs` on one thread and the networks of `large_tensors` on two.

The first step records; it is not timed, as no warm-up of any side is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import aiograd as ag
from aiograd import kernels
from tests.benchmarks.harness import Settings, Table, compare, threads
from tests.benchmarks.large_tensors import steps_of_networks
from tests.benchmarks.layers import pinn
from tests.benchmarks.small_graphs import chain, lstm, mlp, wide


def run(settings: Settings) -> Iterator[Table]:
    """Time all of them."""
    with threads(1):
        yield ag.run(_run(settings))
    if not settings.tiny:
        kernels.warm_up()
    with threads(2):
        yield ag.run(_run_large(settings))


async def _run(settings: Settings) -> Table:
    length = settings.of(1000, 20)
    workloads = [
        replace(chain(settings, length, every_leaf=False, compiled=True), target=0.005, beyond=None),
        replace(chain(settings, length, every_leaf=True, compiled=True), target=0.008, beyond=None),
        replace(wide(settings, length, own_leaves=True, compiled=True), target=0.08, beyond=None),
        replace(wide(settings, length, own_leaves=False, compiled=True), target=0.005, beyond=None),
        *[
            replace(mlp(settings, by_optim=by_optim, compiled=True, as_step=as_step), target=0.15, beyond=None)
            for as_step in (False, True)
            for by_optim in (False, True)
        ],
        replace(lstm(settings, settings.of(100, 3), compiled=True), target=0.06, beyond=None),
        replace(pinn(settings, settings.of(16, 1) * 16, compiled=True), target=0.15, beyond=None),
    ]
    return await compare("Compiled small graphs, 1 thread: forward + backward + free", workloads, settings)


async def _run_large(settings: Settings) -> Table:
    workloads = [replace(workload, target=0.85, beyond=0.75) for workload in steps_of_networks(settings, compiled=True)]
    return await compare("Compiled networks, 2 threads: training step", workloads, settings, rounds=12, pause=0.02)
