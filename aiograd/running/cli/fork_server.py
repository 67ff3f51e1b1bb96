"""``aiograd fork-server``: the process of which a `LocalCluster` forks its workers; started by the package alone, since it reads descriptors.

It imports here the modules that a worker needs beside the command line's own.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401
import contextlib
from collections.abc import Iterable
from operator import attrgetter

import cryptography.hazmat.backends.openssl.backend  # with the first key that is agreed on
import cryptography.hazmat.primitives.asymmetric.ec  # noqa: F401
import numpy.random  # noqa: F401

import aiograd
from aiograd.distributed.cluster.fork_server import serve_forks

with contextlib.suppress(ImportError):  # it does not exist for every platform
    import uvloop  # noqa: F401


def serve(parts: Iterable[str]) -> list[str]:
    """As `serve_forks`, with these parts of `aiograd` imported, by their names in it."""
    for part in parts:
        attrgetter(part)(aiograd)
    return serve_forks()
