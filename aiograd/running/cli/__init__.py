"""The command line: ``aiograd demo``, ``worker``, ``why``, ``trace``, ``wan`` and ``doctor``.

The one place that may install things process-wide (an event loop, signal handlers); the library never does. Status 2: an option or a file that
was named does not fit; 1: something else went wrong. Either is one line on standard error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aiograd import __version__
from aiograd.errors import AiogradError, ArgumentError
from aiograd.running.cli.worker import add_worker
from aiograd.running.late import LateModule

if TYPE_CHECKING:
    from aiograd.running.cli import doctor, fork_server, trace, why
    from aiograd.running.cli.demo import command as demo_command
    from aiograd.running.cli.wan import command as wan_command
else:  # a worker needs none of these, and is the sooner there
    demo_command = LateModule("aiograd.running.cli.demo.command")
    doctor = LateModule("aiograd.running.cli.doctor")
    fork_server = LateModule("aiograd.running.cli.fork_server")
    trace = LateModule("aiograd.running.cli.trace")
    wan_command = LateModule("aiograd.running.cli.wan.command")
    why = LateModule("aiograd.running.cli.why")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status.

    Args:
        arguments: the words after the program's name; by default the arguments of the process.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["fork-server"]:
        words = fork_server.serve(words[1:])  # from here on this is a child of it
    parser = argparse.ArgumentParser(prog="aiograd", description="Autograd for async Python.")
    parser.add_argument("--version", action="version", version=f"aiograd {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    if words[:1] != ["worker"]:
        demo_command.add_demo(commands)
        wan_command.add_wan(commands)
        why.add_why(commands)
    add_worker(commands)

    traces = commands.add_parser("trace", help="merge Chrome traces, or print a table of one")
    traces.add_argument("traces", nargs="+", type=Path, metavar="TRACE.json", help="files written by the profiler")
    traces.add_argument("-o", "--output", type=Path, help="write the merged trace here; open it in ui.perfetto.dev")
    traces.add_argument("-n", "--limit", type=_count, default=20, help="rows of the table (default 20)")
    traces.set_defaults(run=lambda options: trace.trace(options))

    health = commands.add_parser("doctor", help="print what this installation has and whether it works")
    health.set_defaults(run=lambda options: doctor.doctor(options))

    options = parser.parse_args(words)
    command: Callable[[argparse.Namespace], int] = options.run
    try:
        return command(options)
    except (AiogradError, OSError) as error:
        print("\n".join([f"aiograd {options.command}: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        if isinstance(error, ArgumentError):
            return 2
        return 1 if isinstance(error, (AiogradError, ConnectionError, TimeoutError)) else 2  # any other OSError is of a file that was named
    except KeyboardInterrupt:
        return 130  # as a shell says of a command that Ctrl-C ended


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return int(text)
