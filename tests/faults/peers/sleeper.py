"""A system for the tests of the supervisor: it sleeps, and calls that a step.

With ``--on ends`` rank 0 ends at times, with ``fails`` all do, with ``talks`` each sends bytes to the other one of two in each step and waits for
its answer.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time

from tests.faults import task

PORT = 7800
#: bytes that a process sends in each step, and gets back
TALK = 50_000


def echo(listener: socket.socket) -> None:
    """Send back what comes, over one connection."""
    connection, _ = listener.accept()
    while data := connection.recv(TALK):
        connection.sendall(data)


def meet(host: str, rank: int) -> socket.socket:
    """A connection to the other process, which sends back what comes."""
    threading.Thread(target=echo, args=(socket.create_server((host, PORT)),), daemon=True).start()
    network, _, own = host.rpartition(".")
    while True:
        try:
            return socket.create_connection((f"{network}.{int(own) + 1 - 2 * rank}", PORT))
        except ConnectionRefusedError:
            time.sleep(0.05)


def main() -> None:
    """Sleep until the process is ended."""
    options = task.options(__doc__ or "")
    if options.on == "fails":
        raise RuntimeError("it cannot")
    lines = task.Lines(options.lines, f"rank{options.rank}")
    lines.runs(f"rank{options.rank}", os.getpid())
    other = meet(options.host, options.rank) if options.on == "talks" else None
    for step in itertools.count():
        if options.on == "ends" and options.rank == 0 and step == 30:
            return
        began = time.monotonic()
        time.sleep(options.work)
        if other is not None:
            other.sendall(bytes(TALK))
            other.recv(TALK, socket.MSG_WAITALL)
        lines.step(began, step, *task.share(step, options.rank % options.replicas, options.replicas))


if __name__ == "__main__":
    main()
