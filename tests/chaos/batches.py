"""Batches of runs, for several processes to share."""

from __future__ import annotations

import gc
import logging
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

from aiograd.testing import SimulatedLoop
from tests.chaos.ablations import SCENARIOS, Catch, catch_by_scenario, catch_by_seeds
from tests.chaos.cancel import cancel_everywhere
from tests.chaos.cells import Cell, Fault, run_cells
from tests.chaos.collectives import catch, run_group
from tests.chaos.coverage import Coverage, counted
from tests.chaos.proxied import run_proxied
from tests.chaos.replicas import ReplicaRun
from tests.chaos.world import run_seed
from tests.distributed.data_parallel.absorbing import AbsorbRun
from tests.distributed.local_steps.scenario import LocalStepsRun
from tests.serving.scenario import run_life

#: seconds of the processor that one run may take: one that computes for ever is a hang as well
PATIENCE = 120
#: parts that take protections out: the states that faults meet there say nothing of the package
WITHOUT = ("ablations", "groups without")


class Piece(NamedTuple):
    """Some runs of one part.

    Attributes:
        part: its name.
        first, last: seeds from the first to before the last; of an ablation, the seeds that may be tried.
        what: the kind of fault, or the protection that is taken out.
    """

    part: str
    first: int
    last: int
    what: str = ""


@dataclass
class Batch:
    """The results of some runs."""

    counts: Counter[str] = field(default_factory=Counter)
    #: the number of runs
    runs: int = 0
    #: seconds on virtual clocks, and seconds that the runs took
    virtual: float = 0.0
    real: float = 0.0
    cells: Counter[Cell] = field(default_factory=Counter)
    #: (protocol point, fault) by chance
    points: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    catches: list[Catch] = field(default_factory=list)
    hashes: dict[int, str] = field(default_factory=dict)


def carry_out(piece: Piece) -> Batch:
    """Carry out a piece; failures name the command that repeats them."""
    part, first, last, what = piece
    began = time.perf_counter()
    batch, coverage = Batch(), Coverage()
    close = SimulatedLoop.close

    def count(loop: SimulatedLoop) -> None:
        if not loop.is_closed():
            batch.virtual += loop.time()
        close(loop)

    with mock.patch.object(SimulatedLoop, "close", count), counted(coverage):
        found = RUNS[part](*((what,) if what else ()), first, last)
    if part not in WITHOUT:
        found.counts += coverage.named()
    found.runs = 1 if found.catches else last - first
    found.virtual, found.real = batch.virtual, time.perf_counter() - began
    return found


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

    return _batch("seeds", range(first, last), one)


def cells(fault: Fault, first: int, last: int) -> Batch:
    """Runs that make one kind of fault at every point."""

    def one(batch: Batch, seed: int) -> None:
        hits, outcome = run_cells(fault, seed)
        batch.cells += hits
        batch.counts += outcome.counts

    return _batch("cells", range(first, last), one)


def groups(first: int, last: int) -> Batch:
    """Groups of workers whose collectives are disturbed."""

    def one(batch: Batch, seed: int) -> None:
        run = run_group(seed)
        batch.counts["operations of members of groups that ended with a result"] += run.done.total()
        batch.counts.update(f"member of a group: {outcome}" for outcome in run.outcomes.values())

    return _batch("groups", range(first, last), one)


def serving(first: int, last: int) -> Batch:
    """Random lives of servers."""

    def one(batch: Batch, seed: int) -> None:
        batch.counts.update({f"requests to a server: {what}": count for what, count in run_life(seed).items()})

    return _batch("serving", range(first, last), one)


def local_steps(first: int, last: int) -> Batch:
    """Trainings with local steps."""

    def one(batch: Batch, seed: int) -> None:
        batch.counts.update({f"local steps: {what}": count for what, count in LocalStepsRun(seed).run().items()})

    return _batch("local-steps", range(first, last), one)


def group_ablation(protection: str, first: int, most: int) -> Batch:
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


def absorb(first: int, last: int) -> Batch:
    """Training by data-parallel replicas, which compute the shards of lost ones."""

    def one(batch: Batch, seed: int) -> None:
        batch.counts.update({f"absorbing: {what}": count for what, count in AbsorbRun(seed).run().items()})

    return _batch("absorb", range(first, last), one)


def ablation(protection: str, first: int, most: int) -> Batch:
    """One protection taken out: who notices."""
    batch = Batch()
    batch.catches.append(catch_by_seeds(protection, most))
    if protection in SCENARIOS:
        batch.catches.append(catch_by_scenario(protection))
    if all(catch.by is None for catch in batch.catches):
        batch.failures.append(f"nothing notices that {protection} is missing")
    return batch


RUNS: Mapping[str, Callable[..., Batch]] = {
    "seeds": seeds, "cells": cells, "ablations": ablation, "cancel": cancelled, "replicas": replicas, "absorb": absorb, "groups": groups,
    "groups without": group_ablation, "serving": serving, "local-steps": local_steps, "proxied": proxied,
}  # fmt: skip


def _batch(part: str, numbers: range, one: Callable[[Batch, int], None]) -> Batch:
    batch = Batch()
    for number in numbers:
        try:
            with _impatience(part, number):
                one(batch, number)
        except Exception as error:
            again = f"--seed {number}" if part == "seeds" else f"--only-{part} --first {number} --seeds 1"
            batch.failures.append(f"{part} {number}: {type(error).__name__}: {error} (again: python -m tests.chaos {again})")
    return batch


@contextmanager
def _impatience(part: str, number: int) -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise TimeoutError(f"a hang: {part} {number} computes for more than {PATIENCE} s")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
