"""``aiograd why``: asks a worker and the workers that it knows what they wait for, and prints the report.

Note [Status]
    0: nothing waits in a circle, though some of it may wait; 3: there is a cycle; 1: the worker cannot be reached or gives no report; 2: an option
    does not fit. Monitoring needs nothing else: a cluster that computes waits all the time, for each other's gradients.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path
from typing import Any

from aiograd.distributed import Keyring, Worker
from aiograd.distributed.cluster.loading import make_tls
from aiograd.distributed.rpc.http.naming import name_at
from aiograd.distributed.rpc.limits import check_number
from aiograd.engine.run import run
from aiograd.errors import ArgumentError, WorkerLostError
from aiograd.running.cli.output import print_text
from aiograd.running.cli.worker import find_secret, in_words_of_options, read_peer

#: status where there is a cycle
CYCLE = 3
#: seconds between two reports of ``--watch``, and that a worker has to give its name
WATCH_SECONDS, NAME_SECONDS = 1.0, 10.0


def add_why(commands: Any) -> None:
    """Describe the subcommand to the parser of the command line."""
    parser = commands.add_parser(
        "why",
        help="print what the workers of a cluster wait for, and where that goes round in a circle",
        description="Ask a running worker, by its URL or by its name, and the workers that it knows what they wait for. It connects as a worker "
        "does, with the secret of the cluster. Status 0: there is no cycle; 3: there is one; 1: the worker cannot be reached; 2: an option "
        "does not fit.",
    )
    parser.add_argument("worker", metavar="URL|NAME", help="the worker to ask; a name needs --peer NAME=URL")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL", help="where a worker is; may be given several times")
    parser.add_argument("--secret-file", type=Path, metavar="FILE", help="the secret, mode 0600 (default: AIOGRAD_SECRET_FILE, then AIOGRAD_SECRET)")
    parser.add_argument("--certificate", type=Path, metavar="FILE", help="TLS: a certificate chain to show, PEM")
    parser.add_argument("--key", type=Path, metavar="FILE", help="TLS: the certificate's private key, PEM")
    parser.add_argument("--ca", type=Path, metavar="FILE", help="TLS: certificates that the worker's must come from")
    parser.add_argument("--timeout", type=float, default=1.0, metavar="S", help="how long an answer is waited for (default 1)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--watch", action="store_true", help="ask again every second, until Ctrl-C or until the worker cannot be reached")
    parser.set_defaults(run=why)


def why(options: argparse.Namespace) -> int:
    """Print the report; returns the exit status, see Note [Status]."""
    check_number("--timeout", options.timeout)
    peers = dict(read_peer(peer) for peer in options.peer)
    if "://" not in options.worker and options.worker not in peers:
        known = f"; --peer names {', '.join(sorted(peers))}" if peers else ""
        raise ArgumentError(f"{options.worker}: expected the URL of a worker, or a name with --peer {options.worker}=URL{known}")
    keyring = Keyring(find_secret(options.secret_file))
    _, client_ssl = make_tls(options.certificate, options.key, options.ca)
    try:
        status: int = run(_ask(options, peers, keyring, client_ssl))
        return status
    except ArgumentError as error:
        raise ArgumentError(in_words_of_options(str(error))) from error


async def _ask(options: argparse.Namespace, peers: dict[str, str], keyring: Keyring, client_ssl: Any) -> int:
    name = options.worker
    if "://" in name:
        name = await name_at(options.worker, keyring, client_ssl, timeout=NAME_SECONDS)
        peers = {**peers, name: options.worker}
    async with Worker(f"why-{os.getpid()}-{os.urandom(4).hex()}", peers=peers, secret=keyring, client_ssl=client_ssl) as worker:
        while True:
            report = await worker.why(name, timeout=options.timeout, with_known=True)
            if name in report.silent:
                raise WorkerLostError(f"worker {name!r} gave no report: {report.silent[name]}")
            print_text(report.to_json() if options.json else f"{report}\n")
            if not options.watch:
                return CYCLE if report.cycles else 0
            await asyncio.sleep(WATCH_SECONDS)
