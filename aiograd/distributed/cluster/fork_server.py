"""The fork server: a process with the modules of a worker imported, of which workers are forked. `forked` is the side that asks it.

A fork takes 2 ms where a new interpreter and its imports take most of a second of processor time.

Note [One thread]
    The server has one thread, no event loop and no lock that another thread could hold, so that each child begins as a process of its own would.
    Some builds of BLAS start their threads when they are loaded: where the server finds that it has another thread, it ends, and the process that
    asked it starts new interpreters. Of requests it reads nothing but descriptors, and it knows no secret.

Note [A child]
    A request is one packet on the server's standard input with four descriptors: a socket for reports, and standard input, output and error of the
    child. The server answers on the socket with the child's number and a descriptor of the process (a pidfd, which, unlike the number, never names
    another process), and in the end with its exit status, which the system tells the server alone, as the child's parent. The child reads its
    command from the same socket, and ends where there is none: a request that was given up while it was served runs nothing.

Note [Fresh in each child]
    `random`, OpenSSL, and modules of this package that draw while they are imported take note of a fork and draw anew; numpy's global generator is
    seeded here. No other module that the server imports may draw, see tests/distributed/test_fork_server.py. The seed of ``hash`` cannot be
    changed in a running interpreter: the children of one server share it, as processes do that are given the same ``PYTHONHASHSEED``.

Source: Android's zygote, and ``forkserver`` of Python's library.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

#: seconds after which a server without children and without requests ends
IDLE_SECONDS = 30.0
#: descriptors that come with a request
DESCRIPTORS = 4
#: bytes of a command at most
COMMAND_BYTES = 1 << 18


def serve_forks() -> list[str]:
    """Fork a child for each request on standard input; returns in the children only, with the words of the child's command line.

    The server ends when standard input is closed and its children have ended, or when it was idle for `IDLE_SECONDS`, or at once where it has
    another thread.
    """
    os.close(os.pidfd_open(os.getpid()))  # where the system has none, the server ends here
    if len(os.listdir("/proc/self/task")) > 1:
        os._exit(1)
    gc.freeze()  # memory that all children share: their collections leave it alone
    control, is_open = socket.socket(fileno=0), True
    #: by the descriptor of the process: its number, and the socket for reports
    children: dict[int, tuple[int, socket.socket]] = {}
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while is_open or children:
        ready = poll.poll(None if children else IDLE_SECONDS * 1000)
        if not ready:
            break
        for descriptor, _ in ready:
            if descriptor in children:
                poll.unregister(descriptor)
                _bury(descriptor, *children.pop(descriptor))
                continue
            packet, passed, _, _ = socket.recv_fds(control, 1, DESCRIPTORS)
            if not packet:
                poll.unregister(control)
                is_open = False
            elif (number := _fork(passed)) == 0:
                control.detach()  # another file takes its number
                for other, (_, report) in children.items():
                    os.close(other)
                    report.close()
                return _begin(*passed)
            elif number > 0:
                descriptor, report = os.pidfd_open(number), socket.socket(fileno=passed[0])
                children[descriptor] = number, report
                poll.register(descriptor, select.POLLIN)
                with contextlib.suppress(OSError):  # the request was given up
                    socket.send_fds(report, [b"%d" % number], [descriptor])
    os._exit(0)


def _fork(passed: Sequence[int]) -> int:
    """Fork; returns 0 in the child, and its number in the server, or -1 where the system is out of descriptors or processes."""
    number = -1
    if len(passed) == DESCRIPTORS:
        with contextlib.suppress(OSError):
            number = os.fork()
    for descriptor in passed[number > 0 :] if number else ():
        os.close(descriptor)
    return number


def _bury(descriptor: int, number: int, report: socket.socket) -> None:
    os.close(descriptor)
    _, status = os.waitpid(number, 0)
    with report, contextlib.suppress(OSError):  # the process that asked for it may be gone
        report.send(b"%d" % os.waitstatus_to_exitcode(status))


def _begin(report: int, *standard: int) -> list[str]:
    """Make this child as a new process would be; returns the words of its command line."""
    with socket.socket(fileno=report) as commands:
        text = commands.recv(COMMAND_BYTES)
    if not text:
        os._exit(0)
    command = json.loads(text)
    os.setsid()
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(command["folder"])
    os.environ.update(command["environment"])
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(command["name"])  # the command line stays the server's
    np.random.seed()
    importlib.invalidate_caches()  # files may have come since the server looked into their folders
    words: list[str] = command["words"]
    sys.argv[1:] = words
    return words
