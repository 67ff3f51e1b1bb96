"""``python -m tests.chaos``: many seeds, every cell, every protection missed, real processes, and a table at the end.

The parts ``--only-seeds --cells --ablations --cancel --replicas --absorb --groups --serving --local-steps --replay`` run on virtual time;
``--proxied`` and ``--processes`` run in real time, and want a machine that is not busy with something else.

``--seed S`` runs one seed again, tells its story, and shrinks it if it fails. ``--hashes FIRST LAST`` prints the hashes of seeds, for runs to be
compared.

``--release`` (``make release-checks``) writes each piece of work that is done to ``out/release/pieces.jsonl``. Stopped, or ended by ``--hours H``, it
goes on there the next time; ``report.json`` and ``report.md`` beside it have the figures of all times together. Pieces of the parts on virtual time
take turns, so that a run of an hour is a small part of each. When all are done, a state of a transaction that some fault has never met is a failure;
see `tests.chaos.coverage`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

from tests.chaos import batches, collectives
from tests.chaos.batches import Batch, Piece
from tests.chaos.broken import PROTECTIONS
from tests.chaos.cells import CELLS, FAULTS
from tests.chaos.ledger import ROOT, Ledger
from tests.chaos.mix import Mix
from tests.chaos.processes import run_processes
from tests.chaos.report import Report, cell_name, cell_table, judge_states, write_report
from tests.chaos.shrink import attempt, shrink
from tests.chaos.training import run_training
from tests.chaos.world import run_seed

PARTS = ("seeds", "cells", "ablations", "cancel", "replicas", "absorb", "groups", "serving", "local-steps", "replay", "proxied", "processes")
#: parts that this process carries out itself, at the end
OWN = ("replay", "processes")
#: runs in one piece of work, and in one of a part whose runs are long
PIECE, SHORT = 50, ("cancel", "proxied")


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
    #: seeds of training by replicas that absorb losses
    absorb: int
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
    seeds=20_000, cells=200, least=20, ablations=1_000, cancel=2, replicas=1_000, absorb=1_000, groups=400, serving=4_000, local_steps=1_000,
    replay=20, proxied=20, kills=1, stops=5, ends=20,
)  # fmt: skip
#: parts whose size is a number of seeds
SEEDED = ("seeds", "cells", "cancel", "replicas", "absorb", "groups", "serving", "local-steps", "proxied")
RELEASE = Size(
    seeds=1_000_000, cells=2_500, least=1_000, ablations=1_000, cancel=20, replicas=20_000, absorb=20_000, groups=20_000, serving=100_000,
    local_steps=20_000, replay=200, proxied=500, kills=20, stops=100, ends=500, trainings=20,
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument(
        "--seeds",
        type=int,
        help=f"random runs (default {CHAOS.seeds:,}) and trainings by local steps ({CHAOS.local_steps:,}); or runs of each part that is chosen",
    )
    parser.add_argument("--first", type=int, default=0, help="the first of them, and of the seeds of other parts; ablations begin at 0")
    parser.add_argument("--scale", type=float, default=1.0, help="how much of everything, 0.1 for a tenth")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument("--seed", help="run one seed, tell its story, and shrink it if it fails")
    parser.add_argument("--release", action="store_true", help="as much as before a release: many hours; it goes on where it was stopped")
    parser.add_argument("--hours", type=float, default=math.inf, help="begin no piece of work after so long")
    parser.add_argument("--folder", type=Path, help="where the pieces that are done are noted (default out/release with --release, else nowhere)")
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
    chosen = [part for part in PARTS if getattr(options, f"part_{part}")]
    if options.seeds is not None:
        wanted = [part for part in SEEDED if part in chosen] or ["seeds", "local-steps"]
        size = size._replace(least=0, **{part.replace("-", "_"): options.seeds for part in wanted})
    parts = chosen or list(PARTS)
    folder = options.folder or (ROOT / "out" / "release" if options.release else None)
    with tempfile.TemporaryDirectory() as nowhere:
        ledger = Ledger(folder or nowhere, [*size, options.first])
        return run(parts, size, options.first, options.jobs, ledger, time.monotonic() + 3600 * options.hours, together=options.release)


def run(parts: list[str], size: Size, first: int, jobs: int, ledger: Ledger, until: float, *, together: bool) -> int:
    """Run some parts, as far as the ledger does not have them, and print the table.

    Args:
        parts: their names.
        size: how much of each.
        first: the first seed.
        jobs: processes.
        ledger: notes the pieces.
        until: no piece begins later, on the monotonic clock.
        together: pieces of all parts take turns.
    """
    report = Report()
    began = time.monotonic()
    planned = {part: list(pieces_of(part, size, first)) for part in parts}
    rounds = [[part for part in parts if part not in OWN]] if together else [[part] for part in parts if part not in OWN]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=batches.quietly) as pool:
        for each in rounds:
            carry_out(each, [planned[part] for part in each], pool, jobs, ledger, until, report)
    for part in parts:
        if part in OWN and time.monotonic() < until:
            carry_out([part], [planned[part]], None, 1, ledger, until, report, size)
    found = ledger.coverage
    if "cells" in parts:
        print(*cell_table(found), sep="\n")
        if not ledger.todo(planned["cells"]):
            for cell in CELLS:
                if found[cell_name(cell)] < size.least:
                    report.fail(f"cell {cell.point} × {cell.fault} was met {found[cell_name(cell)]} times, expected {size.least}")
    left = sum(len(ledger.todo(pieces)) for pieces in planned.values())
    judge_states(report, found, is_whole=together and size.least > 0 and not left and {*parts} == {*PARTS})
    print()
    report.counts, report.failures = found, list(dict.fromkeys([*ledger.failures, *report.failures]))
    print(*report.lines(), sep="\n")
    if left:
        print(f"pieces left          {left} of {sum(map(len, planned.values()))}: the same command goes on")
    print(f"virtual / real time  {ledger.ratio:,.0f}")
    print(f"seconds              {time.monotonic() - began:.0f}")
    write_report(ledger, planned)
    return 1 if report.failures else 0


def pieces_of(part: str, size: Size, first: int) -> Iterator[Piece]:
    """The pieces of a part."""
    if part in OWN:
        yield Piece(part, first, first + 1)
        return
    if part == "ablations":
        yield from (Piece(part, 0, size.ablations, protection) for protection in PROTECTIONS)
        return
    last = first + getattr(size, part.replace("-", "_"))
    piece = 1 if part in SHORT else PIECE
    for what in FAULTS if part == "cells" else ("",):
        yield from (Piece(part, start, min(start + piece, last), what) for start in range(first, last, piece))
    if part == "groups":
        yield from (Piece("groups without", 0, size.ablations, protection) for protection in collectives.PROTECTIONS)


def carry_out(
    parts: list[str], planned: list[list[Piece]], pool: ProcessPoolExecutor | None, jobs: int, ledger: Ledger, until: float, report: Report,
    size: Size = CHAOS,
) -> None:  # fmt: skip
    """Carry out the pieces that are not done; several parts take turns."""
    names = ", ".join(parts)
    print(f"{names} ...", flush=True)
    since = time.monotonic()
    ordered = sorted((number / len(pieces), piece) for pieces in planned for number, piece in enumerate(pieces))
    todo = ledger.todo(piece for _, piece in ordered)
    waiting, running = iter(todo), dict[Future[Batch], Piece]()
    for done in itertools.count(1):
        while len(running) < 2 * jobs and time.monotonic() < until and (piece := next(waiting, None)) is not None:
            running[begin(pool, piece, size)] = piece
        if not running:
            break
        future = next(iter(wait(running, return_when=FIRST_COMPLETED).done))
        note(ledger, running.pop(future), future.result(), report)
        if len(todo) >= 20 and done % (len(todo) // 10) == 0:
            print(f"  {done * 100 // len(todo)} %", flush=True)
    print(f"{names}: {time.monotonic() - since:.0f} s", flush=True)


def begin(pool: ProcessPoolExecutor | None, piece: Piece, size: Size) -> Future[Batch]:
    """Carry out a piece in the pool, or here where there is none."""
    if pool is not None:
        return pool.submit(batches.carry_out, piece)
    began, batch, done = time.perf_counter(), Batch(runs=1), Future[Batch]()
    if piece.part == "replay":
        compare_hashes(batch, piece.first, size.replay)
    else:
        findings = asyncio.run(run_processes(kills=size.kills, stops=size.stops, ends=size.ends))
        findings.add(asyncio.run(run_training(size.trainings, first=piece.first)))
        batch.counts += findings.counts
        batch.counts.update(f"time: {what}: {1e3 * seconds:.1f}" for what, times in findings.times.items() for seconds in times)
        batch.failures += findings.wrong
    batch.real = time.perf_counter() - began
    done.set_result(batch)
    return done


def note(ledger: Ledger, piece: Piece, batch: Batch, report: Report) -> None:
    """Note a piece that is done, and print its findings."""
    counts = batch.counts + Counter({cell_name(cell): count for cell, count in batch.cells.items()})
    ledger.done(piece, runs=batch.runs, failures=batch.failures, virtual=batch.virtual, real=batch.real, coverage=counts)
    for failure in batch.failures:
        report.fail(failure)
    for each in batch.catches:
        print(f"  without {each.protection:<20} noticed by {_by(each.by):<36} {each.how[:90]}", flush=True)


def compare_hashes(batch: Batch, first: int, count: int) -> None:
    """Run the same seeds in three processes, each of which hashes strings in another way: what happens must be the same to the last step."""
    command = [sys.executable, "-m", "tests.chaos", "--hashes", str(first), str(first + count)]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONHASHSEED": str(seed)}) for seed in (0, 1, 2)
    ]
    answers = [json.loads(process.communicate()[0]) for process in running]
    for seed in range(first, first + count):
        if len({answer.get(str(seed)) for answer in answers}) != 1 or str(seed) not in answers[0]:
            batch.failures.append(f"seed {seed} runs differently each time")
    batch.counts["seeds replayed in three processes"] += count


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
