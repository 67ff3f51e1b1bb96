"""Batches of runs, for several processes to share."""

from __future__ import annotations

import gc
import logging
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.ablations import SCENARIOS, Catch, catch_by_scenario, catch_by_seeds
from tests.chaos.cancel import cancel_everywhere
from tests.chaos.cells import Cell, Fault, run_cells
from tests.chaos.collectives import catch, run_group
from tests.chaos.proxied import run_proxied
from tests.chaos.replicas import ReplicaRun
from tests.chaos.world import run_seed
from tests.distributed.local_steps.scenario import LocalStepsRun
from tests.serving.scenario import run_life

#: seconds of the processor that one run may take: one that computes for ever is a hang as well
PATIENCE = 120


@dataclass
class Batch:
    """The results of some runs."""

    counts: Counter[str] = field(default_factory=Counter)
    cells: Counter[Cell] = field(default_factory=Counter)
    #: (protocol point, fault) by chance
    points: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    catches: list[Catch] = field(default_factory=list)
    hashes: dict[int, str] = field(default_factory=dict)


def quietly() -> None:
    """Prepare a process: nothing that is logged here is news, since failures are meant to happen, and garbage is looked for in what is new."""
    logging.disable(logging.CRITICAL)
    gc.collect()
    gc.freeze()


def seeds(first: int, last: int) -> Batch:
    """Random runs."""

    def one(batch: Batch, seed: int) -> None:
        outcome = run_seed(seed)
        batch.counts += outcome.counts
        batch.points += outcome.points
        batch.hashes[seed] = outcome.trace_hash

    return _batch("seed", range(first, last), one)


def cells(fault: Fault, first: int, last: int) -> Batch:
    """Runs that make one kind of fault at every point."""

    def one(batch: Batch, seed: int) -> None:
        hits, outcome = run_cells(fault, seed)
        batch.cells += hits
        batch.counts += outcome.counts

    return _batch(f"cells {fault}", range(first, last), one)


def groups(first: int, last: int) -> Batch:
    """Groups of workers whose collectives are disturbed."""

    def one(batch: Batch, seed: int) -> None:
        run = run_group(seed)
        batch.counts["operations of members of groups that ended with a result"] += run.done.total()
        batch.counts.update(f"member of a group: {outcome}" for outcome in run.outcomes.values())

    return _batch("group", range(first, last), one)


def serving(first: int, last: int) -> Batch:
    """Random lives of servers."""

    def one(batch: Batch, seed: int) -> None:
        batch.counts.update({f"requests to a server: {what}": count for what, count in run_life(seed).items()})

    return _batch("serving", range(first, last), one)


def local_steps(first: int, last: int) -> Batch:
    """Trainings with local steps."""

    def one(batch: Batch, seed: int) -> None:
        batch.counts.update({f"local steps: {what}": count for what, count in LocalStepsRun(seed).run().items()})

    return _batch("local steps", range(first, last), one)


def group_ablation(protection: str, most: int) -> Batch:
    """One protection of collectives taken out: who notices."""
    batch = Batch()
    noticed = catch(protection, most)
    batch.catches.append(Catch(protection, noticed.seed, noticed.how))
    if noticed.seed is None:
        batch.failures.append(f"nothing notices that {protection} is missing")
    return batch


def proxied(first: int, last: int) -> Batch:
    """Runs over HTTP and proxies, in real time."""

    def one(batch: Batch, seed: int) -> None:
        counts, hits = run_proxied(seed)
        batch.counts += counts
        batch.counts.update({f"proxy: {fate}": count for fate, count in hits.items()})

    return _batch("proxied", range(first, last), one)


def cancelled(first: int, last: int) -> Batch:
    """Passes that are cancelled at every step."""

    def one(batch: Batch, seed: int) -> None:
        steps, committed = cancel_everywhere(seed, order="permuted" if seed % 2 else "fifo", workers=1 + seed % 3)
        batch.counts.update({"steps at which a pass was cancelled": steps, "of which after its commit": committed})

    return _batch("cancel", range(first, last), one)


def replicas(first: int, last: int) -> Batch:
    """Training by data-parallel replicas; every second run divides the state of the optimizer."""

    def one(batch: Batch, number: int) -> None:
        happened = ReplicaRun(number // 2, shard_optimizer=number % 2 == 1).run()
        batch.counts.update({f"replicas: {what}": count for what, count in happened.items()})

    return _batch("replicas", range(first, last), one)


def ablation(protection: str, most: int) -> Batch:
    """One protection taken out: who notices."""
    batch = Batch()
    batch.catches.append(catch_by_seeds(protection, most))
    if protection in SCENARIOS:
        batch.catches.append(catch_by_scenario(protection))
    if all(catch.by is None for catch in batch.catches):
        batch.failures.append(f"nothing notices that {protection} is missing")
    return batch


def _batch(kind: str, numbers: range, one: Callable[[Batch, int], None]) -> Batch:
    batch = Batch()
    for number in numbers:
        try:
            with _impatience(kind, number):
                one(batch, number)
        except Exception as error:
            batch.failures.append(f"{kind} {number}: {type(error).__name__}: {error}")
    return batch


@contextmanager
def _impatience(kind: str, number: int) -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise TimeoutError(f"a hang: {kind} {number} computes for more than {PATIENCE} s")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
