"""How training goes on under faults, in aiograd and elsewhere: a table, results.json and two pictures in out/faults. ``make faults``.

The same network, samples, order of samples and work a step everywhere. Undisturbed and disturbed runs alternate. Every system but aiograd has an
environment of its own, .venv-faults-NAME, made when it is first run; one that cannot be installed or does not train is a row that says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.faults.figures import figures, nearest_rank, other_bits
from tests.faults.injection import FAULTS, Fault
from tests.faults.report import chart, table
from tests.faults.supervisor import FailedRunError, Run, Supervisor
from tests.faults.systems import ROOT, SYSTEMS, System, UnavailableError
from tests.namespaces import Hosts


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), metavar="NAME", help=f"{', '.join(SYSTEMS)} (all)")
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), metavar="NAME", help=f"{', '.join(FAULTS)} (all)")
    parser.add_argument("--seconds", type=float, default=75.0, help="of each run (75)")
    parser.add_argument("--runs", type=int, default=1, help="how often each is repeated, undisturbed and disturbed in turn (1)")
    parser.add_argument("--replicas", type=int, default=4, help="4")
    parser.add_argument("--work", type=float, default=0.05, help="seconds of sleep as the work of a shard (0.05)")
    parser.add_argument("--every", type=float, help="seconds between two faults (15)")
    parser.add_argument("--small", action="store_true", help="aiograd alone, two kills: half a minute in all")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "faults")
    options = parser.parse_args(arguments)
    if options.small:
        options.systems, options.faults, options.seconds, options.every = ["aiograd"], ["kill"], 8.0, options.every or 4.5
    for given, known, name in ((options.systems, SYSTEMS, "system"), (options.faults, FAULTS, "fault")):
        unknown = sorted(set(given) - set(known))
        if unknown:
            parser.error(f"no {name} is called {', '.join(unknown)}; there are {', '.join(known)}")
    if options.seconds <= 0 or options.runs < 1 or options.replicas < 2 or options.work < 0 or (options.every or 1) <= 0:
        parser.error("expected --seconds and --every above 0, --runs from 1, --replicas from 2, --work from 0")
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for system in options.systems:
        reasons = {fault: unsuited(SYSTEMS[system], FAULTS[fault]) for fault in options.faults}
        try:
            if not all(reasons.values()):
                SYSTEMS[system].python()
        except UnavailableError as error:
            reasons = dict.fromkeys(options.faults, str(error))
        for fault, reason in reasons.items():
            kind = FAULTS[fault] if options.every is None else dataclasses.replace(FAULTS[fault], every=options.every)
            found = {"skipped": reason} if reason else row(SYSTEMS[system], kind, options)
            rows.append({"system": system, "fault": fault, **found})
            print(table(rows[-1:]).splitlines()[-1], flush=True)
            write(rows, options)
    print(f"\n{table(rows)}\nwritten to {options.out}")
    return int(any(each["system"] == "aiograd" and each.get("skipped") for each in rows))


def unsuited(system: System, fault: Fault) -> str:
    """Why a system cannot be shown under a fault here; "" if it can."""
    if fault.name == "join" and system.no_join:
        return f"no replica can join: {system.no_join}"
    if fault.rate is not None and system.apart is None:
        return f"no host for each replica: {system.no_hosts}"
    if fault.rate is not None and not Hosts.is_permitted():
        return "network namespaces and tbf are not permitted here"
    return ""


def row(system: System, fault: Fault, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of a system under a fault."""
    are_apart = fault.rate is not None
    if are_apart and system.apart is not None:
        system = system.apart
    try:
        runs = [
            [Supervisor(system, each, options.seconds, options.replicas, options.work, are_apart).run() for each in (None, fault)]
            for _ in range(options.runs)
        ]
    except (FailedRunError, PermissionError) as error:
        return {"skipped": str(error)}
    return summary(runs)


def summary(runs: Sequence[Sequence[Run]]) -> dict[str, Any]:
    """The figures of pairs of an undisturbed and a disturbed run: medians, with the least and the most as ``spread``, and sums of what is counted."""
    found = []
    for calm, disturbed in runs:
        rate = figures(calm.lines, (), calm.began, calm.ended, 1.0).useful
        found.append(figures(disturbed.lines, disturbed.faults, disturbed.began, disturbed.ended, rate))
    seconds = [each for one in found for each in one.to_next]
    measured = {
        "useful": [each.useful for each in found],
        "p50": [each.p50 for each in found],
        "load": [max(run.load for run in pair) for pair in runs],
        "step_seconds": [nearest_rank(step_times(calm), 0.5) for calm, _ in runs],
    }
    return {
        **{name: statistics.median(values) for name, values in measured.items()},
        "spread": {name: (min(values), max(values)) for name, values in measured.items()},
        "runs": len(runs),
        "p99": nearest_rank(seconds, 0.99),
        "longest": max(seconds, default=0.0),
        "lost": sum(each.lost for each in found),
        "twice": sum(each.twice for each in found),
        "other_bits": sum(other_bits(disturbed.lines, calm.lines) for calm, disturbed in runs),
        "restarted": sum(run.restarted for _, run in runs),
        "faults": len(seconds),
    }


def step_times(run: Run) -> list[float]:
    """Seconds of each step, from its beginning to its commit."""
    return [line["t"] - line["began"] for line in run.lines if line["kind"] == "step" and line["t"] >= run.began]


def write(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    """Write the results, the table and the pictures."""
    machine = {"python": platform.python_version(), "machine": platform.machine(), "processor": processor(), "cores": os.cpu_count()}
    command = ["python", "-m", "tests.faults", *sys.argv[1:]]
    results = {"machine": machine, "command": command, "rows": list(rows)}
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "table.md").write_text(table(rows))
    (options.out / "useful.svg").write_text(chart(rows, "useful", "Useful time under faults"))
    (options.out / "next_step.svg").write_text(chart(rows, "p50", "From a fault to the next committed step, median, seconds"))


def processor() -> str:
    """The name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


if __name__ == "__main__":
    sys.exit(main())
