"""``aiograd worker``: a worker as a process of its own, until it is told to stop.

Note [Stopping]
    The first SIGINT or SIGTERM closes the worker in order: peers are told, what runs for them is cancelled, and the process exits with status 0.
    A second one ends it at once. The handlers are Python's own and not the loop's, so that they run even where a function holds the loop up.
    `STOP_SECONDS` after the first signal the process is ended in any case, with status 1 and the stacks of its threads on standard error:
    something in it held up its loop, or a thread of the service's own did not end. Only a signal that comes while the main thread is inside of
    one long call of a C library waits for that.

Note [Managed]
    With ``--managed`` the process belongs to a `LocalCluster`, see Note [Parent and child] there. Its standard input and output are the
    parent's; the service gets /dev/null and standard error in their place, so that nothing it reads or prints gets in between.

Note [Starting anew]
    The coordinator of a `JoinCluster` may want a worker without its state. The process then runs its own command again in its place: same number,
    same parent, nothing left of the old memory. The secret is put back into the environment if it came from there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from aiograd.distributed import Encoding, Limits, Worker
from aiograd.distributed.cluster.joining import LEADER, StopReason, serve_cluster, wait_for_way
from aiograd.distributed.cluster.loading import load_service, make_tls
from aiograd.distributed.rpc.http.addresses import bracket, parse_url
from aiograd.distributed.rpc.keyring_file import parse_secret, read_secret_file
from aiograd.distributed.rpc.limits import check_number
from aiograd.engine.run import run
from aiograd.errors import ArgumentError

#: seconds after the first signal at which the process is gone, also while its threads run
STOP_SECONDS = 4.5
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
ENCODINGS = tuple(encoding.name.lower() for encoding in Encoding)
#: names of arguments of `Worker` in texts of errors, and the option for each
OPTIONS = {
    "worker name ": "--name ",
    "trusted_hosts holds ": "--trusted-host ",
    "ssl=...": "--certificate and --key",
    "allow_plaintext=True": "--allow-plaintext",
    "add_peer(": "--peer (",
}


def add_worker(commands: Any) -> None:
    """Describe the subcommand to the parser of the command line."""
    parser = commands.add_parser(
        "worker",
        help="serve functions and parts of networks to other workers, until stopped",
        description="Serve the functions and classes of a Service to other workers, until SIGINT or SIGTERM. "
        "All workers of a cluster share a secret of 32 bytes: a file that only its owner can read, made with "
        "`(umask 077; openssl rand -hex 32 > cluster.key)` and named by --secret-file or AIOGRAD_SECRET_FILE.",
    )
    parser.add_argument(
        "--name", default=name_from_environment(os.environ), help="what peers call this worker (default: AIOGRAD_NAME, POD_NAME, or w and the number "
        "in SLURM_PROCID or RANK)"
    )  # fmt: skip
    listen = "where to listen (default 127.0.0.1:0, a free port; with --join the address that leads to the coordinator)"
    parser.add_argument("--listen", metavar="HOST:PORT", help=listen)
    parser.add_argument(
        "--join", default=os.environ.get("AIOGRAD_JOIN"), metavar="URL", help="the coordinator of a JoinCluster to work for (default: AIOGRAD_JOIN)"
    )
    parser.add_argument(
        "--rejoin-seconds", type=float, default=60.0, metavar="S", help="with --join, how long a coordinator that was lost is waited for (default 60)"
    )
    parser.add_argument("--service", required=True, metavar="MODULE:NAME", help="the Service to serve, imported from the current folder or the path")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL", help="another worker; may be given several times")
    parser.add_argument("--secret-file", type=Path, metavar="FILE", help="the secret, mode 0600 (default: AIOGRAD_SECRET_FILE, then AIOGRAD_SECRET)")
    parser.add_argument("--certificate", type=Path, metavar="FILE", help="TLS: this worker's certificate chain, PEM")
    parser.add_argument("--key", type=Path, metavar="FILE", help="TLS: the certificate's private key, PEM")
    parser.add_argument("--ca", type=Path, metavar="FILE", help="TLS: certificates that peers' must come from; peers then need one too")
    parser.add_argument(
        "--trusted-host", action="append", default=[], metavar="NAME", help="a name in peers' URLs for this worker; may be given several times"
    )
    parser.add_argument("--allow-plaintext", action="store_true", help="listen beyond this machine without TLS (frames are encrypted anyway)")
    for option, what in (("--encoding", "values"), ("--gradient-encoding", "gradients")):
        parser.add_argument(option, choices=ENCODINGS, default="plain", help=f"how {what} that it sends are rounded (default plain: not at all)")
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="what is logged on standard error (default info)")
    parser.add_argument("--limits", default="{}", metavar="JSON", help='limits that differ from the defaults, {"message_bytes": 1048576}')
    parser.add_argument(
        "--no-tune-gc", action="store_false", dest="tune_gc", help="leave Python's garbage collector as it is (its pauses then grow with the heap)"
    )
    parser.add_argument("--no-tune-malloc", action="store_false", dest="tune_malloc", help="leave the allocator as it is (it gives freed memory up)")
    parser.add_argument("--dashboard", action="store_true", help="serve a page that shows what this worker and its peers do; its URL is printed")
    parser.add_argument("--managed", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=worker)


def worker(options: argparse.Namespace) -> int:
    """Serve until stopped; returns the exit status."""
    with contextlib.ExitStack() as stack:
        control = stack.enter_context(_control()) if options.managed else None
        if not options.name:
            raise ArgumentError("--name is missing, and the environment has no AIOGRAD_NAME, POD_NAME, SLURM_PROCID or RANK to take one from")
        join = None if options.managed or not options.join else read_driver(options.join)
        check_number("--rejoin-seconds", options.rejoin_seconds)
        listen = options.listen or ("127.0.0.1:0" if join is None else None)
        address = None if listen is None else read_address(listen)
        spelt = os.environ.get("AIOGRAD_SECRET")
        peers = dict(read_peer(peer) for peer in options.peer)
        limits = read_limits(options.limits)
        secret = find_secret(options.secret_file)
        server, client = make_tls(options.certificate, options.key, options.ca)
        service = load_service(options.service)
        # after the import: logging that the service's module has set up stays as it is
        logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)

        def make(host: str, port: int) -> Worker:
            return Worker(
                options.name, service=service, host=host, port=port, peers=peers, secret=secret, ssl=server, client_ssl=client,
                allow_plaintext=options.allow_plaintext, trusted_hosts=options.trusted_host, limits=limits,
                encoding=Encoding[options.encoding.upper()], gradient_encoding=Encoding[options.gradient_encoding.upper()],
                dashboard=options.dashboard,
            )  # fmt: skip

        try:
            serving = _serve(make, options.name, address, control, join, options.rejoin_seconds)
            ending = run(serving, tune_gc=options.tune_gc, tune_malloc=options.tune_malloc)
        except ArgumentError as error:
            raise ArgumentError(in_words_of_options(str(error))) from error
    if ending is StopReason.RESTART:  # see Note [Starting anew]
        if spelt is not None:
            os.environ["AIOGRAD_SECRET"] = spelt
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", "aiograd", *sys.argv[1:]])  # noqa: S606
    return 1 if ending is StopReason.ORPHANED else 0


def in_words_of_options(text: str) -> str:
    """A message about Python arguments with the names of command-line options in their place."""
    for argument, option in OPTIONS.items():
        text = text.replace(argument, option)
    return text


async def _serve(
    make: Callable[[str, int], Worker], name: str, address: tuple[str, int] | None, control: tuple[int, int] | None, join: str | None,
    rejoin_seconds: float,
) -> StopReason:  # fmt: skip
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()

    def stop(number: int = 0, frame: object = None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        faulthandler.dump_traceback_later(STOP_SECONDS, exit=True)
        loop.call_soon_threadsafe(stopping.set)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    if address is None and join is not None:
        towards = await wait_for_way(name, join, stopping)
        if towards is None:
            return StopReason.STOPPED
        address = towards, 0
    host, port = address or ("127.0.0.1", 0)
    made = make(host, port)
    async with contextlib.AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(made)
        except OSError as error:
            raise ArgumentError(f"--listen {bracket(host)}:{port}: {error.strerror or error}") from None
        if control is None:
            print(f"worker {made.name} listens on {made.url} (pid {os.getpid()})", flush=True)
            if made.dashboard_url is not None:
                print(f"dashboard: {made.dashboard_url}", flush=True)
            ending = StopReason.STOPPED
            if join is None:
                await stopping.wait()
            else:
                ending = await serve_cluster(made, join, stopping, rejoin_seconds)
            print(f"worker {made.name} stops: {ending.value}", flush=True)
            return ending
        else:
            made.membership.leader = LEADER
            transport, _ = await loop.connect_read_pipe(lambda: _Parent(made, control[1], stop), os.fdopen(os.dup(control[0]), "rb", buffering=0))
            try:
                await stopping.wait()
            finally:
                transport.close()  # also where a function has ended the process in its own way: an open pipe would keep the loop from closing
    return StopReason.STOPPED


class _Parent(asyncio.Protocol):
    """The pipe to the `LocalCluster` that this process belongs to: it is told when the worker listens; when the pipe closes, the worker ends."""

    def __init__(self, made: Worker, out: int, stop: Any) -> None:
        self._made = made
        self._out = out
        self._stop = stop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._tell({"name": self._made.name, "url": self._made.url, "pid": os.getpid(), "incarnation": self._made.endpoint.incarnation.hex()})

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()  # the parent is gone, or wants us to be

    def _tell(self, line: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # the same, and `connection_lost` is about to say so
            os.write(self._out, json.dumps(line).encode() + b"\n")


@contextlib.contextmanager
def _control() -> Iterator[tuple[int, int]]:
    """Keep standard input and output for the parent, see Note [Managed]; gives their new descriptors."""
    control = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    try:
        yield control
    finally:
        for descriptor in control:
            os.close(descriptor)


# ---------------------------------------------------------------- reading the options


def find_secret(path: Path | None) -> bytes:
    """The cluster's secret: from a file, or from the environment, out of which it is taken.

    Raises:
        ArgumentError: there is none, or it is no secret. OSError: the file cannot be read.
    """
    named = path or os.environ.get("AIOGRAD_SECRET_FILE")
    spelt = os.environ.pop("AIOGRAD_SECRET", None)
    if named:
        try:
            return read_secret_file(named)
        except FileNotFoundError as error:
            raise ArgumentError(error.strerror) from None
    if spelt:
        return parse_secret(spelt, "AIOGRAD_SECRET")
    raise ArgumentError(
        "there is no secret that this worker could share with its peers. Make one with `(umask 077; openssl rand -hex 32 > cluster.key)`, copy "
        "it to every machine of the cluster, and name it with --secret-file or AIOGRAD_SECRET_FILE"
    )


def name_from_environment(environment: Mapping[str, str]) -> str | None:
    """A name for a worker from what schedulers tell their processes: of the pod, or from the number of the task; None where there is nothing."""
    for variable in ("AIOGRAD_NAME", "POD_NAME"):
        if environment.get(variable):
            return environment[variable]
    for variable in ("SLURM_PROCID", "RANK"):
        if environment.get(variable):
            return f"w{environment[variable]}"
    return None


def read_driver(url: str) -> str:
    """The URL of a coordinator.

    Raises:
        ArgumentError: it is none.
    """
    try:
        parse_url(url)
    except ArgumentError as error:
        raise ArgumentError(f"--join URL: {error}, for example http://10.0.0.2:7000") from None
    return url


def read_address(text: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[host]:port``.

    Raises:
        ArgumentError: it is neither.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ArgumentError(f"--listen {text}: expected HOST:PORT, for example 127.0.0.1:7000 or [::1]:7000; port 0 is any free one")
    return host.removeprefix("[").removesuffix("]"), int(port)


def read_peer(text: str) -> tuple[str, str]:
    """Name and URL of ``name=url``.

    Raises:
        ArgumentError: it is no such pair.
    """
    name, _, url = text.partition("=")
    if not name or "://" not in url:
        raise ArgumentError(f"--peer {text}: expected NAME=URL, for example worker1=http://10.0.0.2:7000")
    try:
        parse_url(url)
    except ArgumentError as error:
        raise ArgumentError(f"--peer {name}=URL: {error}") from None
    return name, url


def read_limits(text: str) -> Limits:
    """Limits from a JSON object of the limits that differ from the defaults.

    Raises:
        ArgumentError: it is none, or has unknown names or impossible values.
    """
    try:
        given = json.loads(text)
        if not isinstance(given, dict):
            raise ArgumentError(f"found {type(given).__name__}")
        return Limits(**given)
    except RecursionError:
        problem = "it is nested too deep"
    except (ValueError, TypeError) as error:
        problem = str(error)
    shown = text if len(text) <= 200 else f"{text[:200]}..."
    raise ArgumentError(f'--limits {shown}: {problem}; expected a JSON object such as {{"message_bytes": 1048576}}')
