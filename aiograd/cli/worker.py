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
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import importlib
import json
import logging
import os
import signal
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aiograd.distributed import Encoding, Limits, Service, Worker
from aiograd.distributed.http.addresses import parse_url
from aiograd.distributed.keyring_file import parse_secret, read_secret_file
from aiograd.engine.run import run
from aiograd.errors import ArgumentError

#: seconds after the first signal at which the process is gone, whatever its threads do
STOP_SECONDS = 4.5
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
ENCODINGS = tuple(encoding.name.lower() for encoding in Encoding)
#: how texts of errors call arguments of `Worker`, and what they are called here
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
    parser.add_argument("--name", required=True, help="what peers call this worker")
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="where to listen (default 127.0.0.1:0: a free port)")
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
    parser.add_argument("--managed", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=worker)


def worker(options: argparse.Namespace) -> int:
    """Serve until stopped; returns the exit status."""
    with contextlib.ExitStack() as stack:
        control = stack.enter_context(_control()) if options.managed else None
        host, port = read_address(options.listen)
        peers = dict(read_peer(peer) for peer in options.peer)
        limits = read_limits(options.limits)
        secret = find_secret(options.secret_file)
        server, client = make_tls(options.certificate, options.key, options.ca)
        service = load_service(options.service)
        # after the import: logging that the service's module has set up stays as it is
        logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
        try:
            made = Worker(
                options.name, service=service, host=host, port=port, peers=peers, secret=secret, ssl=server, client_ssl=client,
                allow_plaintext=options.allow_plaintext, trusted_hosts=options.trusted_host, limits=limits,
                encoding=Encoding[options.encoding.upper()], gradient_encoding=Encoding[options.gradient_encoding.upper()],
            )  # fmt: skip
            run(_serve(made, options.listen, control))
        except ArgumentError as error:
            raise ArgumentError(in_words_of_options(str(error))) from error
    return 0


def in_words_of_options(text: str) -> str:
    """What is said of arguments of Python, said of options."""
    for argument, option in OPTIONS.items():
        text = text.replace(argument, option)
    return text


async def _serve(made: Worker, listen: str, control: tuple[int, int] | None) -> None:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()

    def stop(number: int = 0, frame: object = None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        faulthandler.dump_traceback_later(STOP_SECONDS, exit=True)
        loop.call_soon_threadsafe(stopping.set)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    async with contextlib.AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(made)
        except OSError as error:
            raise ArgumentError(f"--listen {listen}: {error}") from None
        if control is None:
            print(f"worker {made.name} listens on {made.url} (pid {os.getpid()})", flush=True)
            await stopping.wait()
            print(f"worker {made.name} stops", flush=True)
        else:
            transport, _ = await loop.connect_read_pipe(lambda: _Parent(made, control[1], stop), os.fdopen(os.dup(control[0]), "rb", buffering=0))
            try:
                await stopping.wait()
            finally:
                transport.close()  # also where a function has ended the process in its own way: an open pipe would keep the loop from closing


class _Parent(asyncio.Protocol):
    """The lines of JSON that come from the `LocalCluster` which this process belongs to."""

    def __init__(self, made: Worker, out: int, stop: Any) -> None:
        self._made = made
        self._out = out
        self._stop = stop
        self._pending = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._tell({"name": self._made.name, "url": self._made.url, "pid": os.getpid()})

    def data_received(self, data: bytes) -> None:
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            told = json.loads(line)
            self._made.add_peer(told["peer"], told["url"])
            self._tell({"peer": told["peer"]})

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


def load_service(path: str) -> Service:
    """The Service that ``module:name`` names; the module is imported.

    Raises:
        ArgumentError: there is none. Whatever the module raises when it is imported.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ArgumentError(f"--service {path}: expected MODULE:NAME, for example my_package.serving:service")
    if os.getcwd() not in sys.path and not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())  # a console script has its own folder there instead
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # it is there, and imports something that is not
        raise ArgumentError(f"--service {path}: there is no module {error.name} in {os.getcwd()} or on PYTHONPATH") from None
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ArgumentError(f"--service {path}: module {module_name} has no {name}; it has {_services_in(module) or 'no Service at all'}")
        found = getattr(found, part)
    if not isinstance(found, Service):
        raise ArgumentError(f"--service {path}: expected an aiograd.distributed.Service, found {type(found).__name__}")
    return found


def _services_in(module: Any) -> str:
    return ", ".join(f"{module.__name__}:{name}" for name, value in vars(module).items() if isinstance(value, Service))


def find_secret(path: Path | None) -> bytes:
    """The cluster's secret: from a file, or from the environment, out of which it is taken.

    Raises:
        ArgumentError: there is none, or it is no secret. OSError: the file cannot be read.
    """
    named = path or os.environ.get("AIOGRAD_SECRET_FILE")
    spelt = os.environ.pop("AIOGRAD_SECRET", None)
    if named:
        return read_secret_file(named)
    if spelt:
        return parse_secret(spelt, "AIOGRAD_SECRET")
    raise ArgumentError(
        "there is no secret that this worker could share with its peers. Make one with `(umask 077; openssl rand -hex 32 > cluster.key)`, copy "
        "it to every machine of the cluster, and name it with --secret-file or AIOGRAD_SECRET_FILE"
    )


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
    """Limits from a JSON object of those that differ from the defaults.

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
    raise ArgumentError(f"--limits {shown}: {problem}; expected a JSON object such as {{\"message_bytes\": 1048576}}")


def make_tls(certificate: Path | None, key: Path | None, ca: Path | None) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
    """TLS for those who connect and TLS for connecting; None where the defaults will do.

    With `ca` both sides show certificates, and those come from it.

    Raises:
        ArgumentError: files are missing, or not what they should be.
    """
    if (certificate is None) != (key is None):
        raise ArgumentError("TLS needs both --certificate and --key")
    server = client = None
    try:
        if certificate is not None:
            server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=ca)
            server.minimum_version = ssl.TLSVersion.TLSv1_3
            server.load_cert_chain(certificate, key)
            if ca is not None:
                server.verify_mode = ssl.CERT_REQUIRED
        if ca is not None:
            client = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=ca)
            client.minimum_version = ssl.TLSVersion.TLSv1_3
            if certificate is not None:
                client.load_cert_chain(certificate, key)
    except (OSError, ValueError) as error:  # an SSLError is an OSError and names no file
        files = ", ".join(str(file) for file in (certificate, key, ca) if file is not None)
        raise ArgumentError(f"TLS from {files}: {error}; expected PEM files that this user can read") from None
    return server, client
