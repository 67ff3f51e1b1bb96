"""The subcommand ``aiograd wan``: its options, its table and its plot."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiograd.running.cli.wan.plot import Curve, plot_svg
from aiograd.running.cli.wan.simulated_methods import Measurement, Setting, methods

LETTERS = "ABCDEFGH"


def add_wan(commands: Any) -> None:
    """Describe the subcommand to the parser of the command line."""
    parser = commands.add_parser(
        "wan",
        help="print and plot how much of its time a worker computes when its line is slow",
        description="Run DataParallel, DistributedDataParallel and LocalSteps on simulated lines, in virtual time, and print the part of its time "
        "that a worker computes. Steps are the library's own and take the given time; each run is described. The same seed gives the same text.",
    )
    parser.add_argument("--workers", type=_count, default=1000, help="workers of LocalSteps (default %(default)s)")
    parser.add_argument("--few", type=_count, default=4, help="workers where whole steps are run (default %(default)s)")
    parser.add_argument("--parameters", type=_count, default=1_000_000, help="float32 parameters of the network (default %(default)s)")
    parser.add_argument("--step-seconds", type=_positive, default=0.3, help="a step's loss and backward (default %(default)s)")
    parser.add_argument("--steps", type=_count, default=30, help="local steps in a round (default %(default)s)")
    lines = "0.25,0.5,1,2,5,10,100"
    parser.add_argument("--mbit", type=_numbers, default=lines, metavar="N,N,...", help="lines of workers, up and down (default %(default)s)")
    parser.add_argument("--coordinator-mbit", type=_positive, default=1000.0, help="line of the coordinator (default %(default)s)")
    parser.add_argument("--latency", type=_positive, default=0.03, help="seconds one way (default %(default)s)")
    parser.add_argument("--loss", type=_rate, default=0.0, help="part of the packets that are lost (default %(default)s)")
    parser.add_argument("--seed", type=_seed, default=0, help="of the network (default %(default)s)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the plot here")
    parser.set_defaults(run=wan)


def wan(options: argparse.Namespace) -> int:
    """Run everything; returns the exit status."""
    compared = methods(options.workers, options.few, max(1, options.steps // 2))
    print(f"{options.parameters:,} parameters, {options.step_seconds:g} s per step, rounds of {options.steps} steps; seed {options.seed}")
    lost, coordinator = 100 * options.loss, options.coordinator_mbit
    print(f"lines: {1000 * options.latency:g} ms one way, {lost:g} % of the packets lost, the coordinator's {coordinator:g} Mbit/s\n")
    for letter, method in zip(LETTERS, compared, strict=False):
        print(f"{letter}  {method.name}, {_workers(method.workers)}: {method.run}")
    columns = "".join(f"{letter:>8}" for letter in LETTERS[: len(compared)])
    width = len(columns)
    print(f"\n{'':8}{'utilisation':>{width}}{'kB per step, worker':>{width}}{'coordinator':>{width}}\n{'Mbit/s':8}{columns * 3}", flush=True)
    curves = [Curve(f"{each.name}, {_workers(each.workers)}", []) for each in compared]
    given = {each.name: vars(options)[each.name] for each in dataclasses.fields(Setting)}
    for mbit in options.mbit:
        row = [each.measure(Setting(**{**given, "mbit": mbit})) for each in compared]
        print(_line(mbit, row), flush=True)
        for curve, measurement in zip(curves, row, strict=True):
            curve.points.append((mbit, measurement.utilisation))
    print("\nkB: sent and received, heartbeats and frames included. More workers of A and B send more each, and wait longer.")
    if options.svg is not None:
        title = f"{options.parameters:,} parameters, {options.step_seconds:g} s per step"
        options.svg.parent.mkdir(parents=True, exist_ok=True)
        options.svg.write_text(plot_svg(title, "Mbit/s of each worker's line, up and down", "utilisation", curves), encoding="utf-8")
        print(f"wrote {options.svg}")
    return 0


def _workers(count: int) -> str:
    return f"{count:,} worker{'s' * (count != 1)}"


def _line(mbit: float, row: Sequence[Measurement]) -> str:
    kilobytes = [*(each.bytes / 1000 for each in row), *(each.coordinator_bytes / 1000 for each in row)]
    return f"{mbit:<8g}" + "".join(f"{each.utilisation:8.4f}" for each in row) + "".join(f"{each:8.1f}" for each in kilobytes)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, found {text!r}") from None


def _positive(text: str) -> float:
    number = _number(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text}")
    return number


def _count(text: str) -> int:
    number = _positive(text)
    if number != int(number):
        raise argparse.ArgumentTypeError(f"expected a whole number such as 1000 or 1e6, found {text}")
    return int(number)


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 0, found {text!r}")
    return int(text)


def _rate(text: str) -> float:
    number = _number(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"expected a part of the packets, from 0 to below 1, found {text}")
    return number


def _numbers(text: str) -> list[float]:
    return sorted({_positive(part) for part in text.split(",")})
