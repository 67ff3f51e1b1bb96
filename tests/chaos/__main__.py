"""``python -m tests.chaos``: many seeds, every cell, every protection missed, real processes, and a table at the end.

The parts ``--only-seeds --cells --ablations --cancel --replicas --groups --serving --local-steps --replay`` run on virtual time; ``--proxied`` and
``--processes`` run in real time, and want a machine that is not busy with something else.

``--seed S`` runs one seed again, tells its story, and shrinks it if it fails. ``--hashes FIRST LAST`` prints the hashes of seeds, for runs to be
compared.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from typing import Any, NamedTuple

from tests.chaos import batches, collectives
from tests.chaos.batches import Batch
from tests.chaos.broken import PROTECTIONS
from tests.chaos.cells import CELLS, FAULTS, Cell
from tests.chaos.mix import Mix
from tests.chaos.processes import run_processes
from tests.chaos.report import Report, cell_table
from tests.chaos.shrink import attempt, shrink
from tests.chaos.training import run_training
from tests.chaos.world import run_seed

PARTS = ("seeds", "cells", "ablations", "cancel", "replicas", "groups", "serving", "local-steps", "replay", "proxied", "processes")
#: runs in one piece of work
PIECE = 50


class Size(NamedTuple):
    """How much of everything."""

    seeds: int
    #: runs per kind of fault, and how often each cell has to be met
    cells: int
    least: int
    #: seeds until which a missing protection has to be noticed
    ablations: int
    #: graphs
    cancel: int
    #: seeds of training by data-parallel replicas
    replicas: int
    #: groups whose collectives are disturbed
    groups: int
    #: lives of servers
    serving: int
    #: seeds of training with local steps
    local_steps: int
    #: seeds that are run three times
    replay: int
    proxied: int
    #: per point and role
    kills: int
    stops: int
    ends: int
    #: trainings of 200 steps by real processes
    trainings: int = 1

    def scaled(self, factor: float) -> Size:
        """A part of everything, but as many seeds as ever until a missing protection has to be noticed."""
        return Size(*(max(1, round(count * factor)) for count in self))._replace(ablations=self.ablations)


CHAOS = Size(
    seeds=20_000, cells=200, least=20, ablations=1_000, cancel=2, replicas=1_000, groups=400, serving=4_000, local_steps=1_000,
    replay=20, proxied=20, kills=1, stops=5, ends=20,
)  # fmt: skip
RELEASE = Size(
    seeds=1_000_000, cells=2_500, least=1_000, ablations=1_000, cancel=20, replicas=20_000, groups=20_000, serving=100_000,
    local_steps=20_000, replay=200, proxied=500, kills=20, stops=100, ends=500, trainings=20,
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seeds", type=int, help=f"random runs (default {CHAOS.seeds:,}); trainings by local steps (default {CHAOS.local_steps:,})")
    parser.add_argument("--first", type=int, default=0, help="the first of them, and of the seeds of other parts; ablations begin at 0")
    parser.add_argument("--scale", type=float, default=1.0, help="how much of everything, 0.1 for a tenth")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument("--seed", help="run one seed, tell its story, and shrink it if it fails")
    parser.add_argument("--release", action="store_true", help="as much as before a release: many hours")
    parser.add_argument("--hashes", type=int, nargs=2, metavar=("FIRST", "LAST"), help="print the hashes of these seeds")
    for part in PARTS:
        flags = ["--only-seeds"] if part == "seeds" else [f"--{part}", f"--only-{part}"]
        parser.add_argument(*flags, action="store_true", dest=f"part_{part}", help=f"only the part {part!r}")
    options = parser.parse_args(arguments)
    batches.quietly()
    if options.seed is not None:
        return replay_one(int(options.seed) if options.seed.isdigit() else options.seed)
    if options.hashes is not None:
        print(json.dumps(batches.seeds(*options.hashes).hashes))
        return 0
    size = (RELEASE if options.release else CHAOS).scaled(options.scale)
    if options.seeds is not None:
        size = size._replace(seeds=options.seeds, local_steps=options.seeds)
    parts = [part for part in PARTS if getattr(options, f"part_{part}")] or list(PARTS)
    return run(parts, size, options.first, options.jobs)


def run(parts: list[str], size: Size, first: int, jobs: int) -> int:
    """Run some parts and print the table."""
    report, cells = Report(), Counter[Cell]()
    began = time.monotonic()
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), initializer=batches.quietly) as pool:
        for part in parts:
            print(f"{part} ...", flush=True)
            since = time.monotonic()
            match part:
                case "seeds":
                    gather(report, cells, _pieces(pool, batches.seeds, first, first + size.seeds))
                case "cells":
                    for fault in FAULTS:
                        gather(report, cells, _pieces(pool, batches.cells, first, first + size.cells, fault))
                    print(*cell_table(cells), sep="\n")
                    for cell in CELLS:
                        if cells[cell] < size.least:
                            report.fail(f"cell {cell.point} × {cell.fault} was met {cells[cell]} times, expected {size.least}")
                case "ablations":
                    found = gather(report, cells, [pool.submit(batches.ablation, protection, size.ablations) for protection in PROTECTIONS])
                    print(*_catches(found, list(PROTECTIONS)), sep="\n")
                case "cancel":
                    gather(report, cells, _pieces(pool, batches.cancelled, first, first + size.cancel, piece=1))
                case "replicas":
                    gather(report, cells, _pieces(pool, batches.replicas, first, first + size.replicas))
                case "groups":
                    gather(report, cells, _pieces(pool, batches.groups, first, first + size.groups))
                    missed = [pool.submit(batches.group_ablation, protection, size.ablations) for protection in collectives.PROTECTIONS]
                    print(*_catches(gather(report, cells, missed), list(collectives.PROTECTIONS)), sep="\n")
                case "serving":
                    gather(report, cells, _pieces(pool, batches.serving, first, first + size.serving))
                case "local-steps":
                    gather(report, cells, _pieces(pool, batches.local_steps, first, first + size.local_steps))
                case "replay":
                    compare_hashes(report, first, size.replay)
                case "proxied":
                    gather(report, cells, _pieces(pool, batches.proxied, first, first + size.proxied, piece=1))
                case "processes":
                    findings = asyncio.run(run_processes(kills=size.kills, stops=size.stops, ends=size.ends))
                    findings.add(asyncio.run(run_training(size.trainings, first=first)))
                    report.counts += findings.counts
                    report.times.update(findings.times)
                    for wrong in findings.wrong:
                        report.fail(wrong)
            print(f"{part}: {time.monotonic() - since:.0f} s", flush=True)
    print()
    print(*report.lines(), sep="\n")
    print(f"seconds              {time.monotonic() - began:.0f}")
    return 1 if report.failures else 0


def _pieces(pool: ProcessPoolExecutor, do: Callable[..., Batch], first: int, last: int, *before: Any, piece: int = PIECE) -> list[Future[Batch]]:
    return [pool.submit(do, *before, start, min(start + piece, last)) for start in range(first, last, piece)]


def _catches(found: list[Batch], order: list[str]) -> Iterator[str]:
    catches = [each for batch in found for each in batch.catches]
    for each in sorted(catches, key=lambda each: order.index(each.protection)):
        yield f"  without {each.protection:<20} noticed by {_by(each.by):<36} {each.how[:90]}"


def gather(report: Report, cells: Counter[Cell], futures: list[Future[Batch]]) -> list[Batch]:
    """Add up what comes back."""
    found: list[Batch] = []
    for done, future in enumerate(as_completed(futures), 1):
        batch = future.result()
        found.append(batch)
        report.counts += batch.counts
        cells += batch.cells
        for failure in batch.failures:
            report.fail(failure)
        if len(futures) >= 20 and done % (len(futures) // 10) == 0:
            print(f"  {done * 100 // len(futures)} %", flush=True)
    return found


def compare_hashes(report: Report, first: int, count: int) -> None:
    """Run the same seeds in three processes, each of which hashes strings in another way: what happens must be the same to the last step."""
    command = [sys.executable, "-m", "tests.chaos", "--hashes", str(first), str(first + count)]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONHASHSEED": str(seed)}) for seed in (0, 1, 2)
    ]
    answers = [json.loads(process.communicate()[0]) for process in running]
    for seed in range(first, first + count):
        if len({answer.get(str(seed)) for answer in answers}) != 1 or str(seed) not in answers[0]:
            report.fail(f"seed {seed} runs differently each time")
    report.counts["seeds replayed in three processes"] += count


def replay_one(seed: int | str) -> int:
    """Run one seed, tell its story, and shrink it if it fails."""
    mix = Mix.drawn(seed)
    print(f"seed {seed} on Python {sys.version_info.major}.{sys.version_info.minor}: {mix}")
    failure = attempt(seed, mix)
    if failure is None:
        for line in _story(seed, mix):
            print(line)
        print("nothing is wrong with it")
        return 0
    print(*failure.story, failure.error, "", "shrinking", sep="\n")
    smallest = shrink(failure, lambda mix: attempt(seed, mix), print)
    print("", f"what is left: {smallest.mix}", *smallest.story, smallest.error, sep="\n")
    return 1


def _story(seed: int | str, mix: Mix) -> Iterator[str]:
    story: list[str] = []
    outcome = run_seed(seed, mix=mix, story=story)
    yield from itertools.chain(story, [f"{outcome.steps} steps, hash {outcome.trace_hash}"])


def _by(by: int | str | None) -> str:
    return "nothing" if by is None else f"seed {by}" if isinstance(by, int) else by


if __name__ == "__main__":
    sys.exit(main())
