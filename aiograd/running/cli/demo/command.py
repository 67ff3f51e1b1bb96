"""The subcommand ``aiograd demo``: its options."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from aiograd.distributed.cluster.factory import KINDS
from aiograd.engine.run import run
from aiograd.running.cli.demo import Options, show
from aiograd.running.cli.demo.model import BLOCKS


def add_demo(commands: Any) -> None:
    """Describe the subcommand to the parser of the command line."""
    defaults = Options()
    parser = commands.add_parser(
        "demo",
        help="train a network across worker processes, lose one of them on the way, and check the result",
        description="Cut a small network across worker processes, train it on handwritten digits, kill a worker in the middle of a backward pass, go "
        "on from a checkpoint, and compare every weight with those of the same training in one process. Then train replicas of the whole network, "
        "and let the others compute the part of one that is killed. Fails if something promised is not so.",
    )
    parser.add_argument("--epochs", type=_positive, default=defaults.epochs, help="times through the data (default %(default)s)")
    sizes = range(1, len(BLOCKS) + 1)
    parser.add_argument("--workers", type=int, choices=sizes, default=defaults.workers, help="processes that share the network (default %(default)s)")
    parser.add_argument("--on", choices=KINDS, default=defaults.on, help="where the processes run: here, on Ray, or started here to join the driver")
    parser.add_argument("--no-kill", action="store_true", help="let every worker live")
    parser.add_argument("--output", type=Path, default=defaults.output, metavar="DIR", help="where the trace goes (default %(default)s)")
    parser.set_defaults(run=demo)


def demo(options: argparse.Namespace) -> int:
    """Run the demo; returns the exit status."""
    status: int = run(show(Options(epochs=options.epochs, workers=options.workers, kill=not options.no_kill, on=options.on, output=options.output)))
    return status


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("expected at least 1")
    return number
